// Windows on a stream that never ends: a full ring costs what contiguous keys cost, and every later token the same.
#include "goal.hpp"

namespace goals {
namespace {

using sash::sliding_window;

/// Full ring against contiguous keys, as many of them. The ring's oldest token lies in the middle of it.
figure ring_over_contiguous(const effort& most) {
    constexpr int64 sinks = 4, window = 4092, keys = sinks + window;
    bench::prompt tokens(bench::whole_layer(), keys);
    const double bytes = bench::bytes_of_keys<float>(tokens.shape, keys);
    const int64 length = 3 * window + 1237;
    const auto streamed = bench::filled<float>(tokens, sliding_window{.window = window, .sinks = sinks}, length);
    bench::cold_layers ring(bytes, [&] { return streamed; });
    bench::cold_layers contiguous(bytes, [&] { return bench::filled<float>(tokens, sash::full{}, keys); });
    sash::workspace scratch;
    const auto seconds = [&](auto& layers, int64 position) {
        return machine::seconds_of([&] {
            for (int i = 0; i < 3; ++i)
                sash::read(tokens.query(1), layers.next(), tokens.rows(1),
                           {.first_query = position, .run = sash::serial{}, .workspace = &scratch});
        });
    };
    const auto [ring_seconds, contiguous_seconds] = bench::in_turn(
        most, [&] { return seconds(ring, length - 1); }, [&] { return seconds(contiguous, keys - 1); });
    return bench::ratio(ring_seconds, contiguous_seconds);
}

constexpr int64 window = 1024, sinks = 4;

/// Layers that stand a few positions apart, so that one pass over them sees every place that a window may have in its
/// blocks of 64 tokens; and so many that each is cold when its turn comes.
class stream {
public:
    stream(bench::prompt& tokens, sash::frame frame, int64 length, int64 apart) : tokens_(&tokens) {
        const sash::rope_table frequencies = sash::rope_frequencies(tokens.shape.head_dim, 500000);
        const sash::score scores{.rotary = {.frequencies = frequencies, .by = sash::rotates::library}};
        auto cache = bench::filled<float>(tokens, sliding_window{window, sinks, frame}, length, scores);
        const auto count = static_cast<std::size_t>(64 / apart);
        layers_.reserve(count);
        while (layers_.size() < count) {
            layers_.push_back(cache);
            sash::append(tokens.key(apart), tokens.value(apart), cache);
        }
    }

    /// Thread CPU time of a token, of the mean of all layers.
    double seconds() {
        return machine::seconds_of([this] {
                   for (auto& layer : layers_)
                       sash::attend(tokens_->query(1), tokens_->key(1), tokens_->value(1), layer, tokens_->rows(1),
                                    {.run = sash::serial{}, .workspace = &scratch_});
               }) /
               static_cast<double>(layers_.size());
    }

private:
    bench::prompt* tokens_;
    std::vector<sash::kv_cache<sliding_window>> layers_;
    sash::workspace scratch_;
};

/// Time a token of one stream over that of another.
figure compare(const effort& most, stream& one, stream& other) {
    effort many = most;
    many.most_rounds = 100;
    const auto [one_seconds, other_seconds] = bench::in_turn(
        many, [&] { return one.seconds(); }, [&] { return other.seconds(); });
    return bench::ratio(one_seconds, other_seconds);
}

/// Cost of a token late in a stream over that of one just after the window has filled.
figure late_over_early(const effort& most, int64 late) {
    bench::prompt tokens(bench::quarter_layer(), 2048);
    stream at_first(tokens, sash::frame::compact, window + sinks, 1);
    stream later(tokens, sash::frame::compact, late, 1);
    return compare(most, later, at_first);
}

/// A step in the compact frame over one in the original frame: the sinks are read with one more turn of the query.
figure compact_over_original(const effort& most) {
    bench::prompt tokens(bench::whole_layer(), 2048);
    stream compact(tokens, sash::frame::compact, 3 * window, 4);
    stream original(tokens, sash::frame::original, 3 * window, 4);
    return compare(most, compact, original);
}

}  // namespace

std::vector<goal> stream_goals() {
    return {
        {"decode, full ring over contiguous, 4096 keys", better::lower, 1.05, 1.01, ring_over_contiguous},
        {"decode, window 1024 + 4, 10 windows later over just full", better::lower, 1.03, 1.01,
         [](const effort& most) { return late_over_early(most, 11 * window + sinks); }},
        {"decode, window 1024 + 4, after 1,000,000 tokens over just full", better::lower, 1.03, 1.01,
         [](const effort& most) { return late_over_early(most, 1000000); }},
        {"decode, window 1024 + 4, compact frame over original", better::lower, 1.01, 1.005, compact_over_original},
    };
}

}  // namespace goals
