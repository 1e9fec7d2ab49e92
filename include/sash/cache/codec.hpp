#pragma once
/// \file
/// How a block of 64 tokens of one KV head is laid out. Only this file knows, and int8_rows.hpp for rows of bytes;
/// no compiler flag changes it.
///
///                keys                       values                           behind them
///     float      [4][key_dim][16]           [value_pitch/16][64][16]         one line of 64 bytes: its first word has
///     float16    [4][key_dim][16]           [value_pitch/16][64][16]         bit l set where the value row of lane l
///     bfloat16   [4][⌈key_dim/2⌉][16][2]    [value_pitch/16][32][16][2]      holds a NaN or an infinity
///
/// Both are panels of sixteen numbers that are multiplied alike, keys or columns of values, and a row for each term of
/// the sum, dimension or token. A decoding query multiplies one number with such a row, a prefill takes the same row
/// apart and multiplies each of its numbers with 16 queries; both read a panel from end to end, and the block panel by
/// panel. A window that shows part of a block reads little more than that part. bfloat16 comes in pairs
/// along the dimension that is summed over, keys along d and values along the tokens: what a bfloat16 dot instruction
/// takes. value_pitch is value_dim rounded up to 16, with zeros, so that no kernel has a tail of columns.
///
/// Blocks come uninitialised, but with every bit of that word set: lanes that were never stored hold anything, NaN
/// included.
#include <sash/cache/int8_rows.hpp>

SASH_KERNELS_BEGIN

namespace sash {

namespace detail {

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
    static constexpr int64 key_step = 2;            ///< dimensions of a key that `key_neighbours` takes
    static constexpr int64 key_row = words::value;  ///< of these, side by side for each key
    static constexpr bool has_scales = false;

    SASH_INLINE static constexpr int64 value_pitch(int64 value_dim) {
        return detail::round_up(value_dim, detail::panel_width);
    }
    SASH_INLINE static constexpr int64 key_bytes(int64 key_dim) {
        return detail::round_up(key_dim, words::value) * block_tokens * int64{sizeof(Element)};
    }
    /// Of sixteen keys.
    SASH_INLINE static constexpr int64 panel_bytes(int64 key_dim) { return key_bytes(key_dim) / 4; }
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
        // Every dimension of a key lies in a line of its own. A line is filled at once where as many tokens come as it
        // holds; else all lines are asked for before the first is waited for.
        constexpr int64 group = detail::panel_width;
        for (int64 c = 0; c < value_dim; c += group)
            for (int64 token = lane; token < lane + count; token += 64 / (group * int64{sizeof(Element)}))
                cpu::prefetch_to_write(reinterpret_cast<Element*>(block + key_bytes(key_dim)) + value_at(token, c));
        for (int64 token = 0; token < count;) {
            const float* from = keys + token * key_stride;
            if ((lane + token) % group == 0 && count - token >= group) {
                store_keys<Build>(block, lane + token, key_dim, from, key_stride);
                token += group;
                continue;
            }
            for (int64 d = 0; token == 0 && d < key_dim; d += words::value)
                cpu::prefetch_to_write(reinterpret_cast<Element*>(block) + key_at(d, lane, key_dim));
            store_key<Build>(block, lane + token, key_dim, from);
            ++token;
        }

        std::uint64_t& marks = *nonfinite(block, key_dim, value_dim);
        for (int64 token = 0; token < count;) {
            const float* from = values + token * value_stride;
            const bool pair = paired && (lane + token) % 2 == 0 && token + 1 < count;
            const std::uint64_t found =
                pair ? store_values<Build, words::value>(block, lane + token, key_dim, value_dim, from, value_stride)
                     : store_values<Build, 1>(block, lane + token, key_dim, value_dim, from, value_stride);
            const std::uint64_t those = std::uint64_t{pair ? 3u : 1u} << (lane + token);
            marks = (marks & ~those) | found << (lane + token);
            token += pair ? 2 : 1;
        }
    }

