#pragma once
/// \file
/// One token at a time, or a few: keys stand in the lanes of registers.
///
/// The rows are the query heads of these tokens that share a KV head, up to sixteen. Nothing is computed that memory does
/// not have to deliver first, so the kernel is arranged around the stream of cache lines: each is loaded once and meets
/// all rows (AVX2: four at a time), and what is needed next is asked for while this is worked on.
///
///     S[row][key]  = Σ_d    q[row][d] · K[d][key]            lanes: keys
///     P[row][key]  = 2^(S[row][key] - m[row])
///     O[row][col] += Σ_key  P[row][key] · V[key][col]        lanes: columns
///
/// Keys and values stored as bytes with a scale for each row stay bytes until they are multiplied: S is multiplied by
/// the key's scale, P by the value's. Where the machine has dot products of bytes, such a query is written in base 256,
/// and the first sum is made of exact integer dot products, one for each digit.
///
/// The largest score and the sum of weights are kept lane by lane and put together in `settle`; the stale maximum m is
/// raised when a score exceeds it by 2^8.
#include <sash/cpu/prefill.hpp>

SASH_KERNELS_BEGIN

namespace sash::cpu {

/// A query that meets keys of bytes is written as an integer of so many signed digits in base 256.
inline constexpr int query_digits = 3;
inline constexpr int64 most_dims_in_digits = 1 << 16;  // sums of products of bytes stay below 2^31

template <class Build>
struct decode_rows {
    static constexpr int capacity = 16;

    int rows = 0;
    int64 key_dim = 0, value_dim = 0, value_pitch = 0;
    float* query = nullptr;              // [frames][rows][key_dim], already multiplied
    float* numerator = nullptr;          // [rows][value_pitch]
    float* maximum = nullptr;            // [rows] base 2; stale until settled
    float* denominator = nullptr;        // [rows] once settled
    float* weights = nullptr;            // [rows][64]
    float* peak = nullptr;               // [rows][lanes] largest score of each lane
    float* sum = nullptr;                // [rows][lanes] sum of weights of each lane
    const std::int32_t* head = nullptr;  // [rows]
    std::int8_t* digits = nullptr;       // [frames][rows][digits][key_dim rounded up to 4] the queries in base 256
    float* unit = nullptr;               // [frames][rows] what the last of these digits counts
    std::int32_t* excess = nullptr;      // [frames][rows][digits] 128 · Σ of the digits

    /// Floats of scratch; a multiple of 16.
    static int64 floats(int rows, int64 key_dim, int64 value_dim, int frames) {
        return detail::round_up(frames * rows * key_dim, 16) + rows * codec<float>::value_pitch(value_dim) +
               rows * (block_tokens + 2 * lanes<Build>)+2 * capacity + digit_floats(rows, key_dim, frames);
    }

