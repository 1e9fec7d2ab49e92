// Compiled once for each instruction set, with -DISA=baseline, avx2 or avx512 and the compiler's flags for it.
//
// Why these copies may be linked together. What the linker finds twice under one name it keeps once, perhaps the copy
// with AVX-512 in it, for the whole program. So no two copies of this file may define one name:
//
//   - every function of sash is inlined, or carries the flags it was compiled with in its name (sash/config.hpp);
//   - what this file defines itself has the copy's own name, or lies in the unnamed namespace;
//   - it uses no function template or inline function of anybody else's: no std::vector, no std::sort. They would be
//     compiled here for AVX-512, and might then be what main() calls on a machine without it;
//   - nothing in it runs before main() has chosen: what it exports is a constant.
#include "kernels.hpp"

#define TEXT_OF(x) #x
#define NAME_OF(x) TEXT_OF(x)

namespace dispatch {
namespace {

void attend(cache_type& cache, sash::int64 tokens, const float* q, const float* k, const float* v, float* out) {
    sash::attend({q, tokens, heads, dim}, {k, tokens, kv_heads, dim}, {v, tokens, kv_heads, dim}, cache,
                 {out, tokens, heads, dim});
}

}  // namespace

constexpr kernels ISA = {NAME_OF(ISA), attend};

}  // namespace dispatch
