#pragma once
/// \file
/// A block of 64 tokens whose rows are bytes: every key row and every value row has a scale of its own,
///
///     x[c] ≈ scale · n[c],    scale = max_c |x[c]| / 127,    n[c] = x[c] / scale to nearest, ties to even.
///
///     keys           [4][⌈key_dim/4⌉][16][4]   n + 128, unsigned; dimensions that only pad hold 128, which stands for 0
///     key scales     [64] floats
///     value scales   [64] floats
///     values         [value_pitch/16][64][16]  n, signed; 0 from value_dim on
///     marks          one line of 64 bytes: its first word has bit l set where the value row of lane l is NaN
///
/// Four numbers of a key lie side by side, unsigned: what an instruction takes that multiplies bytes with signed bytes
/// and adds four products. Scales stay outside of the sums: those of keys are multiplied into the scores, those of
/// values into the weights.
///
/// The error of a number is at most half a scale, 1/254 of the largest of its row. Zeros are exact; numbers as large as
/// the largest of their row are off by one unit in the last place at most, where the scale is a normal number (the
/// largest at least 1.5e-36). A row whose largest number is below 127 · 2^-150 reads as zeros. A row that holds a NaN
/// or an infinity has no range: its scale is NaN, and all of it reads as NaN; no other row is touched. What is stored
/// depends on the row alone.
#include <sash/cache/block.hpp>

SASH_KERNELS_BEGIN

namespace sash {

namespace detail {

/// max_c |row[c]|; NaN or infinity where the row holds one.
template <class Build>
float largest_magnitude(const float* row, int64 count) {
    constexpr int64 lanes = cpu::lanes<Build>;
    cpu::integers largest(0);  // magnitudes are in the order of their bits, infinity and NaN above all
    const auto take = [&largest](cpu::floats x) {
        largest = cpu::larger_integers(cpu::as_integers(x) & cpu::integers(0x7fffffff), largest);
    };
    int64 c = 0;
    for (; c + lanes <= count; c += lanes) take(cpu::load(row + c));
    if (c < count) take(cpu::load_up_to(row + c, count - c));
    return sash::detail::bit_cast<float>(cpu::largest_of_lanes(largest));
}

/// What a row of bytes is to be multiplied with; NaN where the row is not finite.
template <class Build>
float row_scale(const float* row, int64 count) {
    const float largest = largest_magnitude<Build>(row, count);
    return is_finite(largest) ? largest / 127 : sash::detail::bit_cast<float>(0x7fc00000u);
}

/// to[c] = row[c] / scale to nearest, between -127 and 127; 0 where the scale is 0 or NaN. `to` has room for whole
/// registers.
template <class Build>
void to_bytes(const float* row, int64 count, float scale, std::int8_t* to) {
    constexpr int64 lanes = cpu::lanes<Build>;
    if (scale == 0 || !is_finite(scale)) {
        std::memset(to, 0, static_cast<std::size_t>(count));
        return;
    }
    const auto take = [&](cpu::floats x, int64 at) {
        const cpu::floats n = cpu::quotient(x, cpu::floats(scale));
        cpu::store(to + at,
                   cpu::nearest_integers(cpu::minimum(cpu::floats(127.0f), cpu::maximum(n, cpu::floats(-127.0f)))));
    };
    int64 c = 0;
    for (; c + lanes <= count; c += lanes) take(cpu::load(row + c), c);
    if (c < count) take(cpu::load_up_to(row + c, count - c), c);
}

}  // namespace detail

template <>
struct codec<int8_rows> {
    static constexpr bool has_scales = true;
    static constexpr bool paired = false;  ///< values: one token a load
    static constexpr int64 key_step = 4;   ///< dimensions of a key that one load takes
    static constexpr int64 key_row = 4;    ///< of these, side by side for each key
    static constexpr int64 scale_bytes = block_tokens * int64{sizeof(float)};

