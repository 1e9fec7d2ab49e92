// Prefill and decode of the softmax policies on one thread, as fractions of what the machine can do: `of_peak` of the fp32
// multiply-adds, counting visible (query, key) pairs only (4 · head_dim operations each); `of_bandwidth` of the bytes read
// from memory, counting each byte of K and V once.
#include "machine.hpp"

#include <sash/sash.hpp>

#include <benchmark/benchmark.h>

#include <random>
#include <vector>

namespace {

using sash::int64;

std::vector<float> noise(int64 n) {
    static std::mt19937 bits(1);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) v = normal(bits);
    return x;
}

constexpr int64 heads = 8, kv_heads = 2;  // a quarter of a 32/8-head layer: the same work a head

/// Pairs (query, key) that a prompt of n tokens makes visible.
double visible_pairs(int64 n, int64 most) {
    double pairs = 0;
    for (int64 i = 0; i < n; ++i) pairs += static_cast<double>(std::min(i + 1, most));
    return pairs;
}

template <class Element, class Policy>
void prefill(benchmark::State& state, Policy policy, int64 n, int64 dim, int64 most_keys) {
    static const double peak = machine::peak_flops();
    const auto q = noise(n * heads * dim), k = noise(n * kv_heads * dim), v = noise(n * kv_heads * dim);
    std::vector<float> out(q.size());
    sash::kv_cache<Policy, Element> cache(policy, {.heads = heads, .kv_heads = kv_heads, .head_dim = dim});
    double seconds = 0;
    for (auto _ : state) {
        cache.reset();
        const double start = machine::thread_seconds();
        sash::attend({q, n, heads, dim}, {k, n, kv_heads, dim}, {v, n, kv_heads, dim}, cache, {out, n, heads, dim}, {.run = sash::serial{}});
        seconds += machine::thread_seconds() - start;
    }
    const double flops = 4.0 * static_cast<double>(dim * heads) * visible_pairs(n, most_keys) * static_cast<double>(state.iterations());
    state.counters["of_peak"] = flops / seconds / peak;
}

template <class Element>
void prefill_full(benchmark::State& state) {
    prefill<Element>(state, sash::full{}, state.range(0), state.range(1), state.range(0));
}
void prefill_window(benchmark::State& state) {
    const sash::sliding_window window{.window = state.range(2), .sinks = 4};
    prefill<float>(state, window, state.range(0), state.range(1), window.window + window.sinks);
}

/// One token against `keys` keys; enough layers in turn that none is in a cache of the machine when its turn comes.
template <class Element>
void decode_cold(benchmark::State& state) {
    static const double bandwidth = machine::read_bandwidth();
    constexpr int64 dim = 128;
    const int64 keys = state.range(0);
    const int64 bytes = keys * kv_heads * dim * 2 * int64{sizeof(Element)};
    const auto k = noise(keys * kv_heads * dim), v = noise(keys * kv_heads * dim), q = noise(heads * dim);
    std::vector<float> out(q.size());
    std::vector<sash::kv_cache<sash::full, Element>> layers;
    for (int64 held = 0; held < int64{540} << 20; held += bytes) {
        layers.emplace_back(sash::full{}, sash::shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim});
        sash::append({k, keys, kv_heads, dim}, {v, keys, kv_heads, dim}, layers.back());
    }
    sash::workspace scratch;
    double seconds = 0;
    std::size_t next = 0;
    for (auto _ : state) {
        const double start = machine::thread_seconds();
        sash::read({q, 1, heads, dim}, layers[next], {out, 1, heads, dim}, {.run = sash::serial{}, .workspace = &scratch});
        seconds += machine::thread_seconds() - start;
        next = (next + 1) % layers.size();
    }
    state.counters["of_bandwidth"] = static_cast<double>(bytes) * static_cast<double>(state.iterations()) / seconds / bandwidth;
}

}  // namespace

BENCHMARK(prefill_full<float>)->ArgNames({"n", "dim"})->ArgsProduct({{512, 2048}, {64, 128}});
BENCHMARK(prefill_full<sash::float16>)->ArgNames({"n", "dim"})->Args({2048, 128});
BENCHMARK(prefill_full<sash::bfloat16>)->ArgNames({"n", "dim"})->Args({2048, 128});
BENCHMARK(prefill_window)->ArgNames({"n", "dim", "window"})->Args({2048, 128, 1024})->Args({2048, 128, 256})->Args({4096, 128, 64});
BENCHMARK(decode_cold<float>)->ArgName("keys")->Arg(1024)->Arg(16384);
BENCHMARK(decode_cold<sash::float16>)->ArgName("keys")->Arg(1024)->Arg(16384);
BENCHMARK(decode_cold<sash::bfloat16>)->ArgName("keys")->Arg(1024)->Arg(16384);

BENCHMARK_MAIN();
