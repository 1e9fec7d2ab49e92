// needle: hides a sentence in a novel at several depths and asks for it. A window finds what lies in it, and nothing
// else; so beside every score stands the share of samples whose needle lay in the window.
#include "chat_template.hpp"
#include "commands.hpp"
#include "policies.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "session.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <fstream>

namespace smollm2 {

namespace {

constexpr const char* hidden_sentence = " The magic number for Lima is 3536803.";
constexpr const char* hidden_number = "3536803";
constexpr const char* task = "Read the following text and answer the question after it.\n\n";
constexpr const char* question = "\n\nQuestion: What is the magic number for Lima?";
constexpr index answer_tokens = 16;

constexpr const char* explanation =
    R"(inside: the whole sentence is in the window of every query of the answer; outside: none of it is. The share of
samples inside follows from window, lengths and depths alone, and so does the score of a window that works.

)";

/// Where the needle lies for the queries that write the answer.
enum class place { inside, at_the_edge, outside };

struct sample {
    index length = 0;    ///< tokens of the whole prompt
    double depth = 0;    ///< share of the haystack before the needle
    index haystack = 0;  ///< tokens of the novel in this prompt
    index at = 0;        ///< tokens of the novel before the needle
    place where = place::inside;
    bool found = false;
    std::string answer = {};
};

/// The prompt is head + novel[0, at) + needle + novel[at, haystack) + tail.
struct prompt_parts {
    std::vector<int> head, novel, needle, tail;
};

prompt_parts make_parts(const session& s, const text& novel) {
    const tokenizer& t = s.tokenizer;
    prompt_parts parts{message(t, "system", default_system), novel.tokens, t.encode(hidden_sentence),
                       t.encode(question)};
    append(parts.head, begin_message(t, "user"));
    append(parts.head, t.encode(task));
    append(parts.tail, end_message(t));
    append(parts.tail, begin_message(t, "assistant"));
    return parts;
}

/// The end of a sentence nearest to token `at`, so that the needle breaks none; `at` itself if there is none near.
index sentence_end(const session& s, std::span<const int> novel, index at) {
    const auto ends = [&](index i) {
        if (i < 1 || i >= static_cast<index>(novel.size())) return false;
        const std::string& before = s.tokenizer.bytes_of(novel[static_cast<std::size_t>(i - 1)]);
        const std::string& behind = s.tokenizer.bytes_of(novel[static_cast<std::size_t>(i)]);
        return before == "." && (behind.starts_with(' ') || behind.starts_with('\n'));
    };
    for (index distance = 0; distance < 100; ++distance) {
        if (ends(at - distance)) return at - distance;
        if (ends(at + distance)) return at + distance;
    }
    return at;
}

/// Which of the needle's positions [first, last] the queries of the answer, [length - 1, length + 15), can see.
place locate(const policy_choice& policy, index first, index last, index length) {
    if (policy.what != policy_choice::kind::window)
        return place::inside;  // a linear state, too, has taken in every token
    const sash::sliding_window& keys = policy.keys;
    if (keys.sees(length + answer_tokens - 2, first)) return place::inside;
    return keys.sees(length - 1, last) ? place::at_the_edge : place::outside;
}

std::vector<sample> make_samples(const session& s, const prompt_parts& parts, const policy_choice& policy,
                                 const std::vector<index>& lengths, const std::vector<double>& depths) {
    std::vector<sample> samples;
    const index head = static_cast<index>(parts.head.size()), needle = static_cast<index>(parts.needle.size());
    for (const index length : lengths) {
        const index haystack = length - head - needle - static_cast<index>(parts.tail.size());
        if (haystack < 1) throw usage_error("length " + std::to_string(length) + " leaves no room for the text");
        if (haystack > static_cast<index>(parts.novel.size()))
            throw usage_error("the text is shorter than " + std::to_string(length) + " tokens");
        for (const double depth : depths) {
            const index at = std::min(
                haystack, sentence_end(s, parts.novel, static_cast<index>(depth * static_cast<double>(haystack))));
            samples.push_back({.length = length,
                               .depth = depth,
                               .haystack = haystack,
                               .at = at,
                               .where = locate(policy, head + at, head + at + needle - 1, length)});
        }
    }
    return samples;
}

/// The likeliest continuation of a prompt that ends in the row `hidden`.
template <class Transformer>
std::string answer(Transformer& sequence, const session& s, matrix hidden) {
    std::vector<int> tokens;
    while (true) {
        index likeliest = 0;
        logits(s.model, hidden, s.run).row(0).maxCoeff(&likeliest);
        tokens.push_back(static_cast<int>(likeliest));
        if (static_cast<index>(tokens.size()) == answer_tokens) return s.tokenizer.decode(tokens);
        hidden = sequence.forward({&tokens.back(), 1});
    }
}

/// Reads the haystack once, up to the last place of a needle. Then the needles go in from the last place to the first,
/// so that each overwrites only what lies behind it. A growing cache rolls back to its place. A window has dropped what
/// it would need for that, and a state has mixed it: they are forked at every place on the way.
template <class Transformer>
void search(Transformer& sequence, const session& s, const prompt_parts& parts, bool rolls_back,
            std::vector<sample>& samples, progress& bar) {
    const auto novel = [&](index from, index to) {
        return std::span(parts.novel).subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(to - from));
    };
    std::ranges::sort(samples, {}, &sample::at);

