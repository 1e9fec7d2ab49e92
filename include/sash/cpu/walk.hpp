#pragma once
/// \file
/// One task of a softmax policy: some query rows of one KV head over some of its keys.
///
/// The walk joins three answers: the policy's intervals (what the queries see), the cache's places (where those keys
/// lie), and the kernels, which take them a tile of up to 64 keys at a time. A tile that every query sees whole carries no
/// mask; only tiles at the diagonal and at a window's edge do.
#include <sash/cpu/decode.hpp>
#include <sash/cpu/prefill.hpp>
#include <sash/cpu/rows.hpp>
#include <sash/kv_cache.hpp>
#include <sash/partial.hpp>

namespace sash::cpu {

inline constexpr float ln_2 = 0.69314718055994530942f;

/// Carves aligned pieces out of scratch memory; with no memory it only counts.
struct arena {
    std::byte* base = nullptr;
    int64 used = 0;

    template <class T>
    SASH_INLINE T* take(int64 n) {
        T* at = base ? reinterpret_cast<T*>(base + used) : nullptr;
        used += detail::round_up(n * static_cast<int64>(sizeof(T)), 64);
        return at;
    }
};

/// What one call asks of one sequence. The rows of a KV head are, token by token, the query heads that share it.
template <class P>
struct softmax_job {
    const P* policy = nullptr;
    const shape* dims = nullptr;
    const detail::score_state* scores = nullptr;
    const detail::block_store* store = nullptr;
    input query;  // the tokens of this round
    output out;
    float* lse = nullptr;               // [tokens, heads] of this round, or null
    float* denominator = nullptr;       // [tokens, heads], or null: sum of exp(score - the row's maximum)
    int64 first_query = 0;              // position of query.tokens' first
    const detail::turn* turns[2] = {};  // per frame: [tokens][pairs], or null where nothing turns
    bool finish = true;
    int64 group = 1;       // query rows a token has in one KV head
    bool decodes = false;  // its rows, being few, go to the decode kernel

