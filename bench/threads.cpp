// More threads, by the clock on the wall. Cores that other work uses show here.
#include "suite.hpp"

namespace {

using bench::int64;

sash::runner team(const benchmark::State& state) { return sash::openmp{static_cast<int>(state.range(0))}; }

void prefill(benchmark::State& state) {
    constexpr int64 n = 2048;
    bench::prompt tokens(bench::quarter_layer(), n);
    bench::prefill<float, sash::full> run(tokens, {});
    for (auto _ : state) run(team(state));
    bench::count_rate(state, "GFLOP/s", bench::flops(tokens.shape, bench::visible_pairs(n, n)) / 1e9);
}

void cold_decode(benchmark::State& state) {
    constexpr int64 keys = 4096;
    bench::prompt tokens(bench::whole_layer(), keys);
    const double bytes = bench::bytes_of_keys<float>(tokens.shape, keys);
    bench::cold_layers layers(bytes, [&] { return bench::filled<float>(tokens, sash::full{}, keys); });
    sash::workspace scratch;
    for (auto _ : state)
        sash::read(tokens.query(1), layers.next(), tokens.rows(1), {.run = team(state), .workspace = &scratch});
    bench::count_rate(state, "GB/s", bytes / 1e9);
}

/// A batch of short sequences: one task each, and more.
void batch(benchmark::State& state) {
    constexpr int64 keys = 512;
    using cache_type = sash::kv_cache<sash::full>;
    bench::prompt tokens(bench::quarter_layer(), keys);
    std::vector<cache_type> caches;
    std::vector<sash::request<cache_type>> requests;
    for (int i = 0; i < 16; ++i) caches.push_back(bench::filled<float>(tokens, sash::full{}, keys));
    for (cache_type& cache : caches)
        requests.push_back({.tokens = {.query = tokens.query(1), .key = tokens.key(1), .value = tokens.value(1)},
                            .cache = &cache,
                            .out = tokens.rows(1)});
    for (auto _ : state) {
        sash::attend(requests, {.run = team(state)});
        for (cache_type& cache : caches) cache.rollback(1);
    }
    bench::count_rate(state, "tokens/s", static_cast<double>(caches.size()));
}

void teams(benchmark::internal::Benchmark* b) { b->ArgName("threads")->Arg(1)->Arg(2)->Arg(4)->UseRealTime(); }

}  // namespace

BENCHMARK(prefill)->Apply(teams);
BENCHMARK(cold_decode)->Apply(teams);
BENCHMARK(batch)->Apply(teams);

BENCHMARK_MAIN();