    /// Shares out `scratch`, 64-byte aligned, of floats(...) floats.
    void bind(float* scratch, int row_count, int64 key_width, int64 value_width, int frames) {
        rows = row_count;
        key_dim = key_width;
        value_dim = value_width;
        value_pitch = codec<float>::value_pitch(value_width);
        weights = scratch;
        peak = weights + rows * block_tokens;
        sum = peak + rows * lanes<Build>;
        maximum = sum + rows * lanes<Build>;
        denominator = maximum + capacity;
        numerator = denominator + capacity;
        query = numerator + rows * value_pitch;
        unit = query + detail::round_up(frames * rows * key_dim, 16);
        excess = reinterpret_cast<std::int32_t*>(unit + frames * rows);
        digits = reinterpret_cast<std::int8_t*>(excess + frames * rows * query_digits);
    }
    int64 digit_pitch() const { return detail::round_up(key_dim, 4); }

private:
    static int64 digit_floats(int rows, int64 key_dim, int frames) {
        if (!has_byte_dots<Build>) return 0;
        return detail::round_up(frames * rows * (1 + query_digits + query_digits * detail::round_up(key_dim, 4) / 4),
                                16);
    }
};

/// Writes one query row in digits:  q[d] ≈ unit · Σ_i 256^i · digit[i][d],  to nearest. The unit is a power of two such
/// that 22 bits hold the largest number of the row: the error is at most 2^-22 of it, what sums of floats have anyway.
/// A row that is not finite has the unit NaN.
template <class Build>
void write_digits(const float* q, int64 dim, int64 pitch, std::int8_t* digits, float& unit, std::int32_t* excess) {
    constexpr int64 width = lanes<Build>;
    constexpr int bits = 8 * query_digits - 3;
    const float largest = detail::largest_magnitude<Build>(q, dim);
    const int exponent = static_cast<int>(sash::detail::bit_cast<std::uint32_t>(largest) >> 23);
    const int counted =
        exponent < 32 ? 32 : exponent;  // below, nothing is seen of it, and the inverse would be infinite
    const bool finite = exponent < 255;
    unit = sash::detail::bit_cast<float>(finite ? (counted - bits) << 23 : 0x7fc00000);
    const floats inverse(sash::detail::bit_cast<float>((254 - counted + bits) << 23));
    integers sum[query_digits];
    for (integers& s : sum) s = integers(0);
    for (int64 d = 0; d < pitch; d += width) {
        const floats x = load_up_to(q + d, dim - d);
        integers rest = nearest_integers(finite ? x * inverse : floats(0.0f));
        for (int i = 0; i < query_digits; ++i) {
            const integers digit = signed_byte(rest, 0);
            rest = (rest - digit) >> 8;
            sum[i] = sum[i] + digit;
            std::int8_t* to = digits + i * pitch + d;
            alignas(64) std::int8_t some[floats::size];
            store(d + width <= pitch ? to : some, digit);
            if (d + width > pitch) std::memcpy(to, some, static_cast<std::size_t>(pitch - d));
        }
    }
    for (int i = 0; i < query_digits; ++i) excess[i] = 128 * static_cast<std::int32_t>(sum_of_lanes(to_floats(sum[i])));
}

/// Completes what the keys of this element type need, once the queries of a frame are there.
template <class Build, class Element>
void prepare(decode_rows<Build>& t, int frame) {
    if constexpr (codec<Element>::has_scales && has_byte_dots<Build>)
        for (int r = 0; r < t.rows; ++r) {
            const int row = frame * t.rows + r;
            write_digits<Build>(t.query + row * t.key_dim, t.key_dim, t.digit_pitch(),
                                t.digits + row * query_digits * t.digit_pitch(), t.unit[row],
                                t.excess + row * query_digits);
        }
}

/// Nothing seen yet.
template <class Build>
void begin(decode_rows<Build>& t) {
    for (int r = 0; r < t.rows; ++r) {
        t.maximum[r] = minus_infinity();
        t.denominator[r] = 0;
        store(t.peak + r * lanes<Build>, floats(minus_infinity()));
        store(t.sum + r * lanes<Build>, floats(0.0f));
    }
    for (int64 i = 0; i < t.rows * t.value_pitch; i += lanes<Build>) store(t.numerator + i, floats(0.0f));
}

namespace decode {

/// How many bytes ahead of what is read memory is asked for: more than arrives while one line is under way, and little
/// enough that it is still in the first cache when its turn comes. (Half a block ahead costs bfloat16 a fifth.)
/// More rows use a line for longer, and the machine reads ahead while they do.
SASH_INLINE int64 ahead(int rows) { return rows > 4 ? 12288 : 8192; }

/// A block is read in pieces of this many dimensions of its keys, then of its tokens' values, so that it is read nearly
/// from end to end although the sums of a piece may not fit in the registers all at once.
inline constexpr int64 piece_dims = 32;
template <int64 BytesOfNumber>
inline constexpr int piece_tokens = 64 / BytesOfNumber;

/// Cache lines that will be wanted soon. Each step of a loop asks for as many bytes as it reads itself, then goes on by
/// `stride`.
struct prefetcher {
    const std::byte* at;
    int64 stride;

