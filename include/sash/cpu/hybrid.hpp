#pragma once
/// \file
/// A call of the verb on a hybrid: piece by piece the window's rows, the linear part's rows, and the mixture of the two.
///
/// Where the combination divides the tokens, the states run behind the queries: before query i reads them they take in
/// the tokens that i no longer sees, from the blocks, as they are stored. For a sliding window that is token i - window,
/// one for each query: a recurrence like any other, whose keys and values come late. For a window in steps it is a block
/// of tokens, then queries that only read.
///
///     piece     | window: softmax kernels |  row, lse, mass  ⎫
///     of tokens | linear: recurrent kernel|  row, lse        ⎭  mixture → out
#include <sash/cache/hybrid.hpp>
#include <sash/cpu/recurrent.hpp>
#include <sash/cpu/softmax.hpp>

namespace sash::cpu {

template <hybrid_policy P>
using window_of = decltype(P::window);

/// One sequence of a call.
template <hybrid_policy P>
struct hybrid_sequence {
    const P* policy = nullptr;
    const shape* dims = nullptr;
    const detail::score_state* scores = nullptr;
    detail::hybrid_store* store = nullptr;  // const to us where nothing is written
    const tokens_of<P>* in = nullptr;       // the query where it reads, the others where it writes
    output out;
    float* lse = nullptr;  // [tokens, heads], or null
    int64 first_query = 0;
    bool reads = false, writes = false, finish = true;

