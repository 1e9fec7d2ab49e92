// Prefill of full attention against the length of the prompt, beside what others would write: the textbook loop, and
// matrix products of Eigen and OpenBLAS, row block by row block. 8 query heads share 2 KV heads.
#include "baselines.hpp"
#include "suite.hpp"

namespace {

using bench::int64;

void count(benchmark::State& state, const sash::shape& shape, int64 n, double seconds) {
    bench::count_flops(state, bench::flops(shape, bench::visible_pairs(n, n)), seconds);
    bench::count_tokens(state, n, seconds);
}

void full(benchmark::State& state) {
    const int64 n = state.range(0);
    bench::prompt tokens(bench::quarter_layer(state.range(1)), n);
    bench::prefill<float, sash::full> run(tokens, {});
    const double seconds = bench::measure(state, run);
    count(state, tokens.shape, n, seconds);
}

void window(benchmark::State& state) {
    const int64 n = state.range(0);
    bench::prompt tokens(bench::quarter_layer(state.range(1)), n);
    bench::prefill<float, sash::sliding_window> run(tokens, {.window = 1024, .sinks = 4});
    const double seconds = bench::measure(state, run);
    bench::count_flops(state, bench::flops(tokens.shape, bench::visible_pairs(n, 1028)), seconds);
    bench::count_tokens(state, n, seconds);
}

void linear(benchmark::State& state) {
    const int64 n = state.range(0);
    bench::prompt tokens(bench::quarter_layer(state.range(1)), n);
    bench::prefill<float, sash::linear<>> run(tokens, {});
    const double seconds = bench::measure(state, run);
    bench::count_tokens(state, n, seconds);
}

template <class Products>
void composition(benchmark::State& state) {
    bench::prompt tokens(bench::quarter_layer(state.range(1)), state.range(0));
    bench::composition<Products> run(tokens);  // finds the best block
    const double seconds = bench::measure(state, run);
    count(state, tokens.shape, state.range(0), seconds);
    state.SetLabel(std::to_string(run.block()) + " rows a block");
}

void naive(benchmark::State& state) {
    bench::prompt tokens(bench::quarter_layer(state.range(1)), state.range(0));
    const double seconds = bench::measure(state, [&] { bench::naive_attention(tokens); });
    count(state, tokens.shape, state.range(0), seconds);
}

void lengths(benchmark::internal::Benchmark* b) {
    b->ArgNames({"n", "dim"})->ArgsProduct({{256, 512, 1024, 2048, 4096, 8192}, {64, 128}})->UseManualTime();
}
void two_lengths(benchmark::internal::Benchmark* b) {
    b->ArgNames({"n", "dim"})->ArgsProduct({{512, 2048}, {64, 128}})->UseManualTime();
}

}  // namespace

BENCHMARK(full)->Apply(lengths);
BENCHMARK(window)->Apply(lengths);
BENCHMARK(linear)->Apply(lengths);
BENCHMARK(composition<bench::eigen_products>)->Apply(two_lengths);
#if defined(SASH_BENCH_OPENBLAS)
BENCHMARK(composition<bench::openblas_products>)->Apply(two_lengths);
#endif
BENCHMARK(naive)->ArgNames({"n", "dim"})->Args({512, 64})->Args({512, 128})->UseManualTime();

int main(int count, char** arguments) {
    bench::let_openblas_choose(arguments);
    benchmark::Initialize(&count, arguments);
    if (benchmark::ReportUnrecognizedArguments(count, arguments)) return 1;
    benchmark::RunSpecifiedBenchmarks();
}