    /// For a loop that reads from end to end and begins `offset` bytes into the block.
    SASH_INLINE prefetcher(const key_tile& tile, int64 block_bytes, int64 offset, int rows) : stride(0) {
        const int64 target = offset + ahead(rows);
        if (target < block_bytes)
            at = tile.block + target;
        else
            at = tile.next != nullptr ? tile.next + (target - block_bytes) : tile.block;
    }
    SASH_INLINE prefetcher(const std::byte* from, int64 by) : at(from), stride(by) {}
    template <int64 Bytes>
    SASH_INLINE void step() {
#pragma GCC unroll 8
        for (int64 i = 0; i < Bytes; i += 64) prefetch(at + i);
        at += stride != 0 ? stride : Bytes;
    }
};

/// Registers of sums in flight: enough to hide the latency of a multiply-add, few enough to leave room for operands.
template <class Build>
inline constexpr int sums = registers<Build> / 2;

/// Rows are taken as many at a time as leave room for two registers of each: by ones, fours or eights. Where there are
/// fewer, the last row is computed more than once, with the same result. (Twos would be one more kernel to compile.)
template <class Build>
inline constexpr int most_rows = sums<Build> / 2;

/// Adds dimensions [first_d, last_d) to the scores of rows [row, row + Rows), for Wide registers of lanes from `lane` on.
template <class Build, class Element, int Rows, int Wide>
void score(const decode_rows<Build>& t, int row, const float* query, const std::byte* block, int64 first_d,
           int64 last_d, int lane, prefetcher& soon) {
    using storage = codec<Element>;
    constexpr int step = storage::key_step;
    constexpr int span = Wide * lanes<Build>;
    const auto* keys = storage::keys(block);
    const float* q[Rows];
    float* to[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const int which = row + r < t.rows ? row + r : t.rows - 1;
        q[r] = query + which * t.key_dim;
        to[r] = t.weights + which * block_tokens;
    }
    floats sum[Rows][Wide];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
        for (int w = 0; w < Wide; ++w) sum[r][w] = first_d == 0 ? floats(0.0f) : load(to[r] + lane + w * lanes<Build>);
    int64 d = first_d;
    for (; d + step <= last_d; d += step) {
#pragma GCC unroll 4
        for (int64 k = 0; k < step; k += storage::key_row) soon.step<span * storage::key_row * int64{sizeof *keys}>();
        typename storage::neighbours near[Wide];
#pragma GCC unroll 16
        for (int w = 0; w < Wide; ++w) near[w] = storage::key_neighbours(keys, d, lane + w * lanes<Build>);
#pragma GCC unroll 4
        for (int k = 0; k < step; ++k) {
            floats key[Wide];
#pragma GCC unroll 16
            for (int w = 0; w < Wide; ++w) key[w] = near[w][k];
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const floats x(q[r][d + k]);
#pragma GCC unroll 16
                for (int w = 0; w < Wide; ++w) sum[r][w] = fma(x, key[w], sum[r][w]);
            }
        }
    }
    for (; d < last_d; ++d)
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
            for (int w = 0; w < Wide; ++w)
                sum[r][w] = fma(floats(q[r][d]), storage::key_lanes(keys, d, lane + w * lanes<Build>), sum[r][w]);
    if constexpr (storage::has_scales)
        if (last_d == t.key_dim)
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
                for (int w = 0; w < Wide; ++w)
                    sum[r][w] = sum[r][w] * load(storage::key_scales(block, t.key_dim) + lane + w * lanes<Build>);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
        for (int w = 0; w < Wide; ++w) store(to[r] + lane + w * lanes<Build>, sum[r][w]);
}

/// The same for lanes [first, last) and what shares a register with them; or for all lanes, where that is more than a
/// quarter of them: the machine reads ahead in a block that is read from end to end, not in a part of each of its rows.
template <class Build, class Element, int Rows>
void score(const decode_rows<Build>& t, int row, const float* query, const key_tile& tile, int64 first_d, int64 last_d,
           int first, int last) {
    using storage = codec<Element>;
    constexpr int vector = lanes<Build>, all = static_cast<int>(block_tokens) / vector;
    constexpr int wide = sums<Build> / Rows < all ? sums<Build> / Rows : all;
    const int64 block_bytes = storage::key_bytes(t.key_dim) + storage::value_bytes(t.value_dim);
    const int end = (last + vector - 1) / vector * vector;
    int lane = first / vector * vector;
    if (end - lane > detail::panel_width) {
        prefetcher soon(tile, block_bytes, storage::key_bytes(first_d), t.rows);
        for (lane = 0; lane < block_tokens; lane += wide * vector)
            score<Build, Element, Rows, wide>(t, row, query, tile.block, first_d, last_d, lane, soon);
        return;
    }
    // What is ahead lies in the same lanes of later dimensions, and at last in the values.
    constexpr int64 row_bytes = block_tokens * storage::key_row * int64{sizeof *storage::keys(nullptr)};
    const std::byte* values = tile.block + storage::key_bytes(t.key_dim);
    for (; lane < end; lane += vector) {
        prefetcher soon(values + first * storage::value_bytes(t.value_dim) / block_tokens, 0);
        if (last_d < t.key_dim)
            soon = prefetcher(tile.block + storage::key_bytes(last_d) + lane * row_bytes / block_tokens, row_bytes);
        score<Build, Element, Rows, 1>(t, row, query, tile.block, first_d, last_d, lane, soon);
    }
}

/// The scores of rows [row, row + Rows) from bytes: one dot product for each digit of the queries, put together in
/// floats. All dimensions at once.
template <class Build, class Element, int Rows>
void score_digits(const decode_rows<Build>& t, int row, int frame, const std::byte* block, int first, int last,
                  prefetcher soon) {
    using storage = codec<Element>;
    constexpr int all = static_cast<int>(block_tokens) / lanes<Build>;
    constexpr int most = sums<Build> / Rows;
    constexpr int wide = most < 1 ? 1 : most < all ? most : all;
    constexpr int span = wide * lanes<Build>;
    const auto* keys = storage::keys(block);
    const float* scales = storage::key_scales(block, t.key_dim);
    const int64 pitch = t.digit_pitch();
    const std::int8_t* q[Rows];
    int index[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        index[r] = frame * t.rows + (row + r < t.rows ? row + r : t.rows - 1);
        q[r] = t.digits + index[r] * query_digits * pitch;
    }
    for (int lane = first / span * span; lane < last; lane += span)
        for (int i = query_digits - 1; i >= 0; --i) {
            integers sum[Rows][wide];
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
                for (int w = 0; w < wide; ++w) sum[r][w] = integers(-t.excess[index[r] * query_digits + i]);
            for (int64 d = 0; d < pitch; d += 4) {
                // Only the first digit's keys come from afar: what it would ask for is spread over all of them.
                soon.step<(span * 4 + query_digits - 1) / query_digits>();
                integers key[wide];
#pragma GCC unroll 16
                for (int w = 0; w < wide; ++w) key[w] = storage::key_words(keys, d, lane + w * lanes<Build>);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    std::int32_t four;
                    std::memcpy(&four, q[r] + i * pitch + d, sizeof four);
                    const integers digit(four);
#pragma GCC unroll 16
                    for (int w = 0; w < wide; ++w) sum[r][w] = dot_bytes(sum[r][w], key[w], digit);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                if (row + r >= t.rows) break;  // the last row again
                float* to = t.weights + (row + r) * block_tokens + lane;
                const floats unit(i == 0 ? t.unit[index[r]] : 256.0f);
#pragma GCC unroll 16
                for (int w = 0; w < wide; ++w) {
                    const floats higher = i == query_digits - 1 ? floats(0.0f) : load(to + w * lanes<Build>);
                    const floats s = (higher + to_floats(sum[r][w])) * unit;
                    store(to + w * lanes<Build>, i == 0 ? s * load(scales + lane + w * lanes<Build>) : s);
                }
            }
        }
}

/// Wide registers of columns, from `column` on:  O += Σ P · V over lanes [first, last), for rows [row, row + Rows) before
/// row `end`.
template <class Build, class Element, int Rows, int Wide>
SASH_INLINE void weigh(const decode_rows<Build>& t, int row, int end, const std::byte* block, int64 column, int first,
                       int last, prefetcher& soon) {
    using storage = codec<Element>;
    const auto* values = storage::values(block, t.key_dim);
    constexpr int64 bytes = Wide * lanes<Build> * int64{sizeof *values};  // of one value row
    const float* p[Rows];
    float* to[Rows];
    floats sum[Rows][Wide];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const int which = row + r < end ? row + r : end - 1;
        p[r] = t.weights + which * block_tokens;
        to[r] = t.numerator + which * t.value_pitch + column;
#pragma GCC unroll 8
        for (int w = 0; w < Wide; ++w) sum[r][w] = load(to[r] + w * lanes<Build>);
    }
    int64 lane = first;
    while (lane < last) {
        if constexpr (storage::paired) {
            if ((lane & 1) == 0 && lane + 1 < last) {
                soon.step<2 * bytes>();
                typename storage::neighbours value[Wide];
#pragma GCC unroll 8
                for (int w = 0; w < Wide; ++w)
                    value[w] = storage::value_neighbours(values, lane, column + w * lanes<Build>, t.value_pitch);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    const floats even(p[r][lane]), odd(p[r][lane + 1]);
#pragma GCC unroll 8
                    for (int w = 0; w < Wide; ++w)
                        sum[r][w] = fma(odd, value[w].second, fma(even, value[w].first, sum[r][w]));
                }
                lane += 2;
                continue;
            }
        }
        {
            soon.step<bytes>();
            floats value[Wide];
#pragma GCC unroll 8
            for (int w = 0; w < Wide; ++w)
                value[w] = storage::value_lanes(values, lane, column + w * lanes<Build>, t.value_pitch);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
                for (int w = 0; w < Wide; ++w) sum[r][w] = fma(floats(p[r][lane]), value[w], sum[r][w]);
            lane += 1;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int w = 0; w < Wide; ++w) store(to[r] + w * lanes<Build>, sum[r][w]);
}

