#pragma once
/// \file
/// Rows of numbers from one element type to another, a register at a time. Widening is exact; narrowing rounds to
/// nearest, ties to even, overflows to infinity and keeps NaN: bit for bit what the conversions of scalar.hpp do.
#include <sash/cpu/simd.hpp>

SASH_KERNELS_BEGIN

namespace sash::cpu {

/// to[i] = from[i] for i < count. Cost: O(count).
template <class Build, class Element>
void widen(const Element* from, float* to, int64 count) {
    int64 i = 0;
    for (; i + lanes<Build> <= count; i += lanes<Build>) store(to + i, load(from + i));
    for (; i < count; ++i) to[i] = float(from[i]);
}

/// to[i] = from[i] rounded to Element, for i < count.
template <class Build, class Element>
void narrow(const float* from, Element* to, int64 count) {
    int64 i = 0;
    for (; i + lanes<Build> <= count; i += lanes<Build>) store(to + i, load(from + i));
    for (; i < count; ++i) to[i] = Element(from[i]);
}

}  // namespace sash::cpu

SASH_KERNELS_END
