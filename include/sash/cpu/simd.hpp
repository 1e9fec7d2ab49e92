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

// Registers are those of NEON. Where a file is compiled for SVE of a fixed length, xsimd's are longer, and not these.
#if XSIMD_WITH_NEON64 && !XSIMD_WITH_SVE
#define SASH_NEON
#endif

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
static_assert(floats::size >= 4 && floats::size <= 16, "sash: registers of 128 to 512 bits");

/// Registers there are: it decides how large a tile of sums can be held in them.
template <class Build>
inline constexpr int registers =
#if defined(__AVX512F__) || defined(__aarch64__)
    32;
#else
    16;
#endif

/// Made from its bits, and told by its bits: under -ffast-math a compiler may assume that there is no infinity.
SASH_INLINE float minus_infinity() { return sash::detail::bit_cast<float>(0xff800000u); }
SASH_INLINE bool is_minus_infinity(float x) { return sash::detail::bit_cast<std::uint32_t>(x) == 0xff800000u; }

// ---- memory

SASH_INLINE floats load(const float* p) { return floats::load_unaligned(p); }
SASH_INLINE void store(float* p, floats x) { x.store_unaligned(p); }
SASH_INLINE integers load(const std::int32_t* p) { return integers::load_unaligned(p); }

/// Loaded once: g++ reads memory again for each use of a number, where it finds an instruction that can.
SASH_INLINE floats load_once(const float* p) {
#if defined(__GNUC__) && defined(__AVX512F__)
    __m512 x = load(p);
    __asm__("" : "+v"(x));
    return floats(x);
#elif defined(__GNUC__) && defined(__AVX__)
    __m256 x = load(p);
    __asm__("" : "+x"(x));
    return floats(x);
#else
    return load(p);
#endif
}

