// One token, or a few drafts, against keys that come from memory. 32 query heads share 8 KV heads.
#include "suite.hpp"

namespace {

using bench::int64;

template <class Element>
void cold(benchmark::State& state) {
    const int64 keys = state.range(0), queries = state.range(1);
    bench::prompt tokens(bench::whole_layer(), std::min<int64>(keys, 4096));
    const double bytes = bench::bytes_of_keys<Element>(tokens.shape, keys);
    bench::cold_layers layers(bytes, [&] { return bench::filled<Element>(tokens, sash::full{}, keys); });
    sash::workspace scratch;
    const double seconds = bench::measure(state, [&] {
        sash::read(tokens.query(queries), layers.next(), tokens.rows(queries),
                   {.first_query = keys - queries, .run = sash::serial{}, .workspace = &scratch});
    });
    bench::count_bytes(state, bytes, seconds);
    bench::count_flops(state, bench::flops(tokens.shape, static_cast<double>(keys * queries)), seconds);
    bench::count_tokens(state, queries, seconds);
}

/// The same keys again and again, from the machine's caches.
template <class Element>
void warm(benchmark::State& state) {
    const int64 keys = state.range(0);
    bench::prompt tokens(bench::quarter_layer(), keys);
    const auto cache = bench::filled<Element>(tokens, sash::full{}, keys);
    sash::workspace scratch;
    const double seconds = bench::measure(state, [&] {
        sash::read(tokens.query(1), cache, tokens.rows(1), {.run = sash::serial{}, .workspace = &scratch});
    });
    bench::count_bytes(state, bench::bytes_of_keys<Element>(tokens.shape, keys), seconds);
    bench::count_flops(state, bench::flops(tokens.shape, static_cast<double>(keys)), seconds);
}

// A fixed number, or the layers would be filled again and again until Google Benchmark knew how many.
void lengths(benchmark::internal::Benchmark* b) {
    b->ArgNames({"keys", "queries"})->ArgsProduct({{1024, 4096, 16384}, {1}})->Iterations(200)->UseManualTime();
}
void drafts(benchmark::internal::Benchmark* b) {
    b->ArgNames({"keys", "queries"})->ArgsProduct({{4096}, {2, 4, 8, 16}})->Iterations(100)->UseManualTime();
}

}  // namespace

BENCHMARK(cold<float>)->Apply(lengths)->Apply(drafts);
BENCHMARK(cold<sash::float16>)->Apply(lengths)->Apply(drafts);
BENCHMARK(cold<sash::bfloat16>)->Apply(lengths)->Apply(drafts);
BENCHMARK(cold<sash::int8_rows>)->Apply(lengths)->Apply(drafts);
BENCHMARK(warm<float>)->ArgName("keys")->Arg(256)->Arg(1024)->UseManualTime();
BENCHMARK(warm<sash::float16>)->ArgName("keys")->Arg(256)->Arg(1024)->UseManualTime();

BENCHMARK_MAIN();
