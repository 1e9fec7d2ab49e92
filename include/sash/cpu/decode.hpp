#pragma once
/// \file
/// One token at a time, or a few: keys stand in the lanes of registers.
///
/// The rows are the query heads of these tokens that share a KV head: up to sixteen; where they meet floats, and registers
/// are many, up to eight. Nothing is computed that memory does not have to deliver first, so the kernel is arranged around
/// the stream of cache lines: each meets all rows when it comes, four or eight at a time, in the order of their addresses,
/// and what is needed next is asked for while this is worked on.
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
    static constexpr int spare_rows = 3;  ///< of weights, that are read where rows are taken four or eight at a time

    int rows = 0;
    int64 key_dim = 0, value_dim = 0, value_pitch = 0;
    float* query = nullptr;              // [frames][rows][key_dim], already multiplied
    float* numerator = nullptr;          // [rows][value_pitch]
    float* maximum = nullptr;            // [rows] base 2; stale until settled
    float* denominator = nullptr;        // [rows] once settled
    float* weights = nullptr;            // [rows + spare_rows][64]
    float* peak = nullptr;               // [rows][lanes] largest score of each lane
    float* sum = nullptr;                // [rows][lanes] sum of weights of each lane
    const std::int32_t* head = nullptr;  // [rows]
    std::int8_t* digits = nullptr;       // [frames][rows][digits][key_dim rounded up to 4] the queries in base 256
    float* unit = nullptr;               // [frames][rows] what the last of these digits counts
    std::int32_t* excess = nullptr;      // [frames][rows][digits] 128 · Σ of the digits

    /// Floats of scratch; a multiple of 16.
    static int64 floats(int rows, int64 key_dim, int64 value_dim, int frames) {
        return detail::round_up(frames * rows * key_dim, 16) + rows * codec<float>::value_pitch(value_dim) +
               rows * 2 * lanes<Build> + (rows + spare_rows) * block_tokens + 2 * capacity +
               digit_floats(rows, key_dim, frames);
    }

    /// Shares out `scratch`, 64-byte aligned, of floats(...) floats.
    void bind(float* scratch, int row_count, int64 key_width, int64 value_width, int frames) {
        rows = row_count;
        key_dim = key_width;
        value_dim = value_width;
        value_pitch = codec<float>::value_pitch(value_width);
        weights = scratch;
        peak = weights + (rows + spare_rows) * block_tokens;
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
/// enough that it is still in the first cache when its turn comes. Measured; numbers that are shorter than a float make
/// more work of a line.
template <class Element>
inline constexpr int64 ahead = std::is_same_v<Element, float> ? 9216 : 12288;

/// The same in a block that is read in part: its short runs begin at the same place of a page each, where a cache of few
/// ways soon drops what came too early.
inline constexpr int64 ahead_in_part = 6144;

inline constexpr int most_tiles = 4;  ///< one that is read and those behind it that are asked for

/// What is read of a block, in order: panels of sixteen keys, and of each panel of values the rows that are seen. What lies
/// side by side is one run.
struct reading {
    const std::byte *keys, *values;
    int64 key_bytes;  // of what is read
    int64 run_bytes;  // of values
    int64 run_pitch;
    int runs;

    SASH_INLINE int64 bytes() const { return key_bytes + runs * run_bytes; }

    template <class Build, class Element>
    SASH_INLINE static reading of(const decode_rows<Build>& t, const std::byte* block, int first, int last) {
        using storage = codec<Element>;
        constexpr int width = static_cast<int>(detail::panel_width);
        constexpr int64 row = width * int64{sizeof *storage::values(nullptr, 0)};
        const int64 panel = storage::panel_bytes(t.key_dim), panels = t.value_pitch / width;
        const int from = first / width, to = (last + width - 1) / width;
        const bool whole = last - first == block_tokens;
        return {block + from * panel, block + storage::key_bytes(t.key_dim) + first * row,
                (to - from) * panel,  (whole ? panels : 1) * (last - first) * row,
                block_tokens * row,   whole ? 1 : static_cast<int>(panels)};
    }
};

/// Asks for what will be read soon, in the order in which it is read, of a tile and then of those behind it. Each step of a
/// loop asks for as many bytes as it reads itself.
struct prefetcher {
    const std::byte* at;
    int64 left;           // of the run
    const reading* tile;  // the last of them is at `end` - 1
    const reading* end;
    int runs;  // of values that follow, in this tile

    SASH_INLINE prefetcher(const reading* tiles, int count, int64 bytes_ahead) : tile(tiles), end(tiles + count) {
        begin_tile();
        const int64 lead = tile->runs > 1 ? ahead_in_part : bytes_ahead, all = tile->bytes();
        go_on(all < lead ? all : lead);
    }
    template <int64 Bytes>
    SASH_INLINE void step() {
#pragma GCC unroll 8
        for (int64 i = 0; i < Bytes; i += 64) prefetch(at + i);
        at += Bytes;
        left -= Bytes;
        if (left <= 0) [[unlikely]] {
            left = 0;  // a step may be longer than the rest of a run; the next run is asked for from its first line on
            go_on(0);
        }
    }

private:
    SASH_INLINE void begin_tile() {
        at = tile->keys;
        left = tile->key_bytes;
        runs = tile->runs;
    }
    SASH_INLINE void go_on(int64 bytes) {
        while (bytes >= left) {
            bytes -= left;
            if (runs > 0) {
                at = tile->values + (tile->runs - runs) * tile->run_pitch;
                left = tile->run_bytes;
                --runs;
                prefetch(at + tile->run_pitch);  // the first line of the next: a new stream is long in coming
            } else if (tile + 1 < end) {
                ++tile;
                begin_tile();
            } else {
                at = tile->keys;  // nobody knows what comes then: the same once more
                left = std::numeric_limits<int64>::max();
            }
        }
        at += bytes;
        left -= bytes;
    }
};

/// Registers of sums in flight: enough to hide the latency of a multiply-add, few enough to leave room for operands.
template <class Build>
inline constexpr int sums = registers<Build> / 2;

/// Rows are taken as many at a time as leave room for two registers of each: by ones, fours or eights. Where there are
/// fewer, a row is computed for nothing. (Twos would be one more kernel to compile.)
template <class Build>
inline constexpr int most_rows = sums<Build> / 2;

/// Registers of a panel that are taken at once, keys or columns of values: all, or as many as the sums leave room for.
template <class Build, int Rows>
inline constexpr int at_once = [] {
    constexpr int panel = static_cast<int>(detail::panel_width) / lanes<Build>;
    return sums<Build> / Rows < panel ? sums<Build> / Rows : panel;
}();

/// Each score, and each column, is so many sums, one over the even terms and one over the odd: where there is but one
/// register of each row at a time, a single sum would have to wait for itself.
template <class Build>
inline constexpr int chains = sums<Build> / most_rows<Build> / at_once<Build, most_rows<Build>>;

/// Are panels taken two at a time, where there are more than `most_paired` rows? One after the other memory is read from end
/// to end; two cost floats a tenth of the bandwidth. But shorter numbers come faster than what they are multiplied with, a
/// number for each row, can be loaded for one panel alone.
inline constexpr int most_paired = 4;
template <class Build, class Element>
inline constexpr bool pairs_panels = !std::is_same_v<Element, float> && !codec<Element>::has_scales &&
                                     2 * most_paired * at_once<Build, most_paired> * chains<Build> <= sums<Build>;

/// Rows that are taken at once, at most.
template <class Build, class Element>
inline constexpr int rows_at_once = pairs_panels<Build, Element> ? most_paired : most_rows<Build>;

/// Panels of values that are taken at once by a few rows: two of bytes, which come faster still.
template <class Build, class Element, int Rows>
inline constexpr int value_panels =
    codec<Element>::has_scales && 2 * Rows* detail::panel_width <= sums<Build>* lanes<Build> ? 2 : 1;

/// Registers of keys, or of columns of values, in `Panels` panels, and the sums of each that are taken side by side: as many
/// for any number of rows, since bits depend on it.
template <class Build, class Element, int Rows, int Panels>
struct breadth {
    static constexpr int in_panel = at_once<Build, Rows>, all = Panels * in_panel;
    static constexpr int sets = codec<Element>::has_scales && Panels > 1 ? 1 : chains<Build>;

    /// Where register w lies, from the first; how far one lies from the next, and one panel.
    SASH_INLINE static constexpr int64 place(int w, int64 to_next, int64 to_panel) {
        return w / in_panel * to_panel + w % in_panel * to_next;
    }
};

/// Scores of rows [row, row + Rows) and of the keys in at_once registers of `Panels` panels from `lane` on.
template <class Build, class Element, int Rows, int Panels>
void score(const decode_rows<Build>& t, int row, const float* query, const std::byte* block, int lane,
           prefetcher& ahead_of_keys) {
    using storage = codec<Element>;
    using registers = breadth<Build, Element, Rows, Panels>;
    constexpr int step = storage::key_step, wide = registers::all, sets = registers::sets;
    const auto* keys = storage::key_column(block, lane, t.key_dim);
    const int64 to_panel = storage::panel_bytes(t.key_dim) / int64{sizeof *keys};
    const auto column_of = [&](int w) { return keys + registers::place(w, lanes<Build> * storage::key_row, to_panel); };
    const float* q[Rows];
    float* to[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const int which = row + r < t.rows ? row + r : t.rows - 1;
        q[r] = query + which * t.key_dim;
        to[r] = t.weights + which * block_tokens;
    }
    floats sum[sets][Rows][wide];
#pragma GCC unroll 2
    for (int c = 0; c < sets; ++c)
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
            for (int w = 0; w < wide; ++w) sum[c][r][w] = floats(0.0f);
    prefetcher soon = ahead_of_keys;
    int64 d = 0;
    for (; d + step <= t.key_dim; d += step) {
        soon.step<wide * lanes<Build> * step * int64{sizeof *keys}>();
        typename storage::neighbours near[wide];
#pragma GCC unroll 16
        for (int w = 0; w < wide; ++w) near[w] = storage::key_terms(column_of(w), d);
#pragma GCC unroll 4
        for (int k = 0; k < step; ++k) {
            floats key[wide];
#pragma GCC unroll 16
            for (int w = 0; w < wide; ++w) key[w] = near[w][k];
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const floats x(q[r][d + k]);
#pragma GCC unroll 16
                for (int w = 0; w < wide; ++w) sum[k % sets][r][w] = fma(x, key[w], sum[k % sets][r][w]);
            }
        }
    }
    ahead_of_keys = soon;
    for (; d < t.key_dim; ++d)
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
            for (int w = 0; w < wide; ++w)
                sum[0][r][w] = fma(floats(q[r][d]), storage::key_term(column_of(w), d), sum[0][r][w]);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
        for (int w = 0; w < wide; ++w) {
            floats s = sum[0][r][w];
            if constexpr (sets == 2) s = s + sum[1][r][w];
            if constexpr (storage::has_scales)
                s = s * load(storage::key_scales(block, t.key_dim) + lane + w * lanes<Build>);
            store(to[r] + lane + w * lanes<Build>, s);
        }
}