template <class Build, class Element, int Rows>
void weigh(const decode_rows<Build>& t, int row, int end, const std::byte* block, int first, int last,
           prefetcher soon) {
    constexpr int most = registers<Build> == 32 ? 4 : 8;
    constexpr int wide = sums<Build> / Rows < most ? sums<Build> / Rows : most;
    constexpr int least = detail::panel_width / lanes<Build>;  // value_pitch is a multiple of so many registers
    int64 column = 0;
    for (; column + wide * lanes<Build> <= t.value_pitch; column += wide * lanes<Build>)
        weigh<Build, Element, Rows, wide>(t, row, end, block, column, first, last, soon);
    if constexpr (wide > least)
        for (; column < t.value_pitch; column += least * lanes<Build>)
            weigh<Build, Element, Rows, least>(t, row, end, block, column, first, last, soon);
}

/// What the stage does to the scores of lanes [first, last), whole registers of them. They are base 2 afterwards.
template <class Build>
void apply(const score_stage& stage, const decode_rows<Build>& t, const tile_visit& visit, int first, int last) {
    const bool capped = stage.soft_cap != 0, sloped = stage.alibi != nullptr;
    const float unit = stage.custom != nullptr ? 1.0f : log2_e;
    for (int r = 0; (capped || sloped) && r < t.rows; ++r) {
        const floats inverse(capped ? 1.0f / stage.soft_cap : 0.0f), cap(stage.soft_cap * unit);
        const floats slope(sloped ? -unit * stage.alibi[t.head[r]] : 0.0f);
        for (int lane = first; lane < last; lane += lanes<Build>) {
            float* at = t.weights + r * block_tokens + lane;
            floats x = load(at);
            x = capped ? cap * tanh(x * inverse) : x * floats(unit);
            if (sloped) x = fma(slope, key_distances<Build>(visit.distance, visit.distance_table, r, lane), x);
            store(at, x);
        }
    }
    if (stage.custom != nullptr)
        stage.custom->keys(stage.custom->functor, {.scores = t.weights + first,
                                                   .keys = last - first,
                                                   .rows = t.rows,
                                                   .pitch = static_cast<std::int32_t>(block_tokens),
                                                   .first_lane = first,
                                                   .head = t.head,
                                                   .distance = visit.distance,
                                                   .distance_table = visit.distance_table});
}

