// The cores of linear attention: a step of decoding from memory, and the prefill of a prompt. 32 states of 128 × 128,
// unless a hybrid has others.
#include "methods.hpp"
#include "suite.hpp"

namespace {

using bench::int64;
namespace systems = sash::systems;

constexpr sash::shape states_of_128{.heads = 32, .kv_heads = 32, .head_dim = 128};

template <class Decay, class Update = sash::additive>
using core = sash::linear<sash::identity, Decay, Update, sash::no_normaliser>;
using constant_decay = core<sash::constant_per_head>;
using bonus = systems::rwkv6;

/// A policy with the numbers that it needs.
template <class Policy>
Policy policy_of() {
    if constexpr (std::is_same_v<Policy, constant_decay>) {
        return {.decay = sash::retnet_decays(32)};
    } else if constexpr (std::is_same_v<Policy, bonus>) {
        static const std::vector<float> u = bench::noise(32 * 128, 9);
        return {.update = {u}};
    } else {
        return {};
    }
}

template <class Policy>
void decode(benchmark::State& state) {
    bench::cold_states<Policy> layers(policy_of<Policy>(), states_of_128);
    const double seconds = bench::measure(state, [&] { layers.step(); });
    bench::count_bytes(state, 2 * layers.bytes(), seconds);
    bench::count_tokens(state, 1, seconds);
}

template <class Policy>
void prefill(benchmark::State& state) {
    const int64 n = state.range(0);
    bench::gated_prefill<Policy> run(policy_of<Policy>(), states_of_128, n);
    const double seconds = bench::measure(state, run);
    // k vᵀ into the state and its product with q; what a decay or a correction adds lowers the figure.
    bench::count_flops(state, 4.0 * 32 * 128 * 128 * static_cast<double>(n), seconds);
    bench::count_tokens(state, n, seconds);
}

/// A layer of 32 / 8 heads, and its window of 64 keys in bfloat16 beside the states.
template <class Method>
void decode_hybrid(benchmark::State& state) {
    bench::cold_sequences<Method> layers({}, 1);
    const double seconds = bench::measure(state, [&] { layers.step(); });
    bench::count_bytes(state, Method().moved() + Method().shared(), seconds);
    bench::count_tokens(state, 1, seconds);
}

template <class Method>
void prefill_hybrid(benchmark::State& state) {
    const int64 n = state.range(0);
    const Method method;
    bench::cache_of<Method> cache(method.policy(), method.shape());
    bench::gated_prompt tokens(method.policy(), method.shape(), n);
    const double seconds = bench::measure(state, [&] {
        cache.reset();
        sash::attend(tokens.slice(0, n), cache, tokens.rows(0, n), {.run = sash::serial{}});
    });
    bench::count_tokens(state, n, seconds);
}

// A fixed number, or the layers would be filled again and again until Google Benchmark knew how many.
void steps(benchmark::internal::Benchmark* b) { b->Iterations(500)->UseManualTime(); }
void lengths(benchmark::internal::Benchmark* b) { b->ArgName("n")->Arg(256)->Arg(2048)->UseManualTime(); }

}  // namespace

#define SASH_BENCH_CORE(...)                               \
    BENCHMARK_TEMPLATE(decode, __VA_ARGS__)->Apply(steps); \
    BENCHMARK_TEMPLATE(prefill, __VA_ARGS__)->Apply(lengths)

SASH_BENCH_CORE(core<sash::no_decay>);
SASH_BENCH_CORE(constant_decay);
SASH_BENCH_CORE(core<sash::per_head_and_token>);
SASH_BENCH_CORE(core<sash::per_channel_and_token>);
SASH_BENCH_CORE(bonus);
SASH_BENCH_CORE(systems::deltanet);
SASH_BENCH_CORE(systems::gated_deltanet);
SASH_BENCH_CORE(systems::kda);
SASH_BENCH_CORE(systems::rwkv7);
BENCHMARK_TEMPLATE(decode_hybrid, bench::method::lolcats)->Apply(steps);
BENCHMARK_TEMPLATE(prefill_hybrid, bench::method::lolcats)->Apply(lengths);
BENCHMARK_TEMPLATE(decode_hybrid, bench::method::liger)->Apply(steps);
BENCHMARK_TEMPLATE(prefill_hybrid, bench::method::liger)->Apply(lengths);

BENCHMARK_MAIN();