/// The scores of rows [row, row + Rows) from bytes: one dot product for each digit of the queries, put together in
/// floats. All dimensions at once.
template <class Build, class Element, int Rows>
void score_digits(const decode_rows<Build>& t, int row, int frame, const std::byte* block, int first, int last,
                  prefetcher& soon) {
    using storage = codec<Element>;
    constexpr int all = static_cast<int>(block_tokens) / lanes<Build>;
    constexpr int most = sums<Build> / Rows;
    constexpr int wide = most < 1 ? 1 : most < all ? most : all;
    constexpr int span = wide * lanes<Build>;
    const float* scales = storage::key_scales(block, t.key_dim);
    const int64 pitch = t.digit_pitch();
    const std::int8_t* q[Rows];
    int index[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        index[r] = frame * t.rows + (row + r < t.rows ? row + r : t.rows - 1);
        q[r] = t.digits + index[r] * query_digits * pitch;
    }
    for (int lane = first / span * span; lane < last; lane += span) {
        const std::uint8_t* keys[wide];
#pragma GCC unroll 16
        for (int w = 0; w < wide; ++w) keys[w] = storage::key_column(block, lane + w * lanes<Build>, t.key_dim);
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
                for (int w = 0; w < wide; ++w) key[w] = storage::key_words(keys[w], d);
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
}

/// sum_r += P_r · V of one token; `weights` is that of the first row.
template <class Build, int Rows, int Wide>
SASH_INLINE void add_token(floats (&sum)[Rows][Wide], const float* weights, const floats (&value)[Wide]) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int w = 0; w < Wide; ++w) sum[r][w] = fma(floats(weights[r * block_tokens]), value[w], sum[r][w]);
}