    SASH_INLINE static constexpr int64 value_pitch(int64 value_dim) {
        return detail::round_up(value_dim, detail::panel_width);
    }
    SASH_INLINE static constexpr int64 key_bytes(int64 key_dim) {
        return detail::round_up(key_dim, key_step) * block_tokens + 2 * scale_bytes;  // and both kinds of scales
    }
    /// Of sixteen keys, without their scales.
    SASH_INLINE static constexpr int64 panel_bytes(int64 key_dim) {
        return detail::round_up(key_dim, key_step) * detail::panel_width;
    }
    SASH_INLINE static constexpr int64 value_bytes(int64 value_dim) { return value_pitch(value_dim) * block_tokens; }
    /// Bytes of one block: a multiple of 64.
    SASH_INLINE static constexpr int64 block_bytes(int64 key_dim, int64 value_dim) {
        return key_bytes(key_dim) + value_bytes(value_dim) + 64;
    }

    /// Rounds `count` tokens and stores them in lanes [lane, lane + count). Touches no other lane.
    /// keys: [count] rows of key_dim, key_stride floats apart; values likewise. Cost: O(count · (key_dim + value_dim)).
    template <class Build>
    static void store(std::byte* block, int64 lane, int64 count, int64 key_dim, int64 value_dim, const float* keys,
                      int64 key_stride, const float* values, int64 value_stride) {
        for (int64 d = 0; d < key_dim; d += key_step) cpu::prefetch_to_write(key_at(block, d, lane, key_dim));
        for (int64 c = 0; c < value_dim; c += detail::panel_width)
            cpu::prefetch_to_write(block + key_bytes(key_dim) + value_at(lane, c));
        for (int64 token = lane; token < lane + count; ++token, keys += key_stride, values += value_stride) {
            const float key_scale = detail::row_scale<Build>(keys, key_dim);
            const float value_scale = detail::row_scale<Build>(values, value_dim);
            store_key<Build>(block, token, key_dim, keys, key_scale);
            store_value<Build>(block, token, key_dim, value_dim, values, value_scale);
            set_scales(block, token, key_dim, value_dim, key_scale, value_scale);
        }
    }

    /// The token in `lane` as floats: scale · n, rounded. key: [key_dim], value: [value_dim].
    template <class Build>
    static void load(const std::byte* block, int64 lane, int64 key_dim, int64 value_dim, float* key, float* value) {
        const float key_scale = key_scales(block, key_dim)[lane];
        const float value_scale = value_scales(block, key_dim)[lane];
        const std::int8_t* row = values(block, key_dim);
        for (int64 d = 0; d < key_dim; ++d) key[d] = key_scale * float(int(*key_at(block, d, lane, key_dim)) - 128);
        for (int64 c = 0; c < value_dim; ++c) value[c] = value_scale * float(int(row[value_at(lane, c)]));
    }

    /// Bytes of a token by itself: key row, value row, their scales.
    SASH_INLINE static constexpr int64 token_bytes(int64 key_dim, int64 value_dim) {
        return key_dim + value_dim + 2 * int64{sizeof(float)};
    }
    /// Copies the token in `lane` to plain bytes, bit for bit.
    template <class Build>
    static void save_token(const std::byte* block, int64 lane, int64 key_dim, int64 value_dim, std::byte* to) {
        for (int64 d = 0; d < key_dim; ++d) *to++ = std::byte{*key_at(block, d, lane, key_dim)};
        for (int64 c = 0; c < value_dim; ++c) *to++ = static_cast<std::byte>(values(block, key_dim)[value_at(lane, c)]);
        const float scales[2] = {key_scales(block, key_dim)[lane], value_scales(block, key_dim)[lane]};
        std::memcpy(to, scales, sizeof scales);
    }
    /// And back.
    template <class Build>
    static void load_token(std::byte* block, int64 lane, int64 key_dim, int64 value_dim, const std::byte* from) {
        for (int64 d = 0; d < detail::round_up(key_dim, key_step); ++d)
            *key_at(block, d, lane, key_dim) = d < key_dim ? std::to_integer<std::uint8_t>(from[d]) : std::uint8_t{128};
        auto* row = const_cast<std::int8_t*>(values(block, key_dim));
        for (int64 c = 0; c < value_pitch(value_dim); ++c)
            row[value_at(lane, c)] = c < value_dim ? std::to_integer<std::int8_t>(from[key_dim + c]) : std::int8_t{0};
        float scales[2];
        std::memcpy(scales, from + key_dim + value_dim, sizeof scales);
        set_scales(block, lane, key_dim, value_dim, scales[0], scales[1]);
    }

