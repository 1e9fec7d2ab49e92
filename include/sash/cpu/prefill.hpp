#pragma once
/// \file
/// Many queries at once: queries stand in the lanes of registers.
///
/// A query tile is up to three registers of rows (48 with AVX-512, 24 with AVX2), a row being one query head of one
/// token: all query heads that share a KV head are just more rows. Its queries are transposed once, then key tiles come
/// by:
///
///     S[key][row]  = Σ_d    K[d][key] · Q[d][row]            scores of a key tile
///     P[key][row]  = 2^(S[key][row] - m[row])                m: running maximum
///     O[col][row] += Σ_key  V[key][col] · P[key][row]        the output, transposed
///
/// Both sums are the same small matrix product (`multiply`): broadcast a number of K or V, multiply it with registers
/// of rows, which lie side by side; K and V are used where they are. Maximum, sum and rescaling are one lane per row:
/// nothing is ever added across a register, and no row's bits depend on which rows stand beside it.
///
/// The output is rescaled only when a row's maximum has grown by 8 (`slack`), a factor of 2^8; until then P is larger
/// than 1, which floats do not mind. `settle` brings everything to the exact maximum.
#include <sash/cache/codec.hpp>
#include <sash/cpu/score_tile.hpp>

#include <span>

SASH_KERNELS_BEGIN

namespace sash::cpu {

/// A row keeps its stale maximum while its scores, base 2, exceed it by less than this.
inline constexpr float slack = 8.0f;

template <class Build>
struct query_tile {
    static constexpr int lanes = cpu::lanes<Build>;
    static constexpr int vectors = 3;
    static constexpr int capacity = lanes * vectors;

    int rows = 0;
    int64 key_dim = 0, value_dim = 0, value_pitch = 0;
    float score_factor = 1;              // still to be multiplied with scores, where queries are words
    float* query = nullptr;              // [frames][key_dim][capacity], or words [frames][key_dim / 2][capacity]
    float* numerator = nullptr;          // [value_pitch][capacity]
    float* maximum = nullptr;            // [capacity] base 2; stale until settled
    float* denominator = nullptr;        // [capacity]
    float* weights = nullptr;            // [64][capacity] scores, then weights, or words [32][capacity] of them
    float* peak = nullptr;               // [capacity] largest score so far
    float* keep = nullptr;               // [capacity] factor that brings sums to a maximum that was raised
    float* panel = nullptr;              // [key_dim rounded up to 2, but at least 64][16] unpacked keys or values
    const std::int32_t* head = nullptr;  // [capacity] query head of each row; read where a stage needs it

    // Memory of the caller that will be wanted soon, the last first. Rows lie apart, where no prefetcher of the machine
    // finds them, and asked for all at once they are waited for: each product asks for one, bit by bit.
    struct {
        const std::byte* at;
        int64 bytes;
    } wishes[2 * capacity];
    int wish_count = 0;

    /// No more than one register of rows: a few drafts that are verified.
    bool alone() const { return rows <= lanes; }

    /// Floats of scratch for one tile; a multiple of 16.
    static int64 floats(int64 key_dim, int64 value_dim, int frames) {
        const int64 lines = frames * key_dim + codec<float>::value_pitch(value_dim) + block_tokens + 4;
        return detail::round_up(lines * capacity, 16) + panel_floats(key_dim);
    }

