#include "tokenizer.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <limits>
#include <stdexcept>

namespace smollm2 {

namespace {

nlohmann::json read_json(const std::filesystem::path& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot open " + path.string());
    return nlohmann::json::parse(file);
}

/// tokenizer.json writes bytes as printable characters: 33 to 126, 161 to 172 and 174 to 255 as themselves, the others,
/// in order, as 256, 257, …
std::unordered_map<char32_t, unsigned char> byte_alphabet() {
    std::unordered_map<char32_t, unsigned char> byte_of;
    char32_t next = 256;
    for (char32_t byte = 0; byte < 256; ++byte) {
        const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        byte_of[printable ? byte : next++] = static_cast<unsigned char>(byte);
    }
    return byte_of;
}

std::size_t contraction_length(std::string_view text) {
    for (const std::string_view end : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
        if (text.starts_with(end)) return end.size();
    return 0;
}

}  // namespace

std::pair<char32_t, std::size_t> first_character(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned lead = byte(0);
    const std::size_t length = lead < 0x80                   ? 1
                               : lead >= 0xF0 && lead < 0xF8 ? 4
                               : lead >= 0xE0                ? 3
                               : lead >= 0xC2                ? 2
                                                             : 1;
    if (length == 1 || lead >= 0xF8 || text.size() < length) return {lead, 1};
    char32_t code = lead & (0x7Fu >> length);
    for (std::size_t i = 1; i < length; ++i) {
        if ((byte(i) & 0xC0) != 0x80) return {lead, 1};
        code = code << 6 | (byte(i) & 0x3F);
    }
    return {code, length};
}

character_classes character_classes::load(const std::filesystem::path& path) {
    const nlohmann::json json = read_json(path);
    character_classes classes;
    for (const auto& [name, what] : {std::pair{"letters", letter}, {"numbers", number}, {"spaces", space}})
        for (const nlohmann::json& ends : json.at(name))
            classes.ranges_.push_back({ends.at(0).get<char32_t>(), ends.at(1).get<char32_t>(), what});
    std::ranges::sort(classes.ranges_, {}, &range::first);
    return classes;
}

character_classes::kind character_classes::of(char32_t code) const {
    const auto behind = std::ranges::upper_bound(ranges_, code, {}, &range::first);
    if (behind == ranges_.begin()) return other;
    const range& candidate = *std::prev(behind);
    return code <= candidate.last ? candidate.what : other;
}

tokenizer tokenizer::load(const std::filesystem::path& folder) {
    const nlohmann::json json = read_json(folder / "tokenizer.json");
    const nlohmann::json& model = json.at("model");
    const auto byte_of = byte_alphabet();
    tokenizer result;
    result.classes_ = character_classes::load(folder / "characters.json");

    for (const nlohmann::json& added : json.at("added_tokens")) result.markers_[added.at("content")] = added.at("id");
    std::unordered_map<std::string, int> token_of;  // as tokenizer.json spells it
    result.byte_token_.fill(-1);
    for (const auto& [spelling, number] : model.at("vocab").items()) {
        const int token = number.get<int>();
        if (token < 0 || token >= 1 << 20) throw std::runtime_error("tokenizer.json: token number " + number.dump());
        token_of[spelling] = token;
        if (token >= result.size()) result.bytes_.resize(static_cast<std::size_t>(token) + 1);
        std::string& bytes = result.bytes_[static_cast<std::size_t>(token)];
        if (result.markers_.contains(spelling)) {
            bytes = spelling;
            continue;
        }
        for (std::string_view rest = spelling; !rest.empty();) {
            const auto [code, length] = first_character(rest);
            bytes += static_cast<char>(byte_of.at(code));
            rest.remove_prefix(length);
        }
        if (bytes.size() == 1) result.byte_token_[static_cast<unsigned char>(bytes[0])] = token;
    }

    int rank = 0;
    for (const nlohmann::json& pair : model.at("merges")) {
        std::string left, right;
        if (pair.is_array()) {
            left = pair.at(0), right = pair.at(1);
        } else {  // older files have "left right"
            const std::string both = pair;
            left = both.substr(0, both.find(' ')), right = both.substr(both.find(' ') + 1);
        }
        result.merges_[pair_key(token_of.at(left), token_of.at(right))] = {rank++, token_of.at(left + right)};
    }
    return result;
}

tokenizer tokenizer::of_bytes() {
    tokenizer result;
    for (int byte = 0; byte < 256; ++byte) {
        result.bytes_.emplace_back(1, static_cast<char>(byte));
        result.byte_token_[static_cast<std::size_t>(byte)] = byte;
    }
    return result;
}

/// Calls f(word) for the words of a text in order.
template <class F>
void tokenizer::for_each_word(std::string_view text, const F& f) const {
    using enum character_classes::kind;
    struct place {
        std::size_t at, length;
        character_classes::kind what;
    };
    const auto look = [&](std::size_t at) -> place {
        if (at >= text.size()) return {text.size(), 0, number};  // the end splits as a digit does
        const auto [code, length] = first_character(text.substr(at));
        return {at, length, classes_.of(code)};
    };
    const auto run_end = [&](place p) {
        const auto what = p.what;
        while (p.length != 0 && p.what == what) p = look(p.at + p.length);
        return p;
    };
    for (std::size_t at = 0; at < text.size();) {
        const place here = look(at);
        std::size_t end = here.at + here.length;
        if (here.what != number) {
            const place word =
                here.length == 1 && text[at] == ' ' ? look(at + 1) : here;  // a blank belongs to the word behind it
            if (const std::size_t length = contraction_length(text.substr(at))) {
                end = at + length;
            } else if (word.what == letter || word.what == other) {
                end = run_end(word).at;
            } else if (here.what == space) {
                // The last space of several stays with what follows, unless that is the end or a digit.
                place last = here, next = look(here.at + here.length);
                while (next.what == space) last = std::exchange(next, look(next.at + next.length));
                end = next.what == number || last.at == here.at ? last.at + last.length : last.at;
            }
        }
        f(text.substr(at, end - at));
        at = end;
    }
}

std::vector<int> tokenizer::merge_word(std::string_view word) const {
    std::vector<int> tokens;
    for (const char byte : word)
        if (const int token = byte_token_[static_cast<unsigned char>(byte)]; token >= 0) tokens.push_back(token);
    while (tokens.size() > 1) {
        merge best{std::numeric_limits<int>::max(), -1};
        std::uint64_t best_pair = 0;
        for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
            const std::uint64_t pair = pair_key(tokens[i], tokens[i + 1]);
            const auto found = merges_.find(pair);
            if (found != merges_.end() && found->second.rank < best.rank) best = found->second, best_pair = pair;
        }
        if (best.result < 0) break;
        // All of them at once: a pair that this creates was learned later than this one.
        std::size_t kept = 0;
        for (std::size_t i = 0; i < tokens.size(); ++kept) {
            const bool merged = i + 1 < tokens.size() && pair_key(tokens[i], tokens[i + 1]) == best_pair;
            tokens[kept] = merged ? best.result : tokens[i];
            i += merged ? 2 : 1;
        }
        tokens.resize(kept);
    }
    return tokens;
}

std::vector<int> tokenizer::encode(std::string_view text) const {
    std::vector<int> tokens;
    std::unordered_map<std::string_view, std::vector<int>> known;  // a text repeats its words
    for_each_word(text, [&](std::string_view word) {
        auto found = known.find(word);
        if (found == known.end()) found = known.emplace(word, merge_word(word)).first;
        tokens.insert(tokens.end(), found->second.begin(), found->second.end());
    });
    return tokens;
}

std::vector<int> tokenizer::marker(std::string_view name) const {
    const auto found = markers_.find(std::string(name));
    return found == markers_.end() ? encode(name) : std::vector<int>{found->second};
}

std::string tokenizer::decode(std::span<const int> tokens) const {
    std::string text;
    for (const int token : tokens) text += bytes_of(token);
    return text;
}

}  // namespace smollm2
