#pragma once
/// \file
/// What all blocks of 64 tokens of one KV head have in common, whatever they hold. How one is laid out is said in
/// codec.hpp (floats and 16-bit numbers) and in int8_rows.hpp; nobody else knows.
#include <sash/cpu/convert.hpp>

namespace sash {

inline constexpr int64 block_tokens = 64;

/// How a block of tokens stored as `Element` is laid out, written and read.
template <class Element>
struct codec;

namespace detail {

inline constexpr int64 panel_width = 16;  ///< keys or columns taken at a time; value_pitch is a multiple of it

/// Where row `row` of column `column` lies in panels of sixteen columns, of `rows` rows each: [columns / 16][rows][16].
SASH_INLINE constexpr int64 place_in_panels(int64 row, int64 rows, int64 column) {
    return (column / panel_width * rows + row) * panel_width + column % panel_width;
}

SASH_INLINE bool is_finite(float x) { return (sash::detail::bit_cast<std::uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }
SASH_INLINE bool is_finite(float16 x) { return (x.bits & 0x7c00u) != 0x7c00u; }
SASH_INLINE bool is_finite(bfloat16 x) { return (x.bits & 0x7f80u) != 0x7f80u; }

}  // namespace detail
}  // namespace sash