/// O += Σ P · V over lanes [first, last), for `count` <= Rows rows from `row` on and the columns in at_once registers from
/// `column` on, of `Panels` panels. Where a score is two sums a column is, too: of the even tokens and of the odd ones.
template <class Build, class Element, int Rows, int Panels>
void weigh(const decode_rows<Build>& t, int row, int count, const std::byte* block, int64 column, int64 first,
           int64 last, prefetcher& ahead_of_values) {
    using storage = codec<Element>;
    using registers = breadth<Build, Element, Rows, Panels>;
    constexpr int wide = registers::all, sets = registers::sets, odd = sets - 1;
    const auto* values = storage::value_column(block, column, t.key_dim);
    constexpr int64 bytes = wide * lanes<Build> * int64{sizeof *values};  // of one token
    const auto column_of = [](int w) {
        constexpr int64 numbers = lanes<Build> * (storage::paired ? 2 : 1);
        return registers::place(w, numbers, block_tokens * detail::panel_width);
    };
    const float* const weights = t.weights + row * block_tokens;  // of rows beyond `count` anything
    float* const to = t.numerator + row * t.value_pitch + column;
    floats sum[sets][Rows][wide];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int w = 0; w < wide; ++w) {
            sum[odd][r][w] = floats(0.0f);
            sum[0][r][w] = load(to + (r < count ? r : 0) * t.value_pitch + w * lanes<Build>);
        }
    prefetcher soon = ahead_of_values;
    for (int64 lane = first; lane < last;) {
        floats value[2][wide];
        if ((lane & 1) == 0 && lane + 1 < last) {
            soon.step<2 * bytes>();
#pragma GCC unroll 8
            for (int w = 0; w < wide; ++w) {
                const auto both = storage::value_terms(values + column_of(w), lane);
                value[0][w] = both.first;
                value[1][w] = both.second;
            }
            add_token<Build, Rows, wide>(sum[0], weights + lane, value[0]);
            add_token<Build, Rows, wide>(sum[odd], weights + lane + 1, value[1]);
            lane += 2;
        } else {
            soon.step<bytes>();
#pragma GCC unroll 8
            for (int w = 0; w < wide; ++w) value[0][w] = storage::value_term(values + column_of(w), lane);
            if (odd == 0 || (lane & 1) == 0)
                add_token<Build, Rows, wide>(sum[0], weights + lane, value[0]);
            else
                add_token<Build, Rows, wide>(sum[odd], weights + lane, value[0]);
            lane += 1;
        }
    }
    ahead_of_values = soon;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int w = 0; w < wide; ++w) {
            const floats s = odd != 0 ? sum[0][r][w] + sum[odd][r][w] : sum[0][r][w];
            if (r < count) store(to + r * t.value_pitch + w * lanes<Build>, s);
        }
}

