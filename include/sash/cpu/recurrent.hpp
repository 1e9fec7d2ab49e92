#pragma once
/// \file
/// The recurrent kernel: all new tokens of one state, in order, and the output heads that read it.
///
///     S = alpha S + phi(k) v^T        out_r = S^T phi(q_r) / (z · phi(q_r))        (or scale · S^T phi(q_r))
///
/// Columns of S never mix, so they lie in the lanes. A pass walks down the rows of S once: each row is loaded,
/// written with up to four tokens while it is in registers, read by every query of those tokens, and stored. Decode
/// is bound by the memory traffic of S, prefill by multiply-adds. Each element sees the same operations in the same
/// order whichever pass it is in, so the bits do not depend on how the tokens are cut into calls.
#include <sash/cache/state.hpp>
#include <sash/cpu/feature_row.hpp>
#include <sash/cpu/rows.hpp>
#include <sash/partial.hpp>
#include <sash/rope.hpp>

#include <cmath>

namespace sash::cpu {

/// One call, for every state. Tensors are [tokens, heads, dim]; what a call does not use is empty.
struct recurrent_call {
    input query, key, value, decay;
    output out;
    float* lse = nullptr;                 ///< [tokens, heads], or null
    bool reads = false, writes = false;   ///< both: token t is written, then read. reads alone: the state is constant
    const detail::turn* turns = nullptr;  ///< [tokens][pairs]: query and key are turned before the map; or null
    int64 pairs = 0;
    rotary_layout layout = rotary_layout::half_split;
    float scale = 1;                      ///< of the output, where there is no normaliser
};

// ------------------------------------------------------------------------------------------------------------ one pass

/// What one pass over a state works on: `Tokens` tokens to write, in order, and `rows` queries a token.
inline constexpr int most_tokens = 4, most_rows = 4;
struct state_pass {
    float* state = nullptr;                  ///< S [features][pitch]
    int64 features = 0, pitch = 0;
    const float* key[most_tokens] = {};      ///< phi(k), [features]
    const float* value[most_tokens] = {};    ///< [pitch]
    float alpha[most_tokens] = {};
    const float* query[2 * most_rows] = {};  ///< phi(q), [features]; token-major
    float* numerator[2 * most_rows] = {};    ///< S^T phi(q), [pitch]
};

/// Columns [column, column + Vectors registers) of a pass. Tokens = 0 reads only. (The pragmas keep the arrays in
/// registers: g++ 12 works on them in memory without.)
template <class Build, int Tokens, int Rows, int Vectors, class Decay>
void pass_columns(const state_pass& p, int64 column) {
    constexpr int steps = Tokens > 0 ? Tokens : 1, readers = steps * Rows;
    floats value[steps][Vectors], alpha[steps], sum[readers > 0 ? readers : 1][Vectors];
    const float *key[steps], *query[readers > 0 ? readers : 1];
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) {
        key[t] = p.key[t];
        alpha[t] = floats(p.alpha[t]);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) value[t][v] = load(p.value[t] + column + v * lanes<Build>);
    }
#pragma GCC unroll 8
    for (int r = 0; r < readers; ++r) {
        query[r] = p.query[r];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sum[r][v] = floats(0.0f);
    }

    float* row = p.state + column;
    for (int64 f = 0; f < p.features; ++f, row += p.pitch) {
        floats s[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) s[v] = load(row + v * lanes<Build>);
#pragma GCC unroll 4
        for (int t = 0; t < steps; ++t) {
            if constexpr (Tokens > 0) {
                const floats phi(key[t][f]);
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; ++v) {
                    if constexpr (Decay::needs_input) s[v] = alpha[t] * s[v];
                    s[v] = fma(phi, value[t][v], s[v]);
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                const floats phi(query[t * Rows + r][f]);
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; ++v) sum[t * Rows + r][v] = fma(phi, s[v], sum[t * Rows + r][v]);
            }
        }
        if constexpr (Tokens > 0) {
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) store(row + v * lanes<Build>, s[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < readers; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) store(p.numerator[r] + column + v * lanes<Build>, sum[r][v]);
    }
}

