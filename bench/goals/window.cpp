// A window should cost what it shows: its time over that of full attention, over the same ratio of visible pairs.
#include "goal.hpp"

namespace goals {
namespace {

figure time_over_pairs(const effort& most, const sash::shape& shape, int64 n, int64 window) {
    constexpr int64 sinks = 4;
    bench::prompt tokens(shape, n);
    bench::prefill<float, sash::full> full(tokens, {});
    bench::prefill<float, sash::sliding_window> windowed(tokens, {.window = window, .sinks = sinks});
    const auto [full_seconds, window_seconds] = bench::in_turn(
        most, [&] { return full.seconds(); }, [&] { return windowed.seconds(); });
    return bench::ratio(window_seconds, full_seconds,
                        bench::visible_pairs(n, n) / bench::visible_pairs(n, window + sinks));
}

goal row(int64 n, int64 window, double must, double aim) {
    return {"window " + std::to_string(window) + " + 4 prefill d128 n" + std::to_string(n) + ", time over pairs",
            better::lower, must, aim, [=](const effort& most) {
                // The longest takes seconds: one KV head of it is enough, and a few rounds.
                if (n <= 4096) return time_over_pairs(most, bench::quarter_layer(), n, window);
                effort few = most;
                few.least_rounds = most.least_rounds / 2;
                return time_over_pairs(few, {.heads = 4, .kv_heads = 1, .head_dim = 128}, n, window);
            }};
}

}  // namespace

std::vector<goal> window_goals() {
    return {row(2048, 1024, 1.15, 1.04), row(2048, 256, 1.4, 1.2), row(4096, 64, 2.2, 1.7),
            row(16384, 4096, 1.08, 1.03)};
}

}  // namespace goals
