#pragma once
// What each copy of attend.cpp, compiled for an instruction set of its own, offers to the rest of the program.
#include <sash/sash.hpp>

namespace dispatch {

inline constexpr sash::int64 heads = 8, kv_heads = 2, dim = 64, row = heads * dim, kv_row = kv_heads * dim;

// The same type in every copy: its layout depends on no flag, so one cache may be passed between them.
using cache_type = sash::kv_cache<sash::sliding_window>;

struct kernels {
    const char* name;
    void (*attend)(cache_type& cache, sash::int64 tokens, const float* q, const float* k, const float* v, float* out);
};

extern const kernels baseline;  // x86-64 and nothing more; all there is on other machines
extern const kernels avx2;      // AVX2, FMA, F16C
extern const kernels avx512;    // these, and AVX-512 F, BW, DQ, VL, CD

}  // namespace dispatch