    std::vector<decltype(sequence.caches)> forks;
    sequence.feed(parts.head);
    index read = 0;
    for (const sample& one : samples) {
        sequence.feed(novel(read, one.at));
        read = one.at;
        if (!rolls_back) forks.push_back(sequence.caches);
    }
    index done = 0;
    for (auto one = samples.rbegin(); one != samples.rend(); ++one) {
        if (rolls_back) {
            sash::rollback(sequence.caches, sequence.length() - static_cast<index>(parts.head.size()) - one->at);
        } else {
            sequence.caches = std::move(forks.back());
            forks.pop_back();
        }
        std::vector<int> rest = parts.needle;
        const auto behind = novel(one->at, one->haystack);
        rest.insert(rest.end(), behind.begin(), behind.end());
        append(rest, parts.tail);
        one->answer = answer(sequence, s, sequence.feed(rest));
        one->found = one->answer.find(hidden_number) != std::string::npos;
        bar.at(++done);
    }
    std::ranges::sort(samples, {}, [](const sample& one) { return std::pair(one.length, one.depth); });
}

char mark(const sample& one) {
    if (one.where == place::outside) return one.found ? '!' : '.';
    return one.found ? '#' : 'o';
}

/// "3 of 5": found among the samples of one length whose needle lies there.
std::string score(const std::vector<sample>& samples, index length, place where) {
    int all = 0, found = 0;
    for (const sample& one : samples) {
        if (one.length != length || one.where != where) continue;
        ++all;
        found += one.found;
    }
    return all == 0 ? "-" : std::to_string(found) + " of " + std::to_string(all);
}

void print_scores(const policy_choice& policy, const std::vector<sample>& samples, const std::vector<index>& lengths) {
    for (const index length : lengths) {
        std::string by_depth;
        int inside = 0;
        for (const sample& one : samples) {
            if (one.length != length) continue;
            by_depth += mark(one);
            inside += one.where == place::inside;
        }
        std::printf("%-27s%8lld%12.0f%%%12s%12s%12s   %s\n", policy.name().c_str(), static_cast<long long>(length),
                    100.0 * inside / static_cast<double>(by_depth.size()),
                    score(samples, length, place::inside).c_str(), score(samples, length, place::at_the_edge).c_str(),
                    score(samples, length, place::outside).c_str(), by_depth.c_str());
    }
    std::fflush(stdout);
}

nlohmann::ordered_json to_json(const policy_choice& policy, const sample& one) {
    constexpr const char* names[] = {"inside", "edge", "outside"};
    return {{"policy", policy.type()},
            {"window", policy.window()},
            {"sinks", policy.sinks()},
            {"frame", policy.frame()},
            {"length", one.length},
            {"depth", one.depth},
            {"place", names[static_cast<int>(one.where)]},
            {"found", one.found},
            {"answer", one.answer}};
}

}  // namespace

int needle(arguments& options) {
    std::vector<policy_choice> policies = parse_policies(options.values("--policy"));
    if (policies.empty()) policies = parse_policies({"full", "252+4", "1020+4", "linear"});
    std::vector<index> lengths;
    for (const std::string& length : split(options.value("--lengths", "1024,2048,4096"), ','))
        lengths.push_back(parse_number<index>("--lengths", length));
    std::vector<double> depths;
    for (const std::string& depth : split(options.value("--depths", "0.1,0.3,0.5,0.7,0.9"), ',')) {
        depths.push_back(parse_number<double>("--depths", depth));
        if (depths.back() < 0 || depths.back() > 1) throw usage_error("--depths: " + depth + " is not between 0 and 1");
    }
    const sash::scalar element = parse_element(options.value("--element", "float"));
    const std::string text_name = options.value("--text", default_text);
    const index from = options.number<index>("--from", 3000, 0);
    const std::string json = options.value("--json", "");
    check_writable(json);
    const session s = open_session(options);
    text novel = load_text(s, text_name, from + std::ranges::max(lengths) + 200);
    novel.tokens.erase(novel.tokens.begin(),
                       novel.tokens.begin() + std::min<std::ptrdiff_t>(from, std::ssize(novel.tokens)));
    const prompt_parts parts = make_parts(s, novel);

    std::printf("%s: \"%s\" hidden in %s at %zu depths from %g to %g, asked for at the end\n",
                s.model.config.name.c_str(), hidden_sentence + 1, novel.name.c_str(), depths.size(),
                std::ranges::min(depths), std::ranges::max(depths));
    std::printf("%s", explanation);
    std::printf("%-27s%8s%13s%12s%12s%12s   %s\n", "found", "tokens", "in window", "inside", "at edge", "outside",
                "by depth");
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const policy_choice& policy : policies) {
        std::vector<sample> samples = make_samples(s, parts, policy, lengths, depths);
        progress bar("needle, " + policy.name(), static_cast<long long>(samples.size()), s.show_progress);
        with_cache(policy, element, [&]<class Cache>(const typename Cache::policy_type& p) {
            transformer<Cache> sequence(s.model, p, s.run);
            search(sequence, s, parts, policy.what == policy_choice::kind::full, samples, bar);
        });
        print_scores(policy, samples, lengths);
        for (const sample& one : samples) rows.push_back(to_json(policy, one));
    }
    std::printf("\nby depth: # found, o missed though in the window, . missed outside it, ! found outside it\n");
    if (!json.empty()) {
        std::ofstream file(json);
        const nlohmann::ordered_json all = {{"model", s.model.config.name}, {"text", novel.name}, {"needles", rows}};
        using on_error = nlohmann::ordered_json::error_handler_t;  // an answer may end within a character
        file << all.dump(1, ' ', false, on_error::replace) << "\n";
    }
    return 0;
}

}  // namespace smollm2
