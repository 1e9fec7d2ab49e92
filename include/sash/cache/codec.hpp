#pragma once
/// \file
/// How a block of 64 tokens of one KV head is laid out. Only this file knows; no compiler flag changes it.
///
///                keys                     values                   behind them
///     float      [key_dim][64]            [64][value_pitch]        one line of 64 bytes: its first word has bit l
///     float16    [key_dim][64]            [64][value_pitch]        set where the value row of lane l holds a NaN
///     bfloat16   [⌈key_dim/2⌉][64][2]     [32][value_pitch][2]     or an infinity
///
/// Keys are transposed: a decoding query multiplies one number with 16 neighbouring keys, a prefill takes the same line
/// apart and multiplies each key with 16 queries, and both read the block from end to end. bfloat16 comes in pairs
/// along the dimension that is summed over, keys along d and values along the tokens: what a bfloat16 dot instruction
/// takes. value_pitch is value_dim rounded up to 16, with zeros, so that no kernel has a tail of columns.
///
/// Blocks come uninitialised. Lanes that were never stored hold anything, NaN included.
#include <sash/cpu/convert.hpp>

SASH_KERNELS_BEGIN

namespace sash {

inline constexpr int64 block_tokens = 64;

namespace detail {

inline constexpr int64 panel_width = 16;  ///< keys or columns unpacked at a time; value_pitch is a multiple of it

/// Sixteen columns of a matrix of floats, `pitch` floats between rows.
struct panel {
    const float* data;
    int64 pitch;
};

SASH_INLINE bool is_finite(float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }
SASH_INLINE bool is_finite(float16 x) { return (x.bits & 0x7c00u) != 0x7c00u; }
SASH_INLINE bool is_finite(bfloat16 x) { return (x.bits & 0x7f80u) != 0x7f80u; }

/// Numbers that are summed together and therefore lie side by side: the two of a bfloat16 pair.
template <class Element>
inline constexpr int64 elements_in_word = 1;
template <>
inline constexpr int64 elements_in_word<bfloat16> = 2;

}  // namespace detail

template <class Element>
struct codec {
    using words = std::integral_constant<int64, detail::elements_in_word<Element>>;
    static constexpr bool paired = words::value == 2;

    SASH_INLINE static constexpr int64 value_pitch(int64 value_dim) {
        return detail::round_up(value_dim, detail::panel_width);
    }
    SASH_INLINE static constexpr int64 key_bytes(int64 key_dim) {
        return detail::round_up(key_dim, words::value) * block_tokens * int64{sizeof(Element)};
    }
    SASH_INLINE static constexpr int64 value_bytes(int64 value_dim) {
        return value_pitch(value_dim) * block_tokens * int64{sizeof(Element)};
    }
    /// Bytes of one block: a multiple of 64.
    SASH_INLINE static constexpr int64 block_bytes(int64 key_dim, int64 value_dim) {
        return key_bytes(key_dim) + value_bytes(value_dim) + 64;
    }

    /// Rounds `count` tokens to Element and stores them in lanes [lane, lane + count). Touches no other lane.
    /// keys: [count] rows of key_dim, key_stride floats apart; values likewise. Cost: O(count · (key_dim + value_dim)).
    template <class Build>
    static void store(std::byte* block, int64 lane, int64 count, int64 key_dim, int64 value_dim, const float* keys,
                      int64 key_stride, const float* values, int64 value_stride) {
        // Every dimension of a key lies in a line of its own: ask for all of them before waiting for the first.
        for (int64 d = 0; d < key_dim; d += words::value)
            cpu::prefetch_to_write(reinterpret_cast<Element*>(block) + key_at(d, lane));
        for (int64 token = 0; token < count; ++token)
            store_key<Build>(block, lane + token, key_dim, keys + token * key_stride);

        std::uint64_t& marks = *nonfinite(block, key_dim, value_dim);
        for (int64 token = 0; token < count; ++token) {
            const bool finite =
                store_value<Build>(block, lane + token, key_dim, value_dim, values + token * value_stride);
            const std::uint64_t bit = std::uint64_t{1} << (lane + token);
            marks = finite ? marks & ~bit : marks | bit;
        }
    }

    /// Widens the token in `lane`, exactly. key: [key_dim], value: [value_dim].
    template <class Build>
    static void load(const std::byte* block, int64 lane, int64 key_dim, int64 value_dim, float* key, float* value) {
        const Element* from = keys(block);
        for (int64 d = 0; d < key_dim; ++d) key[d] = float(from[key_at(d, lane)]);
        const Element* row = values(block, key_dim);
        for (int64 c = 0; c < value_dim; ++c) value[c] = float(row[value_at(lane, c, value_pitch(value_dim))]);
    }

    // ---- what the kernels read

    SASH_INLINE static const Element* keys(const std::byte* block) { return reinterpret_cast<const Element*>(block); }
    SASH_INLINE static const Element* values(const std::byte* block, int64 key_dim) {
        return reinterpret_cast<const Element*>(block + key_bytes(key_dim));
    }
    /// Bit l: the value row of lane l holds a NaN or an infinity. Says nothing about lanes that were never stored.
    SASH_INLINE static std::uint64_t nonfinite_lanes(const std::byte* block, int64 key_dim, int64 value_dim) {
        return *nonfinite(const_cast<std::byte*>(block), key_dim, value_dim);
    }