    /// Shares out `scratch`, 64-byte aligned, of floats(...) floats.
    void bind(float* scratch, int row_count, int64 key_width, int64 value_width, int frames) {
        rows = row_count;
        key_dim = key_width;
        value_dim = value_width;
        value_pitch = codec<float>::value_pitch(value_width);
        panel = scratch;
        query = panel + panel_floats(key_dim);
        numerator = query + frames * key_dim * capacity;
        weights = numerator + value_pitch * capacity;
        maximum = weights + block_tokens * capacity;
        denominator = maximum + capacity;
        peak = denominator + capacity;
        keep = peak + capacity;
    }

private:
    static int64 panel_floats(int64 key_dim) {
        return detail::larger(detail::round_up(key_dim, 2), block_tokens) * detail::panel_width;
    }
};

/// The rows of a tile, transposed: to[d][r] = factor · rows[r][d] for d < count, or, of words, rows[r][d]. Lanes of the
/// last register that have no row become zero.
template <class Build, class Number>
void transpose_rows(const query_tile<Build>& tile, const Number* const* rows, int64 count, float factor, Number* to) {
    constexpr int64 pitch = query_tile<Build>::capacity;
    constexpr bool words = !std::is_same_v<Number, float>;
    const auto take = [&](int64 row, int64 d) {
        const quad four = load_quad(reinterpret_cast<const float*>(rows[row] + d));
        return words ? four : scaled(four, factor);
    };
    const auto take_one = [&](int64 row, int64 d) -> Number {
        Number x;
        std::memcpy(&x, rows[row] + d, sizeof x);  // words of a caller are aligned as bfloat16 is
        if constexpr (words)
            return x;
        else
            return factor * x;
    };
    int64 r = 0;
    for (; r + 4 <= tile.rows; r += 4) {
        for (int64 i = r + 4; i < r + 8 && i < tile.rows;
             ++i)  // rows are short and lie apart: the machine guesses none
            for (int64 line = 0; line < count; line += 16) prefetch(rows[i] + line);
        int64 d = 0;
        for (float* at = reinterpret_cast<float*>(to) + r; d + 4 <= count; d += 4, at += 4 * pitch)
            transpose_4x4(take(r, d), take(r + 1, d), take(r + 2, d), take(r + 3, d), at, at + pitch, at + 2 * pitch,
                          at + 3 * pitch);
        for (; d < count; ++d)
            for (int64 i = r; i < r + 4; ++i) to[d * pitch + i] = take_one(i, d);
    }
    for (; r < detail::round_up(tile.rows, lanes<Build>); ++r)
        for (int64 d = 0; d < count; ++d) to[d * pitch + r] = r < tile.rows ? take_one(r, d) : Number(0);
}

/// Prepares the queries that read `frame`: rows[r] points to key_dim floats, or to words of two bfloat16, the last filled
/// up with 0. Floats are multiplied by `factor` here; words are used as they are, but for its sign, and their scores are
/// multiplied.
template <class Build, class Number = float>
void pack_queries(query_tile<Build>& tile, int frame, const Number* const* rows, float factor) {
    constexpr int64 pitch = query_tile<Build>::capacity;
    Number* to = reinterpret_cast<Number*>(tile.query + frame * tile.key_dim * pitch);
    tile.score_factor = factor < 0 ? -factor : factor;
    if constexpr (std::is_same_v<Number, float>) {
        transpose_rows(tile, rows, tile.key_dim, factor, to);
    } else {
        const int64 count = (tile.key_dim + 1) / 2;
        transpose_rows(tile, rows, count, 1.0f, to);
        const std::uint32_t signs = factor < 0 ? 0x80008000u : 0u;
        for (int64 i = 0; signs != 0 && i < count * pitch; i += lanes<Build>)
            store(to + i, load(to + i) ^ integers(static_cast<std::int32_t>(signs)));
    }
}

/// Nothing seen yet.
template <class Build>
void begin(query_tile<Build>& tile) {
    constexpr int64 capacity = query_tile<Build>::capacity;
    for (int64 i = 0; i < capacity; i += lanes<Build>) {
        store(tile.maximum + i, floats(minus_infinity()));
        store(tile.peak + i, floats(minus_infinity()));
        store(tile.denominator + i, floats(0.0f));
    }
    for (int64 i = 0; i < tile.value_pitch * capacity; i += lanes<Build>) store(tile.numerator + i, floats(0.0f));
}

namespace prefill {

/// Some registers of rows and the lanes of the key tile that they meet.
struct strip {
    int column, vectors;  // first row; registers of rows
    int first, last;      // lanes of the block
};

/// Rows of the tile of sums held in registers: 8 × 3 registers and a few operands of 32; 4 × 3 of 16, but 8 × 1.
template <class Build, int Vectors>
inline constexpr int tile_height = registers<Build> == 32 || Vectors == 1 ? 8 : 4;

/// The same where the query tile is `alone`. Then each load of a multiplier serves one multiplication, and all that can
/// be saved is loads of rows.
template <class Build>
inline constexpr int lone_height = registers<Build> == 32 ? 16 : 8;

/// Rows of a tile of sums in most products of a query tile.
template <class Build>
SASH_INLINE int64 usual_height(const query_tile<Build>& tile) {
    return tile.alone() ? lone_height<Build> : tile_height<Build, 3>;
}

/// Memory that will be wanted soon, asked for bit by bit: `step` bytes further at every term of a product. Blocks come
/// from an outer cache or from memory; asked for all at once they would keep the product waiting.
struct upcoming {
    const std::byte* at;
    int64 step;
};

/// What a product of so many steps is to ask for: the next wish, or, where there is none, what the block has to offer.
template <class Build>
SASH_INLINE upcoming wish_or(query_tile<Build>& tile, int64 steps, upcoming usual) {
    if (tile.wish_count == 0) return usual;
    const auto& wish = tile.wishes[--tile.wish_count];
    return {wish.at, (wish.bytes + steps - 1) / steps};
}

/// c[j][i] = keep[i] · c[j][i] + Σ_t a[t][j] · b[t][i]   for j < height, rounded up to 8, and i < vectors · lanes, or,
/// without `accumulate`, Σ alone. Number is float, or a word of two bfloat16: then a term is two terms.
template <class Number>
struct product {
    int vectors;
    bool alone;       // the query tile is: sums are in tiles of lone_height
    float* c;         // rows are the capacity of a query tile apart
    const Number* a;  // rows are the width of a panel apart
    const Number* b;  // as c
    int64 terms, height;
    bool accumulate;
    const float* keep;  // null: all ones
    upcoming soon;
};

/// Summed in the order of t, from 0 on: terms of weight 0 before and behind change no bit, and what a row gains from a
/// block does not depend on the rows beside it. (It is also faster than sums that begin with c, which has to come first.)
template <class Build, int Vectors, int high, class Number>
void multiply(const product<Number>& p) {
    using registers = std::conditional_t<std::is_same_v<Number, float>, floats, integers>;
    constexpr int64 pitch = query_tile<Build>::capacity;
    const std::byte* soon = p.soon.at;
    const int64 terms = p.terms;
    for (int64 j0 = 0; j0 < p.height; j0 += high) {
        float* c = p.c + j0 * pitch;
        // The unroll pragmas keep the sums in registers: g++ 12 spills them at every step without.
        floats sum[high][Vectors];
#pragma GCC unroll 16
        for (int j = 0; j < high; ++j)
#pragma GCC unroll 3
            for (int v = 0; v < Vectors; ++v) sum[j][v] = floats(0.0f);

        const Number* left = p.a + j0;
        const Number* right = p.b;
        for (int64 t = 0; t < terms; ++t, left += detail::panel_width, right += pitch, soon += p.soon.step) {
            prefetch(soon);
            registers row[Vectors];
#pragma GCC unroll 3
            for (int v = 0; v < Vectors; ++v) row[v] = load(right + v * lanes<Build>);
            const multipliers<Build, high, Number> column(left);
#pragma GCC unroll 16
            for (int j = 0; j < high; ++j) {
                const registers x = column[j];
#pragma GCC unroll 3
                for (int v = 0; v < Vectors; ++v) sum[j][v] = multiply_add(x, row[v], sum[j][v]);
            }
        }
        if (p.keep != nullptr) {
#pragma GCC unroll 16
            for (int j = 0; j < high; ++j)
#pragma GCC unroll 3
                for (int v = 0; v < Vectors; ++v)
                    sum[j][v] = fma(load(c + j * pitch + v * lanes<Build>), load(p.keep + v * lanes<Build>), sum[j][v]);
        } else if (p.accumulate) {
#pragma GCC unroll 16
            for (int j = 0; j < high; ++j)
#pragma GCC unroll 3
                for (int v = 0; v < Vectors; ++v) sum[j][v] = load(c + j * pitch + v * lanes<Build>) + sum[j][v];
        }
#pragma GCC unroll 16
        for (int j = 0; j < high; ++j)
#pragma GCC unroll 3
            for (int v = 0; v < Vectors; ++v) store(c + j * pitch + v * lanes<Build>, sum[j][v]);
    }
}

template <class Build, class Number>
void multiply(const product<Number>& p) {
    if (p.vectors == 3)
        multiply<Build, 3, tile_height<Build, 3>>(p);
    else if (p.vectors == 2)
        multiply<Build, 2, tile_height<Build, 2>>(p);
    else if (p.alone)
        multiply<Build, 1, lone_height<Build>>(p);
    else
        multiply<Build, 1, tile_height<Build, 1>>(p);
}

/// For each row of one register, the 64 lanes it sees.
template <class Build>
struct seen_lanes {
    integers low, high;