    // ---- what the kernels read

    SASH_INLINE static const std::uint8_t* keys(const std::byte* block) {
        return reinterpret_cast<const std::uint8_t*>(block);
    }
    SASH_INLINE static const std::int8_t* values(const std::byte* block, int64 key_dim) {
        return reinterpret_cast<const std::int8_t*>(block + key_bytes(key_dim));
    }
    /// What the keys of the block are to be multiplied with, [64]; likewise the values.
    SASH_INLINE static const float* key_scales(const std::byte* block, int64 key_dim) {
        return reinterpret_cast<const float*>(block + key_bytes(key_dim) - 2 * scale_bytes);
    }
    SASH_INLINE static const float* value_scales(const std::byte* block, int64 key_dim) {
        return reinterpret_cast<const float*>(block + key_bytes(key_dim) - scale_bytes);
    }
    /// Bit l: the value row of lane l is NaN. Says nothing about lanes that were never stored.
    SASH_INLINE static std::uint64_t nonfinite_lanes(const std::byte* block, int64 key_dim, int64 value_dim) {
        return *nonfinite(const_cast<std::byte*>(block), key_dim, value_dim);
    }

    template <class Build>
    static constexpr bool multiplies_words = false;  ///< of two Elements, by a kernel of many queries

    /// Keys [lane, lane + 16), [key_dim][16], unpacked to `scratch`.
    template <class Build, class Number>
    static const float* key_panel(const std::byte* block, int64 lane, int64 key_dim, float* scratch) {
        constexpr int64 width = detail::panel_width;
        const float* scales = key_scales(block, key_dim) + lane;
        for (int64 i = 0; i < width; i += cpu::lanes<Build>) {
            const cpu::floats scale = cpu::load(scales + i);
            const std::uint8_t* column = key_column(block, lane + i, key_dim);
            for (int64 d = 0; d < key_dim; d += key_step) {
                const neighbours four = key_terms(column, d);
#pragma GCC unroll 4
                for (int k = 0; k < key_step; ++k)
                    if (d + k < key_dim) cpu::store(scratch + (d + k) * width + i, four[k] * scale);
            }
        }
        return scratch;
    }

    /// Columns [column, column + 16) of the value rows of lanes [first, last); row l of the panel is lane l.
    template <class Build, class Number>
    static const float* value_panel(const std::byte* block, int64 column, int64 first, int64 last, int64 key_dim,
                                    float* scratch) {
        constexpr int64 width = detail::panel_width;
        const float* scales = value_scales(block, key_dim);
        for (int64 token = first; token < last; ++token)
#pragma GCC unroll 4
            for (int64 i = 0; i < width; i += cpu::lanes<Build>)
                cpu::store(scratch + token * width + i,
                           value_term(value_column(block, column + i, key_dim), token) * cpu::floats(scales[token]));
        return scratch;
    }

    /// Four dimensions of as many keys as a register holds, without their scales.
    struct neighbours {
        cpu::integers signed_bytes;
        SASH_INLINE cpu::floats operator[](int k) const { return cpu::to_floats(cpu::signed_byte(signed_bytes, k)); }
    };
    /// A column of a panel, as wide as a register: as many keys from `lane` on, or columns of values, with all their terms.
    SASH_INLINE static const std::uint8_t* key_column(const std::byte* block, int64 lane, int64 key_dim) {
        return key_at(block, 0, lane, key_dim);
    }
    SASH_INLINE static const std::int8_t* value_column(const std::byte* block, int64 column, int64 key_dim) {
        return values(block, key_dim) + value_at(0, column);
    }
    /// The bytes of four dimensions of a column of keys, d and on (d a multiple of 4).
    SASH_INLINE static cpu::integers key_words(const std::uint8_t* column, int64 d) {
        return cpu::load(reinterpret_cast<const std::int32_t*>(column + d * detail::panel_width));
    }
    SASH_INLINE static neighbours key_terms(const std::uint8_t* column, int64 d) {
        return {key_words(column, d) ^ cpu::integers(static_cast<std::int32_t>(0x80808080u))};
    }
    SASH_INLINE static cpu::floats key_term(const std::uint8_t* column, int64 d) {
        return key_terms(column, d & -key_step)[static_cast<int>(d & (key_step - 1))];
    }
    /// One token of a column of values, without its scale.
    SASH_INLINE static cpu::floats value_term(const std::int8_t* column, int64 token) {
        return cpu::to_floats(cpu::load(column + token * detail::panel_width));
    }
    /// Tokens t and t + 1.
    struct two_tokens {
        cpu::floats first, second;
    };
    SASH_INLINE static two_tokens value_terms(const std::int8_t* column, int64 token) {
        return {value_term(column, token), value_term(column, token + 1)};
    }

private:
    static constexpr int64 chunk = 64;  // numbers rounded at a time, whole registers of them

