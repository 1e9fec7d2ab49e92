// check: compares the program with other implementations, and with itself. ctest runs both.
//
//   check --golden FILE            the prepared model: logits and tokens against values that golden.py made
//   check --golden FILE --random   the built-in model: logits under every policy against the textbook, and against
//                                  itself: forks, cuts into chunks, a window as wide as the text
#include "commands.hpp"
#include "policies.hpp"
#include "session.hpp"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <fstream>

namespace smollm2 {

namespace {

constexpr int skipped = 77;  // ctest's SKIP_RETURN_CODE

int failures = 0;

void expect(bool holds, const std::string& what) {
    std::printf("%s  %s\n", holds ? "ok    " : "FAILED", what.c_str());
    failures += !holds;
}

std::string with_number(const std::string& what, double number) {
    char text[32];
    std::snprintf(text, sizeof text, ": %.3g", number);
    return what + text;
}

std::span<const int> part(const std::vector<int>& tokens, std::size_t first, std::size_t count) {
    return std::span(tokens).subspan(first, count);
}

/// All logits of a text that is fed in chunks.
template <class Cache>
matrix logits_of(const session& s, const typename Cache::policy_type& policy, const std::vector<int>& tokens,
                 std::size_t chunk) {
    transformer<Cache> sequence(s.model, policy, s.run);
    matrix all(static_cast<index>(tokens.size()), s.model.config.vocabulary);
    for (std::size_t at = 0; at < tokens.size(); at += chunk) {
        const std::size_t count = std::min(chunk, tokens.size() - at);
        all.middleRows(static_cast<index>(at), static_cast<index>(count)) =
            logits(s.model, sequence.forward(part(tokens, at, count)), s.run);
    }
    return all;
}

double difference(const matrix& a, const matrix& b) { return static_cast<double>((a - b).cwiseAbs().maxCoeff()); }

// ------------------------------------------------------------------------------------------- other implementations

/// Compares logits with the chosen ones of a golden file.
void compare_logits(const matrix& ours, const nlohmann::json& rows, double allowed, const std::string& what) {
    double largest = 0;
    int compared = 0;
    for (const nlohmann::json& row : rows) {
        const std::vector<index> words = row.at("words");
        const std::vector<float> theirs = row.at("logits");
        for (std::size_t i = 0; i < words.size(); ++i, ++compared) {
            const double apart =
                std::abs(static_cast<double>(ours(row.at("position").get<index>(), words[i]) - theirs[i]));
            largest = std::isnan(apart) || std::isnan(largest) ? std::nan("") : std::max(largest, apart);
        }
    }
    expect(compared > 0 && largest < allowed,
           with_number(std::to_string(compared) + " logits of " + what + ", largest difference", largest));
}

void check_logits(const session& s, const nlohmann::json& golden, std::size_t chunk) {
    const std::vector<int> tokens = golden.at("tokens");
    compare_logits(
        logits_of<sash::kv_cache<sash::full>>(s, sash::full{}, tokens, chunk), golden.at("rows"), 2e-3,
        std::to_string(tokens.size()) + " tokens in chunks of " + std::to_string(chunk) + " against transformers");
}

void check_loss(const session& s, const nlohmann::json& golden) {
    const std::vector<int> tokens = golden.at("tokens");
    transformer<sash::kv_cache<sash::full>> sequence(s.model, sash::full{}, s.run);
    double sum = 0;
    for (const float loss : losses(s.model, sequence.forward(part(tokens, 0, tokens.size() - 1)),
                                   part(tokens, 1, tokens.size() - 1), s.run))
        sum += static_cast<double>(loss);
    const double apart = std::abs(sum / static_cast<double>(tokens.size() - 1) - golden.at("mean_loss").get<double>());
    expect(apart < 1e-4, with_number("mean loss against torch, difference", apart));
}

void check_tokens(const session& s, const nlohmann::json& golden) {
    for (const nlohmann::json& one : golden.at("texts")) {
        const std::string text = one.at("text");
        const std::vector<int> ours = s.tokenizer.encode(text);
        expect(ours == one.at("tokens").get<std::vector<int>>(), "tokens of " + one.at("text").dump());
    }
    const std::filesystem::path novel = s.folder / "texts" / (std::string(default_text) + ".txt");
    const std::vector<int> ours = load_text(s, novel.string(), 1 << 30).tokens;
    const std::vector<int> theirs = load_text(s, default_text, 1 << 30).tokens;
    expect(ours == theirs,
           std::string(default_text) + ".txt gives the tokens in the .tokens file, " + std::to_string(theirs.size()));
    std::ifstream file(novel, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    expect(s.tokenizer.decode(ours) == text, "and they decode to the text");
}

int check_prepared(arguments& options, const nlohmann::json& golden) {
    const session s = open_session(options);
    if (s.built_in) {
        std::printf("skipped: there is no prepared model in %s\n", s.folder.c_str());
        return skipped;
    }
    check_logits(s, golden, 512);
    check_logits(s, golden, 100);
    check_logits(s, golden, 1);
    check_loss(s, golden);
    check_tokens(s, golden);
    return failures != 0;
}

// ------------------------------------------------------------------------------------------------- the built-in model

/// Logits of one policy, with the checks that hold for each: finite, and the same however the text is cut.
template <class Policy, class Element = float>
matrix check_policy(const session& s, const char* name, const Policy& policy, const std::vector<int>& tokens) {
    using Cache = sash::kv_cache<Policy, Element>;
    const matrix whole = logits_of<Cache>(s, policy, tokens, tokens.size());
    expect(whole.allFinite(), std::string(name) + ": finite");
    const double apart = std::max(difference(whole, logits_of<Cache>(s, policy, tokens, 1)),
                                  difference(whole, logits_of<Cache>(s, policy, tokens, 97)));
    expect(apart < 1e-3, with_number(std::string(name) + ": fed one by one or in chunks, largest difference", apart));
    return whole;
}

/// Reads half a text, then the other half: again on a fork, from a checkpoint, from a file, and after a rollback where the
/// policy has one. Nothing of what happened in between may show.
template <class Policy>
void check_return(const session& s, const std::string& name, const Policy& policy, const std::vector<int>& tokens) {
    using Cache = sash::kv_cache<Policy>;
    const std::size_t half = tokens.size() / 2;
    const std::span<const int> rest = part(tokens, half, tokens.size() - half);
    transformer<Cache> sequence(s.model, policy, s.run), loaded(s.model, policy, s.run);
    sequence.forward(part(tokens, 0, half));

    auto fork = sequence.caches;
    const auto checkpoint = sash::checkpoint(sequence.caches);
    const std::vector<std::byte> file = sash::save(sequence.caches);
    const matrix first = sequence.forward(rest);
    if (sash::can_rollback(sequence.caches, std::ssize(rest))) {
        sash::rollback(sequence.caches, std::ssize(rest));
        expect(sequence.forward(rest) == first, name + ": goes on after a rollback as it did before");
    }
    sequence.caches = std::move(fork);
    expect(sequence.forward(rest) == first, name + ": a fork goes on in the same way");
    sash::restore(sequence.caches, checkpoint);
    expect(sequence.forward(rest) == first, name + ": and a restored checkpoint");
    sash::load(loaded.caches, file);
    expect(loaded.forward(rest) == first, name + ": and caches read from a file");
}

/// Every policy against the textbook.
void check_textbook(const session& s, const nlohmann::json& golden) {
    const std::vector<int> tokens = s.tokenizer.encode(golden.at("built_in_text").get<std::string>());
    for (const nlohmann::json& one : golden.at("built_in")) {
        const std::string spelling = one.at("policy");
        with_cache(
            parse_policy(spelling), sash::scalar::f32, [&]<class Cache>(const typename Cache::policy_type& policy) {
                for (const std::size_t chunk : {tokens.size(), std::size_t{7}})
                    compare_logits(logits_of<Cache>(s, policy, tokens, chunk), one.at("rows"), 2e-4,
                                   spelling + " in chunks of " + std::to_string(chunk) + " against the textbook");
            });
    }
}

int check_built_in(arguments& options, const nlohmann::json& golden) {
    const session s = open_session(options);
    check_textbook(s, golden);
    const std::vector<int> tokens = load_text(s, default_text, 700).tokens;
    const index length = static_cast<index>(tokens.size());
    using window = sash::sliding_window;

    const matrix full = check_policy(s, "full", sash::full{}, tokens);
    const matrix wide = check_policy(s, "a window as long as the text", window{.window = length}, tokens);
    const matrix narrow = check_policy(s, "64, no sinks", window{.window = 64}, tokens);
    const matrix sinks = check_policy(s, "60 + 4, original", window{.window = 60, .sinks = 4}, tokens);
    const matrix compact =
        check_policy(s, "60 + 4, compact", window{.window = 60, .sinks = 4, .frame = sash::frame::compact}, tokens);
    const matrix linear = check_policy(s, "linear", sash::linear<>{}, tokens);
    const matrix half = check_policy<sash::full, sash::float16>(s, "full in float16", sash::full{}, tokens);
    const matrix brain = check_policy<sash::full, sash::bfloat16>(s, "full in bfloat16", sash::full{}, tokens);

    expect(difference(full, wide) < 1e-4,
           with_number("full and the wide window, largest difference", difference(full, wide)));
    const auto differ_only_after = [&](const matrix& a, const matrix& b, index shared, const char* what) {
        expect(difference(a.topRows(shared), b.topRows(shared)) < 1e-4,
               std::string(what) + ": equal for the first " + std::to_string(shared) + " tokens");
        expect(difference(a.bottomRows(length - shared), b.bottomRows(length - shared)) > 1e-2,
               std::string(what) + ": different afterwards");
    };
    differ_only_after(full, narrow, 64, "full and 64 keys");
    differ_only_after(full, sinks, 64, "full and 60 + 4 keys");
    differ_only_after(sinks, compact, 64, "both frames");
    expect(difference(full, linear) > 1e-2, "full and linear differ");
    expect(difference(full, half) < 3e-2,
           with_number("full in float and in float16, largest difference", difference(full, half)));
    expect(difference(full, brain) < 3e-1,
           with_number("full in float and in bfloat16, largest difference", difference(full, brain)));

    check_return(s, "full", sash::full{}, tokens);
    check_return(s, "60 + 4, compact", window{.window = 60, .sinks = 4, .frame = sash::frame::compact}, tokens);
    check_return(s, "linear", sash::linear<>{}, tokens);
    return failures != 0;
}

}  // namespace

int check(arguments& options) {
    const std::string path = options.value("--golden", "");
    std::ifstream file(path);
    if (!file) throw usage_error("check needs --golden FILE: cannot open \"" + path + "\"");
    const nlohmann::json golden = nlohmann::json::parse(file);
    return options.has("--random") ? check_built_in(options, golden) : check_prepared(options, golden);
}

}  // namespace smollm2