    /// Widens the token in `lane`, exactly. key: [key_dim], value: [value_dim].
    template <class Build>
    static void load(const std::byte* block, int64 lane, int64 key_dim, int64 value_dim, float* key, float* value) {
        const Element* from = keys(block);
        for (int64 d = 0; d < key_dim; ++d) key[d] = float(from[key_at(d, lane, key_dim)]);
        const Element* row = values(block, key_dim);
        for (int64 c = 0; c < value_dim; ++c) value[c] = float(row[value_at(lane, c)]);
    }

    /// Bytes of a token by itself: key row, value row.
    SASH_INLINE static constexpr int64 token_bytes(int64 key_dim, int64 value_dim) {
        return (key_dim + value_dim) * int64{sizeof(Element)};
    }
    /// Copies the token in `lane` to plain bytes, bit for bit.
    template <class Build>
    static void save_token(const std::byte* block, int64 lane, int64 key_dim, int64 value_dim, std::byte* to) {
        const auto put = [&to](Element x) {
            std::memcpy(to, &x, sizeof x);
            to += sizeof x;
        };
        for (int64 d = 0; d < key_dim; ++d) put(keys(block)[key_at(d, lane, key_dim)]);
        for (int64 c = 0; c < value_dim; ++c) put(values(block, key_dim)[value_at(lane, c)]);
    }
    /// And back.
    template <class Build>
    static void load_token(std::byte* block, int64 lane, int64 key_dim, int64 value_dim, const std::byte* from) {
        Element* key = reinterpret_cast<Element*>(block);
        Element* value = reinterpret_cast<Element*>(block + key_bytes(key_dim));
        const int64 pitch = value_pitch(value_dim);
        const auto next = [&from] {
            Element x;
            std::memcpy(&x, from, sizeof x);
            from += sizeof x;
            return x;
        };
        for (int64 d = 0; d < key_dim; ++d) key[key_at(d, lane, key_dim)] = next();
        pad_key(block, lane, key_dim);
        bool finite = true;
        for (int64 c = 0; c < pitch; ++c) {
            const Element x = c < value_dim ? next() : Element(0.0f);
            finite &= detail::is_finite(x);
            value[value_at(lane, c)] = x;
        }
        std::uint64_t& marks = *nonfinite(block, key_dim, value_dim);
        const std::uint64_t bit = std::uint64_t{1} << lane;
        marks = finite ? marks & ~bit : marks | bit;
    }

    // ---- what the kernels read

    SASH_INLINE static const Element* keys(const std::byte* block) { return reinterpret_cast<const Element*>(block); }
    SASH_INLINE static const Element* values(const std::byte* block, int64 key_dim) {
        return reinterpret_cast<const Element*>(block + key_bytes(key_dim));
    }
    /// Bit l: the value row of lane l may hold a NaN or an infinity: it does, or nothing was ever stored there.
    SASH_INLINE static std::uint64_t nonfinite_lanes(const std::byte* block, int64 key_dim, int64 value_dim) {
        return *nonfinite(const_cast<std::byte*>(block), key_dim, value_dim);
    }

    /// Can a kernel of many queries multiply words of two Elements as they are?
    template <class Build>
    static constexpr bool multiplies_words = paired&& cpu::multiplies_pairs<Build>;

    /// Keys [lane, lane + 16), a row a dimension: floats, in place or unpacked to `scratch`, [key_dim][16]. Or a row a
    /// pair of dimensions: words of two Elements (std::int32_t), in place.
    template <class Build, class Number>
    static const Number* key_panel(const std::byte* block, int64 lane, int64 key_dim, float* scratch) {
        return panel<Build, Number>(key_column(block, lane, key_dim), 0, key_dim, scratch);
    }

    /// Columns [column, column + 16) of the value rows of lanes [first, last). Row l of the panel is lane l; of words, the
    /// lanes 2 l and 2 l + 1.
    template <class Build, class Number>
    static const Number* value_panel(const std::byte* block, int64 column, int64 first, int64 last, int64 key_dim,
                                     float* scratch) {
        return panel<Build, Number>(value_column(block, column, key_dim), first, last, scratch);
    }

