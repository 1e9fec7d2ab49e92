#pragma once
/// \file
/// The only file that includes xsimd, and the only one that knows how its versions 8 to 14 differ. Kernels are written
/// with `floats`, as many as one register holds, and with the functions below; each is one or two instructions.
///
/// Where xsimd lacks an operation, or means something else by it from version to version, the instruction is named
/// here: multiply-add on AVX-512 (xsimd 8 multiplies, rounds, then adds), maximum (8 keeps the second operand's NaN, 14
/// the first's), 16-bit elements, bits of an integer as a mask. Every function is always inlined, so that files built
/// for different machines share none of them.
#include <sash/scalar.hpp>

#include <bit>

// Around kernels and around xsimd, whose functions become part of them. g++ 12 warns of its own AVX-512 header. Under
// -ffast-math clang takes an infinity for something that cannot be, where it sees one being made; kernels are full of
// them (a score that is not seen is -infinity), so there it is told to compute what is written.
#if defined(__clang__) && defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#define SASH_KERNELS_BEGIN _Pragma("float_control(push)") _Pragma("float_control(precise, on)")
#define SASH_KERNELS_END _Pragma("float_control(pop)")
#elif defined(__GNUC__) && !defined(__clang__)
#define SASH_KERNELS_BEGIN                                                                     \
    _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wmaybe-uninitialized\"") \
        _Pragma("GCC diagnostic ignored \"-Wuninitialized\"")
#define SASH_KERNELS_END _Pragma("GCC diagnostic pop")
#else
#define SASH_KERNELS_BEGIN
#define SASH_KERNELS_END
#endif

SASH_KERNELS_BEGIN
#include <xsimd/xsimd.hpp>