template <class Build>
void rescale(decode_rows<Build>& t, int row, float factor) {
    float* sum = t.sum + row * lanes<Build>;
    store(sum, load(sum) * floats(factor));
    float* numerator = t.numerator + row * t.value_pitch;
    for (int64 c = 0; c < t.value_pitch; c += lanes<Build>) store(numerator + c, load(numerator + c) * floats(factor));
}

SASH_INLINE float exp2_of(float x) {
    alignas(64) float lane[floats::size];
    exp2(floats(x)).store_aligned(lane);
    return lane[0];
}

/// Scores of one row -> weights; unseen lanes become exactly 0. `scales`, or null: what the weight of each lane is
/// times, after it has joined the sum; of unseen lanes they may be anything.
template <class Build>
void exponentiate(decode_rows<Build>& t, int row, std::uint64_t seen, const float* scales) {
    constexpr int count = static_cast<int>(block_tokens) / lanes<Build>;
    float* scores = t.weights + row * block_tokens;
    floats top = load(t.peak + row * lanes<Build>);
    for (int i = 0; i < count; ++i) {
        const lane_mask mask = mask_from(static_cast<std::uint32_t>(seen >> (i * lanes<Build>)));
        const floats x = select(mask, load(scores + i * lanes<Build>), floats(minus_infinity()));
        store(scores + i * lanes<Build>, x);
        top = cpu::maximum(x, top);
    }
    store(t.peak + row * lanes<Build>, top);

    if (any(top > floats(t.maximum[row]) + floats(slack))) {
        const float raised = maximum_of_lanes(top);
        rescale(t, row, exp2_of(t.maximum[row] - raised));
        t.maximum[row] = raised;
    }
    const float base = is_minus_infinity(t.maximum[row]) ? 0.0f : t.maximum[row];
    floats sum = load(t.sum + row * lanes<Build>);
    for (int i = 0; i < count; ++i) {
        const floats weight = exp2(load(scores + i * lanes<Build>) - floats(base));
        store(scores + i * lanes<Build>, scales ? weight * load(scales + i * lanes<Build>) : weight);
        sum = sum + weight;
    }
    store(t.sum + row * lanes<Build>, sum);
}

