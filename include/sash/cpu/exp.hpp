#pragma once
/// \file
/// Two to the power of x, in registers: the softmax works in base 2, with log2(e) folded into the queries.
#include <sash/cpu/simd.hpp>

SASH_KERNELS_BEGIN

namespace sash::cpu {

inline constexpr float log2_e = 1.44269504f;

/// 2^x for x <= 127.
///
/// With n = round(x) and f = x - n in [-1/2, 1/2]:  2^x = 2^n · p(f),  p(f) = 1 + f·q(f), q of degree 4 chosen so that
/// the largest relative error of p is least (Remez): 9.2e-8. Max error: 2 ulp. Exactly 1 at 0, exactly 0 at -infinity
/// and wherever the result would be far below the smallest normal number (x < -126 may give 0), NaN for NaN. Holds
/// under -ffast-math too: rounding is an instruction of its own that cannot be reassociated, no test is one for
/// infinity.
SASH_INLINE floats exp2(floats x) {
#if defined(__AVX512F__)
    const floats n(_mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    const integers whole = xsimd::nearbyint_as_int(x);
    const floats n = xsimd::to_float(whole);
#endif
    const floats f = x - n;
    floats p = fma(f, floats(0.00132647271f), floats(0.00967151264f));
    p = fma(p, f, floats(0.0555073374f));
    p = fma(p, f, floats(0.240222421f));
    p = fma(p, f, floats(0.693146978f));
    p = fma(p, f, floats(1.0f));
#if defined(__AVX512F__)
    return floats(_mm512_scalef_ps(p, n));  // p is NaN at -infinity, where this instruction is defined to give 0
#else
    // n is added to the exponent field. From -126 on that field stays positive; below, and for -infinity, 0 it is.
    const floats scaled = as_floats(as_integers(p) + (whole << 23));
    return select(x < floats(-126.0f), floats(0.0f), scaled);
#endif
}

/// tanh x.
///
/// From 5/8 on |tanh x| = 1 - 2 / (e^2|x| + 1). Below, where that difference would cancel, x + x^3·p(x^2) with p of
/// degree 4 chosen as above: 4.4e-9. Max error: 2 ulp. Odd, ±1 at ±infinity, NaN for NaN.
SASH_INLINE floats tanh(floats x) {
    const floats u = x * x;
    floats p = fma(u, floats(-0.00570498713f), floats(0.0206390874f));
    p = fma(p, u, floats(-0.0537397151f));
    p = fma(p, u, floats(0.133314422f));
    p = fma(p, u, floats(-0.333332819f));
    const floats small = fma(p * u, x, x);

    const floats a = as_floats(as_integers(x) & integers(0x7fffffff));
    const lane_mask is_large = a >= floats(0.625f);
    if (!any(is_large)) return small;  // scores seldom come near their cap
    const integers sign = as_integers(x) & integers(static_cast<std::int32_t>(0x80000000u));
    const floats e = exp2(minimum(floats(32.0f), a * floats(2 * log2_e)));  // beyond, tanh is 1
    const floats large = floats(1.0f) - floats(2.0f) / (e + floats(1.0f));
    return select(is_large, as_floats(as_integers(large) | sign), small);
}

}  // namespace sash::cpu

SASH_KERNELS_END
