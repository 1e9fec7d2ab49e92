#pragma once
/// \file
/// A call of the verb on softmax policies: rounds of angles, storing and reading, cut into tasks by shape alone.
///
/// A bounded cache takes a long append in pieces, so that a piece is stored while everything its queries see is still there;
/// each piece is one round. Sequences of a batch go through a round together: their tasks are one list.
#include <sash/cpu/walk.hpp>
#include <sash/execution.hpp>

namespace sash::cpu {

// ------------------------------------------------------------------------------------------------------------------ the plan

/// Cuts the keys of some rows into pieces: calls f(first, last) with ranges of positions. Cuts fall on multiples of `piece`,
/// so that they depend on positions alone; a short beginning (sinks) joins the piece behind it. Up to `whole` keys are not
/// cut at all.
template <class Intervals, class F>
SASH_INLINE void for_each_piece(const Intervals& keys, int64 length, int64 piece, int64 whole, F&& f) {
    int64 first = 0, count = 0;
    for (const key_interval& i : keys) count += detail::larger(0, detail::smaller(i.last, length) - i.first);
    if (count <= whole) return f(first, length);
    count = 0;
    for (const key_interval& i : keys) {
        const int64 last = detail::smaller(i.last, length);
        for (int64 at = i.first; at < last;) {
            const int64 next = detail::smaller(last, (at / piece + 1) * piece);
            if (count > 0 && count + next - at > piece) {
                f(first, at);
                first = at;
                count = 0;
            }
            count += next - at;
            at = next;
        }
    }
    f(first, length);
}

/// Tasks that share rows: whoever finishes the last of them merges all.
struct piece_group {
    std::atomic<int64> missing;
    int64 first_task, pieces;
};

/// The tasks of one round. Lists are null while they are only counted.
struct softmax_plan {
    softmax_task* tasks = nullptr;
    piece_group** group_of = nullptr;  // per task; null where its keys are not split
    piece_group* groups = nullptr;
    int64 task_count = 0, group_count = 0;
    int64 work = 0;  // multiply-adds at most
};

/// Keys of a piece: as many as the caller says, or, if 0, about 1 MiB of K and V, so that what a task costs beside its keys
/// is little. A tile of queries costs more to begin and to merge.
SASH_INLINE int64 keys_of_piece(int64 key_piece, const detail::block_store& store, bool decodes) {
    if (key_piece > 0) return key_piece;
    int64 keys = decodes ? 512 : 2048;
    while (keys < 4096 && 2 * keys / block_tokens * store.block_bytes <= (int64{9} << 17)) keys *= 2;
    return keys;
}

inline constexpr int64 most_tiles_that_split = 4;  // with more tiles of queries a KV head, there are tasks enough

/// A few rows, of one token or of some drafts, go to the decode kernel, which reads keys and values at the memory's pace.
/// Where more share a KV head, multiply-adds take as long as the memory does, and the prefill kernel's lanes fill: that is
/// beyond half of the rows that the decode kernel takes, for floats, and for words that are multiplied as they are. But all
/// rows must fit in one of its tiles, or each tile would read the keys anew.
template <class Build, class Element, class P>
SASH_INLINE bool suits_decode(const softmax_job<P>& job) {
    constexpr int64 most = decode_rows<Build>::capacity, half = query_tile<Build>::capacity < most ? most : most / 2;
    const bool fills_lanes = std::is_same_v<Element, float> || multiplies_as_words<Build, Element>(job);
    return job.rows() <= (fills_lanes ? half : most);
}

/// Adds the tasks of one tile of rows: one for each piece of its keys.
template <class Build, class P>
void plan_tile(softmax_plan& plan, arena& memory, const softmax_job<P>& job, softmax_task tile, int64 piece,
               int64 whole) {
    const key_interval queries = job.queries_of(tile.first_row, tile.rows);
    const int64 first_task = plan.task_count;
    for_each_piece(ask::visible(*job.policy, queries.first, queries.last, tile.head), job.store->length, piece, whole,
                   [&](int64 first, int64 last) {
                       tile.key_first = first;
                       tile.key_last = last;
                       if (plan.tasks) {
                           plan.tasks[plan.task_count] = tile;
                           plan.group_of[plan.task_count] = nullptr;
                       }
                       ++plan.task_count;
                       plan.work += tile.rows * (last - first) * (job.dims->key_dim + job.dims->value_dim);
                   });
    const int64 pieces = plan.task_count - first_task;
    if (pieces == 1) return;
    for (int64 i = first_task; i < plan.task_count; ++i) {
        float* partial = memory.take<float>(partial_floats(tile.rows, codec<float>::value_pitch(job.dims->value_dim)));
        if (!plan.tasks) continue;
        plan.tasks[i].partial = partial;
        plan.group_of[i] = plan.groups + plan.group_count;
    }
    if (plan.groups)
        ::new (static_cast<void*>(plan.groups + plan.group_count)) piece_group{{pieces}, first_task, pieces};
    ++plan.group_count;
}

/// Adds the tasks of one sequence. The last rows have most keys, so they come first.
template <class Build, class P>
void plan_job(softmax_plan& plan, arena& memory, const softmax_job<P>& job, int64 index, int64 key_piece) {
    const int64 rows = job.rows();
    if (rows == 0) return;
    const int64 height = job.decodes ? rows : query_tile<Build>::capacity;
    const int64 tiles = (rows + height - 1) / height;
    const bool splits = tiles <= most_tiles_that_split;
    const int64 piece = splits ? keys_of_piece(key_piece, *job.store, job.decodes) : detail::far_away;
    // A window as long as a piece, with its sinks, is not worth a second one.
    const int64 whole = key_piece > 0 ? 0 : piece + piece / 4;
    const auto add_head = [&](softmax_plan& to, arena& from, int64 head) {
        for (int64 t = tiles - 1; t >= 0; --t)
            plan_tile<Build>(to, from, job,
                             {index, head, t * height, detail::smaller(height, rows - t * height), 0, 0, nullptr},
                             piece, whole);
    };
    if (plan.tasks == nullptr && !ask::visible_by_head<P>) {  // counted: all heads alike
        const int64 heads = job.store->heads;
        softmax_plan one;
        arena partials;
        add_head(one, partials, 0);
        plan.task_count += heads * one.task_count;
        plan.group_count += heads * one.group_count;
        plan.work += heads * one.work;
        memory.used += heads * partials.used;
        return;
    }
    for (int64 head = 0; head < job.store->heads; ++head) add_head(plan, memory, head);
}

/// Counts, then lists. Without memory it only counts what it would take.
template <class Build, class P>
softmax_plan plan_round(arena& memory, const softmax_job<P>* jobs, int64 count, int64 key_piece) {
    softmax_plan counted;
    arena partials;
    for (int64 j = 0; j < count; ++j) plan_job<Build>(counted, partials, jobs[j], j, key_piece);
    softmax_plan plan;
    plan.tasks = memory.take<softmax_task>(counted.task_count);
    plan.group_of = memory.take<piece_group*>(counted.task_count);
    plan.groups = memory.take<piece_group>(counted.group_count);
    if (memory.base == nullptr) {
        memory.used += partials.used;
        return counted;
    }
    for (int64 j = 0; j < count; ++j) plan_job<Build>(plan, memory, jobs[j], j, key_piece);
    return plan;
}

// ------------------------------------------------------------------------------------------------------------- rotary angles

/// turns[t][pair] for `count` tokens from `first` on, read in `frame`: by the whole position where the library turns, else
/// by what the frame adds to the caller's own turn. Equal positions in a row (a full compact window) are looked up.
template <class Build, class P>
const detail::turn* make_turns(arena& memory, const softmax_job<P>& job, int64 first, int64 count, int frame) {
    const detail::score_state& s = *job.scores;
    detail::turn* const turns = memory.take<detail::turn>(count * s.pairs);
    detail::turn* to = turns;
    if (turns == nullptr) return nullptr;
    int64 before = std::numeric_limits<int64>::min();
    for (int64 t = 0; t < count; ++t, to += s.pairs) {
        const int64 query = first + t;
        const int64 at = ask::read_position(*job.policy, query, frame) - (s.by == rotates::caller ? query : 0);
        const detail::turn* known = at == before ? to - s.pairs : at == s.steady_position ? s.steady : nullptr;
        if (known != nullptr)
            std::memcpy(to, known, static_cast<std::size_t>(s.pairs) * sizeof(detail::turn));
        else
            for (int64 pair = 0; pair < s.pairs; ++pair) to[pair] = detail::turn_by<Build>(at, s.frequencies[pair]);
        before = at;
    }
    return turns;
}

/// What one sequence does in one round.
template <class P>
struct softmax_round {
    softmax_job<P> job;  // what is read
    input key, value;    // what is stored, at store->length
    detail::block_store* store = nullptr;
    const detail::turn* key_turns = nullptr;  // [key.tokens][pairs], or null
    bool only_visible = false;                // tokens that no query of the job sees need not be stored
};

/// Takes room for the angles of a round, and fills it where there is memory.
template <class Build, class P>
void take_turns(arena& memory, softmax_round<P>& r) {
    const detail::score_state& s = *r.job.scores;
    r.key_turns = r.job.turns[0] = r.job.turns[1] = nullptr;
    if (s.pairs == 0) return;
    const int64 tokens = r.job.query.tokens;
    if (s.by == rotates::library) {
        if (r.key.tokens > 0) r.key_turns = make_turns<Build>(memory, r.job, r.store->length, r.key.tokens, 0);
        const bool same = r.job.first_query == r.store->length && tokens <= r.key.tokens;
        if (tokens > 0)
            r.job.turns[0] = same ? r.key_turns : make_turns<Build>(memory, r.job, r.job.first_query, tokens, 0);
    }
    if (tokens > 0 && detail::reads_other_frames(*r.job.policy, r.store->heads))
        r.job.turns[1] = make_turns<Build>(memory, r.job, r.job.first_query, tokens, 1);
}

// ------------------------------------------------------------------------------------------------------------- storing tokens

/// Stores tokens [first, first + count) of a round's keys and values into one head, as Elements; token `first` stands at
/// position store->length + first. scratch: [count][key_dim + value_dim].
template <class Build, class Element, class P>
void store_tokens(const softmax_round<P>& r, int64 head, int64 first, int64 count, float* scratch) {
    const detail::block_store& s = *r.store;
    const int64 key_head = head / (s.heads / r.key.heads), value_head = head / (s.heads / r.value.heads);
    const bool plain_keys = r.key.type == scalar::f32 && r.key.dim_stride == 1 && r.key_turns == nullptr;
    const bool plain_values = r.value.type == scalar::f32 && r.value.dim_stride == 1;
    float* const made_keys = scratch;
    float* const made_values = scratch + count * s.key_dim;
    for (int64 t = 0; t < count; ++t) {
        float* key = made_keys + t * s.key_dim;
        if (!plain_keys) read_row<Build>(r.key, first + t, key_head, key);
        if (r.key_turns)
            turn_registers<Build>(key, r.key_turns + (first + t) * r.job.scores->pairs, r.job.scores->pairs,
                                  r.job.scores->layout);
        if (!plain_values) read_row<Build>(r.value, first + t, value_head, made_values + t * s.value_dim);
    }
    const float* keys = plain_keys ? static_cast<const float*>(r.key.at(first, key_head)) : made_keys;
    const float* values = plain_values ? static_cast<const float*>(r.value.at(first, value_head)) : made_values;
    const int64 key_stride = plain_keys ? r.key.token_stride : s.key_dim;
    const int64 value_stride = plain_values ? r.value.token_stride : s.value_dim;
    // A head's rows lie apart, where no prefetcher of the machine finds them: ask for some while others are stored.
    constexpr int64 ahead = 16;
    const auto ask_for = [&](int64 from, int64 to) {
        for (int64 t = from; t < detail::smaller(to, count); ++t) {
            for (int64 d = 0; plain_keys && d < s.key_dim; d += 16) prefetch(keys + t * key_stride + d);
            for (int64 d = 0; plain_values && d < s.value_dim; d += 16) prefetch(values + t * value_stride + d);
        }
    };
    ask_for(0, ahead);
    for (int64 done = 0; done < count;) {
        const detail::token_place at = detail::locate<Build>(s, head, s.length + first + done);
        const int64 n = detail::smaller(ahead, detail::smaller(at.together, count - done));
        ask_for(done + n, done + n + ahead);
        codec<Element>::template store<Build>(at.block, at.lane, n, s.key_dim, s.value_dim, keys + done * key_stride,
                                              key_stride, values + done * value_stride, value_stride);
        done += n;
    }
}

/// Blocks of 64 positions that a round writes to.
template <class P>
SASH_INLINE int64 blocks_written(const softmax_round<P>& r) {
    const int64 first = r.store->length, last = first + r.key.tokens;
    return r.key.tokens == 0 ? 0 : (last - 1) / block_tokens - first / block_tokens + 1;
}

template <class P>
SASH_INLINE bool some_query_sees(const softmax_job<P>& job, int64 first, int64 last, int64 head) {
    for (const key_interval& i : ask::visible(*job.policy, job.first_query, job.first_query + job.query.tokens, head))
        if (i.first < last && first < i.last) return true;
    return false;
}

/// One task of storing: what a round brings for one head and one block.
template <class Build, class Element, class P>
void store_block(const softmax_round<P>& r, int64 head, int64 index, float* scratch) {
    const int64 length = r.store->length, block = length / block_tokens + index;
    const int64 first = detail::larger(length, block * block_tokens);
    const int64 last = detail::smaller(length + r.key.tokens, (block + 1) * block_tokens);
    if (r.only_visible && !some_query_sees(r.job, first, last, head)) return;
    store_tokens<Build, Element>(r, head, first - length, last - first, scratch);
}

// ---------------------------------------------------------------------------------------------------------------- one round

struct workers {
    const runner* run;
    int64 count;
    std::byte* scratch;  // [count][bytes]
    int64 bytes;
};

/// first: [count + 1], filled with the number of each sequence's first task.
template <class Build, class Element, class P>
void store_round(const softmax_round<P>* rounds, int64 count, int64* first, workers with) {
    int64 tokens = 0;
    first[0] = 0;
    for (int64 j = 0; j < count; ++j) {
        first[j + 1] = first[j] + blocks_written(rounds[j]) * rounds[j].store->heads;
        tokens += rounds[j].key.tokens * rounds[j].store->heads;
    }
    if (tokens < 64) with.count = 1;  // waking a thread would cost more
    detail::run_tasks<Build>(
        *with.run, first[count], with.scratch, with.bytes, with.count, [&](int64 i, std::byte* mine) {
            const int64 j = detail::list_of(first, count, i), task = i - first[j], heads = rounds[j].store->heads;
            store_block<Build, Element>(rounds[j], task % heads, task / heads, reinterpret_cast<float*>(mine));
        });
}

template <class Build, class Element, class P>
void read_round(const softmax_job<P>* jobs, const softmax_plan& plan, workers with) {
    if (plan.work < 1 << 16) with.count = 1;
    detail::run_tasks<Build>(*with.run, plan.task_count, with.scratch, with.bytes, with.count,
                             [&](int64 i, std::byte* mine) {
                                 const softmax_task& task = plan.tasks[i];
                                 const softmax_job<P>& job = jobs[task.job];
                                 const int64 pitch = codec<float>::value_pitch(job.dims->value_dim);
                                 arena memory{mine};
                                 if (job.decodes) {
                                     decode_scratch<Build> s;
                                     s.template carve<P>(memory, *job.dims, task.rows);
                                     attend_few<Build, Element>(job, task, s);
                                 } else {
                                     query_scratch<Build> s;
                                     s.template carve<P>(memory, *job.dims, pitch);
                                     attend_tile<Build, Element>(job, task, s);
                                 }
                                 piece_group* group = plan.group_of[i];
                                 if (group && group->missing.fetch_sub(1, std::memory_order_acq_rel) == 1)
                                     merge_pieces<Build>(job, plan.tasks + group->first_task, group->pieces, pitch);
                             });
}

/// Scratch with which one worker can do any task of these rounds.
template <class Build, class P>
int64 bytes_of_worker(const softmax_round<P>* rounds, int64 count) {
    int64 most = 0;
    for (int64 j = 0; j < count; ++j) {
        const softmax_job<P>& job = rounds[j].job;
        arena tile, one, tokens;
        query_scratch<Build>{}.template carve<P>(tile, *job.dims, codec<float>::value_pitch(job.dims->value_dim));
        if (job.decodes) decode_scratch<Build>{}.template carve<P>(one, *job.dims, job.rows());
        tokens.take<float>(block_tokens * (job.dims->key_dim + job.dims->value_dim));
        most = detail::larger(most, detail::larger(tile.used, detail::larger(one.used, tokens.used)));
    }
    return most;
}

/// One round of every sequence: angles, tokens stored, rows computed. Without memory it counts the bytes it needs, advancing
/// the stores it is given (then copies) all the same.
template <class Build, class Element, class P>
int64 perform_round(std::byte* base, softmax_round<P>* rounds, int64 count, int64 key_piece, const runner& run) {
    arena memory{base};
    for (int64 j = 0; j < count; ++j) {
        rounds[j].job.decodes = suits_decode<Build, Element>(rounds[j].job);
        take_turns<Build>(memory, rounds[j]);
    }
    workers with{&run, detail::larger(1, detail::smaller(run.concurrency(), 64)), nullptr,
                 bytes_of_worker<Build>(rounds, count)};
    with.scratch = memory.take<std::byte>(with.count * with.bytes);
    int64* first_task = memory.take<int64>(count + 1);
    if (base) store_round<Build, Element>(rounds, count, first_task, with);
    for (int64 j = 0; j < count; ++j)
        if (rounds[j].key.tokens > 0)
            rounds[j].store->length += rounds[j].key.tokens;  // a store that is only read is not touched
    softmax_job<P>* jobs = memory.take<softmax_job<P>>(count);
    if (base == nullptr) {
        for (int64 j = 0; j < count; ++j) plan_round<Build>(memory, &rounds[j].job, 1, key_piece);
        return memory.used;
    }
    for (int64 j = 0; j < count; ++j) jobs[j] = rounds[j].job;
    const softmax_plan plan = plan_round<Build>(memory, jobs, count, key_piece);
    read_round<Build, Element>(jobs, plan, with);
    return memory.used;
}

// ------------------------------------------------------------------------------------------------------------- the whole call

/// One sequence of a call.
template <class P>
struct softmax_sequence {
    softmax_job<P> job;  // queries, or none
    input key, value;    // new tokens, or none
    detail::block_store* store = nullptr;
    bool only_visible = false;
    bool writes = false;  // false: the store is read, and is const to us