/// Calls f(Rows, row) for rows [row, row + Rows), Rows a constant, until all of [row, end) have had their turn.
template <class Build, class F>
SASH_INLINE void in_groups(int row, int end, const F& f) {
    for (; row < end; row += most_rows<Build>) {
        const int left = end - row;
        if (left == 1)
            f(std::integral_constant<int, 1>{}, row);
        else if (left <= 4 || most_rows<Build> == 4)
            f(std::integral_constant<int, 4>{}, row);
        else
            f(std::integral_constant<int, most_rows<Build>>{}, row);
    }
}

/// Q·K of all rows, for lanes [first, last).
template <class Build, class Element>
void score_rows(const decode_rows<Build>& t, const key_tile& tile, int frame, int first, int last) {
    using storage = codec<Element>;
    if constexpr (storage::has_scales && has_byte_dots<Build>)
        if (t.key_dim <= most_dims_in_digits) {
            const int64 block_bytes = storage::key_bytes(t.key_dim) + storage::value_bytes(t.value_dim);
            return in_groups<Build>(0, t.rows, [&](auto rows, int row) {
                score_digits<Build, Element, decltype(rows)::value>(t, row, frame, tile.block, first, last,
                                                                    prefetcher(tile, block_bytes, 0, t.rows));
            });
        }
    const float* query = t.query + frame * t.rows * t.key_dim;
    for (int64 d = 0; d < t.key_dim; d += piece_dims)
        in_groups<Build>(0, t.rows, [&](auto rows, int row) {
            score<Build, Element, decltype(rows)::value>(t, row, query, tile, d,
                                                         detail::smaller(d + piece_dims, t.key_dim), first, last);
        });
}