    SASH_INLINE static int64 value_at(int64 token, int64 column) {
        return detail::place_in_panels(token, block_tokens, column);
    }
    SASH_INLINE static int64 word_at(int64 d, int64 lane, int64 key_dim) {
        return detail::place_in_panels(d / key_step, (key_dim + key_step - 1) / key_step, lane) * key_step;
    }
    SASH_INLINE static std::uint8_t* key_at(std::byte* block, int64 d, int64 lane, int64 key_dim) {
        return reinterpret_cast<std::uint8_t*>(block) + word_at(d, lane, key_dim) + d % key_step;
    }
    SASH_INLINE static const std::uint8_t* key_at(const std::byte* block, int64 d, int64 lane, int64 key_dim) {
        return key_at(const_cast<std::byte*>(block), d, lane, key_dim);
    }
    SASH_INLINE static std::uint64_t* nonfinite(std::byte* block, int64 key_dim, int64 value_dim) {
        return reinterpret_cast<std::uint64_t*>(block + block_bytes(key_dim, value_dim) - 64);
    }

    SASH_INLINE static void set_scales(std::byte* block, int64 lane, int64 key_dim, int64 value_dim, float key_scale,
                                       float value_scale) {
        const_cast<float*>(key_scales(block, key_dim))[lane] = key_scale;
        const_cast<float*>(value_scales(block, key_dim))[lane] = value_scale;
        std::uint64_t& marks = *nonfinite(block, key_dim, value_dim);
        const std::uint64_t bit = std::uint64_t{1} << lane;
        marks = detail::is_finite(value_scale) ? marks & ~bit : marks | bit;
    }

    template <class Build>
    static void store_key(std::byte* block, int64 lane, int64 key_dim, const float* key, float scale) {
        std::int8_t rounded[chunk];
        for (int64 d0 = 0; d0 < key_dim; d0 += chunk) {
            const int64 n = detail::smaller(chunk, key_dim - d0);
            detail::to_bytes<Build>(key + d0, n, scale, rounded);
            for (int64 i = n; i % key_step != 0; ++i) rounded[i] = 0;
            for (int64 i = 0; i < n; i += key_step) {
                std::uint32_t word;
                std::memcpy(&word, rounded + i, sizeof word);
                word ^= 0x80808080u;  // n + 128
                std::memcpy(key_at(block, d0 + i, lane, key_dim), &word, sizeof word);
            }
        }
    }

    template <class Build>
    static void store_value(std::byte* block, int64 lane, int64 key_dim, int64 value_dim, const float* value,
                            float scale) {
        auto* to = const_cast<std::int8_t*>(values(block, key_dim));
        std::int8_t rounded[chunk];
        for (int64 c0 = 0; c0 < value_dim; c0 += chunk) {
            const int64 n = detail::smaller(chunk, value_dim - c0), pitch = value_pitch(n);
            detail::to_bytes<Build>(value + c0, n, scale, rounded);
            std::memset(rounded + n, 0, static_cast<std::size_t>(pitch - n));
            for (int64 c = 0; c < pitch; c += detail::panel_width)
                std::memcpy(to + value_at(lane, c0 + c), rounded + c, detail::panel_width);
        }
    }
};

}  // namespace sash

SASH_KERNELS_END
