// Compiled many times, with UNIT naming the flags: R31.
#include "unit.hpp"

#ifdef __cpp_exceptions
#elif defined(DEFINES_ON_ERROR)
#include <cstdlib>
void sash::on_error(std::string_view) { std::abort(); }
#endif

namespace odr::UNIT {

namespace {

cache_type make() {
    return cache_type(sash::sliding_window{.window = 7, .sinks = 2},
                      {.heads = heads, .kv_heads = kv_heads, .head_dim = head_dim}, {.soft_cap = 30},
                      {.rollback_slack = 4});
}

void attend(cache_type& cache, sash::int64 tokens, const float* q, const float* k, const float* v, float* out) {
    sash::attend({q, tokens, heads, head_dim}, {k, tokens, kv_heads, head_dim}, {v, tokens, kv_heads, head_dim}, cache,
                 {out, tokens, heads, head_dim});
}

cache_type fork(const cache_type& cache) { return cache; }

void roll_back(cache_type& cache, sash::int64 tokens) { cache.rollback(tokens); }

void save_and_load(cache_type& cache) {
    const auto bytes = cache.save();
    cache.reset();
    cache.load(bytes);
}

void destroy(cache_type* cache) { cache->~cache_type(); }

// Several storage types, the recurrent kernels, a batch, the form without a cache.
void other_policies(const float* q, const float* k, const float* v, float* out) {
    const sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = head_dim};
    sash::kv_cache<sash::full, sash::bfloat16> narrow({}, shape);
    sash::kv_cache<sash::linear<>> recurrent({}, shape);
    const sash::input query{q, 1, heads, head_dim}, key{k, 1, kv_heads, head_dim}, value{v, 1, kv_heads, head_dim};
    sash::request<decltype(narrow)> one[] = {{{.query = query, .key = key, .value = value}, &narrow, {out, 1, heads, head_dim}}};
    sash::attend(one);
    sash::attend(query, key, value, recurrent, {out + row, 1, heads, head_dim});
    sash::attend(sash::full{}, query, key, value, {out + 2 * row, 1, heads, head_dim});
}

}  // namespace

#define TEXT_OF(x) #x
#define NAME_OF(x) TEXT_OF(x)
extern const unit functions;
const unit functions = {NAME_OF(UNIT), make, attend, fork, roll_back, save_and_load, destroy, other_policies};

}  // namespace odr::UNIT
