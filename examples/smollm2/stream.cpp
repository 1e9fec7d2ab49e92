// stream: feeds a text through the model under one policy after the other and measures what each loses.
#include "commands.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "session.hpp"

#include <cmath>
#include <limits>

namespace smollm2 {

namespace {

using clock = std::chrono::steady_clock;

double seconds_since(clock::time_point start) { return std::chrono::duration<double>(clock::now() - start).count(); }

/// The ready sets of policies.
std::vector<policy_choice> grid(std::string_view name) {
    if (name == "study") {  // the settings of the study: windows of 64 to 512 keys beside 4 sinks, original positions
        std::vector<std::string> all = {"full@4096"};
        for (const char* window : {"64", "128", "256", "512"})
            for (const char* sinks : {"", "+4"}) all.push_back(window + std::string(sinks) + "@4096");
        for (const char* window : {"64", "256"})
            for (const char* sinks : {"+1", "+2", "+8", "+16"}) all.push_back(window + std::string(sinks) + "@4096");
        all.push_back("linear@4096");
        return parse_policies(all);
    }
    if (name == "stream")  // how far a stream can go
        return parse_policies({"full@8192", "256@32768", "252+4@32768", "252+4:compact@32768", "1020+4:compact@32768"});
    if (name == "demo")  // both pictures in a few minutes
        return parse_policies(
            {"full@8192", "64@4096", "64+4@4096", "256@4096", "256+4@4096", "252+4@16384", "252+4:compact@16384"});
    throw usage_error("unknown grid \"" + std::string(name) + "\": study, stream or demo");
}

/// Tokens per second when the text goes on one token at a time. The sequence is forked first, and left as it was.
template <class Transformer>
double decode_speed(Transformer& sequence, const session& s, std::span<const int> next) {
    auto kept = sequence.caches;
    const auto start = clock::now();
    for (const int& token : next) logits(s.model, sequence.forward({&token, 1}), s.run);
    const double seconds = seconds_since(start);
    sequence.caches = std::move(kept);
    return static_cast<double>(next.size()) / seconds;
}

struct stream_options {
    index chunk = 256;
    index decoded = 8;
};

template <class Transformer>
stream_result stream_text(Transformer& sequence, const session& s, const policy_choice& policy, const text& t,
                          index length, const stream_options& options) {
    stream_result result{policy, {}, {}};
    result.losses.reserve(static_cast<std::size_t>(length));
    progress bar(policy.name(), length, s.show_progress);
    const auto tokens = [&](index first, index count) {
        return std::span(t.tokens).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    };
    double sum = 0;
    index at = 0;
    for (const index end : range_ends(length)) {
        const index from = at;
        const double sum_before = sum, attention_before = sequence.attention_seconds();
        const auto start = clock::now();
        while (at < end) {
            const index count = std::min(options.chunk, end - at);
            const matrix& hidden = sequence.forward(tokens(at, count));
            for (const float loss : losses(s.model, hidden, tokens(at + 1, count), s.run)) {
                result.losses.push_back(loss);
                sum += static_cast<double>(loss);
            }
            at += count;
            bar.at(at, "perplexity " + short_number(std::exp(sum / static_cast<double>(at))));
        }
        const double seconds = seconds_since(start);
        const index decoded = std::min(options.decoded, static_cast<index>(t.tokens.size()) - end);
        result.ranges.push_back({.from = from,
                                 .to = end,
                                 .perplexity = std::exp((sum - sum_before) / static_cast<double>(end - from)),
                                 .cumulative = std::exp(sum / static_cast<double>(end)),
                                 .prefill_tokens_per_s = static_cast<double>(end - from) / seconds,
                                 .decode_tokens_per_s = decode_speed(sequence, s, tokens(end, decoded)),
                                 .cache_bytes = sequence.cache_bytes(),
                                 .attention_share = (sequence.attention_seconds() - attention_before) / seconds});
    }
    return result;
}

}  // namespace

int stream(arguments& options) {
    const std::string text_name = options.value("--text", default_text);
    const std::string grid_name = options.value("--grid", "");
    std::vector<policy_choice> policies = parse_policies(options.values("--policy"));
    const sash::int64 most = options.number<sash::int64>("--to", 0, 0);
    const std::string element_name = options.value("--element", "float");
    const sash::scalar element = parse_element(element_name);
    const std::string json = options.value("--json", ""), plot = options.value("--plot", "");
    check_writable(json);
    check_writable(plot);
    const stream_options how{.chunk = options.number<index>("--chunk", 256, 1)};
    if (policies.empty() && grid_name.empty() && text_name == "all") policies = parse_policies({"252+4:compact"});
    if (policies.empty() || !grid_name.empty())
        for (const policy_choice& policy : grid(grid_name.empty() ? "demo" : grid_name)) policies.push_back(policy);

    const session s = open_session(options);
    constexpr sash::int64 unlimited = std::numeric_limits<sash::int64>::max();
    sash::int64 longest = 0;
    for (policy_choice& policy : policies) {
        if (policy.tokens == 0) policy.tokens = unlimited;
        if (most > 0) policy.tokens = std::min(policy.tokens, most);
        if (s.built_in) policy.tokens = std::min<sash::int64>(policy.tokens, 32768);  // the paragraph has no end
        longest = std::max(longest, policy.tokens);
    }
    const text t = load_text(s, text_name, longest == unlimited ? unlimited : longest + 1 + how.decoded);
    const sash::int64 available =
        static_cast<sash::int64>(t.tokens.size()) - 1;  // every position needs a token behind it
    if (available < 1) throw std::runtime_error(t.name + " has fewer than 2 tokens");
    longest = std::min(longest, available);

    const stream_setting setting{s.model.config.name, t.name, element_name, s.model.config.trained_positions,
                                 s.threads};
    print_setting(setting, policies, longest);
    std::vector<stream_result> results;
    for (const policy_choice& policy : policies) {
        with_cache(policy, element, [&]<class Cache>(const typename Cache::policy_type& p) {
            transformer<Cache> sequence(s.model, p, s.run);
            results.push_back(stream_text(sequence, s, policy, t, std::min(policy.tokens, available), how));
        });
        print_perplexities(results.back());
    }
    print_summary(results, longest);
    if (!json.empty()) write_json(json, setting, results);
    if (!plot.empty()) write_plot(plot, setting, results);
    return 0;
}

}  // namespace smollm2