/// P·V of rows [row, end), which see the same lanes: run by run, so what is not seen is not even multiplied by zero.
template <class Build, class Element>
void weigh_rows(const decode_rows<Build>& t, const key_tile& tile, int row, int end, std::uint64_t seen) {
    using storage = codec<Element>;
    constexpr int piece = piece_tokens<sizeof *storage::values(tile.block, 0)>;
    const int64 key_bytes = storage::key_bytes(t.key_dim), value_bytes = storage::value_bytes(t.value_dim);
    while (seen != 0) {
        const int from = std::countr_zero(seen), run = std::countr_one(seen >> from);
        const int to = from + (run < piece ? run : piece);
        const prefetcher soon(tile, key_bytes + value_bytes, key_bytes + from * value_bytes / block_tokens, t.rows);
        in_groups<Build>(row, end, [&](auto rows, int first) {
            weigh<Build, Element, decltype(rows)::value>(t, first, end, tile.block, from, to, soon);
        });
        seen = to == 64 ? 0 : seen >> to << to;
    }
}

}  // namespace decode

/// The rows read a key tile: scores, softmax, weighted values.
template <class Build, class Element>
void absorb(decode_rows<Build>& t, const key_tile& tile, const tile_visit& visit, const score_stage& stage) {
    using storage = codec<Element>;
    const std::uint64_t candidates = lanes_between(tile.first, tile.last);
    const auto seen_by = [&](int r) { return visit.visible != nullptr ? visit.visible[r] & candidates : candidates; };
    std::uint64_t seen = 0;
    for (int r = 0; r < t.rows; ++r) seen |= seen_by(r);
    if (seen == 0) return;
    const int first = std::countr_zero(seen), last = 64 - std::countl_zero(seen);
    decode::score_rows<Build, Element>(t, tile, visit.frame, first, last);

    constexpr int vector = lanes<Build>;
    if (!stage.empty()) decode::apply(stage, t, visit, first / vector * vector, (last + vector - 1) / vector * vector);
    const float* scales = nullptr;
    if constexpr (storage::has_scales) {
        scales = storage::value_scales(tile.block, t.key_dim);
        constexpr int64 read = 2 * storage::scale_bytes;
        const int64 key_bytes = storage::key_bytes(t.key_dim);
        decode::prefetcher(tile, key_bytes + storage::value_bytes(t.value_dim), key_bytes - read, t.rows)
            .template step<read>();
    }
    for (int r = 0; r < t.rows; ++r) decode::exponentiate(t, r, seen_by(r), scales);
    for (int row = 0, end; row < t.rows; row = end) {
        for (end = row + 1; end < t.rows && seen_by(end) == seen_by(row);) ++end;
        decode::weigh_rows<Build, Element>(t, tile, row, end, seen_by(row));
    }
}

/// Brings numerator and denominator to the exact maximum of each row.
template <class Build>
void settle(decode_rows<Build>& t) {
    for (int r = 0; r < t.rows; ++r) {
        const float peak = maximum_of_lanes(load(t.peak + r * lanes<Build>));
        if (peak > t.maximum[r]) decode::rescale(t, r, decode::exp2_of(t.maximum[r] - peak));
        t.maximum[r] = peak;
        t.denominator[r] = sum_of_lanes(load(t.sum + r * lanes<Build>));
    }
}

}  // namespace sash::cpu

SASH_KERNELS_END