    /// words: what each row sees, or null: all of [keys.first, keys.last).
    SASH_INLINE seen_lanes(const std::uint64_t* words, int64 row, int64 rows, const key_tile& keys) : low(0), high(0) {
        alignas(64) std::int32_t half[2][floats::size] = {};
        for (int64 i = 0; i < lanes<Build> && row + i < rows; ++i) {
            const std::uint64_t seen = words != nullptr ? words[row + i] : lanes_between(keys.first, keys.last);
            half[0][i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(seen));
            half[1][i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(seen >> 32));
        }
        low = integers::load_aligned(half[0]);
        high = integers::load_aligned(half[1]);
    }
    /// The rows that see this lane.
    SASH_INLINE lane_mask rows(int64 lane) const {
        const integers bit(static_cast<std::int32_t>(1u << (lane & 31)));
        return has_bits(lane < 32 ? low : high, bit);
    }
};

/// As `multiply` with one register of rows, but a lane counts only in rows that see it: 0 · NaN would not be 0. A word
/// loses the half that is not seen.
template <class Build, class Number>
void multiply_seen(const product<Number>& p, const seen_lanes<Build>& seen, int64 first) {
    constexpr int64 pitch = query_tile<Build>::capacity;
    const floats keep = p.keep != nullptr ? load(p.keep) : floats(1.0f);
    for (int64 j = 0; j < p.height; ++j) {
        floats sum(0.0f);
        for (int64 t = 0; t < p.terms; ++t) {
            const Number number = p.a[t * detail::panel_width + j];
            if constexpr (std::is_same_v<Number, float>) {
                sum = select(seen.rows(first + t), fma(floats(number), load(p.b + t * pitch), sum), sum);
            } else {
                const floats word = as_floats(integers(number)), none(0.0f);
                const floats low = as_floats(as_integers(word) & integers(0xffff));
                const floats high = high_bfloat16(as_integers(word));
                const int64 lane = 2 * (first + t);
                const integers left = as_integers(select(seen.rows(lane), low, none)) |
                                      as_integers(select(seen.rows(lane + 1), high, none));
                sum = multiply_add(left, load(p.b + t * pitch), sum);
            }
        }
        store(p.c + j * pitch, fma(load(p.c + j * pitch), keep, sum));
    }
}

/// ALiBi of one register of rows: score · factor - unit · slope · distance.
template <class Build>
void add_alibi(const float* alibi, const query_tile<Build>& tile, const tile_visit& visit, const strip& s, float factor,
               float unit) {
    constexpr int64 pitch = query_tile<Build>::capacity;
    const row_distances<Build> distance(visit.distance, visit.distance_table, s.column, tile.rows, pitch);
    alignas(64) float slope[floats::size] = {};
    for (int i = 0; i < lanes<Build> && s.column + i < tile.rows; ++i)
        slope[i] = -unit * alibi[tile.head[s.column + i]];
    const floats slopes = load(slope);
    for (int lane = s.first; lane < s.last; ++lane) {
        float* at = tile.weights + lane * pitch + s.column;
        store(at, fma(slopes, distance.to(lane), load(at) * floats(factor)));
    }
}

/// Brings the scores of words, which are products of the queries as they came, to the scale of all others.
template <class Build>
void scale(query_tile<Build>& tile, const strip& s) {
    for (int64 lane = s.first; lane < s.last; ++lane) {
        float* at = tile.weights + lane * query_tile<Build>::capacity + s.column;
        store(at, load(at) * floats(tile.score_factor));
    }
}

/// What the stage does to the scores of one register of rows, which are base 2 afterwards.
template <class Build>
void apply(const score_stage& stage, const query_tile<Build>& tile, const tile_visit& visit, const strip& s) {
    constexpr int64 pitch = query_tile<Build>::capacity;
    const bool capped = stage.soft_cap != 0;
    const float unit = stage.custom != nullptr ? 1.0f : log2_e;  // brings scores to base 2, if nothing is to follow
    if (capped)
        soft_cap<Build>(tile.weights + s.first * pitch + s.column, s.last - s.first, pitch, 1.0f / stage.soft_cap,
                        stage.soft_cap * unit);
    if (stage.alibi != nullptr) add_alibi(stage.alibi, tile, visit, s, capped ? 1.0f : unit, unit);
    if (stage.custom != nullptr) {
        const auto from = [&](auto* array) { return array != nullptr ? array + s.column : nullptr; };
        const int64 rows = detail::smaller(lanes<Build>, tile.rows - s.column);
        stage.custom->rows(stage.custom->functor, {.scores = tile.weights + s.first * pitch + s.column,
                                                   .keys = s.last - s.first,
                                                   .rows = static_cast<std::int32_t>(rows),
                                                   .pitch = static_cast<std::int32_t>(pitch),
                                                   .first_lane = s.first,
                                                   .head = from(tile.head),
                                                   .distance = from(visit.distance),
                                                   .distance_table = from(visit.distance_table)});
    }
}

/// Multiplies the numerators of one register of rows by `factor`.
template <class Build>
void rescale(query_tile<Build>& tile, int column, floats factor) {
    for (int64 c = 0; c < tile.value_pitch; ++c) {
        float* at = tile.numerator + c * query_tile<Build>::capacity + column;
        store(at, load(at) * factor);
    }
}

/// Largest score of each row of one register, lanes [first, last).
template <class Build>
floats largest_score(const query_tile<Build>& tile, int column, int first, int last) {
    constexpr int64 pitch = query_tile<Build>::capacity;
    const float* scores = tile.weights + column;
    floats tops[4] = {floats(minus_infinity()), floats(minus_infinity()), floats(minus_infinity()),
                      floats(minus_infinity())};  // four chains: one would wait for itself at every lane
    int lane = first;
    for (; lane + 4 <= last; lane += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) tops[i] = cpu::maximum(load(scores + (lane + i) * pitch), tops[i]);
    for (; lane < last; ++lane) tops[0] = cpu::maximum(load(scores + lane * pitch), tops[0]);
    return cpu::maximum(cpu::maximum(tops[0], tops[1]), cpu::maximum(tops[2], tops[3]));
}

/// Joins the largest scores of one register of rows, lanes [first, last), to its maximum. Says whether the numerators
/// are to be multiplied by tile.keep: where the maximum of some row that has any was raised.
template <class Build>
bool raise(query_tile<Build>& tile, int column, int first, int last, floats factor) {
    const floats top = largest_score(tile, column, first, last) * factor;
    store(tile.peak + column, cpu::maximum(top, load(tile.peak + column)));

    const floats stale = load(tile.maximum + column);
    const lane_mask grown = top > stale + floats(slack);
    const floats maximum = select(grown, top, stale), none(1.0f);
    store(tile.maximum + column, maximum);
    // The factor of a row that does not grow is exactly 1. The sums of one that had seen nothing are 0, or NaN.
    const lane_mask rescaled = grown & ~is_minus_infinity(stale);
    if (!any(rescaled)) {
        store(tile.keep + column, none);
        return false;
    }
    store(tile.keep + column, select(rescaled, seldom_exp2<Build>(stale - maximum), none));
    return true;
}

/// 2^(factor · score - base) of one register of rows in place, lanes [lane, lane + Count); adds them to `sum`. As words of
/// two bfloat16 word i is lanes 2 i and 2 i + 1; what is summed is the weights before they are rounded, so that
/// log-sum-exps are what they are without words.
template <class Build, int Count, class Number>
SASH_INLINE floats sum_of_weights(float* scores, int64 lane, floats base, floats factor, floats sum) {
    constexpr int64 pitch = query_tile<Build>::capacity;
    constexpr bool words = !std::is_same_v<Number, float>;
    float* at = scores + lane * pitch;
    floats weight[Count];
#pragma GCC unroll 4
    for (int i = 0; i < Count; ++i) {
        const floats x = load(at + i * pitch);
        weight[i] = words ? fma(x, factor, floats(0.0f) - base) : x - base;
    }
    exp2(weight);
    if constexpr (words) {
        auto* to = reinterpret_cast<std::int32_t*>(scores) + lane / 2 * pitch;
#pragma GCC unroll 2
        for (int i = 0; i < Count; i += 2) {
            store(to + i / 2 * pitch, pairs_of_normal(weight[i], weight[i + 1]));
            sum = sum + (weight[i] + weight[i + 1]);
        }
    } else {
#pragma GCC unroll 4
        for (int i = 0; i < Count; ++i) {
            store(at + i * pitch, weight[i]);
            sum = sum + weight[i];
        }
    }
    return sum;
}

/// 2^(factor · score - maximum) of one register of rows in place, lanes [first, last), of words an even number from an even
/// one on; their sum joins the denominator.
template <class Build, class Number>
void exponentiate(query_tile<Build>& tile, int column, int first, int last, floats factor) {
    float* scores = tile.weights + column;
    const floats maximum = load(tile.maximum + column);
    // Nothing seen yet: -inf - 0, never -inf - -inf.
    const floats base = select(is_minus_infinity(maximum), floats(0.0f), maximum);
    constexpr bool words = !std::is_same_v<Number, float>;
    constexpr int few = words ? 2 : 1, many = registers<Build> == 32 ? 4 : 2;
    floats sum(0.0f);
    int lane = first;
    for (; lane + many <= last; lane += many)
        sum = sum_of_weights<Build, many, Number>(scores, lane, base, factor, sum);
    for (; lane < last; lane += few) sum = sum_of_weights<Build, few, Number>(scores, lane, base, factor, sum);
    store(tile.denominator + column, load(tile.denominator + column) * load(tile.keep + column) + sum);
}

/// How a visit is cut up, given that rows differ in what they see.
template <class Build>
struct cut {
    strip rows[query_tile<Build>::vectors];              // for each register of rows, from the first lane that one of
    int registers = 0;                                   // its rows sees to the last; none for one that sees nothing
    strip products[2 * query_tile<Build>::vectors + 1];  // the same area, as much of it as can be in full width
    int count = 0;
    strip hull = {0, 0, 64, 0};  // all of it and what lies between, if no register in the middle is without