    /// A column of a panel, as wide as a register: as many keys from `lane` on, or columns of values, with all their terms.
    SASH_INLINE static const Element* key_column(const std::byte* block, int64 lane, int64 key_dim) {
        return keys(block) + key_at(0, lane, key_dim);
    }
    SASH_INLINE static const Element* value_column(const std::byte* block, int64 column, int64 key_dim) {
        return values(block, key_dim) + value_at(0, column);
    }
    /// Neighbouring terms, dimensions of keys or tokens of values, t and t + 1 (t even): one load where they are paired.
    struct neighbours {
        cpu::floats first, second;
        SASH_INLINE cpu::floats operator[](int k) const { return k == 0 ? first : second; }
    };
    SASH_INLINE static neighbours key_terms(const Element* column, int64 d) { return terms(column, d); }
    SASH_INLINE static neighbours value_terms(const Element* column, int64 token) { return terms(column, token); }
    /// One of them.
    SASH_INLINE static cpu::floats key_term(const Element* column, int64 d) { return term(column, d); }
    SASH_INLINE static cpu::floats value_term(const Element* column, int64 token) { return term(column, token); }

private:
    SASH_INLINE static int64 key_at(int64 d, int64 lane, int64 key_dim) {
        constexpr int64 together = words::value;
        return detail::place_in_panels(d / together, (key_dim + together - 1) / together, lane) * together +
               d % together;
    }
    SASH_INLINE static int64 value_at(int64 token, int64 column) {
        constexpr int64 together = words::value;
        return detail::place_in_panels(token / together, block_tokens / together, column) * together + token % together;
    }
    SASH_INLINE static std::uint64_t* nonfinite(std::byte* block, int64 key_dim, int64 value_dim) {
        return reinterpret_cast<std::uint64_t*>(block + key_bytes(key_dim) + value_bytes(value_dim));
    }

    SASH_INLINE static std::int32_t* as_words(Element* p) { return reinterpret_cast<std::int32_t*>(p); }
    SASH_INLINE static const std::int32_t* as_words(const Element* p) {
        return reinterpret_cast<const std::int32_t*>(p);
    }
    SASH_INLINE static void pad_key(std::byte* block, int64 lane, int64 key_dim) {
        for (int64 d = key_dim; d % words::value != 0; ++d)
            reinterpret_cast<Element*>(block)[key_at(d, lane, key_dim)] = Element(0.0f);
    }

    SASH_INLINE static neighbours split(const Element* p) {
        const cpu::integers both = cpu::load(reinterpret_cast<const std::int32_t*>(p));
        return {cpu::low_bfloat16(both), cpu::high_bfloat16(both)};
    }
    SASH_INLINE static cpu::floats term(const Element* column, int64 t) {
        if constexpr (paired)
            return split(column + (t & -2) * detail::panel_width)[static_cast<int>(t & 1)];
        else
            return cpu::load(column + t * detail::panel_width);
    }
    SASH_INLINE static neighbours terms(const Element* column, int64 t) {
        if constexpr (paired)
            return split(column + t * detail::panel_width);
        else
            return {term(column, t), term(column, t + 1)};
    }
    SASH_INLINE static void unpack(const Element* p, float* to, [[maybe_unused]] int64 pitch) {
        if constexpr (paired) {
            const neighbours both = split(p);
            cpu::store(to, both.first);
            cpu::store(to + pitch, both.second);
        } else {
            cpu::store(to, cpu::load(p));
        }
    }

    /// Rows [first, last) of the panel at `from`, in their places: as they lie, or as floats in `scratch`, [last][16].
    template <class Build, class Number>
    static const Number* panel(const Element* from, [[maybe_unused]] int64 first, [[maybe_unused]] int64 last,
                               [[maybe_unused]] float* scratch) {
        if constexpr (!std::is_same_v<Number, float>) {
            return as_words(from);
        } else if constexpr (std::is_same_v<Element, float>) {
            return from;
        } else {
            constexpr int64 width = detail::panel_width;
            for (int64 t = first / words::value * words::value; t < last; t += words::value)
#pragma GCC unroll 4
                for (int64 i = 0; i < width; i += cpu::lanes<Build>)
                    unpack(from + t * width + i * words::value, scratch + t * width + i, width);
            return scratch;
        }
    }