/// All columns, as many at a time as the registers hold: one token wants long rows, several tokens want few columns.
template <class Build, int Tokens, int Rows, class Decay>
void pass(const state_pass& p) {
    constexpr int tokens = Tokens > 0 ? Tokens : 1;
    constexpr int budget = registers<Build> / (tokens * (Rows + (Tokens > 0)) + 1);
    constexpr int wide = budget >= 8 ? 8 : budget >= 4 ? 4 : budget >= 2 ? 2 : 1;
    int64 column = 0;
    for (; column + wide * lanes<Build> <= p.pitch; column += wide * lanes<Build>)
        pass_columns<Build, Tokens, Rows, wide, Decay>(p, column);
    if constexpr (wide > 4)
        for (; column + 4 * lanes<Build> <= p.pitch; column += 4 * lanes<Build>)
            pass_columns<Build, Tokens, Rows, 4, Decay>(p, column);
    if constexpr (wide > 1)
        for (; column < p.pitch; column += lanes<Build>) pass_columns<Build, Tokens, Rows, 1, Decay>(p, column);
}

template <class Build, int Tokens, class Decay>
void pass(const state_pass& p, int64 rows) {
    switch (rows) {
        case 0: return pass<Build, Tokens, 0, Decay>(p);
        case 1: return pass<Build, Tokens, 1, Decay>(p);
        case 2: return pass<Build, Tokens, 2, Decay>(p);
        case 3: return pass<Build, Tokens, 3, Decay>(p);
        default: return pass<Build, Tokens, 4, Decay>(p);
    }
}

// --------------------------------------------------------------------------------------------------- a block of tokens

/// A token as it is written: phi(k), v and alpha, side by side in the log of the state or in scratch.
struct written_token {
    const float* key;
    const float* value;
    float alpha;
};
template <class Build>
written_token token_in(const detail::state_store& store, const float* entry) {
    return {entry, entry + store.feature_pitch, entry[store.feature_pitch + store.value_pitch]};
}

/// Up to `most_tokens` tokens and the queries that read after each, token-major.
struct token_block {
    written_token token[most_tokens] = {};
    int64 tokens = 0;              ///< in a call that only reads there is nothing in `token`
    int64 rows = 0;                ///< queries a token
    const float* query = nullptr;  ///< in: phi(q) [tokens · rows][feature_pitch]
    float* numerator = nullptr;    ///< out: S^T phi(q) [tokens · rows][value_pitch]
    float* denominator = nullptr;  ///< out: z·phi(q) [tokens · rows]
};

/// Tokens that one pass over a state takes: as many as leave the sums in registers.
SASH_INLINE constexpr int64 tokens_of_block(int64 rows) { return rows <= 1 ? 4 : rows <= most_rows ? 2 : 1; }

/// The normaliser: z = alpha z + phi(k), then z·phi(q), features in the lanes.
template <class Build>
void advance_normaliser(const detail::state_store& store, float* z, bool writes, const token_block& b) {
    for (int64 t = 0; t < b.tokens; ++t) {
        if (writes) {
            const floats alpha(b.token[t].alpha);
            for (int64 f = 0; f < store.feature_pitch; f += lanes<Build>)
                cpu::store(z + f, fma(alpha, load(z + f), load(b.token[t].key + f)));
        }
        for (int64 r = t * b.rows; r < (t + 1) * b.rows; ++r) {
            floats sum(0.0f);
            for (int64 f = 0; f < store.feature_pitch; f += lanes<Build>)
                sum = fma(load(b.query + r * store.feature_pitch + f), load(z + f), sum);
            b.denominator[r] = sum_of_lanes(sum);
        }
    }
}

/// Points a pass at `count` queries of a block from the given one on.
template <class Build>
void point_at_queries(state_pass& p, const detail::state_store& store, const token_block& b, int64 first, int64 count) {
    for (int64 r = 0; r < count; ++r) {
        p.query[r] = b.query + (first + r) * store.feature_pitch;
        p.numerator[r] = b.numerator + (first + r) * store.value_pitch;
    }
}

template <class Build>
void point_at_token(state_pass& p, const token_block& b, int64 t, int64 at) {
    p.key[at] = b.token[t].key;
    p.value[at] = b.token[t].value;
    p.alpha[at] = b.token[t].alpha;
}

/// Reads queries [first, last) of a block from a state that stays as it is.
template <class Build>
void read_state(state_pass p, const detail::state_store& store, const token_block& b, int64 first, int64 last) {
    for (int64 count; first < last; first += count) {
        count = detail::smaller(last - first, most_rows);
        point_at_queries<Build>(p, store, b, first, count);
        pass<Build, 0, no_decay>(p, count);
    }
}