    SASH_INLINE cut(const query_tile<Build>& tile, const key_tile& keys, const std::uint64_t* visible) {
        const std::uint64_t candidates = lanes_between(keys.first, keys.last);
        int first = 0, last = 64;  // what all registers have in common
        bool same_first = true, same_last = true;
        for (int row = 0; row < tile.rows; row += lanes<Build>) {
            std::uint64_t seen = visible == nullptr ? candidates : 0;
            for (int i = row; visible != nullptr && i < row + lanes<Build> && i < tile.rows; ++i)
                seen |= visible[i] & candidates;
            if (seen == 0) continue;
            rows[registers] = {row, 1, std::countr_zero(seen), 64 - std::countl_zero(seen)};
            same_first = same_first && rows[registers].first == rows[0].first;
            same_last = same_last && rows[registers].last == rows[0].last;
            if (first < rows[registers].first) first = rows[registers].first;
            if (last > rows[registers].last) last = rows[registers].last;
            ++registers;
        }
        if (registers == 0) return;
        if (!same_first) first = (first + 7) / 8 * 8;  // whole register tiles of keys
        if (!same_last) last = last / 8 * 8;
        const bool side_by_side = rows[registers - 1].column - rows[0].column == (registers - 1) * lanes<Build>;
        if (first >= last || !side_by_side) first = last = 64;  // nothing in common
        for (int i = 0; i < registers; ++i)
            add(rows[i].column, 1, rows[i].first, first < rows[i].last ? first : rows[i].last);
        add(rows[0].column, registers, first, last);
        for (int i = 0; i < registers; ++i) add(rows[i].column, 1, last, rows[i].last);
        if (!side_by_side) return;
        hull = {rows[0].column, registers, 64, 0};
        for (int i = 0; i < registers; ++i) {
            hull.first = rows[i].first < hull.first ? rows[i].first : hull.first;
            hull.last = rows[i].last > hull.last ? rows[i].last : hull.last;
        }
    }