    /// Keys [lane, lane + 16) as floats, [key_dim][16]: in place where they are floats, else unpacked to `scratch`.
    template <class Build>
    static detail::panel key_panel(const std::byte* block, int64 lane, int64 key_dim, float* scratch) {
        const Element* from = keys(block);
        if constexpr (std::is_same_v<Element, float>) {
            return {from + lane, block_tokens};
        } else {
            constexpr int64 width = detail::panel_width;
            for (int64 d = 0; d < key_dim; d += words::value)
#pragma GCC unroll 4
                for (int64 i = 0; i < width; i += cpu::lanes<Build>)
                    unpack(from + key_at(d, lane + i), scratch + d * width + i, width);
            return {scratch, width};
        }
    }

    /// Columns [column, column + 16) of the value rows of lanes [first, last), as floats; row l of the panel is lane l.
    template <class Build>
    static detail::panel value_panel(const std::byte* block, int64 column, int64 first, int64 last, int64 key_dim,
                                     int64 value_dim, float* scratch) {
        const Element* from = values(block, key_dim);
        const int64 pitch = value_pitch(value_dim);
        if constexpr (std::is_same_v<Element, float>) {
            return {from + column, pitch};
        } else {
            constexpr int64 width = detail::panel_width;
            for (int64 token = first / words::value * words::value; token < last; token += words::value)
#pragma GCC unroll 4
                for (int64 i = 0; i < width; i += cpu::lanes<Build>)
                    unpack(from + value_at(token, column + i, pitch), scratch + token * width + i, width);
            return {scratch, width};
        }
    }

    /// One number, dimension d, of as many keys from `lane` on as a register holds.
    SASH_INLINE static cpu::floats key_lanes(const Element* keys, int64 d, int64 lane) {
        return word(keys + key_at(d & -words::value, lane), d);
    }
    /// As many numbers of one value row, from `column` on, as a register holds.
    SASH_INLINE static cpu::floats value_lanes(const Element* values, int64 token, int64 column, int64 pitch) {
        return word(values + value_at(token & -words::value, column, pitch), token);
    }
    /// Two neighbours along the dimension that is summed over, d and d + 1 (d even): one load where they are paired.
    struct two {
        cpu::floats first, second;
    };
    SASH_INLINE static two key_pair(const Element* keys, int64 d, int64 lane) {
        if constexpr (paired)
            return split(keys + key_at(d, lane));
        else
            return {key_lanes(keys, d, lane), key_lanes(keys, d + 1, lane)};
    }
    SASH_INLINE static two value_pair(const Element* values, int64 token, int64 column, int64 pitch) {
        if constexpr (paired)
            return split(values + value_at(token, column, pitch));
        else
            return {value_lanes(values, token, column, pitch), value_lanes(values, token + 1, column, pitch)};
    }

private:
    SASH_INLINE static int64 key_at(int64 d, int64 lane) {
        return (d / words::value * block_tokens + lane) * words::value + d % words::value;
    }
    SASH_INLINE static int64 value_at(int64 token, int64 column, int64 pitch) {
        return (token / words::value * pitch + column) * words::value + token % words::value;
    }
    SASH_INLINE static std::uint64_t* nonfinite(std::byte* block, int64 key_dim, int64 value_dim) {
        return reinterpret_cast<std::uint64_t*>(block + key_bytes(key_dim) + value_bytes(value_dim));
    }

    SASH_INLINE static two split(const Element* p) {
        const cpu::integers both = cpu::load(reinterpret_cast<const std::int32_t*>(p));
        return {cpu::low_bfloat16(both), cpu::high_bfloat16(both)};
    }
    SASH_INLINE static cpu::floats word(const Element* p, [[maybe_unused]] int64 which) {
        if constexpr (paired) {
            const two both = split(p);
            return which & 1 ? both.second : both.first;
        } else {
            return cpu::load(p);
        }
    }
    SASH_INLINE static void unpack(const Element* p, float* to, [[maybe_unused]] int64 pitch) {
        if constexpr (paired) {
            const two both = split(p);
            cpu::store(to, both.first);
            cpu::store(to + pitch, both.second);
        } else {
            cpu::store(to, cpu::load(p));
        }
    }

    template <class Build>
    static void store_key(std::byte* block, int64 lane, int64 key_dim, const float* key) {
        Element* to = reinterpret_cast<Element*>(block);
        Element rounded[64];
        for (int64 d0 = 0; d0 < key_dim; d0 += 64) {
            const int64 n = detail::smaller(64, key_dim - d0);
            cpu::narrow<Build>(key + d0, rounded, n);
            for (int64 i = 0; i < n; ++i) to[key_at(d0 + i, lane)] = rounded[i];
        }
        if constexpr (paired)
            if (key_dim & 1) to[key_at(key_dim, lane)] = Element(0.0f);
    }

    /// Returns whether every number, as stored, is finite.
    template <class Build>
    static bool store_value(std::byte* block, int64 lane, int64 key_dim, int64 value_dim, const float* value) {
        Element* to = reinterpret_cast<Element*>(block + key_bytes(key_dim));
        const int64 pitch = value_pitch(value_dim);
        Element rounded[64];
        bool finite = true;
        for (int64 c0 = 0; c0 < value_dim; c0 += 64) {
            const int64 n = detail::smaller(64, value_dim - c0);
            cpu::narrow<Build>(value + c0, rounded, n);
            for (int64 i = 0; i < n; ++i) {
                finite &= detail::is_finite(rounded[i]);
                to[value_at(lane, c0 + i, pitch)] = rounded[i];
            }
        }
        for (int64 c = value_dim; c < pitch; ++c) to[value_at(lane, c, pitch)] = Element(0.0f);
        return finite;
    }
};

}  // namespace sash

SASH_KERNELS_END
