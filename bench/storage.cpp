// The types that keys and values are stored in: prefill, and appending alone.
#include "suite.hpp"

namespace {

using bench::int64;

/// Tokens of type Number, stored as Element.
template <class Element, class Number = float>
void prefill(benchmark::State& state) {
    const int64 n = state.range(0), dim = state.range(1);
    bench::prompt_of<Number> tokens(bench::quarter_layer(dim), n);
    bench::prefill<Element, sash::full, Number> run(tokens, {});
    const double seconds = bench::measure(state, run);
    bench::count_flops(state, bench::flops(tokens.shape, bench::visible_pairs(n, n)), seconds);
    bench::count_tokens(state, n, seconds);
}

template <class Element>
void append(benchmark::State& state) {
    const int64 n = state.range(0);
    bench::prompt tokens(bench::whole_layer(), n);
    sash::kv_cache<sash::full, Element> cache(sash::full{}, tokens.shape);
    const double seconds = bench::measure(state, [&] {
        cache.reset();
        sash::append(tokens.key(n), tokens.value(n), cache, {.run = sash::serial{}});
    });
    state.counters["GB/s"] = bench::bytes_of_keys<Element>(tokens.shape, n) / seconds / 1e9;
    bench::count_tokens(state, n, seconds);
}

void lengths(benchmark::internal::Benchmark* b) {
    b->ArgNames({"n", "dim"})->ArgsProduct({{512, 2048}, {64, 128}})->UseManualTime();
}

}  // namespace

BENCHMARK(prefill<float>)->Apply(lengths);
BENCHMARK(prefill<sash::float16>)->Apply(lengths);
BENCHMARK(prefill<sash::bfloat16>)->Apply(lengths);
BENCHMARK_TEMPLATE(prefill, sash::bfloat16, sash::bfloat16)->Apply(lengths);
BENCHMARK(prefill<sash::int8_rows>)->Apply(lengths);
BENCHMARK(append<float>)->ArgName("n")->Arg(2048)->UseManualTime();
BENCHMARK(append<sash::float16>)->ArgName("n")->Arg(2048)->UseManualTime();
BENCHMARK(append<sash::bfloat16>)->ArgName("n")->Arg(2048)->UseManualTime();
BENCHMARK(append<sash::int8_rows>)->ArgName("n")->Arg(2048)->UseManualTime();

BENCHMARK_MAIN();