/// What the stage does to the scores of lanes [first, last), whole registers of them. They are base 2 afterwards.
template <class Build>
void apply(const score_stage& stage, const decode_rows<Build>& t, const tile_visit& visit, int first, int last) {
    const bool capped = stage.soft_cap != 0, sloped = stage.alibi != nullptr;
    const float unit = stage.custom != nullptr ? 1.0f : log2_e;
    for (int r = 0; (capped || sloped) && r < t.rows; ++r) {
        float* scores = t.weights + r * block_tokens;
        if (capped)
            soft_cap<Build>(scores + first, (last - first) / lanes<Build>, lanes<Build>, 1.0f / stage.soft_cap,
                            stage.soft_cap * unit);
        const floats slope(sloped ? -unit * stage.alibi[t.head[r]] : 0.0f), factor(capped ? 1.0f : unit);
        for (int lane = first; sloped && lane < last; lane += lanes<Build>) {
            const floats distance = key_distances<Build>(visit.distance, visit.distance_table, r, lane);
            store(scores + lane, fma(slope, distance, load(scores + lane) * factor));
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
void rescale(decode_rows<Build>& t, int row, floats factor) {
    float* sum = t.sum + row * lanes<Build>;
    store(sum, load(sum) * factor);
    float* numerator = t.numerator + row * t.value_pitch;
    for (int64 c = 0; c < t.value_pitch; c += lanes<Build>) store(numerator + c, load(numerator + c) * factor);
}

/// Scores of one row -> weights, for the registers that hold lanes [first, last); unseen lanes become exactly 0. `scales`,
/// or null: what the weight of each lane is times, after it has joined the sum; of unseen lanes they may be anything.
template <class Build>
void exponentiate(decode_rows<Build>& t, int row, std::uint64_t seen, int first, int last, const float* scales) {
    constexpr int width = lanes<Build>;
    first = first / width * width;
    float* scores = t.weights + row * block_tokens;
    floats top = load(t.peak + row * width);
    for (int lane = first; lane < last; lane += width) {
        const lane_mask mask = mask_from(static_cast<std::uint32_t>(seen >> lane));
        const floats x = select(mask, load(scores + lane), floats(minus_infinity()));
        store(scores + lane, x);
        top = cpu::maximum(x, top);
    }
    store(t.peak + row * width, top);

    if (any(top > floats(t.maximum[row]) + floats(slack))) {
        const float raised = maximum_of_lanes(top);
        if (!is_minus_infinity(t.maximum[row]))  // else the sums are 0, or NaN
            rescale(t, row, seldom_exp2<Build>(floats(t.maximum[row] - raised)));
        t.maximum[row] = raised;
    }
    const float base = is_minus_infinity(t.maximum[row]) ? 0.0f : t.maximum[row];
    floats sum = load(t.sum + row * width);
    for (int lane = first; lane < last; lane += width) {
        const floats weight = exp2(load(scores + lane) - floats(base));
        store(scores + lane, scales ? weight * load(scales + lane) : weight);
        sum = sum + weight;
    }
    store(t.sum + row * width, sum);
}

/// Calls f(Rows, row) for rows [row, row + Rows), Rows a constant, at most `Most`, until all of [row, end) have had their
/// turn.
template <int Most, class F>
SASH_INLINE void in_groups(int row, int end, const F& f) {
    for (; row < end; row += Most) {
        const int left = end - row;
        if (left == 1)
            f(std::integral_constant<int, 1>{}, row);
        else if (left <= 4 || Most == 4)
            f(std::integral_constant<int, 4>{}, row);
        else
            f(std::integral_constant<int, Most>{}, row);
    }
}

/// Q·K of all rows in floats, for lanes [first, last) and what else lies in their `Panels` panels. Rows that do not fit in
/// one pass find the keys in the first cache: the first pass alone asks for what is ahead.
template <class Build, class Element, int Panels>
void score_floats(const decode_rows<Build>& t, const key_tile& tile, int frame, int first, int last, prefetcher& soon) {
    constexpr int width = Panels * static_cast<int>(detail::panel_width);
    const float* query = t.query + frame * t.rows * t.key_dim;
    for (int lane = first / width * width; lane < last; lane += width)
        in_groups<rows_at_once<Build, Element>>(0, t.rows, [&](auto rows, int row) {
            constexpr int count = decltype(rows)::value, span = Panels * at_once<Build, count> * lanes<Build>;
            prefetcher none = soon;
            for (int at = lane; at < lane + width; at += span)
                score<Build, Element, count, Panels>(t, row, query, tile.block, at, row == 0 ? soon : none);
        });
}

/// Q·K of all rows, for lanes [first, last).
template <class Build, class Element>
void score_rows(const decode_rows<Build>& t, const key_tile& tile, int frame, int first, int last, prefetcher& soon) {
    using storage = codec<Element>;
    if constexpr (storage::has_scales && has_byte_dots<Build>)
        if (t.key_dim <= most_dims_in_digits)
            return in_groups<most_rows<Build>>(0, t.rows, [&](auto rows, int row) {
                prefetcher none = soon;
                score_digits<Build, Element, decltype(rows)::value>(t, row, frame, tile.block, first, last,
                                                                    row == 0 ? soon : none);
            });
    if constexpr (pairs_panels<Build, Element>)
        if (t.rows > most_paired) return score_floats<Build, Element, 2>(t, tile, frame, first, last, soon);
    score_floats<Build, Element, 1>(t, tile, frame, first, last, soon);
}

/// P·V of rows [row, end) over the lanes [from, to), in pairs of panels or as few rows take them.
template <class Build, class Element, bool Pairs>
void weigh_run(const decode_rows<Build>& t, const std::byte* block, int row, int end, int from, int to,
               prefetcher& soon) {
    constexpr int width = static_cast<int>(detail::panel_width);
    for (int64 column = 0; column < t.value_pitch; column += 2 * width)
        in_groups<rows_at_once<Build, Element>>(row, end, [&](auto rows, int first) {
            constexpr int most = decltype(rows)::value, span = at_once<Build, most> * lanes<Build>;
            const int count = end - first < most ? end - first : most;
            prefetcher none = soon;
            prefetcher& mine = first == 0 ? soon : none;
            if constexpr (Pairs || value_panels<Build, Element, most> == 2)
                if (column + width < t.value_pitch)
                    return weigh<Build, Element, most, 2>(t, first, count, block, column, from, to, mine);
            for (int64 at = column; at < detail::smaller(column + 2 * width, t.value_pitch); at += span)
                weigh<Build, Element, most, 1>(t, first, count, block, at, from, to, mine);
        });
}

/// P·V of rows [row, end), which see the same lanes: run by run, so what is not seen is not even multiplied by zero.
template <class Build, class Element>
void weigh_rows(const decode_rows<Build>& t, const key_tile& tile, int row, int end, std::uint64_t seen,
                prefetcher& soon) {
    for (int from = 0, to; seen != 0; seen = to == 64 ? 0 : seen >> to << to) {
        from = std::countr_zero(seen);
        to = from + std::countr_one(seen >> from);
        if (pairs_panels<Build, Element> && end - row > most_paired)
            weigh_run<Build, Element, pairs_panels<Build, Element>>(t, tile.block, row, end, from, to, soon);
        else
            weigh_run<Build, Element, false>(t, tile.block, row, end, from, to, soon);
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
    decode::reading tiles[decode::most_tiles] = {
        decode::reading::template of<Build, Element>(t, tile.block, first, last)};
    int count = 1;
    const key_tile* next = tile.next;
    for (int64 known = 0; next != nullptr && count < decode::most_tiles && known < decode::ahead<Element>;
         next = next->next) {
        tiles[count] = decode::reading::template of<Build, Element>(t, next->block, next->first, next->last);
        known += tiles[count++].bytes();
    }
    decode::prefetcher soon(tiles, count, decode::ahead<Element>);
    decode::score_rows<Build, Element>(t, tile, visit.frame, first, last, soon);

    constexpr int vector = lanes<Build>;
    if (!stage.empty()) decode::apply(stage, t, visit, first / vector * vector, (last + vector - 1) / vector * vector);
    const float* scales = nullptr;
    if constexpr (storage::has_scales) scales = storage::value_scales(tile.block, t.key_dim);
    for (int r = 0; r < t.rows; ++r) decode::exponentiate(t, r, seen_by(r), first, last, scales);
    for (int row = 0, end; row < t.rows; row = end) {
        for (end = row + 1; end < t.rows && seen_by(end) == seen_by(row);) ++end;
        decode::weigh_rows<Build, Element>(t, tile, row, end, seen_by(row), soon);
    }
}

/// Brings numerator and denominator to the exact maximum of each row.
template <class Build>
void settle(decode_rows<Build>& t) {
    for (int r = 0; r < t.rows; ++r) {
        const float peak = maximum_of_lanes(load(t.peak + r * lanes<Build>));
        if (peak > t.maximum[r]) decode::rescale(t, r, seldom_exp2<Build>(floats(t.maximum[r] - peak)));
        t.maximum[r] = peak;
        t.denominator[r] = sum_of_lanes(load(t.sum + r * lanes<Build>));
    }
}

}  // namespace sash::cpu

SASH_KERNELS_END