    /// Sixteen keys at once, from lane `lane`, a multiple of 16, on.
    template <class Build>
    static void store_keys(std::byte* block, int64 lane, int64 key_dim, const float* keys, int64 stride) {
        constexpr int64 width = detail::panel_width;
        Element* to = reinterpret_cast<Element*>(block);
        alignas(64) float turned[width * width];  // [dimension][key]
        for (int64 d0 = 0; d0 < key_dim; d0 += width) {
            const int64 n = detail::smaller(width, key_dim - d0);
            transpose(keys + d0, stride, n, turned);
            for (int64 d = 0; d < n; d += words::value)
                for (int64 i = 0; i < width; i += cpu::lanes<Build>) {
                    if constexpr (paired)
                        cpu::store(
                            as_words(to + key_at(d0 + d, lane + i, key_dim)),
                            cpu::pairs(cpu::load(turned + d * width + i), cpu::load(turned + (d + 1) * width + i)));
                    else
                        cpu::store(to + key_at(d0 + d, lane + i, key_dim), cpu::load(turned + d * width + i));
                }
        }
    }

    /// to[c][r] = row r, number c < n; what lies behind, up to an even number, is 0.
    SASH_INLINE static void transpose(const float* rows, int64 stride, int64 n, float* to) {
        constexpr int64 width = detail::panel_width;
        int64 c = 0;
        for (; c + 4 <= n; c += 4)
            for (int64 r = 0; r < width; r += 4) {
                const float* from = rows + r * stride + c;
                float* at = to + c * width + r;
                cpu::transpose_4x4(cpu::load_quad(from), cpu::load_quad(from + stride),
                                   cpu::load_quad(from + 2 * stride), cpu::load_quad(from + 3 * stride), at, at + width,
                                   at + 2 * width, at + 3 * width);
            }
        for (; c < detail::round_up(n, 2); ++c)
            for (int64 r = 0; r < width; ++r) to[c * width + r] = c < n ? rows[r * stride + c] : 0.0f;
    }

    template <class Build>
    static void store_key(std::byte* block, int64 lane, int64 key_dim, const float* key) {
        Element* to = reinterpret_cast<Element*>(block);
        Element rounded[64];
        for (int64 d0 = 0; d0 < key_dim; d0 += 64) {
            const int64 n = detail::smaller(64, key_dim - d0);
            cpu::narrow<Build>(key + d0, rounded, n);
            for (int64 i = 0; i < n; ++i) to[key_at(d0 + i, lane, key_dim)] = rounded[i];
        }
        pad_key(block, lane, key_dim);
    }

    /// One value row, or the two of a pair. Bit i: row i holds a number that, as stored, is not finite.
    template <class Build, int64 Rows>
    static std::uint64_t store_values(std::byte* block, int64 lane, int64 key_dim, int64 value_dim, const float* values,
                                      int64 stride) {
        Element* to = reinterpret_cast<Element*>(block + key_bytes(key_dim));
        const int64 pitch = value_pitch(value_dim);
        cpu::lane_mask found[Rows];
        for (auto& mask : found) mask = cpu::mask_from(0);
        for (int64 c = 0; c < pitch; c += cpu::lanes<Build>) {
            cpu::floats x[Rows];
            for (int r = 0; r < Rows; ++r) {
                x[r] = cpu::load_up_to(values + r * stride + c, value_dim - c);
                found[r] = found[r] | cpu::is_nonfinite(cpu::rounded_to<Element>(x[r]));
            }
            if constexpr (Rows == 2)
                cpu::store(as_words(to + value_at(lane, c)), cpu::pairs(x[0], x[1]));
            else if constexpr (!paired)
                cpu::store(to + value_at(lane, c), x[0]);
            else
                store_halves(to + value_at(lane, c), x[0]);
        }
        std::uint64_t bits = 0;
        for (int r = 0; r < Rows; ++r) bits |= std::uint64_t{cpu::any(found[r])} << r;
        return bits;
    }

    /// One half of as many words as a register holds; the other halves stay.
    SASH_INLINE static void store_halves(Element* to, cpu::floats x) {
        Element rounded[cpu::floats::size];
        cpu::store(rounded, x);
        for (std::size_t i = 0; i < cpu::floats::size; ++i) to[2 * i] = rounded[i];
    }
};

}  // namespace sash

SASH_KERNELS_END
