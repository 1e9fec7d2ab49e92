#pragma once
/// \file
/// Storage types narrower than float, and the exact conversions between them. Arithmetic is never done in them.
#include <sash/config.hpp>

#include <bit>

namespace sash {

namespace detail {

/// IEEE binary16 -> binary32. Every binary16 number, NaN payloads included, has an exact image.
SASH_INLINE constexpr float widen_float16(std::uint16_t h) {
    const std::uint32_t sign = std::uint32_t(h & 0x8000u) << 16;
    const std::uint32_t exponent = (h >> 10) & 0x1fu;
    std::uint32_t fraction = h & 0x3ffu;
    if (exponent == 0x1f)
        return sash::detail::bit_cast<float>(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0u));
    if (exponent != 0) return sash::detail::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
    if (fraction == 0) return sash::detail::bit_cast<float>(sign);
    std::uint32_t scale = 113;  // subnormal: shift until the leading one is where binary32 does not store it
    while ((fraction & 0x400u) == 0) {
        fraction <<= 1;
        --scale;
    }
    return sash::detail::bit_cast<float>(sign | scale << 23 | (fraction & 0x3ffu) << 13);
}

/// binary32 -> binary16, round to nearest, ties to even; overflow to infinity, NaN stays NaN (quiet, high payload
/// bits).
SASH_INLINE constexpr std::uint16_t narrow_float16(float x) {
    const std::uint32_t bits = sash::detail::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // from 65520 on
    if (magnitude < 0x33000001u) return static_cast<std::uint16_t>(sign);             // up to 2^-25, the tie to zero
    const std::uint32_t exponent = magnitude >> 23;
    const std::uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t shift = exponent < 113 ? 126 - exponent : 13;
    const std::uint32_t kept = fraction >> shift;
    const std::uint32_t rest = fraction & ((1u << shift) - 1);
    const std::uint32_t half = 1u << (shift - 1);
    const std::uint32_t up = rest > half || (rest == half && (kept & 1)) ? 1 : 0;
    const std::uint32_t base = exponent < 113 ? 0 : (exponent - 113) << 10;  // the leading one of `kept` adds 1 << 10
    return static_cast<std::uint16_t>(sign | (base + kept + up));
}

SASH_INLINE constexpr float widen_bfloat16(std::uint16_t h) { return sash::detail::bit_cast<float>(std::uint32_t(h) << 16); }

/// binary32 -> bfloat16, round to nearest, ties to even; NaN stays NaN (quiet).
SASH_INLINE constexpr std::uint16_t narrow_bfloat16(float x) {
    const std::uint32_t bits = sash::detail::bit_cast<std::uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace detail

/// IEEE binary16: 11 significant bits, largest finite 65504. A bit pattern with conversions. It may alias
/// other types of two bytes: a program's own half type is read through it.
struct SASH_MAY_ALIAS float16 {
    std::uint16_t bits;

    float16() = default;
    SASH_INLINE constexpr explicit float16(float x) : bits(detail::narrow_float16(x)) {}
    SASH_INLINE constexpr operator float() const { return detail::widen_float16(bits); }
};

/// bfloat16: the upper half of a float; 8 significant bits, the range of float. It may alias, too.
struct SASH_MAY_ALIAS bfloat16 {
    std::uint16_t bits;

    bfloat16() = default;
    SASH_INLINE constexpr explicit bfloat16(float x) : bits(detail::narrow_bfloat16(x)) {}
    SASH_INLINE constexpr operator float() const { return detail::widen_bfloat16(bits); }
};

/// Rows of bytes: each key row and each value row of a token is stored as 8-bit integers with one float scale beside
/// them. A storage type of caches, named as their `Element`; no view has it. See cache/int8_rows.hpp for its accuracy.
struct int8_rows {};

/// The run-time name of an element type, carried by views; `i8` names int8_rows, which views cannot be made of.
enum class scalar : unsigned char { f32, f16, bf16, i8 };

namespace detail {

template <class T>
struct scalar_of {
    static_assert(never<T>, "sash: views are of float, sash::float16 or sash::bfloat16");
};
template <>
struct scalar_of<float> {
    static constexpr scalar value = scalar::f32;
};
template <>
struct scalar_of<float16> {
    static constexpr scalar value = scalar::f16;
};
template <>
struct scalar_of<bfloat16> {
    static constexpr scalar value = scalar::bf16;
};
template <class T>
struct scalar_of<const T> : scalar_of<T> {};

/// The name of what a cache stores: that of a view's elements, or i8.
template <class T>
inline constexpr scalar storage_name = scalar_of<T>::value;
template <>
inline constexpr scalar storage_name<int8_rows> = scalar::i8;

SASH_INLINE constexpr int64 bytes_of(scalar s) { return s == scalar::f32 ? 4 : s == scalar::i8 ? 1 : 2; }

}  // namespace detail
}  // namespace sash
