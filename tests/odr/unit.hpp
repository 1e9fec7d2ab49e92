#pragma once
// What each file, built with flags of its own, offers to the program that links them all.
#include <sash/sash.hpp>

namespace odr {

using cache_type = sash::kv_cache<sash::sliding_window>;

inline constexpr sash::int64 heads = 4, kv_heads = 2, head_dim = 40;
inline constexpr sash::int64 row = heads * head_dim;

struct unit {
    const char* name;
    cache_type (*make)();
    void (*attend)(cache_type& cache, sash::int64 tokens, const float* q, const float* k, const float* v, float* out);
    cache_type (*fork)(const cache_type& cache);
    void (*roll_back)(cache_type& cache, sash::int64 tokens);
    void (*save_and_load)(cache_type& cache);
    void (*destroy)(cache_type* cache);  // the memory is the caller's
    void (*other_policies)(const float* q, const float* k, const float* v, float* out);  // a token each, 3 rows of outputs
};

}  // namespace odr
