#pragma once
/// \file
/// Two to the power of x, in registers: the softmax works in base 2, with log2(e) folded into the queries.
#include <sash/cpu/simd.hpp>

SASH_KERNELS_BEGIN

namespace sash::cpu {

inline constexpr float log2_e = 1.44269504f;

/// (2^f - 1) / f for |f| <= 1/2, of degree 4: chosen so that the largest relative error of 1 + f·q(f) is least (Remez),
/// 9.2e-8.
SASH_INLINE floats exp2_slope(floats f) {
    floats q = fma(f, floats(0.00132647271f), floats(0.00967151264f));
    q = fma(q, f, floats(0.0555073374f));
    q = fma(q, f, floats(0.240222421f));
    return fma(q, f, floats(0.693146978f));
}

/// 2^x for x <= 127.
///
/// With n = round(x) and f = x - n in [-1/2, 1/2]:  2^x = 2^n · p(f),  p(f) = 1 + f·q(f), q as above. Max error: 2 ulp.
/// Exactly 1 at 0, exactly 0 at -infinity and wherever the result would be far below the smallest normal number (x <
/// -126 may give 0), NaN for NaN. Holds under -ffast-math too: rounding is an instruction of its own that cannot be
/// reassociated, no test is one for infinity.
SASH_INLINE floats exp2(floats x) {
#if defined(__AVX512F__)
    const floats n(_mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    const integers whole = xsimd::nearbyint_as_int(x);
    const floats n = xsimd::to_float(whole);
#endif
    const floats f = x - n;
    const floats p = fma(exp2_slope(f), f, floats(1.0f));
#if defined(__AVX512F__)
    return floats(_mm512_scalef_ps(p, n));  // p is NaN at -infinity, where this instruction is defined to give 0
#else
    // n is added to the exponent field. From -126 on that field stays positive; below, and for -infinity, 0 it is.
    const floats scaled = as_floats(as_integers(p) + (whole << 23));
    return select(x < floats(-126.0f), floats(0.0f), scaled);
#endif
}

/// p · 2^n for a whole number n from -252 to 252.
SASH_INLINE floats times_exp2(floats p, floats n) {
#if defined(__AVX512F__)
    return floats(_mm512_scalef_ps(p, n));
#else
    const integers whole = nearest_integers(n), half = whole >> 1, bias(127);  // in two steps: 2^n may be out of range
    return p * as_floats((half + bias) << 23) * as_floats((whole - half + bias) << 23);
#endif
}

/// n = round(x log2 e), and x - n ln 2 in two steps (Cody and Waite), so that nothing is lost for large |x|; in units
/// of ln 2.
struct exp_parts {
    floats n, f;
};
SASH_INLINE exp_parts parts_of_exp(floats x) {
    const floats n = to_floats(nearest_integers(x * floats(log2_e)));
    return {n, fma(n, floats(2.12194440e-4f), fma(n, floats(-0.693359375f), x)) * floats(log2_e)};
}

/// e^x.
///
/// 2^n · 2^f by the parts and the polynomial above. Max error: 3 ulp; exactly 1 at 0, 0 at -infinity, infinity where it
/// is too large, NaN for NaN.
SASH_INLINE floats exp_of(floats x) {
    const floats most(89.0f), least(-104.0f);  // beyond, the result is infinite, or 0
    const exp_parts x_is = parts_of_exp(minimum(most, maximum(least, x)));
    return times_exp2(fma(exp2_slope(x_is.f), x_is.f, floats(1.0f)), x_is.n);
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

namespace xsimd {

/// What feature maps and scores find when they call exp of a register. xsimd's own is made of functions whose names do not
/// tell instruction sets apart: without optimisation they are shared by files that must not share them. (And on NEON
/// version 8 goes through a table of functions.)
SASH_INLINE sash::cpu::floats exp(const sash::cpu::floats& x) { return sash::cpu::exp_of(x); }

}  // namespace xsimd

SASH_KERNELS_END
