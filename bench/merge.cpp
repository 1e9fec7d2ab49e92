// Joining partial results: rows of keys that lay apart, in pieces of a split or on several machines.
#include "suite.hpp"

namespace {

using bench::int64;

void partials(benchmark::State& state) {
    const int64 dim = state.range(0);
    std::vector<float> left = bench::noise(dim, 1), right = bench::noise(dim, 2);
    sash::partial one{left, 2, 0.5f};
    const sash::partial other{right, 3, 0.25f};
    for (auto _ : state) {
        one.merge(other);
        one.denominator = 2;  // or it would grow out of range
        benchmark::DoNotOptimize(left.data());
        benchmark::ClobberMemory();
    }
    bench::count_rate(state, "GB/s", static_cast<double>(2 * dim) * sizeof(float) / 1e9);
}

void finished_pairs(benchmark::State& state) {
    const int64 dim = state.range(0);
    std::vector<float> out = bench::noise(dim, 1);
    const std::vector<float> other = bench::noise(dim, 2);
    float lse = 1;
    for (auto _ : state) {
        sash::merge_finished(out, lse, other, 0.5f);
        lse = 1;
        benchmark::DoNotOptimize(out.data());
        benchmark::ClobberMemory();
    }
    bench::count_rate(state, "GB/s", static_cast<double>(2 * dim) * sizeof(float) / 1e9);
}

/// A query in one call, cut into pieces of some keys that are merged again: what splitting costs.
void pieces(benchmark::State& state) {
    constexpr int64 keys = 16384;
    bench::prompt tokens(bench::quarter_layer(), keys);
    const auto cache = bench::filled<float>(tokens, sash::full{}, keys);
    sash::workspace scratch;
    const double seconds = bench::measure(state, [&] {
        sash::read(tokens.query(1), cache, tokens.rows(1),
                   {.run = sash::serial{}, .workspace = &scratch, .key_piece = state.range(0)});
    });
    bench::count_bytes(state, bench::bytes_of_keys<float>(tokens.shape, keys), seconds);
}

}  // namespace

BENCHMARK(partials)->ArgName("dim")->Arg(64)->Arg(128)->Arg(256);
BENCHMARK(finished_pairs)->ArgName("dim")->Arg(64)->Arg(128)->Arg(256);
BENCHMARK(pieces)->ArgName("piece")->Arg(64)->Arg(256)->Arg(512)->Arg(2048)->Arg(16384)->UseManualTime();

BENCHMARK_MAIN();
