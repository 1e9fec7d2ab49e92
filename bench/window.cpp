// What a window costs, against how much it shows: prefill, and a step of decoding. 4 sinks throughout.
#include "suite.hpp"

namespace {

using bench::int64;

constexpr int64 sinks = 4;

void prefill(benchmark::State& state) {
    const int64 n = state.range(0), window = state.range(1);
    bench::prompt tokens(bench::quarter_layer(), n);
    bench::prefill<float, sash::sliding_window> run(tokens, {.window = window, .sinks = sinks});
    const double seconds = bench::measure(state, run);
    bench::count_flops(state, bench::flops(tokens.shape, bench::visible_pairs(n, window + sinks)), seconds);
    bench::count_tokens(state, n, seconds);
}

/// One token is appended and read, layer by layer; each layer comes from memory.
template <class Element>
void decode(benchmark::State& state) {
    const sash::sliding_window policy{
        .window = state.range(0), .sinks = sinks, .frame = static_cast<sash::frame>(state.range(1))};
    bench::prompt tokens(bench::whole_layer(), 2048);
    const sash::rope_table frequencies = sash::rope_frequencies(128, 500000);
    const double bytes = bench::bytes_of_keys<Element>(tokens.shape, policy.window + sinks);
    const auto streamed =
        bench::filled<Element>(tokens, policy, 3 * policy.window + 500,
                               {.rotary = {.frequencies = frequencies, .by = sash::rotates::library}});
    bench::cold_layers layers(std::max(bytes, 4e6), [&] { return streamed; });
    sash::workspace scratch;
    const double seconds = bench::measure(state, [&] {
        sash::attend(tokens.query(1), tokens.key(1), tokens.value(1), layers.next(), tokens.rows(1),
                     {.run = sash::serial{}, .workspace = &scratch});
    });
    bench::count_bytes(state, bytes, seconds);
    bench::count_tokens(state, 1, seconds);
}

void windows(benchmark::internal::Benchmark* b) {
    b->ArgNames({"window", "compact"})->ArgsProduct({{64, 256, 1024, 4096}, {0, 1}})->Iterations(300)->UseManualTime();
}

}  // namespace

BENCHMARK(prefill)
    ->ArgNames({"n", "window"})
    ->ArgsProduct({{2048}, {64, 256, 1024, 2048}})
    ->Args({4096, 64})
    ->Args({8192, 256})
    ->Args({8192, 1024})
    ->UseManualTime();
BENCHMARK(decode<float>)->Apply(windows);
BENCHMARK(decode<sash::bfloat16>)->Apply(windows);

BENCHMARK_MAIN();
