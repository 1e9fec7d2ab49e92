// Linear attention: a state is read and written once a token.
#include "goal.hpp"

namespace goals {
namespace {

/// One token into the next of some cold layers.
template <class Policy>
class cold_steps {
public:
    cold_steps(bench::prompt& tokens, const Policy& policy, int64 length, double touched)
        : tokens_(&tokens),
          layers_(touched, [first = bench::filled<float>(tokens, policy, length)] { return first; }) {}

    double seconds() {
        constexpr int steps = 64;
        return machine::seconds_of([this] {
                   for (int i = 0; i < steps; ++i)
                       sash::attend(tokens_->query(1), tokens_->key(1), tokens_->value(1), layers_.next(),
                                    tokens_->rows(1), {.run = sash::serial{}, .workspace = &scratch_});
               }) /
               steps;
    }

private:
    bench::prompt* tokens_;
    bench::cold_layers<sash::kv_cache<Policy>> layers_;
    sash::workspace scratch_;
};

double bytes_of_state(const sash::shape& s) {
    return static_cast<double>(s.kv_heads * s.head_dim * s.head_dim) * sizeof(float);
}

/// Decay by head and token, no feature map, no normaliser: the state is read and written, and little else.
figure gated_of_bandwidth(const effort& most) {
    using gated = sash::linear<sash::identity, sash::per_head_and_token, sash::additive, sash::no_normaliser>;
    bench::prompt tokens({.heads = 32, .kv_heads = 32, .head_dim = 128}, 1);
    const std::vector<float> decay(32, -0.1f);
    const double state = bytes_of_state(tokens.shape);
    bench::cold_layers layers(state, [&] {
        return sash::kv_cache(gated{}, tokens.shape, sash::score{}, {.memory = bench::reused_memory()});
    });
    sash::workspace scratch;
    const auto seconds = [&] {
        constexpr int steps = 48;  // 100 MB of states
        return machine::seconds_of([&] {
                   for (int i = 0; i < steps; ++i)
                       sash::attend({.query = tokens.query(1),
                                     .key = tokens.key(1),
                                     .value = tokens.value(1),
                                     .decay = {decay, 1, 32, 1}},
                                    layers.next(), tokens.rows(1), {.run = sash::serial{}, .workspace = &scratch});
               }) /
               steps;
    };
    for (std::size_t done = 0; done < layers.count(); done += 48) seconds();  // the first token touches new memory
    return bench::of_peak(most, 2 * state, machine::read_bandwidth<>, seconds);
}

/// The smallest window of the study against the state update of elu + 1, both cold.
figure small_window_over_linear(const effort& most) {
    constexpr int64 window = 64, sinks = 4;
    bench::prompt tokens(bench::whole_layer(), 512);
    const double touched = 4 * bytes_of_state(tokens.shape);  // a quarter of the layers is enough: states are small
    cold_steps windowed(tokens, sash::sliding_window{.window = window, .sinks = sinks}, 1000, touched);
    cold_steps recurrent(tokens, sash::linear{}, 1000, touched);
    const auto [window_seconds, linear_seconds] = bench::in_turn(
        most, [&] { return windowed.seconds(); }, [&] { return recurrent.seconds(); });
    return bench::ratio(window_seconds, linear_seconds);
}

}  // namespace

std::vector<goal> linear_goals() {
    return {
        {"decode, window 64 + 4 over linear elu + 1", better::lower, 1, 0.5, small_window_over_linear},
        {"cold decode, decay by head, 32 states, 2 × bytes, of read bandwidth", better::higher, 0.95, 1.28,
         gated_of_bandwidth},
    };
}

}  // namespace goals
