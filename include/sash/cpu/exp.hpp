#pragma once
/// \file
/// Two to the power of x, in registers: the softmax works in base 2, with log2(e) folded into the queries.
#include <sash/cpu/simd.hpp>

SASH_KERNELS_BEGIN

namespace sash::cpu {

inline constexpr float log2_e = 1.44269504f;

/// (2^f - 1) / f for |f| <= 1/2, of degree 4: chosen so that the largest relative error of 1 + f·q(f) is least (Remez),
/// 9.2e-8.
inline constexpr float slope_of_exp2[5] = {0.00132647271f, 0.00967151264f, 0.0555073374f, 0.240222421f, 0.693146978f};
SASH_INLINE floats exp2_slope(floats f) {
    constexpr auto& q = slope_of_exp2;
    floats p = fma(f, floats(q[0]), floats(q[1]));
#pragma GCC unroll 3
    for (int k = 2; k < 5; ++k) p = fma(p, f, floats(q[k]));
    return p;
}

/// 2^x of `Count` registers, each x <= 127.
///
/// With n = round(x) and f = x - n in [-1/2, 1/2]:  2^x = 2^n · p(f),  p(f) = 1 + f·q(f), q as above. Max error: 2 ulp. Exactly 1 at 0, exactly 0 at -infinity
/// and wherever the result would be far below the smallest normal number (x < -126 may give 0), NaN for NaN. Holds
/// under -ffast-math too: rounding is an instruction of its own that cannot be reassociated, no test is one for
/// infinity.
///
/// Registers go through each step side by side: one after the other they would fill the machine's window with what
/// still waits, and few of them would be under way at once.
template <int Count>
SASH_INLINE void exp2(floats (&x)[Count]) {
    constexpr auto& q = slope_of_exp2;
    floats p[Count];
#if defined(__AVX512F__)
    floats n[Count];
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i)
        n[i] = floats(_mm512_roundscale_ps(x[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i) x[i] = floats(_mm512_fnmadd_ps(n[i], floats(1.0f), x[i]));
#else
    integers n[Count];
    lane_mask tiny[Count];
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i) {
        n[i] = xsimd::nearbyint_as_int(x[i]);
        tiny[i] = x[i] < floats(-126.0f);
        x[i] = x[i] - xsimd::to_float(n[i]);
    }
#endif
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i) p[i] = fma(x[i], floats(q[0]), floats(q[1]));
#pragma GCC unroll 3
    for (int k = 2; k < 5; ++k)
#pragma GCC unroll 8
        for (int i = 0; i < Count; ++i) p[i] = fma(p[i], x[i], floats(q[k]));
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i) p[i] = fma(p[i], x[i], floats(1.0f));
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i) {
#if defined(__AVX512F__)
        x[i] = floats(_mm512_scalef_ps(p[i], n[i]));  // p is NaN at -infinity, where this is defined to give 0
#else
        // n is added to the exponent field. From -126 on that field stays positive; below, and for -infinity, 0 it is.
        x[i] = select(tiny[i], floats(0.0f), as_floats(as_integers(p[i]) + (n[i] << 23)));
#endif
    }
}

/// The same of one register.
SASH_INLINE floats exp2(floats x) {
    floats one[1] = {x};
    exp2(one);
    return one[0];
}

/// The same as a function of its own: for where a maximum has been raised, which is seldom.
template <class Build>
floats seldom_exp2(floats x) {
    return exp2(x);
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
    const floats large = floats(1.0f) - quotient(floats(2.0f), e + floats(1.0f));
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