    /// Tokens of one round: all, unless a ring would lose what their queries see.
    SASH_INLINE int64 piece() const {
        const int64 tokens = writes ? key.tokens : job.query.tokens;
        return writes && store->bounded && !only_visible ? detail::smaller(tokens, store->piece) : tokens;
    }
    SASH_INLINE int64 rounds() const {
        if (only_visible) return 1;  // no key at all is one round too: its rows are written
        const int64 tokens = writes ? key.tokens : job.query.tokens;
        return tokens == 0 ? 0 : (tokens + piece() - 1) / piece();
    }
};

/// Round number `index` of a sequence; what is done before is done.
template <class Build, class P>
softmax_round<P> round_of(const softmax_sequence<P>& s, int64 index, detail::block_store* store) {
    softmax_round<P> r{s.job, {}, {}, store, nullptr, s.only_visible};
    r.job.store = store;
    r.job.query.tokens = 0;
    if (index >= s.rounds()) return r;
    const int64 all = s.writes ? s.key.tokens : s.job.query.tokens;
    const int64 first = index * s.piece(), count = detail::smaller(s.piece(), all - first);
    if (s.writes) {
        r.key = s.key.tokens_from(first, count);
        r.value = s.value.tokens_from(first, count);
    }
    r.job.query = s.job.query;
    if (s.rounds() == 1 || s.job.query.tokens == 0) return r;
    r.job.query = s.job.query.tokens_from(first, count);  // in several rounds the queries run along with the tokens
    r.job.out = s.job.out.tokens_from(first, count);
    if (r.job.lse) r.job.lse += first * s.job.dims->heads;
    r.job.first_query = s.job.first_query + first;
    return r;
}

/// Bytes that the largest round of a sequence takes, its store as it is in `imagined`.
template <class Build, class Element, class P>
int64 largest_round(const softmax_sequence<P>& s, detail::block_store imagined, int64 key_piece, const runner& run) {
    int64 largest = 0;
    for (int64 i = 0; i < detail::larger(1, s.rounds());
         ++i) {  // without tokens it still stands in the lists of a batch
        softmax_round<P> r = round_of<Build>(s, i, &imagined);
        largest = detail::larger(largest, perform_round<Build, Element>(nullptr, &r, 1, key_piece, run));
    }
    return largest;
}

/// The length at which the same number of new tokens takes most workspace, in what storage has room for: at its end. A
/// ring is run through again and again; there it is where a cut falls right in front of the last token. And it grows to
/// its full size beside the same workspace, unless that is far away.
template <class Build, class Element, class P>
int64 fullest_length(const softmax_sequence<P>& s, int64 key_piece) {
    const detail::block_store& store = *s.store;
    if (!store.bounded) return detail::chain_room(store) - s.key.tokens;
    const int64 piece = keys_of_piece(key_piece, store, suits_decode<Build, Element>(s.job));
    constexpr int64 near = 16384 / block_tokens;
    const int64 blocks = detail::smaller(detail::steady_blocks<Build>(store, *s.job.policy),
                                         detail::larger(near, 8 * store.ring_blocks));
    const int64 last = detail::larger(store.length + s.key.tokens - 1, blocks * block_tokens);
    return detail::round_up(last, piece) + 1 - s.key.tokens;
}

/// Bytes of workspace that `perform` takes for these sequences. `ahead`: for the same number of new tokens where they take
/// most, so that the workspace grows when storage does, and not while a sequence runs through it.
template <class Build, class Element, class P>
int64 workspace_for(const softmax_sequence<P>* sequences, int64 count, int64 key_piece, const runner& run,
                    bool ahead = false) {
    int64 sum = detail::round_up(count * static_cast<int64>(sizeof(softmax_round<P>)), 64);
    for (int64 j = 0; j < count; ++j) {
        softmax_sequence<P> s = sequences[j];
        detail::block_store imagined = *s.store;
        const int64 later = ahead && s.writes ? fullest_length<Build, Element>(s, key_piece) : 0;
        if (later > imagined.length) imagined.length = s.job.first_query = later;
        sum += largest_round<Build, Element>(s, imagined, key_piece, run);
    }
    return sum;
}

/// Stores the new tokens of all sequences and computes their rows. Nothing in here fails: room in the stores and workspace_for
/// bytes of workspace are there.
template <class Build, class Element, class P>
void perform(softmax_sequence<P>* sequences, int64 count, int64 key_piece, const runner& run, std::byte* workspace) {
    auto* rounds = reinterpret_cast<softmax_round<P>*>(workspace);
    workspace += detail::round_up(count * static_cast<int64>(sizeof(softmax_round<P>)), 64);
    int64 most = 0;
    for (int64 j = 0; j < count; ++j) most = detail::larger(most, sequences[j].rounds());
    for (int64 i = 0; i < most; ++i) {
        for (int64 j = 0; j < count; ++j)
            ::new (static_cast<void*>(rounds + j))
                softmax_round<P>(round_of<Build>(sequences[j], i, sequences[j].store));
        perform_round<Build, Element>(workspace, rounds, count, key_piece, run);
        for (int64 j = 0; j < count; ++j)
            if (sequences[j].writes) detail::advance<Build>(*sequences[j].store, *sequences[j].job.policy, 0);
    }
}

}  // namespace sash::cpu