    SASH_INLINE int64 rows() const { return query.tokens * group; }  // of one KV head
    SASH_INLINE int64 token_of(int64 row) const { return row / group; }
    SASH_INLINE int64 head_of(int64 kv_head, int64 row) const { return kv_head * group + row % group; }
    /// The head of `query` that holds query head `head`: several may read one.
    SASH_INLINE int64 operand_of(int64 head) const { return head / (dims->heads / dims->query_heads); }
    /// Positions of the queries of rows [first, first + count).
    SASH_INLINE key_interval queries_of(int64 first, int64 count) const {
        return {first_query + token_of(first), first_query + token_of(first + count - 1) + 1};
    }
};

/// Rows [first_row, first_row + rows) of one KV head over the keys in [key_first, key_last). Where the keys of a row are
/// split, partials go to `partial`, else (null) the rows are finished and written out.
struct softmax_task {
    int64 job, head, first_row, rows, key_first, key_last;
    float* partial;  // numerators [rows][value_pitch], maxima (base 2) [rows], denominators [rows]
};

SASH_INLINE constexpr int64 partial_floats(int64 rows, int64 value_pitch) {
    return rows * value_pitch + detail::round_up(2 * rows, 16);
}

SASH_INLINE bool is_seen(float maximum) { return !detail::is_minus_infinity(maximum); }

/// What the numerators of a row are multiplied by: 1 / (denominator [+ the sink logit's share]). Writes the row's lse,
/// in natural log, of the keys alone; -inf for a row that saw no key, whose output is exactly 0. `maximum` is base 2.
template <class P>
SASH_INLINE float finish_row(const softmax_job<P>& job, int64 token, int64 head, float maximum, float denominator) {
    const float m = is_seen(maximum) ? maximum * ln_2 : detail::minus_infinity();
    if (job.lse)
        job.lse[token * job.dims->heads + head] =
            detail::is_zero(denominator) ? detail::minus_infinity() : m + ::logf(denominator);
    if (job.denominator) job.denominator[token * job.dims->heads + head] = denominator;
    float factor = 1, mass = denominator;
    if (job.finish && job.scores->sink_logits) {
        const merge_factors f = factors_to_merge(m, job.scores->sink_logits[head]);
        factor = f.left;
        mass = f.left * denominator + f.right;
    }
    return detail::is_zero(denominator) ? 0 : factor / mass;
}

/// out = weight · numerator, [pitch]. Where no key was seen the numerators may be anything, and the row is 0.
template <class Build, class P>
void write_finished(const softmax_job<P>& job, int64 token, int64 head, float* numerator, int64 pitch, float maximum,
                    float denominator) {
    const floats weight(finish_row(job, token, head, maximum, denominator));
    const bool seen = !detail::is_zero(denominator);
    for (int64 c = 0; c < pitch; c += lanes<Build>)
        store(numerator + c, seen ? load(numerator + c) * weight : floats(0.0f));
    write_row<Build>(job.out, token, head, numerator);
}

/// Hands over the rows of a task: finished, to the output; or, where keys are split, maxima and denominators to its partial
/// (the numerators are there).
template <class Build, class P>
void deliver(const softmax_job<P>& job, const softmax_task& task, float* numerator, const float* maximum,
             const float* denominator, int64 pitch) {
    for (int64 r = 0; r < task.rows; ++r) {
        if (task.partial) {
            task.partial[task.rows * pitch + r] = maximum[r];
            task.partial[task.rows * pitch + task.rows + r] = denominator[r];
        } else {
            const int64 row = task.first_row + r;
            write_finished<Build>(job, job.token_of(row), job.head_of(task.head, row), numerator + r * pitch, pitch,
                                  maximum[r], denominator[r]);
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- the queries

/// Query row r of a KV head in the given frame, as floats, turned where the positions are rotary.
template <class Build, class P>
const float* query_row(const softmax_job<P>& job, int64 kv_head, int64 r, int frame, float* scratch) {
    const int64 token = job.token_of(r), operand = job.operand_of(job.head_of(kv_head, r));
    const detail::turn* turns = job.turns[frame];
    if (turns == nullptr) return float_row<Build>(job.query, token, operand, scratch);
    read_row<Build>(job.query, token, operand, scratch);
    turn_registers<Build>(scratch, turns + token * job.scores->pairs, job.scores->pairs, job.scores->layout);
    return scratch;
}

template <class P>
SASH_INLINE score_stage stage_of(const softmax_job<P>& job) {
    score_stage stage;
    stage.soft_cap = job.scores->soft_cap;
    stage.alibi = job.scores->alibi;
    stage.custom = job.scores->custom ? &job.scores->custom : nullptr;
    return stage;
}

// ------------------------------------------------------------------------------------------------------- who sees what in a tile

/// Bits of the lanes [first, last) of a block.
SASH_INLINE std::uint64_t lane_bits(int64 first, int64 last) {
    if (last <= first) return 0;
    const std::uint64_t below_last = last >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << last) - 1;
    return below_last & ~((std::uint64_t{1} << first) - 1);
}

/// The lanes of a tile that one query sees, as bits. `lane_zero` is the position lane 0 would have.
template <class P>
SASH_INLINE std::uint64_t seen_lanes(const P& p, int64 query, int64 kv_head, int frame, int64 lane_zero, int64 first,
                                     int64 last) {
    std::uint64_t bits = 0;
    if constexpr (ask::exact<P>) {
        for (const key_interval& i : ask::visible(p, query, query + 1, kv_head))
            if (i.frame == frame)
                bits |=
                    lane_bits(detail::larger(first, i.first - lane_zero), detail::smaller(last, i.last - lane_zero));
    } else {
        for (int64 lane = first; lane < last; ++lane)
            if (ask::sees(p, query, lane_zero + lane, kv_head)) bits |= std::uint64_t{1} << lane;
    }
    return bits;
}

/// A tile in the line of those that are read soon. Lane 0 of it would stand at position lane_zero.
struct tile_in_line {
    key_tile tile;
    int64 lane_zero = 0;
    int frame = 0;
    bool mine = false;  // or a later task's: a hint
};

/// The tiles that a task reads, in order; then the rest of its KV head, and the beginning of `next_head`: what the tasks
/// after it read. Of the keys those that are held, block by block. (All are, but where a window has just been widened.)
template <class Build, class P>
struct tile_stream {
    using intervals = decltype(ask::visible(std::declval<const P&>(), int64{}, int64{}, int64{}));

    const softmax_job<P>& job;
    const softmax_task& task;
    key_interval queries;  // positions of the task's
    int64 next_head;       // or beyond the last: nothing comes
    int64 head = task.head, at = task.key_first;
    bool mine = true;
    int index = 0;  // of the interval
    intervals seen = ask::visible(*job.policy, queries.first, queries.last, task.head);

    tile_in_line next() {
        const detail::block_store& store = *job.store;
        for (;;) {
            if (index == seen.count) {
                if (next_head >= store.heads) return {};
                head = next_head;
                next_head = store.heads;
                mine = false;
                index = 0;
                at = 0;
                seen = ask::visible(*job.policy, queries.first, queries.last, head);
                continue;
            }
            const key_interval& keys = seen.item[index];
            const int64 first = detail::next_held(store, detail::larger(at, keys.first));
            mine = mine && first < task.key_last;
            const int64 last = detail::smaller(keys.last, mine ? task.key_last : store.length);
            if (first >= last) {
                ++index;
                continue;
            }
            const detail::token_place place = detail::locate<Build>(store, head, first);
            const int64 count = detail::smaller(place.together, last - first);
            at = first + count;
            return {{place.block, static_cast<std::int32_t>(place.lane), static_cast<std::int32_t>(place.lane + count)},
                    first - place.lane,
                    keys.frame,
                    mine};
        }
    }
};

// ---------------------------------------------------------------------------------------------------- a task's rows and keys

/// What a kernel is told about each of its rows, beside the keys.
struct row_notes {
    std::uint64_t* visible;       // [rows]
    float* distance;              // [rows]
    float* distance_table;        // [64][rows] or [rows][64], as the kernel reads it; null where distances are affine
    std::int32_t* head;           // [rows]
    int64 row_pitch, lane_pitch;  // of the table

    template <class P>
    SASH_INLINE void carve_notes(arena& from, int64 rows, int64 pitch_of_rows, int64 pitch_of_lanes) {
        visible = from.take<std::uint64_t>(rows);
        distance = from.take<float>(rows);
        distance_table = ask::affine_distance<P> ? nullptr : from.take<float>(rows * block_tokens);
        head = from.take<std::int32_t>(rows);
        row_pitch = pitch_of_rows;
        lane_pitch = pitch_of_lanes;
    }
};

/// A kernel with the rows of a task, as the walk sees it. Behind pointers, so that the walk is compiled once for all
/// kernels and types of elements.
struct key_reader {
    const void* rows;
    void (*pack)(const void* rows, int frame, float factor);  // prepares the queries of a frame
    void (*absorb)(const void* rows, const key_tile& keys, const tile_visit& visit, const score_stage& stage);

    template <class Rows>
    SASH_INLINE static key_reader of(const Rows& rows) {
        return {&rows,
                [](const void* self, int frame, float factor) { static_cast<const Rows*>(self)->pack(frame, factor); },
                [](const void* self, const key_tile& keys, const tile_visit& visit, const score_stage& stage) {
                    static_cast<const Rows*>(self)->absorb(keys, visit, stage);
                }};
    }
};

/// Distances of every row to the lanes of a tile, where the score stage asks for them.
template <class P>
SASH_INLINE void fill_distances(const softmax_job<P>& job, const softmax_task& task, const row_notes& s,
                                const key_tile& tile, int64 lane_zero) {
    for (int64 r = 0; r < task.rows; ++r) {
        const int64 query = job.first_query + job.token_of(task.first_row + r);
        if constexpr (ask::affine_distance<P>) {
            const int64 to_first = ask::distance(*job.policy, query, lane_zero + tile.first, task.head);
            s.distance[r] = static_cast<float>(to_first + tile.first);
        } else {
            for (int64 lane = tile.first; lane < tile.last; ++lane)
                s.distance_table[r * s.row_pitch + lane * s.lane_pitch] =
                    static_cast<float>(ask::distance(*job.policy, query, lane_zero + lane, task.head));
        }
    }
}

/// One word for each row: the lanes it sees. Returns whether some row lacks a lane, and in `any` whether one is seen at all.
template <class P>
SASH_INLINE bool fill_visible(const softmax_job<P>& job, const softmax_task& task, std::uint64_t* visible,
                              const key_tile& tile, int frame, int64 lane_zero, bool& any) {
    const std::uint64_t all = lane_bits(tile.first, tile.last);
    bool partial = false;
    any = false;
    for (int64 r = 0; r < task.rows;) {
        const int64 token = job.token_of(task.first_row + r);
        const std::uint64_t bits =
            seen_lanes(*job.policy, job.first_query + token, task.head, frame, lane_zero, tile.first, tile.last);
        partial |= bits != all;
        any |= bits != 0;
        for (const int64 end = detail::smaller(task.rows, (token + 1) * job.group - task.first_row); r < end; ++r)
            visible[r] = bits;
    }
    return partial;
}

/// The rows of a task read its keys.
template <class Build, class P>
void read_keys(const softmax_job<P>& job, const softmax_task& task, const row_notes& s, const key_reader& f) {
    const score_stage stage = stage_of(job);
    const float factor = stage.empty() ? job.scores->scale * log2_e : job.scores->scale;
    for (int64 r = 0; r < task.rows; ++r)
        s.head[r] = static_cast<std::int32_t>(job.head_of(task.head, task.first_row + r));
    const key_interval queries = job.queries_of(task.first_row, task.rows);
    // A head's tiles of queries are taken from the last to the first; each begins about where the one before it did.
    tile_stream<Build, P> coming{job, task, queries, task.head + (task.first_row == 0 ? 1 : 0)};
    constexpr int places = decode::most_tiles;  // tiles may be small: while one is read, some are on their way
    tile_in_line line[places];
    const auto join = [&](int at) {
        line[at] = coming.next();
        if (line[at].tile.block != nullptr) line[(at + places - 1) % places].tile.next = &line[at].tile;
    };
    for (int at = 0; at < places; ++at) join(at);
    unsigned packed = 0;
    for (int at = 0; line[at].mine; join(at), at = (at + 1) % places) {
        const tile_in_line& now = line[at];
        if (!(packed >> now.frame & 1u)) f.pack(f.rows, now.frame, factor);
        packed |= 1u << now.frame;
        tile_visit visit;
        visit.frame = now.frame;
        const key_interval lanes{now.lane_zero + now.tile.first, now.lane_zero + now.tile.last, now.frame};
        if (!ask::whole(*job.policy, queries, lanes, task.head)) {
            bool any;
            if (fill_visible(job, task, s.visible, now.tile, now.frame, now.lane_zero, any)) visit.visible = s.visible;
            if (!any) continue;
        }
        if (!stage.empty()) {
            fill_distances(job, task, s, now.tile, now.lane_zero);
            visit.distance = s.distance;
            visit.distance_table = s.distance_table;
        }
        f.absorb(f.rows, now.tile, visit, stage);
    }
}

// ------------------------------------------------------------------------------------------------------------- many rows: prefill

/// Scratch of one worker that absorbs tiles of keys into a tile of queries.
template <class Build>
struct query_scratch : row_notes {
    query_tile<Build> tile;
    float* rows;       // [capacity][key_dim] converted or turned queries, then [capacity][value_pitch] results
    const void** row;  // [capacity] floats, or words of two bfloat16

    template <class P>
    void carve(arena& from, const shape& dims, int64 value_pitch) {
        constexpr int64 capacity = query_tile<Build>::capacity;
        const int frames = ask::frames<P>;
        float* memory = from.take<float>(query_tile<Build>::floats(dims.key_dim, dims.value_dim, frames));
        carve_notes<P>(from, capacity, 1, capacity);
        rows = from.take<float>(capacity * detail::larger(dims.key_dim, value_pitch));
        row = from.take<const void*>(capacity);
        if (memory) tile.bind(memory, 0, dims.key_dim, dims.value_dim, frames);
        for (int64 r = 0; head && r < capacity; ++r) head[r] = 0;
    }
};

/// As query_row, in words of two bfloat16, the last filled up with 0: where they lie, if nothing is to be done to them, else
/// in `scratch`.
template <class Build, class P>
const std::int32_t* query_words(const softmax_job<P>& job, int64 kv_head, int64 r, int frame, float* scratch) {
    const int64 dim = job.query.dim;
    if (job.turns[frame] == nullptr && job.query.dim_stride == 1 && dim % 2 == 0)
        return static_cast<const std::int32_t*>(job.query.at(job.token_of(r), job.operand_of(job.head_of(kv_head, r))));
    const float* row = query_row<Build>(job, kv_head, r, frame, scratch);
    auto* words = reinterpret_cast<bfloat16*>(scratch);  // a number is read before its place is written
    narrow<Build>(row, words, dim);
    if (dim % 2 != 0) words[dim] = bfloat16(0.0f);
    return reinterpret_cast<const std::int32_t*>(words);
}

/// Packs the task's query rows for one frame: transposed, with the scale (and log2 e, where nothing follows it) multiplied in.
template <class Build, class Number, class P>
void pack_frame(const softmax_job<P>& job, const softmax_task& task, query_scratch<Build>& s, int frame, float factor) {
    const auto** rows = reinterpret_cast<const Number**>(s.row);
    for (int64 r = 0; r < task.rows; ++r) {
        float* scratch = s.rows + r * job.dims->key_dim;
        if constexpr (std::is_same_v<Number, float>)
            rows[r] = query_row<Build>(job, task.head, task.first_row + r, frame, scratch);
        else
            rows[r] = query_words<Build>(job, task.head, task.first_row + r, frame, scratch);
    }
    pack_queries<Build, Number>(s.tile, frame, rows, factor);
}

/// Finishes the rows of a tile: straight into the caller's memory where it holds floats side by side.
template <class Build, class P>
void write_tile(const softmax_job<P>& job, const softmax_task& task, query_scratch<Build>& s) {
    constexpr int64 capacity = query_tile<Build>::capacity;
    const bool straight = job.out.type == scalar::f32 && job.out.dim_stride == 1;
    const auto token = [&](int64 r) { return job.token_of(task.first_row + r); };
    const auto head = [&](int64 r) { return job.head_of(task.head, task.first_row + r); };
    float* rows[capacity];
    float weights[capacity];
    for (int64 r = 0; r < task.rows; ++r) {
        weights[r] = finish_row(job, token(r), head(r), s.tile.maximum[r], s.tile.denominator[r]);
        rows[r] = straight ? static_cast<float*>(job.out.at(token(r), head(r))) : s.rows + r * s.tile.value_pitch;
    }
    unpack<Build>(s.tile, rows, weights);
    for (int64 r = 0; r < task.rows; ++r) {
        if (detail::is_zero(s.tile.denominator[r]))
            std::memset(rows[r], 0, static_cast<std::size_t>(job.out.dim) * sizeof(float));
        if (!straight) write_row<Build>(job.out, token(r), head(r), rows[r]);
    }
}

/// A tile of query rows: its queries are packed once a frame, its keys are absorbed.
template <class Build, class Element, class Number, class P>
struct tile_of_queries {
    const softmax_job<P>& job;
    const softmax_task& task;
    query_scratch<Build>& s;

    SASH_INLINE void pack(int frame, float factor) const { pack_frame<Build, Number>(job, task, s, frame, factor); }
    SASH_INLINE void absorb(const key_tile& keys, const tile_visit& visit, const score_stage& stage) const {
        cpu::absorb<Build, Element, Number>(s.tile, keys, visit, stage);
    }
};

/// Wishes for rows [first, last) of the heads that read one KV head, from `first_head` of a caller's tensor on: as one
/// where they lie side by side, but no more at once than a product may ask for.
template <class Build, class View>
void wish_for_rows(query_tile<Build>& tile, const View& x, int64 first, int64 last, int64 first_head, int64 group) {
    const int64 bytes = x.dim * detail::bytes_of(x.type);
    const std::byte* end = nullptr;
    int64 token = first / group, head = first % group;
    for (int64 r = first; r < last; ++r) {
        const auto* at = static_cast<const std::byte*>(x.at(token, first_head + head));
        if (at == end && tile.wishes[tile.wish_count - 1].bytes < 2048)
            tile.wishes[tile.wish_count - 1].bytes += bytes;
        else
            tile.wishes[tile.wish_count++] = {at, bytes};
        end = at + bytes;
        if (++head == group) ++token, head = 0;
    }
}

template <class Build, class Element, class Number, class P>
void attend_tile_with(const softmax_job<P>& job, const softmax_task& task, query_scratch<Build>& s) {
    s.tile.rows = static_cast<int>(task.rows);
    s.tile.head = s.head;
    begin<Build>(s.tile);
    // What the next tile begins with, if it comes here, and before that what this one ends with.
    s.tile.wish_count = 0;
    const int64 next = detail::larger(0, task.first_row - s.tile.capacity), head = job.head_of(task.head, 0);
    if (job.dims->heads == job.dims->query_heads)
        wish_for_rows(s.tile, job.query, next, task.first_row, head, job.group);
    if (!task.partial) wish_for_rows(s.tile, job.out, task.first_row, task.first_row + task.rows, head, job.group);
    const tile_of_queries<Build, Element, Number, P> rows{job, task, s};
    read_keys<Build>(job, task, s, key_reader::of(rows));
    settle<Build>(s.tile);
    if (!task.partial) return write_tile<Build>(job, task, s);
    unpack<Build>(s.tile, task.partial);
    deliver<Build>(job, task, task.partial, s.tile.maximum, s.tile.denominator, s.tile.value_pitch);
}

/// Queries that come in bfloat16 meet keys and values that are stored so as they are, two numbers a multiplication, where
/// the machine can: queries (once turned) and weights are then rounded to bfloat16. Any other query is widened, and so is
/// what is stored: nothing else is rounded.
template <class Build, class Element, class P>
SASH_INLINE bool multiplies_as_words(const softmax_job<P>& job) {
    return codec<Element>::template multiplies_words<Build> && job.query.type == scalar::bf16;
}

template <class Build, class Element, class P>
void attend_tile(const softmax_job<P>& job, const softmax_task& task, query_scratch<Build>& s) {
    if constexpr (codec<Element>::template multiplies_words<Build>)
        if (multiplies_as_words<Build, Element>(job))
            return attend_tile_with<Build, Element, std::int32_t>(job, task, s);
    attend_tile_with<Build, Element, float>(job, task, s);
}

// --------------------------------------------------------------------------------------------------------- a few rows: decode

template <class Build>
struct decode_scratch : row_notes {
    decode_rows<Build> rows;
    float* row;  // [key_dim]

    template <class P>
    void carve(arena& from, const shape& dims, int64 count) {
        const int frames = ask::frames<P>;
        float* memory =
            from.take<float>(decode_rows<Build>::floats(static_cast<int>(count), dims.key_dim, dims.value_dim, frames));
        carve_notes<P>(from, count, block_tokens, 1);
        row = from.take<float>(dims.key_dim);
        if (memory) rows.bind(memory, static_cast<int>(count), dims.key_dim, dims.value_dim, frames);
    }
};

/// All rows of a KV head.
template <class Build, class Element, class P>
struct rows_of_head {
    const softmax_job<P>& job;
    const softmax_task& task;
    decode_scratch<Build>& s;

    void pack(int frame, float factor) const {
        const int64 dim = job.dims->key_dim;
        for (int64 r = 0; r < task.rows; ++r) {
            const float* from = query_row<Build>(job, task.head, task.first_row + r, frame, s.row);
            float* to = s.rows.query + (frame * task.rows + r) * dim;
            int64 c = 0;
            for (; c + lanes<Build> <= dim; c += lanes<Build>) store(to + c, load(from + c) * floats(factor));
            for (; c < dim; ++c) to[c] = from[c] * factor;
        }
        prepare<Build, Element>(s.rows, frame);
    }
    SASH_INLINE void absorb(const key_tile& keys, const tile_visit& visit, const score_stage& stage) const {
        cpu::absorb<Build, Element>(s.rows, keys, visit, stage);
    }
};

template <class Build, class Element, class P>
void attend_few(const softmax_job<P>& job, const softmax_task& task, decode_scratch<Build>& s) {
    s.rows.head = s.head;
    begin<Build>(s.rows);
    const rows_of_head<Build, Element, P> rows{job, task, s};
    read_keys<Build>(job, task, s, key_reader::of(rows));
    settle<Build>(s.rows);
    const int64 pitch = s.rows.value_pitch;
    if (task.partial)
        std::memcpy(task.partial, s.rows.numerator, static_cast<std::size_t>(task.rows * pitch) * sizeof(float));
    deliver<Build>(job, task, s.rows.numerator, s.rows.maximum, s.rows.denominator, pitch);
}

// ----------------------------------------------------------------------------------------------------------- partials of a split

/// into = left · into + right · from, over a padded row.
template <class Build>
void merge_rows(float* into, float left, const float* from, float right, int64 pitch) {
    for (int64 c = 0; c < pitch; c += lanes<Build>)
        store(into + c, fma(floats(right), load(from + c), floats(left) * load(into + c)));
}

/// Merges the partials of `pieces` tasks with the same rows, in ascending order of their keys, into the first; writes the rows out.
template <class Build, class P>
void merge_pieces(const softmax_job<P>& job, const softmax_task* tasks, int64 pieces, int64 pitch) {
    const int64 rows = tasks[0].rows;
    float* const into = tasks[0].partial;
    float* const maximum = into + rows * pitch;
    float* const denominator = maximum + rows;
    for (int64 piece = 1; piece < pieces; ++piece)
        for (int64 r = 0; r < rows; ++r) {
            const float* from = tasks[piece].partial;
            const float other = from[rows * pitch + r], other_mass = from[rows * pitch + rows + r];
            if (detail::is_zero(other_mass))
                continue;  // it saw nothing. A visible NaN has the mass NaN, whatever its maximum, and spreads
            const float m = larger_maximum(maximum[r], other);
            const float left = is_seen(maximum[r]) ? ::exp2f(maximum[r] - m) : 0,
                        right = is_seen(other) ? ::exp2f(other - m) : 0;
            merge_rows<Build>(into + r * pitch, left, from + r * pitch, right, pitch);
            denominator[r] = left * denominator[r] + right * other_mass;
            maximum[r] = m;
        }
    softmax_task whole = tasks[0];
    whole.partial = nullptr;
    deliver<Build>(job, whole, into, maximum, denominator, pitch);
}

}  // namespace sash::cpu