    /// The products of O += V·P: every register of rows is in one of them, so that its sums do not depend on the others.
    /// Is it one product over the hull, with weights 0 where a register sees nothing, or one for each register? Each
    /// product loads and stores all its sums, about as long as two terms take.
    SASH_INLINE std::span<const strip> to_weigh() const {
        int apart = 0;
        for (int i = 0; i < registers; ++i) apart += cost_to_weigh(rows[i]);
        const bool at_once = hull.vectors > 0 && cost_to_weigh(hull) < apart;
        return at_once ? std::span(&hull, 1) : std::span(rows, static_cast<std::size_t>(registers));
    }

private:
    /// Alone, a register of rows waits for its own sums, and for the loads of what it is multiplied with.
    SASH_INLINE static int cost_to_weigh(const strip& s) {
        const int terms = s.last - s.first + 2;
        return s.vectors == 1 ? terms * 5 / 4 + 2 : s.vectors * terms + 2;
    }
    SASH_INLINE void add(int column, int vectors, int first, int last) {
        if (first < last) products[count++] = {column, vectors, first, last};
    }
};

/// S = K·Q for all products of the cut. Other lanes of the same register tiles may be scored too; they are not read.
/// Meanwhile the values of the block are on their way.
template <class Build, class Element, class Number>
void score(query_tile<Build>& tile, const key_tile& keys, const cut<Build>& parts, const float* query) {
    constexpr int64 pitch = query_tile<Build>::capacity, width = detail::panel_width;
    constexpr int64 together = std::is_same_v<Number, float> ? 1 : 2;  // dimensions in a term
    const int64 terms = (tile.key_dim + together - 1) / together;
    const std::byte* values = keys.block + codec<Element>::key_bytes(tile.key_dim);
    const int64 bytes = codec<Element>::value_bytes(tile.value_dim) / block_tokens;  // for each lane
    const int64 high = usual_height(tile), grain = detail::larger(high, 8);
    const int64 step = together * bytes * high / tile.key_dim;
    for (int64 lane = keys.first / width * width; lane < keys.last; lane += width) {
        const auto* panel =
            codec<Element>::template key_panel<Build, Number>(keys.block, lane, tile.key_dim, tile.panel);
        for (int i = 0; i < parts.count; ++i) {
            const strip& s = parts.products[i];
            const int64 from = detail::larger(s.first / grain * grain, lane),
                        to = detail::smaller(s.last, lane + width);
            if (from < to)
                multiply<Build>(product<Number>{
                    .vectors = s.vectors,
                    .alone = tile.alone(),
                    .c = tile.weights + from * pitch + s.column,
                    .a = panel + (from - lane),
                    .b = reinterpret_cast<const Number*>(query) + s.column,
                    .terms = terms,
                    .height = to - from,
                    .accumulate = false,
                    .keep = nullptr,
                    .soon = wish_or(tile, terms * ((to - from + high - 1) / high), {values + from * bytes, step})});
        }
    }
}

/// Scores of lanes that a row does not see become -infinity.
template <class Build>
void hide(query_tile<Build>& tile, const strip& s, const std::uint64_t* visible, const key_tile& keys) {
    constexpr int64 pitch = query_tile<Build>::capacity;
    const seen_lanes<Build> seen(visible, s.column, tile.rows, keys);
    for (int lane = s.first; lane < s.last; ++lane) {
        float* at = tile.weights + lane * pitch + s.column;
        store(at, select(seen.rows(lane), load(at), floats(minus_infinity())));
    }
}

/// Rounds the lanes of a strip to whole terms. The lanes it gains are seen by nobody: their scores become -infinity.
template <class Build, class Number>
strip whole_terms(query_tile<Build>& tile, strip s) {
    if constexpr (!std::is_same_v<Number, float>) {
        float* scores = tile.weights + s.column;
        const auto hide_lane = [&](int lane) {
            store(scores + lane * query_tile<Build>::capacity, floats(minus_infinity()));
        };
        if (s.first & 1) hide_lane(--s.first);
        if (s.last & 1) hide_lane(s.last++);
    }
    return s;
}

/// Weights of one register of rows in the lanes of the hull that it does not see.
template <class Build, class Number>
void clear_beside(query_tile<Build>& tile, const strip& s, const strip& hull) {
    constexpr int together = std::is_same_v<Number, float> ? 1 : 2;  // lanes in a term
    const auto clear = [&](int first, int last) {
        for (int term = first; term < last; ++term)
            store(tile.weights + term * query_tile<Build>::capacity + s.column, floats(0.0f));
    };
    clear(hull.first / together, s.first / together);
    clear(s.last / together, (hull.last + together - 1) / together);
}

/// O += V·P. A value that is not finite must not meet the weight 0 of a row that does not see it: `careful`.
/// Meanwhile the keys of the next block are on their way.
template <class Build, class Element, class Number>
void weigh(query_tile<Build>& tile, const key_tile& keys, std::span<const strip> products, const std::uint64_t* visible,
           bool careful, const float* keep) {
    constexpr int64 pitch = query_tile<Build>::capacity, width = detail::panel_width;
    constexpr int together = std::is_same_v<Number, float> ? 1 : 2;  // lanes in a term
    const Number* weights = reinterpret_cast<const Number*>(tile.weights);
    const std::byte* next = keys.next != nullptr ? keys.next->block : keys.block;
    const int64 bytes = codec<Element>::key_bytes(tile.key_dim) / tile.value_pitch;  // for each column
    const int64 high = usual_height(tile), step = together * bytes * high / block_tokens;
    for (int64 column = 0; column < tile.value_pitch; column += width) {
        const auto* panel = codec<Element>::template value_panel<Build, Number>(keys.block, column, keys.first,
                                                                                keys.last, tile.key_dim, tile.panel);
        for (const strip& s : products) {
            const int64 first = s.first / together, last = (s.last + together - 1) / together;
            const product<Number> p{
                .vectors = s.vectors,
                .alone = tile.alone(),
                .c = tile.numerator + column * pitch + s.column,
                .a = panel + first * width,
                .b = weights + first * pitch + s.column,
                .terms = last - first,
                .height = width,
                .accumulate = true,
                .keep = keep != nullptr ? keep + s.column : nullptr,
                .soon = wish_or(tile, (width / high) * (last - first), {next + column * bytes, step})};
            if (careful)
                multiply_seen(p, seen_lanes<Build>(visible, s.column, tile.rows, keys), first);
            else
                multiply<Build>(p);
        }
    }
}

/// Must it be kept apart who sees which lane? Where a lane that not every row sees holds a value that is not finite. With
/// words the lanes that share one with a lane that is seen matter, too.
template <class Build, class Element, class Number>
bool needs_care(const query_tile<Build>& tile, const key_tile& keys, const tile_visit& visit) {
    const std::uint64_t candidates = lanes_between(keys.first, keys.last);
    std::uint64_t met = visit.visible != nullptr ? candidates : 0;
    if constexpr (!std::is_same_v<Number, float>)
        met |= lanes_between(keys.first & -2, (keys.last + 1) & -2) & ~candidates;
    return met != 0 && (codec<Element>::nonfinite_lanes(keys.block, tile.key_dim, tile.value_dim) & met) != 0;
}

}  // namespace prefill

/// The rows of the tile read a key tile: scores, softmax, weighted values. Number is float, or std::int32_t: queries and
/// weights are then words of two Elements, and the machine multiplies them with the words of the block.
template <class Build, class Element, class Number = float>
void absorb(query_tile<Build>& tile, const key_tile& keys, const tile_visit& visit, const score_stage& stage) {
    const prefill::cut<Build> parts(tile, keys, visit.visible);
    if (parts.registers == 0) return;
    const float* query = tile.query + visit.frame * tile.key_dim * query_tile<Build>::capacity;
    prefill::score<Build, Element, Number>(tile, keys, parts, query);
    // A score of words is still to be scaled: where nothing else happens to it, beside the subtraction of the maximum.
    constexpr bool words = !std::is_same_v<Number, float>;
    const floats late(words && stage.empty() ? tile.score_factor : 1.0f);

    bool raised = false;
    prefill::strip terms[query_tile<Build>::vectors];
    for (int i = 0; i < parts.registers; ++i) {
        const prefill::strip& s = parts.rows[i];
        if constexpr (words)
            if (!stage.empty()) prefill::scale(tile, s);
        if (!stage.empty()) prefill::apply(stage, tile, visit, s);
        if (visit.visible != nullptr) prefill::hide(tile, s, visit.visible, keys);
        terms[i] = prefill::whole_terms<Build, Number>(tile, s);
        raised |= prefill::raise(tile, s.column, terms[i].first, terms[i].last, late);
    }
    const bool careful = prefill::needs_care<Build, Element, Number>(tile, keys, visit);
    const auto products = careful ? std::span(parts.rows, static_cast<std::size_t>(parts.registers)) : parts.to_weigh();
    for (int i = 0; i < parts.registers; ++i) {  // not in one loop: a maximum is waited for once, not once a register
        prefill::exponentiate<Build, Number>(tile, terms[i].column, terms[i].first, terms[i].last, late);
        if (products.size() == 1) prefill::clear_beside<Build, Number>(tile, terms[i], products[0]);
    }
    prefill::weigh<Build, Element, Number>(tile, keys, products, visit.visible, careful, raised ? tile.keep : nullptr);
}

/// Brings numerator and denominator to the exact maximum of each row.
template <class Build>
void settle(query_tile<Build>& tile) {
    for (int column = 0; column < tile.rows; column += lanes<Build>) {
        const floats peak = load(tile.peak + column), base = load(tile.maximum + column);
        const lane_mask grown = peak > base;
        if (!any(grown)) continue;
        const floats keep = select(grown, seldom_exp2<Build>(base - peak), floats(1.0f));
        prefill::rescale(tile, column, keep);
        store(tile.denominator + column, load(tile.denominator + column) * keep);
        store(tile.maximum + column, peak);
    }
}

/// Writes the numerators as rows: rows[r][c] = factor[r] · numerator for c < value_dim. `factor` has `capacity` numbers:
/// ones for partials, 1 / denominator for outputs (and 0 where that is 0).
template <class Build>
void unpack(const query_tile<Build>& tile, float* const* rows, const float* factor) {
    constexpr int64 pitch = query_tile<Build>::capacity;
    int64 r = 0;
    for (; r + 4 <= tile.rows; r += 4) {
        for (int64 i = r + 4; i < r + 8 && i < tile.rows; ++i)
            for (int64 line = 0; line < tile.value_dim; line += 16) prefetch_to_write(rows[i] + line);
        int64 c = 0;
        for (const float* from = tile.numerator + r; c + 4 <= tile.value_dim; c += 4, from += 4 * pitch)
            transpose_4x4(scaled(load_quad(from), factor + r), scaled(load_quad(from + pitch), factor + r),
                          scaled(load_quad(from + 2 * pitch), factor + r),
                          scaled(load_quad(from + 3 * pitch), factor + r), rows[r] + c, rows[r + 1] + c,
                          rows[r + 2] + c, rows[r + 3] + c);
        for (; c < tile.value_dim; ++c)
            for (int64 i = r; i < r + 4; ++i) rows[i][c] = factor[i] * tile.numerator[c * pitch + i];
    }
    for (; r < tile.rows; ++r)
        for (int64 c = 0; c < tile.value_dim; ++c) rows[r][c] = factor[r] * tile.numerator[c * pitch + r];
}

/// The same into [rows][value_pitch], as they are; columns from value_dim on become 0.
template <class Build>
void unpack(const query_tile<Build>& tile, float* numerator) {
    constexpr int capacity = query_tile<Build>::capacity;
    float* rows[capacity];
    float ones[capacity];
    for (int r = 0; r < capacity; ++r) {
        rows[r] = numerator + r * tile.value_pitch;
        ones[r] = 1.0f;
    }
    unpack(tile, rows, ones);
    for (int r = 0; r < tile.rows; ++r)
        for (int64 c = tile.value_dim; c < tile.value_pitch; ++c) rows[r][c] = 0;
}

}  // namespace sash::cpu

SASH_KERNELS_END
