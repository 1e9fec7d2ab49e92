#pragma once
/// \file
/// Factors of decay that keep their digits next to 1.
///
/// A factor alpha = exp(g) of 0.99999, rounded to fp32, is off by up to 3e-8, and by the same 3e-8 for every token:
/// after 8192 tokens what is left is off by 1e-4. What matters is how far alpha is from 1. So a factor is held as a
/// fade:
///
///     alpha - 1, with the sign bit set      where alpha is large: -0 stands for 1
///     alpha                                 where it is small (between 1/2 and 0.71 either will do)
///
/// and x · alpha is kept + fade · x, with kept = x or 0: one operation on bits for both. An infinity turns NaN.
///
/// That is half of it: a number of fp32 that shrinks by less than half of its last digit stays what it is, token for
/// token. So what is added with a token is added to fade · x first, then to what is kept: rounded once, and up or down
/// by chance.
#include <sash/cpu/exp.hpp>

#include <cmath>

SASH_KERNELS_BEGIN

namespace sash::cpu {

inline constexpr float no_fade = -0.0f;

/// All bits of the lanes in which a fade is alpha - 1.
SASH_INLINE integers near_one(floats fade) { return as_integers(fade) >> 31; }
SASH_INLINE floats with_sign(floats x) {
    return as_floats(as_integers(x) | integers(static_cast<std::int32_t>(0x80000000u)));
}
SASH_INLINE float with_sign(float x) {
    return sash::detail::bit_cast<float>(sash::detail::bit_cast<std::uint32_t>(x) | 0x80000000u);
}

/// What of x · alpha is not fade · x.
SASH_INLINE floats kept(floats x, floats fade) { return as_floats(as_integers(x) & near_one(fade)); }
/// x · alpha, and alpha itself.
SASH_INLINE floats faded(floats x, floats fade) { return fma(fade, x, kept(x, fade)); }
SASH_INLINE floats factor_of(floats fade) { return faded(floats(1.0f), fade); }
SASH_INLINE double factor_of(float fade) {
    return (sash::detail::bit_cast<std::uint32_t>(fade) >> 31 ? 1.0 : 0.0) + double{fade};
}

/// The fade of a factor 0 to 1.
SASH_INLINE floats fade_of(floats alpha) {
    return select(alpha < floats(0.5f), alpha, with_sign(alpha - floats(1.0f)));
}
SASH_INLINE float fade_of(double alpha) {
    return alpha < 0.5 ? static_cast<float>(alpha) : with_sign(static_cast<float>(alpha - 1));
}

/// The fade of exp(g), g <= 0. Relative error of alpha - 1, or of alpha where it is below 0.7: 4e-7.
SASH_INLINE floats fade_of_log(floats g) {
    const exp_parts g_is = parts_of_exp(maximum(floats(-104.0f), g));  // below, alpha is 0
    const floats less_one = g_is.f * exp2_slope(g_is.f);
    return select(g_is.n == floats(0.0f), with_sign(less_one), times_exp2(floats(1.0f) + less_one, g_is.n));
}
SASH_INLINE float fade_of_log(float g) { return g > -0.5f ? with_sign(::expm1f(g)) : ::expf(g); }

/// The fade of a product: (1 + a)(1 + b) = 1 + (a + b + ab).
SASH_INLINE floats fade_of_both(floats a, floats b) {
    const floats together = fma(a, b, a) + b;
    const floats product = factor_of(a) * factor_of(b);
    const floats both = as_floats(near_one(a) & near_one(b) & as_integers(floats(1.0f)));
    return select(both > floats(0.0f), select(together < floats(-0.5f), product, with_sign(together)), product);
}

}  // namespace sash::cpu

SASH_KERNELS_END