/// Writes the tokens of a block into a state and reads it after each: in one pass where the sums fit, else one by one.
template <class Build, class Decay>
void advance_state(const detail::state_store& store, float* state, const token_block& b) {
    state_pass p{.state = state, .features = store.features, .pitch = store.value_pitch};
    const bool one_pass = b.tokens > 1 && b.tokens == tokens_of_block(b.rows);
    const int64 step = one_pass ? b.tokens : 1;
    const int64 rows = detail::smaller(b.rows, most_rows);
    for (int64 t = 0; t < b.tokens; t += step) {
        for (int64 i = 0; i < step; ++i) point_at_token<Build>(p, b, t + i, i);
        point_at_queries<Build>(p, store, b, t * b.rows, step * rows);
        if (step == 4)
            rows == 0 ? pass<Build, 4, 0, Decay>(p) : pass<Build, 4, 1, Decay>(p);
        else if (step == 2)
            pass<Build, 2, Decay>(p, rows);
        else
            pass<Build, 1, Decay>(p, rows);
        if (step == 1)
            read_state<Build>(p, store, b, t * b.rows + rows, (t + 1) * b.rows);  // the readers beyond one pass
    }
}

template <class Build>
void replay(const detail::state_store& store, int64 s, float* state, int64 first, int64 last) {
    float* z = state + store.features * store.value_pitch;
    for (token_block b; first < last; first += b.tokens) {
        b.tokens = detail::smaller(last - first, most_tokens);
        for (int64 t = 0; t < b.tokens; ++t) b.token[t] = token_in<Build>(store, store.entry(s, first + t));
        if (store.has_normaliser) advance_normaliser<Build>(store, z, true, b);
        advance_state<Build, per_head_and_token>(store, state, b);  // alpha = 1 changes no bit
    }
}

// ------------------------------------------------------------------------------------------------------------ the call

/// Scratch of one task, in floats, and how it is divided.
struct recurrent_rows {
    float* raw;          ///< [key_dim]
    float* map;          ///< what the feature map needs
    float* entry;        ///< [tokens][phi(k) | v | alpha], where there is no log
    float* query;        ///< [tokens · rows][feature_pitch]
    float* numerator;    ///< [tokens · rows][value_pitch]
    float* denominator;  ///< [tokens · rows]
};

template <class P>
SASH_INLINE constexpr int64 recurrent_scratch(const P& policy, const shape& s) {
    constexpr int64 pad = detail::state_padding;
    const int64 rows = detail::heads_of_states(policy, s).readers, tokens = tokens_of_block(rows);
    const int64 features = detail::round_up(policy.features(s.key_dim), pad);
    const int64 values = detail::round_up(s.value_dim, pad);
    return detail::round_up(s.key_dim, pad) + map_scratch(policy.map, s.key_dim) +
           (most_tokens + tokens * rows) * (features + values + pad);
}

template <class Build, class P>
recurrent_rows divide_scratch(float* scratch, const P& policy, const shape& s, const detail::state_store& store,
                              int64 readers) {
    recurrent_rows rows;
    rows.raw = scratch;
    rows.map = rows.raw + detail::round_up(s.key_dim, detail::state_padding);
    rows.entry = rows.map + map_scratch(policy.map, s.key_dim);
    rows.query = rows.entry + most_tokens * store.entry_floats();
    rows.numerator = rows.query + readers * store.feature_pitch;
    rows.denominator = rows.numerator + readers * store.value_pitch;
    return rows;
}

/// The operands of one state in one call.
template <class P>
struct recurrent_task {
    const P& policy;
    const shape& dims;
    detail::state_store& store;
    const recurrent_call& call;
    detail::state_heads heads;
    int64 state;
    recurrent_rows rows;
};

/// Row (token, head) of query or key, turned, mapped.
template <class Build, operand Which, class P>
void features_of(const recurrent_task<P>& at, const input& x, int64 token, int64 head, int64 map_head, float* phi) {
    const int64 dim = at.dims.key_dim;
    read_row<Build>(x, token, head, at.rows.raw);
    if (at.call.turns)
        turn_row<Build>(at.rows.raw, at.call.turns + token * at.call.pairs, at.call.pairs, at.call.layout);
    for (int64 d = dim; d < detail::round_up(dim, detail::state_padding); ++d) at.rows.raw[d] = 0;
    map_row<Build, Which>(at.policy.map, map_head, at.rows.raw, dim, phi, at.store.feature_pitch, at.rows.map);
}