/// Asks for the cache line at `p`. Any address will do: a prefetch does not fault.
SASH_INLINE void prefetch([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
    __builtin_prefetch(p, 0, 3);
#endif
}

/// The same for memory that is not used at once: into the second cache.
SASH_INLINE void prefetch_early([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
    __builtin_prefetch(p, 0, 2);
#endif
}

SASH_INLINE void prefetch_to_write([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
    __builtin_prefetch(p, 1, 3);
#endif
}

// ---- bits

SASH_INLINE floats as_floats(integers x) {
#if defined(SASH_NEON)
    return floats(vreinterpretq_f32_s32(x));  // xsimd 8 calls a function through a table
#elif XSIMD_VERSION_MAJOR < 11
    return xsimd::bitwise_cast<floats>(x);
#else
    return xsimd::bitwise_cast<float>(x);
#endif
}

SASH_INLINE integers as_integers(floats x) {
#if defined(SASH_NEON)
    return integers(vreinterpretq_s32_f32(x));
#elif XSIMD_VERSION_MAJOR < 11
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
#elif defined(SASH_NEON)
    return lane_mask(vtstq_s32(x, bits));
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

/// `Count` numbers side by side, each to be multiplied with whole registers.
template <class Build, int Count, class Number>
struct multipliers {
    const Number* at;

    SASH_INLINE explicit multipliers(const Number* p) : at(p) {}
    SASH_INLINE auto operator[](int i) const { return xsimd::batch<Number, xsimd::default_arch>(at[i]); }
};

#if defined(SASH_NEON)
/// NEON multiplies by one lane of a register: four numbers take one register, not four, and the sums of a tile are not
/// driven out to memory.
template <class Build, int Count>
struct multipliers<Build, Count, float> {
    float32x4_t four[Count / 4];

    SASH_INLINE explicit multipliers(const float* p) {
#pragma GCC unroll 8
        for (int i = 0; i < Count / 4; ++i) four[i] = vld1q_f32(p + 4 * i);
    }
    SASH_INLINE floats operator[](int i) const { return floats(vdupq_n_f32(four[i / 4][i % 4])); }
};
#endif

#if defined(__AVX512F__)
/// Sixteen multipliers for one register: each is a load, and there is room for no more of them than there are
/// multiplications. So four of the sixteen are taken out of the line that has to be loaded anyway.
template <class Build>
struct multipliers<Build, 16, float> {
    const float* at;
    __m512 line;

    SASH_INLINE explicit multipliers(const float* p) : at(p) {
        __m512 loaded = _mm512_loadu_ps(p);
        asm("" : "+v"(loaded));  // or each of the four would load it once more
        line = loaded;
    }
    SASH_INLINE floats operator[](int i) const {
        return i % 4 == 2 ? floats(_mm512_permutexvar_ps(_mm512_set1_epi32(i), line)) : floats(at[i]);
    }
};
#endif

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

/// Lanes that are infinite or NaN, told by their bits.
SASH_INLINE lane_mask is_nonfinite(floats x) {
    const integers exponent(0x7f800000);
    return as_float_mask((as_integers(x) & exponent) == exponent);
}

/// Sum of the lanes, always in the same order: halves onto each other.
SASH_INLINE float sum_of_lanes(floats x) {
#if defined(__SSE2__)
#if defined(__AVX512F__)
    const __m256 eight =
        _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(__AVX__)
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
#else
    const __m128 four = x;
#endif
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    alignas(64) float lane[floats::size];
    x.store_aligned(lane);
    for (std::size_t half = floats::size / 2; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
#endif
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

#if defined(SASH_NEON)
template <class Element>
SASH_INLINE uint16x4_t load_words(const Element* p) {
    uint16x4_t words;
    __builtin_memcpy(&words, p, sizeof words);
    return words;
}
template <class Element>
SASH_INLINE void store_words(Element* p, uint16x4_t words) {
    __builtin_memcpy(p, &words, sizeof words);
}
#elif !defined(__F16C__) || !defined(__AVX__)
/// 16-bit elements, each in the lower half of a lane.
SASH_INLINE integers load_words(const float16* p) {
#if defined(__SSE2__) && !defined(__AVX__)
    return integers(_mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), _mm_setzero_si128()));
#else
    alignas(64) std::int32_t word[floats::size];
    for (std::size_t i = 0; i < floats::size; ++i) word[i] = p[i].bits;
    return integers::load_aligned(word);
#endif
}

/// The exponent is moved to its place and 112, the difference of the biases, added. A subnormal number has no leading
/// one of its own: it is read as if it had one, of 2^-14, and that is subtracted: exactly, and no subnormal float comes
/// about, which a program may have told the machine to take for zero. Infinity and NaN have the largest exponent in
/// both.
SASH_INLINE floats widen_float16(integers words) {
    const auto if_below = [](integers x, integers limit, integers bits) { return ((x - limit) >> 31) & bits; };
    const integers one(1 << 23), infinity(31 << 23);
    const integers magnitude = (words & integers(0x7fff)) << 13;
    const integers leading_one = if_below(magnitude, one, integers(113 << 23));
    const integers read = magnitude + integers(112 << 23) + if_below(magnitude, one, one);
    const integers number = as_integers(as_floats(read) - as_floats(leading_one));
    const integers largest = if_below(infinity, magnitude + integers(1), integers(255 << 23));
    const integers quiet = if_below(infinity, magnitude, integers(1 << 22));
    return as_floats(number | largest | quiet | (words & integers(0x8000)) << 16);
}
#endif

SASH_INLINE floats load(const float16* p) {
#if defined(__AVX512F__)
    return floats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__) && defined(__AVX__)
    return floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(SASH_NEON)
    return floats(vcvt_f32_f16(vreinterpret_f16_u16(load_words(p))));
#else
    return widen_float16(load_words(p));
#endif
}

SASH_INLINE void store(float16* p, floats x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__) && defined(__AVX__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(SASH_NEON)
    store_words(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
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
#elif defined(SASH_NEON)
    return floats(vreinterpretq_f32_u32(vshll_n_u16(load_words(p), 16)));
#elif defined(__SSE2__) && !defined(__AVX__)
    const __m128i words = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return floats(_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), words)));
#else
    alignas(64) float wide[floats::size];
    for (std::size_t i = 0; i < floats::size; ++i) wide[i] = detail::widen_bfloat16(p[i].bits);
    return floats::load_aligned(wide);
#endif
}

/// Rounded to bfloat16, which is the upper half of each lane; what the lower half holds does not matter. NaN stays NaN.
SASH_INLINE integers rounded_bfloat16(floats x) {
    const integers bits = as_integers(x), magnitude = bits & integers(0x7fffffff);
    const integers rounded = bits + integers(0x7fff) + ((bits >> 16) & integers(1));
    const lane_mask nan = as_float_mask(magnitude > integers(0x7f800000));
    return as_integers(select(nan, as_floats(bits | integers(0x400000)), as_floats(rounded)));
}

SASH_INLINE void store(bfloat16* p, floats x) {
    const integers rounded = rounded_bfloat16(x);
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#elif defined(SASH_NEON)
    store_words(p, vshrn_n_u32(vreinterpretq_u32_s32(rounded), 16));
#else
    alignas(64) std::int32_t word[floats::size];
    rounded.store_aligned(word);
    for (std::size_t i = 0; i < floats::size; ++i)
        p[i].bits = static_cast<std::uint16_t>(static_cast<std::uint32_t>(word[i]) >> 16);
#endif
}

/// Words of two bfloat16 each: lane i of `even` in the lower half of word i, of `odd` in the upper.
SASH_INLINE integers pairs(floats even, floats odd) {
    const integers low = (rounded_bfloat16(even) >> 16) & integers(0xffff);
    return low | (rounded_bfloat16(odd) & integers(static_cast<std::int32_t>(0xffff0000u)));
}
SASH_INLINE void store(std::int32_t* p, integers x) { x.store_unaligned(p); }

/// The same by the machine's own conversion, where it has one: it takes subnormal numbers for 0.
SASH_INLINE integers pairs_of_normal(floats even, floats odd) {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr std::uint16_t interleaved[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                  21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                  11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    return integers(_mm512_permutexvar_epi16(_mm512_load_si512(interleaved), halves));
#else
    return pairs(even, odd);
#endif
}

/// store, by the machine's own conversion where it has one: numbers below 2^-126 may become 0.
SASH_INLINE void store_normal(float* p, floats x) { store(p, x); }
SASH_INLINE void store_normal(bfloat16* p, floats x) {
#if defined(__AVX512BF16__)
    const __m256bh words = _mm512_cvtneps_pbh(x);
    __builtin_memcpy(static_cast<void*>(p), &words, sizeof words);
#else
    store(p, x);
#endif
}

/// Does the machine multiply words of two bfloat16? It does twice as many of them a cycle as floats.
template <class Build>
inline constexpr bool multiplies_pairs =
#if defined(__AVX512BF16__)
    true;
#else
    false;
#endif

/// sum + a · b: of floats, rounded once; of words of two bfloat16, low · low + high · high, which the instruction rounds
/// after each of the two sums, taking subnormal numbers for 0. (Written out, for machines without it, they stay.)
SASH_INLINE floats multiply_add(floats a, floats b, floats sum) { return fma(a, b, sum); }
SASH_INLINE floats multiply_add(integers a, integers b, floats sum) {
#if defined(__AVX512BF16__)
    return floats(_mm512_dpbf16_ps(sum, (__m512bh)__m512i(a), (__m512bh)__m512i(b)));
#else
    return fma(low_bfloat16(a), low_bfloat16(b), fma(high_bfloat16(a), high_bfloat16(b), sum));
#endif
}

/// x as an Element holds it.
template <class Element>
SASH_INLINE floats rounded_to(floats x) {
    if constexpr (std::is_same_v<Element, bfloat16>) {
        return high_bfloat16(rounded_bfloat16(x));
    } else if constexpr (std::is_same_v<Element, float16>) {
        float16 narrow[floats::size];
        store(narrow, x);
        return load(narrow);
    } else {
        return x;
    }
}

/// The first `count` numbers at p, and zeros: no more of a register than there is.
SASH_INLINE floats load_up_to(const float* p, std::int64_t count) {
    constexpr auto all = static_cast<std::int64_t>(floats::size);
    if (count >= all) return load(p);
    alignas(64) float part[floats::size] = {};
    for (std::int64_t i = 0; i < count; ++i) part[i] = p[i];
    return floats::load_aligned(part);
}

// ---- bytes, and dot products of them

/// As many signed bytes as a register has floats, each in a lane of its own.
SASH_INLINE integers load(const std::int8_t* p) {
#if defined(__AVX512F__)
    return integers(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return integers(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(__SSE2__) && !defined(__AVX__)
    std::int32_t four;
    std::memcpy(&four, p, sizeof four);
    const __m128i twice = _mm_unpacklo_epi8(_mm_cvtsi32_si128(four), _mm_cvtsi32_si128(four));
    return integers(_mm_srai_epi32(_mm_unpacklo_epi16(twice, twice), 24));
#else
    alignas(64) std::int32_t wide[floats::size];
    for (std::size_t i = 0; i < floats::size; ++i) wide[i] = p[i];
    return integers::load_aligned(wide);
#endif
}

/// The lanes of x as bytes; each is between -128 and 127.
SASH_INLINE void store(std::int8_t* p, integers x) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
#elif defined(__AVX2__)
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
#else
    alignas(64) std::int32_t wide[floats::size];
    x.store_aligned(wide);
    for (std::size_t i = 0; i < floats::size; ++i) p[i] = static_cast<std::int8_t>(wide[i]);
#endif
}

/// x / y, to nearest. (On aarch64 the operator of xsimd 8.1 is a reciprocal in two steps, off by some units.)
SASH_INLINE floats quotient(floats x, floats y) {
#if defined(__aarch64__)
    return floats(vdivq_f32(x, y));
#else
    return x / y;
#endif
}

/// To nearest, ties to even; |x| < 2^31, not NaN.
SASH_INLINE integers nearest_integers(floats x) { return xsimd::nearbyint_as_int(x); }
SASH_INLINE floats to_floats(integers x) { return xsimd::to_float(x); }

SASH_INLINE integers larger_integers(integers a, integers b) { return xsimd::max(a, b); }

SASH_INLINE std::int32_t largest_of_lanes(integers x) {
    alignas(64) std::int32_t lane[floats::size];
    x.store_aligned(lane);
    std::int32_t top = lane[0];
    for (std::size_t i = 1; i < floats::size; ++i) top = top < lane[i] ? lane[i] : top;
    return top;
}

/// Byte `which` of every lane, with its sign.
SASH_INLINE integers signed_byte(integers words, int which) { return (words << (24 - 8 * which)) >> 24; }

/// Has this machine an instruction for dot_bytes?
template <class Build>
inline constexpr bool has_byte_dots =
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
    true;
#else
    false;
#endif

/// sum + Σ_i a_i · b_i in every lane, over the four unsigned bytes a_i and signed bytes b_i of the lane. Exact.
SASH_INLINE integers dot_bytes(integers sum, integers a, integers b) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#if defined(__clang__)
    return integers(_mm512_dpbusd_epi32(sum, a, b));
#else
    __m512i out = sum;  // by name: for its own function g++ 12 keeps each sum in two registers, and runs out of them
    __asm__("vpdpbusd %2, %1, %0" : "+v"(out) : "v"(__m512i(a)), "v"(__m512i(b)));
    return integers(out);
#endif
#else
    for (int i = 0; i < 4; ++i) sum = sum + (a >> 8 * i & integers(255)) * signed_byte(b, i);
    return sum;
#endif
}

// ---- transposing

/// Four floats side by side: what every transposition here is made of.
#if defined(__SSE2__)
using quad = __m128;
SASH_INLINE quad load_quad(const float* p) { return _mm_loadu_ps(p); }
SASH_INLINE quad scaled(quad x, float factor) { return _mm_mul_ps(x, _mm_set1_ps(factor)); }
SASH_INLINE quad scaled(quad x, const float* factors) { return _mm_mul_ps(x, _mm_loadu_ps(factors)); }
#elif defined(SASH_NEON)
using quad = float32x4_t;
SASH_INLINE quad load_quad(const float* p) { return vld1q_f32(p); }
SASH_INLINE quad scaled(quad x, float factor) { return vmulq_n_f32(x, factor); }
SASH_INLINE quad scaled(quad x, const float* factors) { return vmulq_f32(x, vld1q_f32(factors)); }
#else
struct quad {
    float lane[4];
};
SASH_INLINE quad load_quad(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
SASH_INLINE quad scaled(quad x, float f) { return {{x.lane[0] * f, x.lane[1] * f, x.lane[2] * f, x.lane[3] * f}}; }
SASH_INLINE quad scaled(quad x, const float* f) {
    return {{x.lane[0] * f[0], x.lane[1] * f[1], x.lane[2] * f[2], x.lane[3] * f[3]}};
}
#endif

/// to_c[r] = row_r[c], bit for bit.
SASH_INLINE void transpose_4x4(quad a, quad b, quad c, quad d, float* to0, float* to1, float* to2, float* to3) {
#if defined(__SSE2__)
    const __m128 ac_low = _mm_unpacklo_ps(a, c), ac_high = _mm_unpackhi_ps(a, c);
    const __m128 bd_low = _mm_unpacklo_ps(b, d), bd_high = _mm_unpackhi_ps(b, d);
    _mm_storeu_ps(to0, _mm_unpacklo_ps(ac_low, bd_low));
    _mm_storeu_ps(to1, _mm_unpackhi_ps(ac_low, bd_low));
    _mm_storeu_ps(to2, _mm_unpacklo_ps(ac_high, bd_high));
    _mm_storeu_ps(to3, _mm_unpackhi_ps(ac_high, bd_high));
#elif defined(SASH_NEON)
    const float32x4_t ac_low = vzip1q_f32(a, c), ac_high = vzip2q_f32(a, c);
    const float32x4_t bd_low = vzip1q_f32(b, d), bd_high = vzip2q_f32(b, d);
    vst1q_f32(to0, vzip1q_f32(ac_low, bd_low));
    vst1q_f32(to1, vzip2q_f32(ac_low, bd_low));
    vst1q_f32(to2, vzip1q_f32(ac_high, bd_high));
    vst1q_f32(to3, vzip2q_f32(ac_high, bd_high));
#else
    float* const to[4] = {to0, to1, to2, to3};
    for (int i = 0; i < 4; ++i) {
        to[i][0] = a.lane[i];
        to[i][1] = b.lane[i];
        to[i][2] = c.lane[i];
        to[i][3] = d.lane[i];
    }
#endif
}

/// even[i] = p[2 i], odd[i] = p[2 i + 1].
SASH_INLINE void unzip(const float* p, floats& even, floats& odd) {
    const floats low = load(p), high = load(p + floats::size);
#if defined(__AVX512F__)
    alignas(64) static constexpr std::int32_t twice[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const integers at = load(twice);
    even = floats(_mm512_permutex2var_ps(low, at, high));
    odd = floats(_mm512_permutex2var_ps(low, at + integers(1), high));
#elif defined(__AVX__)
    const __m256 first = _mm256_permute2f128_ps(low, high, 0x20), second = _mm256_permute2f128_ps(low, high, 0x31);
    even = floats(_mm256_shuffle_ps(first, second, 0x88));
    odd = floats(_mm256_shuffle_ps(first, second, 0xdd));
#elif defined(__SSE2__)
    even = floats(_mm_shuffle_ps(low, high, 0x88));
    odd = floats(_mm_shuffle_ps(low, high, 0xdd));
#elif defined(SASH_NEON)
    even = floats(vuzp1q_f32(low, high));
    odd = floats(vuzp2q_f32(low, high));
#else
    alignas(64) float apart[2][floats::size];
    for (std::size_t i = 0; i < 2 * floats::size; ++i) apart[i % 2][i / 2] = p[i];
    even = floats::load_aligned(apart[0]);
    odd = floats::load_aligned(apart[1]);
#endif
}

#if defined(__SSE2__)
SASH_INLINE quad plus(quad a, quad b) { return _mm_add_ps(a, b); }
SASH_INLINE void store_quad(float* p, quad x) { _mm_storeu_ps(p, x); }
#elif defined(SASH_NEON)
SASH_INLINE quad plus(quad a, quad b) { return vaddq_f32(a, b); }
SASH_INLINE void store_quad(float* p, quad x) { vst1q_f32(p, x); }
#else
SASH_INLINE quad plus(quad a, quad b) {
    return {{a.lane[0] + b.lane[0], a.lane[1] + b.lane[1], a.lane[2] + b.lane[2], a.lane[3] + b.lane[3]}};
}
SASH_INLINE void store_quad(float* p, quad x) { std::memcpy(p, &x, sizeof x); }
#endif

/// to[i] = sum of the lanes of x[i], of four registers.
SASH_INLINE void store_sums_of_lanes(const floats* x, float* to) {
#if defined(__AVX512F__)
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512 odd = _mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 2, 3, 2));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(1, 0, 1, 0)), odd);
    const __m512 pairs_of_quads = _mm512_add_ps(all, _mm512_shuffle_f32x4(all, all, _MM_SHUFFLE(1, 0, 3, 2)));
    const __m512 upper = _mm512_shuffle_f32x4(pairs_of_quads, pairs_of_quads, _MM_SHUFFLE(2, 3, 0, 1));
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_add_ps(pairs_of_quads, upper)));
#else
    alignas(64) float lane[4 * floats::size];
    quad each[4];
    for (std::size_t i = 0; i < 4; ++i) {
        float* const mine = lane + i * floats::size;
        x[i].store_aligned(mine);
        each[i] = load_quad(mine);
        for (std::size_t j = 4; j < floats::size; j += 4) each[i] = plus(each[i], load_quad(mine + j));
    }
    transpose_4x4(each[0], each[1], each[2], each[3], lane, lane + 4, lane + 8, lane + 12);
    store_quad(to, plus(plus(load_quad(lane), load_quad(lane + 4)), plus(load_quad(lane + 8), load_quad(lane + 12))));
#endif
}

}  // namespace sash::cpu

SASH_KERNELS_END
