// Linear attention: a state is read and written once a token.
#include "../gated.hpp"
#include "goal.hpp"

#include <cstdio>

namespace goals {
namespace {

namespace systems = sash::systems;
using undecayed = sash::linear<sash::identity, sash::no_decay, sash::additive, sash::no_normaliser>;

/// One token into the next of some cold layers.
template <class Policy, class Element = float>
class cold_steps {
public:
    cold_steps(bench::prompt& tokens, const Policy& policy, int64 length, double touched)
        : tokens_(&tokens),
          touched_(touched),
          layers_(touched, [first = bench::filled<Element>(tokens, policy, length)] { return first; }) {}

    double seconds() {
        constexpr int steps = 64;
        return bench::seconds_of_step(steps, touched_, [this] {
            sash::attend(tokens_->query(1), tokens_->key(1), tokens_->value(1), layers_.next(), tokens_->rows(1),
                         {.run = sash::serial{}, .workspace = &scratch_});
        });
    }

private:
    bench::prompt* tokens_;
    double touched_;
    bench::cold_layers<sash::kv_cache<Policy, Element>> layers_;
    sash::workspace scratch_;
};

double bytes_of_state(const sash::shape& s) {
    return static_cast<double>(s.kv_heads * s.head_dim * s.head_dim) * sizeof(float);
}

std::string per_token(double seconds, int64 tokens) {
    char text[48];
    std::snprintf(text, sizeof text, "%.1f µs a token", seconds * 1e6 / static_cast<double>(tokens));
    return text;
}

constexpr sash::shape states_of_128{.heads = 32, .kv_heads = 32, .head_dim = 128};

/// A step of 32 states that come from memory: they are read and written, and little else should cost time.
template <class Policy>
figure step_of_bandwidth(const effort& most) {
    bench::cold_states<Policy> layers({}, states_of_128);
    return bench::of_peak(most, 2 * layers.bytes(), machine::read_bandwidth<>, [&] { return layers.seconds(); });
}

/// A prompt under one update over the same prompt under a decay by head and token.
template <class Policy>
figure prefill_over_scalar_decay(const effort& most) {
    constexpr int64 n = 2048;
    bench::gated_prefill<Policy> one({}, states_of_128, n);
    bench::gated_prefill<systems::simple_gla> scalar({}, states_of_128, n);
    const auto [seconds, scalar_seconds] = bench::in_turn(
        most, [&] { return one.seconds(); }, [&] { return scalar.seconds(); });
    figure f = bench::ratio(seconds, scalar_seconds);
    f.note = per_token(bench::summary(seconds).median, n);
    return f;
}

/// A prompt in one call, so in chunks, over the same prompt in calls that are just too short for them.
template <class Policy>
figure recurrence_over_chunks(const effort& most) {
    constexpr int64 n = 1024;
    bench::gated_prefill<Policy> chunks({}, states_of_128, n), recurrence({}, states_of_128, n);
    recurrence.most = sash::cpu::least_chunked - 1;
    const auto [seconds, longer_seconds] = bench::in_turn(
        most, [&] { return chunks.seconds(); }, [&] { return recurrence.seconds(); });
    figure f = bench::ratio(longer_seconds, seconds);
    f.note = per_token(bench::summary(seconds).median, n);
    return f;
}

/// The smallest window of the study, stored as Element, against the state update of elu + 1, whose state is fp32; both
/// cold.
template <class Element>
figure small_window_over_linear(const effort& most) {
    constexpr int64 window = 64, sinks = 4;
    bench::prompt tokens(bench::whole_layer(), 512);
    const double touched = 4 * bytes_of_state(tokens.shape);  // a quarter of the layers is enough: states are small
    cold_steps<sash::sliding_window, Element> windowed(tokens, {.window = window, .sinks = sinks}, 1000, touched);
    cold_steps<sash::linear<>> recurrent(tokens, {}, 1000, touched);
    const auto [window_seconds, linear_seconds] = bench::in_turn(
        most, [&] { return windowed.seconds(); }, [&] { return recurrent.seconds(); });
    return bench::ratio(window_seconds, linear_seconds);
}

}  // namespace

std::vector<goal> linear_goals() {
    return {
        {"decode, window 64 + 4 over linear elu + 1", better::lower, 1, 0.5, small_window_over_linear<float>},
        {"decode, window 64 + 4 bfloat16 over linear elu + 1", better::lower, goal::none, goal::none,
         small_window_over_linear<sash::bfloat16>},
        {"cold decode, no decay, 32 states, 2 × bytes, of read bandwidth", better::higher, 0.95, 1.28,
         step_of_bandwidth<undecayed>},
        {"cold decode, decay by head, 32 states, 2 × bytes, of read bandwidth", better::higher, 0.95, 1.28,
         step_of_bandwidth<systems::simple_gla>},
        {"cold decode, decay by channel, 32 states, 2 × bytes, of read bandwidth", better::higher, 0.95, 1.28,
         step_of_bandwidth<systems::gla>},
        {"cold decode, delta rule, 32 states, 2 × bytes, of read bandwidth", better::higher, 0.8, 0.95,
         step_of_bandwidth<systems::gated_deltanet>},
        {"cold decode, delta rule by channel, 32 states, 2 × bytes, of read bandwidth", better::higher, 0.8, 0.95,
         step_of_bandwidth<systems::kda>},
        {"cold decode, diagonal + low rank, 32 states, 2 × bytes, of read bandwidth", better::higher, 0.8, 0.95,
         step_of_bandwidth<systems::rwkv7>},
        {"prefill n1024, decay by head, × recurrence", better::higher, 1.3, 1.6,
         recurrence_over_chunks<systems::simple_gla>},
        {"prefill n1024, decay by channel, × recurrence", better::higher, 1.3, 1.5,
         recurrence_over_chunks<systems::gla>},
        {"prefill n1024, delta rule, × recurrence", better::higher, 1.3, 1.7,
         recurrence_over_chunks<systems::gated_deltanet>},
        {"prefill n1024, diagonal + low rank, × recurrence", better::higher, 1.3, 1.4,
         recurrence_over_chunks<systems::rwkv7>},
        {"prefill n2048, decay by channel, time over decay by head", better::lower, 1.6, 1.2,
         prefill_over_scalar_decay<systems::gla>},
        {"prefill n2048, diagonal + low rank, time over decay by head", better::lower, 1.6, 1.4,
         prefill_over_scalar_decay<systems::rwkv7>},
        {"prefill n2048, delta rule, time over decay by head", better::lower, goal::none, goal::none,
         prefill_over_scalar_decay<systems::gated_deltanet>},
    };
}

}  // namespace goals