/// phi(k), v and alpha of the block's tokens, from `first` on, into the log or into scratch.
template <class Build, class P>
void pack_written(const recurrent_task<P>& at, token_block& b, int64 first) {
    const detail::state_store& store = at.store;
    const shape& s = at.dims;
    const int64 position = store.length + first;
    const int64 map_heads = ask::key_map_heads(at.policy.map, s.key_dim);
    if (store.log_tokens > 0) detail::make_room_in_log<Build>(store, at.state, position, b.tokens);
    for (int64 t = 0; t < b.tokens; ++t) {
        const bool logs = store.log_tokens > 0;
        float* phi = logs ? store.entry(at.state, position + t) : at.rows.entry + t * store.entry_floats();
        float* value = phi + store.feature_pitch;
        features_of<Build, operand::key>(at, at.call.key, first + t, at.heads.of_state(at.state, s.key_heads),
                                         at.heads.of_state(at.state, map_heads), phi);
        read_row<Build>(at.call.value, first + t, at.heads.of_state(at.state, s.value_heads), value);
        for (int64 d = s.value_dim; d < store.value_pitch; ++d) value[d] = 0;
        float& alpha = value[store.value_pitch];
        alpha = 1;
        if constexpr (P::needs_decay)
            alpha = std::exp(detail::decay_at(at.call.decay, first + t, at.heads.of_state(at.state, s.gate_heads)));
        b.token[t] = token_in<Build>(store, phi);
    }
}

/// phi(q) of the block's queries.
template <class Build, class P>
void pack_queries_of_state(const recurrent_task<P>& at, const token_block& b, int64 first) {
    const int64 map_heads = ask::query_map_heads(at.policy.map, at.dims.key_dim);
    for (int64 t = 0; t < b.tokens; ++t)
        for (int64 r = 0; r < b.rows; ++r) {
            const int64 head = at.state * at.heads.readers + r;
            const int64 query_head = at.heads.of_output(head, at.dims.query_heads);
            float* phi = at.rows.query + (t * b.rows + r) * at.store.feature_pitch;
            features_of<Build, operand::query>(at, at.call.query, first + t, query_head,
                                               at.heads.of_output(head, map_heads), phi);
        }
}

/// row = factor · row / divisor, or 0 where the divisor is 0, whatever was in the row.
template <class Build>
void finish_row(float* row, int64 pitch, float factor, float divisor) {
    for (int64 d = 0; d < pitch; d += lanes<Build>)
        store(row + d, detail::is_zero(divisor) ? floats(0.0f) : floats(factor) * (load(row + d) / floats(divisor)));
}

/// out = numerator / denominator and lse = log(denominator), or out = scale · numerator.
template <class Build, class P>
void finish_rows(const recurrent_task<P>& at, const token_block& b, int64 first) {
    for (int64 r = 0; r < b.tokens * b.rows; ++r) {
        float* row = b.numerator + r * at.store.value_pitch;
        const int64 token = first + r / b.rows, head = at.state * at.heads.readers + r % b.rows;
        if constexpr (P::has_normaliser) {
            const float mass = b.denominator[r];
            finish_row<Build>(row, at.store.value_pitch, 1, mass);
            if (at.call.lse) at.call.lse[token * at.dims.heads + head] = detail::is_zero(mass) ? minus_infinity() : std::log(mass);
        } else {
            finish_row<Build>(row, at.store.value_pitch, at.call.scale, 1);
        }
        write_row<Build>(at.call.out, token, head, row);
    }
}

/// All tokens of a call, in order, for one state and the output heads that read it. Calls for different states may
/// run at the same time. `scratch` holds recurrent_scratch(policy, shape) floats, 64-byte aligned. The caller adds
/// the tokens to store.length when every state is done.
template <class Build, class P>
void recurrent(const P& policy, const shape& s, detail::state_store& store, const recurrent_call& call, int64 state,
               float* scratch) {
    const detail::state_heads heads = detail::heads_of_states(policy, s);
    token_block b;
    b.rows = call.reads ? heads.readers : 0;
    const int64 most = tokens_of_block(heads.readers);
    const recurrent_task<P> at{
        policy, s, store, call, heads, state, divide_scratch<Build>(scratch, policy, s, store, most * heads.readers)};
    b.query = at.rows.query;
    b.numerator = at.rows.numerator;
    b.denominator = at.rows.denominator;
    float* z = store.state(state) + store.features * store.value_pitch;

    const int64 tokens = call.reads ? call.query.tokens : call.key.tokens;
    for (int64 t = 0; t < tokens; t += b.tokens) {
        b.tokens = detail::smaller(tokens - t, tokens_of_block(b.rows));
        if (call.writes) pack_written<Build>(at, b, t);
        if (call.reads) pack_queries_of_state<Build>(at, b, t);
        if constexpr (P::has_normaliser) advance_normaliser<Build>(store, z, call.writes, b);
        if (call.writes)
            advance_state<Build, decltype(P::decay)>(store, store.state(state), b);
        else
            read_state<Build>({.state = store.state(state), .features = store.features, .pitch = store.value_pitch},
                              store, b, 0, b.tokens * b.rows);
        if (call.reads) finish_rows<Build>(at, b, t);
    }
}

}  // namespace sash::cpu