namespace sash::cpu {

/// The widest instruction set this file is compiled for.
template <class Build>
using simd_arch = xsimd::default_arch;

using floats = xsimd::batch<float, xsimd::default_arch>;
using integers = xsimd::batch<std::int32_t, xsimd::default_arch>;
using lane_mask = xsimd::batch_bool<float, xsimd::default_arch>;

/// Floats in a register.
template <class Build>
inline constexpr int lanes = static_cast<int>(floats::size);

/// Registers there are: it decides how large a tile of sums can be held in them.
template <class Build>
inline constexpr int registers =
#if defined(__AVX512F__) || defined(__aarch64__)
    32;
#else
    16;
#endif

/// Made from its bits, and told by its bits: under -ffast-math a compiler may assume that there is no infinity.
SASH_INLINE float minus_infinity() { return std::bit_cast<float>(0xff800000u); }
SASH_INLINE bool is_minus_infinity(float x) { return std::bit_cast<std::uint32_t>(x) == 0xff800000u; }

// ---- memory

SASH_INLINE floats load(const float* p) { return floats::load_unaligned(p); }
SASH_INLINE void store(float* p, floats x) { x.store_unaligned(p); }
SASH_INLINE integers load(const std::int32_t* p) { return integers::load_unaligned(p); }

/// Asks for the cache line at `p`. Any address will do: a prefetch does not fault.
SASH_INLINE void prefetch([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
    __builtin_prefetch(p, 0, 3);
#endif
}

SASH_INLINE void prefetch_to_write([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
    __builtin_prefetch(p, 1, 3);
#endif
}

// ---- bits

SASH_INLINE floats as_floats(integers x) {
#if XSIMD_VERSION_MAJOR < 11
    return xsimd::bitwise_cast<floats>(x);
#else
    return xsimd::bitwise_cast<float>(x);
#endif
}

SASH_INLINE integers as_integers(floats x) {
#if XSIMD_VERSION_MAJOR < 11
    return xsimd::bitwise_cast<integers>(x);
#else
    return xsimd::bitwise_cast<std::int32_t>(x);
#endif
}

SASH_INLINE lane_mask as_float_mask(xsimd::batch_bool<std::int32_t, xsimd::default_arch> m) {
#if XSIMD_VERSION_MAJOR < 9
    return xsimd::bool_cast(m);
#else
    return xsimd::batch_bool_cast<float>(m);
#endif
}

/// Lanes of x that have any bit of `bits`.
SASH_INLINE lane_mask has_bits(integers x, integers bits) {
#if defined(__AVX512F__)
    return lane_mask(_mm512_test_epi32_mask(x, bits));
#else
    return as_float_mask((x & bits) != integers(0));
#endif
}

/// Lane i is set where bit i is.
SASH_INLINE lane_mask mask_from(std::uint32_t bits) {
#if defined(__AVX512F__)
    return lane_mask(static_cast<__mmask16>(bits));
#else
    alignas(64) static constexpr std::int32_t place[16] = {1 << 0,  1 << 1,  1 << 2,  1 << 3, 1 << 4,  1 << 5,
                                                           1 << 6,  1 << 7,  1 << 8,  1 << 9, 1 << 10, 1 << 11,
                                                           1 << 12, 1 << 13, 1 << 14, 1 << 15};
    return has_bits(integers(static_cast<std::int32_t>(bits)), load(place));
#endif
}

// ---- arithmetic

/// a · b + c, rounded once where the machine can.
SASH_INLINE floats fma(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return floats(_mm512_fmadd_ps(a, b, c));
#else
    return xsimd::fma(a, b, c);
#endif
}

SASH_INLINE floats select(lane_mask m, floats yes, floats no) { return xsimd::select(m, yes, no); }
SASH_INLINE bool any(lane_mask m) { return xsimd::any(m); }

/// a > b ? a : b. So a NaN in `a` is ignored and one in `b` is kept: give the running maximum as `b` and it never turns
/// NaN. It is the maximum instruction of x86, in every version of xsimd and under -ffast-math.
SASH_INLINE floats maximum(floats a, floats b) {
#if defined(__AVX512F__)
    return floats(_mm512_max_ps(a, b));
#elif defined(__AVX__)
    return floats(_mm256_max_ps(a, b));
#elif defined(__SSE2__)
    return floats(_mm_max_ps(a, b));
#else
    return xsimd::select(a > b, a, b);
#endif
}

/// a < b ? a : b. Again a NaN in `b` is kept.
SASH_INLINE floats minimum(floats a, floats b) { return xsimd::select(a < b, a, b); }

SASH_INLINE lane_mask is_minus_infinity(floats x) {
    return as_float_mask(as_integers(x) == integers(static_cast<std::int32_t>(0xff800000u)));
}

/// Sum of the lanes, always in the same order.
SASH_INLINE float sum_of_lanes(floats x) {
    alignas(64) float lane[floats::size];
    x.store_aligned(lane);
    for (std::size_t half = floats::size / 2; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
}

/// Largest of the lanes; none may be NaN.
SASH_INLINE float maximum_of_lanes(floats x) {
    alignas(64) float lane[floats::size];
    x.store_aligned(lane);
    float top = lane[0];
    for (std::size_t i = 1; i < floats::size; ++i) top = lane[i] > top ? lane[i] : top;
    return top;
}

// ---- 16-bit elements: as many as a register has floats, widened exactly, narrowed to nearest even

SASH_INLINE floats load(const float16* p) {
#if defined(__AVX512F__)
    return floats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__) && defined(__AVX__)
    return floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    alignas(64) float wide[floats::size];
    for (std::size_t i = 0; i < floats::size; ++i) wide[i] = detail::widen_float16(p[i].bits);
    return floats::load_aligned(wide);
#endif
}

SASH_INLINE void store(float16* p, floats x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__) && defined(__AVX__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    alignas(64) float wide[floats::size];
    x.store_aligned(wide);
    for (std::size_t i = 0; i < floats::size; ++i) p[i].bits = detail::narrow_float16(wide[i]);
#endif
}

/// The two halves of 32-bit words that hold two bfloat16 each.
SASH_INLINE floats low_bfloat16(integers words) { return as_floats(words << 16); }
SASH_INLINE floats high_bfloat16(integers words) {
    return as_floats(words & integers(static_cast<std::int32_t>(0xffff0000u)));
}

SASH_INLINE floats load(const bfloat16* p) {
#if defined(__AVX512F__)
    return low_bfloat16(integers(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
#elif defined(__AVX2__)
    return low_bfloat16(integers(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#else
    alignas(64) float wide[floats::size];
    for (std::size_t i = 0; i < floats::size; ++i) wide[i] = detail::widen_bfloat16(p[i].bits);
    return floats::load_aligned(wide);
#endif
}

SASH_INLINE void store(bfloat16* p, floats x) {
#if defined(__AVX512F__)
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
#else
    alignas(64) float wide[floats::size];
    x.store_aligned(wide);
    for (std::size_t i = 0; i < floats::size; ++i) p[i].bits = detail::narrow_bfloat16(wide[i]);
#endif
}

// ---- transposing

/// to_c[r] = row_r[c] · factor[c] for four rows of four: the step that every transposition here is made of.
SASH_INLINE void transpose_4x4(const float* row0, const float* row1, const float* row2, const float* row3,
                               const float* factor, float* to0, float* to1, float* to2, float* to3) {
#if defined(__SSE2__)
    const __m128 f = _mm_loadu_ps(factor);
    const __m128 a = _mm_mul_ps(_mm_loadu_ps(row0), f), b = _mm_mul_ps(_mm_loadu_ps(row1), f);
    const __m128 c = _mm_mul_ps(_mm_loadu_ps(row2), f), d = _mm_mul_ps(_mm_loadu_ps(row3), f);
    const __m128 ac_low = _mm_unpacklo_ps(a, c), ac_high = _mm_unpackhi_ps(a, c);
    const __m128 bd_low = _mm_unpacklo_ps(b, d), bd_high = _mm_unpackhi_ps(b, d);
    _mm_storeu_ps(to0, _mm_unpacklo_ps(ac_low, bd_low));
    _mm_storeu_ps(to1, _mm_unpackhi_ps(ac_low, bd_low));
    _mm_storeu_ps(to2, _mm_unpacklo_ps(ac_high, bd_high));
    _mm_storeu_ps(to3, _mm_unpackhi_ps(ac_high, bd_high));
#else
    float* const to[4] = {to0, to1, to2, to3};
    for (int c = 0; c < 4; ++c) {
        to[c][0] = row0[c] * factor[c];
        to[c][1] = row1[c] * factor[c];
        to[c][2] = row2[c] * factor[c];
        to[c][3] = row3[c] * factor[c];
    }
#endif
}

}  // namespace sash::cpu

SASH_KERNELS_END
