// The cost of a token against its position in a stream: full attention grows, a window with sinks and linear attention
// stay as they are. One layer of 32 / 8 heads, from memory.
#include "suite.hpp"

namespace {

using bench::int64;

template <class Policy>
void decode(benchmark::State& state, const Policy& policy, double (*bytes_read)(const sash::shape&, int64)) {
    const int64 position = state.range(0);
    bench::prompt tokens(bench::whole_layer(), std::min<int64>(position, 4096));
    const double bytes = bytes_read(tokens.shape, position);
    const auto first = bench::filled<float>(tokens, policy, position);
    bench::cold_layers layers(std::max(bytes, 12e6), [&] { return bench::own_copy(first, tokens); });
    sash::workspace scratch;
    const auto step = [&] {
        sash::attend(tokens.query(1), tokens.key(1), tokens.value(1), layers.next(), tokens.rows(1),
                     {.run = sash::serial{}, .workspace = &scratch});
    };
    for (std::size_t i = 0; i < layers.count(); ++i) step();  // the first append may take new memory
    const double seconds = bench::measure(state, step);
    bench::count_bytes(state, bytes, seconds);
    bench::count_tokens(state, 1, seconds);
}

void full(benchmark::State& state) { decode(state, sash::full{}, bench::bytes_of_keys<float>); }

void window(benchmark::State& state) {
    decode(state, sash::sliding_window{.window = 1024, .sinks = 4}, [](const sash::shape& s, int64 position) {
        return bench::bytes_of_keys<float>(s, std::min<int64>(position, 1028));
    });
}

void linear(benchmark::State& state) {
    decode(state, sash::linear{}, [](const sash::shape& s, int64) {  // read and written
        return 2.0 * static_cast<double>(s.kv_heads * s.head_dim * s.head_dim) * sizeof(float);
    });
}

void positions(benchmark::internal::Benchmark* b) {
    // A fixed number, or the layers would be filled again and again until Google Benchmark knew how many.
    b->ArgName("position")->RangeMultiplier(2)->Range(256, 32768)->Iterations(200)->UseManualTime();
}

}  // namespace

BENCHMARK(full)->Apply(positions);
BENCHMARK(window)->Apply(positions)->Arg(1000000);
BENCHMARK(linear)->Apply(positions)->Arg(1000000);

BENCHMARK_MAIN();