    SASH_INLINE int64 tokens() const { return writes ? in->key.tokens : in->query.tokens; }
    SASH_INLINE int64 piece() const { return detail::smaller(tokens(), store->piece); }
};

/// What one piece works with. Rows are those of the piece.
struct hybrid_scratch {
    float *window_rows, *window_lse, *window_mass;  // [piece][heads][value_dim], [piece][heads]
    float *linear_rows, *linear_lse;
    float* queries;              // [piece][query_heads][key_dim], turned
    detail::turn* turns;         // [pairs], of one token
    float *keys, *values;        // [piece][key_heads][key_dim], [piece][value_heads][value_dim] that enter the states
    float* states;               // [states][state_floats]: the copy that a `read` goes on with
    std::byte *softmax, *tasks;  // of the kernels; tasks: [workers][task_bytes]
    int64 workers, task_bytes;
};

/// The window's part of tokens [first, first + count).
template <class Build, class P>
softmax_sequence<window_of<P>> window_sequence(const hybrid_sequence<P>& s, int64 first, int64 count,
                                               const hybrid_scratch& with) {
    const shape& dims = *s.dims;
    softmax_sequence<window_of<P>> made;
    made.job.policy = &s.policy->window;
    made.job.dims = s.dims;
    made.job.scores = s.scores;
    made.job.store = made.store = s.store;
    made.job.group = dims.heads / detail::stored_heads(dims);
    made.job.finish = s.finish;
    made.job.first_query = s.first_query + first;
    made.writes = s.writes;
    if (s.reads) {
        made.job.query = s.in->query.tokens_from(first, count);
        made.job.out = output(with.window_rows, count, dims.heads, dims.value_dim);
        made.job.lse = with.window_lse;
        made.job.denominator = with.window_mass;
    }
    if (s.writes) {
        made.key = s.in->key.tokens_from(first, count);
        made.value = s.in->value.tokens_from(first, count);
    }
    return made;
}

/// Bytes of the window's largest piece.
template <class Build, class Element, class P>
int64 window_workspace(const hybrid_sequence<P>& s, int64 key_piece, const runner& run) {
    detail::block_store imagined = *s.store;
    int64 most = 0;
    for (int64 first = 0; first < s.tokens(); first += s.piece()) {
        const int64 count = detail::smaller(s.piece(), s.tokens() - first);
        softmax_sequence<window_of<P>> window = window_sequence<Build>(s, first, count, {});
        window.store = &imagined;
        window.job.store = &imagined;
        most = detail::larger(most, workspace_for<Build, Element>(&window, 1, key_piece, run));
        if (s.writes) imagined.length += count;
    }
    return most;
}

/// Without memory it only counts.
template <class Build, class Element, class P>
hybrid_scratch take_hybrid_scratch(arena& memory, const hybrid_sequence<P>& s, int64 key_piece, const runner& run) {
    const shape& d = *s.dims;
    const int64 n = s.piece(), rows = s.reads ? n * d.heads : 0;
    hybrid_scratch w{};
    w.window_rows = memory.take<float>(rows * d.value_dim);
    w.window_lse = memory.take<float>(rows);
    w.window_mass = memory.take<float>(rows);
    w.linear_rows = memory.take<float>(rows * d.value_dim);
    w.linear_lse = memory.take<float>(rows);
    if (P::divides_tokens) {
        w.queries = memory.take<float>(s.reads ? n * d.query_heads * d.key_dim : 0);
        w.turns = memory.take<detail::turn>(s.scores->pairs);
        w.keys = memory.take<float>(n * d.key_heads * d.key_dim);
        w.values = memory.take<float>(n * d.value_heads * d.value_dim);
        if (!s.writes) w.states = memory.take<float>(s.store->states.states * s.store->states.state_floats);
    }
    w.workers = detail::larger(1, detail::smaller(run.concurrency(), 64));
    w.task_bytes =
        detail::round_up(recurrent_scratch(s.policy->linear, d, s.store->states.element) * int64{sizeof(float)}, 64);
    w.tasks = memory.take<std::byte>(w.workers * w.task_bytes);
    w.softmax = memory.take<std::byte>(window_workspace<Build, Element>(s, key_piece, run));
    return w;
}

template <class Build, class Element, class P>
int64 hybrid_workspace(const hybrid_sequence<P>& s, int64 key_piece, const runner& run) {
    arena counted;
    take_hybrid_scratch<Build, Element>(counted, s, key_piece, run);
    return counted.used;
}

/// Everything that the pieces of one sequence share.
template <class Build, hybrid_policy P>
struct hybrid_work {
    const hybrid_sequence<P>& s;
    detail::state_store& states;  // the cache's, or the copy that is read
    detail::pinned_set pinned;
    hybrid_scratch with;
    int64 key_piece;
    const runner& run;
};

// ------------------------------------------------------------------------------------------------- the linear part's rows

/// One call of the recurrent kernel, all states.
template <class Build, class P>
void step_states(const hybrid_work<Build, P>& at, const recurrent_call& call) {
    const int64 tokens = call.reads ? call.query.tokens : call.key.tokens;
    const int64 work = tokens * at.states.states * at.states.state_floats;
    detail::run_tasks<Build>(at.run, at.states.states, at.with.tasks, at.with.task_bytes,
                             work < 1 << 16 ? 1 : at.with.workers, [&](int64 i, std::byte* mine) {
                                 recurrent<Build>(at.s.policy->linear, *at.s.dims, at.states, call, i,
                                                  reinterpret_cast<float*>(mine));
                             });
    if (call.writes) count_tokens(at.states, call);
}

/// Where a step puts the rows of the piece from `first` on.
template <class Build, class P>
void put_rows_to(recurrent_call& call, const hybrid_work<Build, P>& at, int64 first, int64 count) {
    const shape& d = *at.s.dims;
    call.reads = true;
    call.out = output(at.with.linear_rows + first * d.heads * d.value_dim, count, d.heads, d.value_dim);
    if (decltype(P::linear)::has_normaliser) call.lse = at.with.linear_lse + first * d.heads;
}

/// Every token enters when it comes.
template <class Build, class P>
void step_with_tokens(const hybrid_work<Build, P>& at, int64 first, int64 count) {
    const tokens_of<P>& in = *at.s.in;
    recurrent_call call;
    call.scale = static_cast<float>(decltype(P::linear)::default_scale(at.s.dims->key_dim));
    call.writes = at.s.writes;
    if (at.s.writes) {
        call.key = in.key.tokens_from(first, count);
        call.value = in.value.tokens_from(first, count);
        if constexpr (P::needs_decay) call.decay = in.decay.tokens_from(first, count);
        if constexpr (P::needs_beta) call.beta = in.beta.tokens_from(first, count);
        if constexpr (P::needs_vectors) {
            call.removal = in.removal.tokens_from(first, count);
            call.replacement = in.replacement.tokens_from(first, count);
        }
    }
    if (at.s.reads) {
        call.query = in.query.tokens_from(first, count);
        put_rows_to(call, at, 0, count);
    }
    step_states(at, call);
}

/// The position of the token that is number `index` among those that do not stay.
SASH_INLINE int64 leaving_position(const detail::pinned_set& pinned, int64 index) {
    for (const key_interval& stay : pinned) {
        if (index < stay.first) break;
        index += stay.last - stay.first;
    }
    return index;
}

/// The next `count` tokens that leave, as floats.
template <class Build, class Element, class P>
void load_leaving(const hybrid_work<Build, P>& at, int64 count, recurrent_call& call) {
    const shape& d = *at.s.dims;
    const detail::block_store& blocks = *at.s.store;
    const int64 stored = detail::stored_heads(d), by_key = stored / d.key_heads, by_value = stored / d.value_heads;
    call.writes = true;
    call.key = input(at.with.keys, count, d.key_heads, d.key_dim);
    call.value = input(at.with.values, count, d.value_heads, d.value_dim);
    for (int64 t = 0; t < count; ++t) {
        const int64 position = leaving_position(at.pinned, at.states.length + t);
        for (int64 h = 0; h < stored; ++h) {
            const detail::token_place from = detail::locate<Build>(blocks, h, position);
            codec<Element>::template load<Build>(from.block, from.lane, d.key_dim, d.value_dim,
                                                 at.with.keys + (t * d.key_heads + h / by_key) * d.key_dim,
                                                 at.with.values + (t * d.value_heads + h / by_value) * d.value_dim);
        }
    }
}

/// The piece's queries as the window sees them.
template <class Build, class P>
input turned_queries(const hybrid_work<Build, P>& at, int64 first, int64 count) {
    const detail::score_state& s = *at.s.scores;
    const input query = at.s.in->query.tokens_from(first, count);
    if (s.pairs == 0 || s.by == rotates::caller) return query;
    for (int64 t = 0; t < count; ++t) {
        for (int64 pair = 0; pair < s.pairs; ++pair)
            at.with.turns[pair] = detail::turn_by<Build>(at.s.first_query + first + t, s.frequencies[pair]);
        for (int64 h = 0; h < query.heads; ++h) {
            float* row = at.with.queries + (t * query.heads + h) * query.dim;
            read_row<Build>(query, t, h, row);
            turn_row<Build>(row, at.with.turns, s.pairs, s.layout);
        }
    }
    return input(at.with.queries, count, query.heads, query.dim);
}

/// The rows of states that hold nothing yet.
template <class Build = build::here>
void empty_rows(const recurrent_call& call, int64 rows) {
    std::memset(call.out.data, 0, static_cast<std::size_t>(rows * call.out.dim) * sizeof(float));
    for (int64 r = 0; r < rows; ++r) call.lse[r] = minus_infinity();
}

/// Tokens enter once they have left the window of the query that comes: in steps of tokens and queries in pairs, tokens
/// alone, or queries alone.
template <class Build, class Element, class P>
void step_with_leaving(const hybrid_work<Build, P>& at, int64 first, int64 count) {
    const int64 stored = at.s.store->length, all = stored - detail::pinned_count(at.pinned, stored);
    const auto missing = [&](int64 row) {  // tokens that are to enter before this query reads
        const int64 query = at.s.first_query + first + row;
        return detail::smaller(all, detail::tokens_in_states<Build>(*at.s.policy, at.pinned, query)) - at.states.length;
    };
    const auto enter = [&](int64 tokens) {
        for (int64 now; tokens > 0; tokens -= now) {
            now = detail::smaller(tokens, at.s.piece());
            recurrent_call call;
            load_leaving<Build, Element>(at, now, call);
            step_states(at, call);
        }
    };
    if (!at.s.reads) return enter(missing(count - 1));
    const input queries = turned_queries(at, first, count);
    for (int64 row = 0, rows; row < count; row += rows) {
        const int64 each = missing(row) > 0;  // tokens that enter with a query: one or none
        enter(missing(row) - each);
        for (rows = 1; row + rows < count && missing(row + rows) == each * (rows + 1);) ++rows;
        recurrent_call call;
        if (each) load_leaving<Build, Element>(at, rows, call);
        call.query = queries.tokens_from(row, rows);
        put_rows_to(call, at, row, rows);
        if (at.states.length + each > 0 || at.states.was_set)
            step_states(at, call);
        else
            empty_rows(call, rows * at.s.dims->heads);
    }
}

// ------------------------------------------------------------------------------------------------------------ the mixture

template <class Build, class P>
void mix_token(const hybrid_work<Build, P>& at, int64 first, int64 token) {
    const shape& d = *at.s.dims;
    constexpr bool has_mass = decltype(P::linear)::has_normaliser;
    for (int64 h = 0; h < d.heads; ++h) {
        const int64 row = token * d.heads + h;
        const mixture m = at.s.policy->combine(h, row_masses{at.with.window_lse[row], at.with.window_mass[row],
                                                             has_mass ? at.with.linear_lse[row] : minus_infinity()});
        float* window = at.with.window_rows + row * d.value_dim;
        const float* linear = at.with.linear_rows + row * d.value_dim;
        for (int64 c = 0; c < d.value_dim; ++c) window[c] = m.window * window[c] + m.linear * linear[c];
        write_row<Build>(at.s.out, first + token, h, window);
        if (at.s.lse) at.s.lse[(first + token) * d.heads + h] = m.lse;
    }
}

/// Stores the new tokens of a sequence and computes its rows. Nothing in here fails: room in the store and
/// hybrid_workspace bytes of workspace are there.
template <class Build, class Element, class P>
void perform_hybrid(const hybrid_sequence<P>& s, int64 key_piece, const runner& run, std::byte* workspace) {
    arena memory{workspace};
    const hybrid_scratch with = take_hybrid_scratch<Build, Element>(memory, s, key_piece, run);
    detail::state_store copied = s.store->states;
    const bool on_copy = P::divides_tokens && !s.writes;
    if (on_copy) {
        const auto bytes = static_cast<std::size_t>(copied.states * copied.state_floats) * sizeof(float);
        std::memcpy(with.states, copied.data, bytes);
        copied.data = with.states;
        copied.log_tokens = 0;
    }
    const hybrid_work<Build, P> at{s,
                                   on_copy ? copied : s.store->states,
                                   detail::pinned_positions<Build>(*s.policy, s.store->heads),
                                   with,
                                   key_piece,
                                   run};
    for (int64 first = 0, count; first < s.tokens(); first += count) {
        count = detail::smaller(s.piece(), s.tokens() - first);
        softmax_sequence<window_of<P>> window = window_sequence<Build>(s, first, count, with);
        perform<Build, Element>(&window, 1, key_piece, run, with.softmax);
        if constexpr (P::divides_tokens)
            step_with_leaving<Build, Element>(at, first, count);
        else
            step_with_tokens(at, first, count);
        if (!s.reads) continue;
        const int64 work = count * s.dims->heads * s.dims->value_dim;
        detail::run_tasks<Build>(run, count, with.tasks, 0, work < 1 << 16 ? 1 : with.workers,
                                 [&](int64 token, std::byte*) { mix_token(at, first, token); });
    }
}

}  // namespace sash::cpu
