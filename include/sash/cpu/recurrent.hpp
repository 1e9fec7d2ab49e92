#pragma once
/// \file
/// The recurrent kernel: all new tokens of one state, in order, and the output heads that read it.
///
///     S = alpha S + d r^T + phi(k) u^T        out_r = S^T phi(q_r) / (z · phi(q_r))        (or scale · S^T phi(q_r))
///
/// with u = v, except that the delta rule writes the error u = beta (v - r); and r = S^T a, what the state holds along
/// a vector a, before the token, for the two rules that correct it. To look a up is to read the state once more, with a
/// for a query: so all rules share one pass, and a correction costs one more reader.
///
/// Columns of S never mix, so they lie in the lanes. A pass walks down the rows of S once: each row is loaded, written
/// with up to four tokens while it is in registers, read by every query of those tokens, and stored. Decode is bound by
/// the memory traffic of S, so what comes next is asked for on the way. Each element sees the same operations in the
/// same order whichever pass it is in, so the bits do not depend on how the tokens are cut into calls.
///
/// Long calls are bound by multiply-adds, of which the recurrence needs three for each element and token, four or five
/// where it corrects. They go in chunks, which need one less (chunk.hpp): all tokens but those that a rollback can
/// reach. Under the delta rule short calls grow a chunk, too, token by token (waiting.hpp).
#include <sash/cpu/chunk.hpp>
#include <sash/cpu/column.hpp>
#include <sash/cpu/fade.hpp>
#include <sash/cpu/feature_row.hpp>
#include <sash/cpu/rows.hpp>
#include <sash/cpu/waiting.hpp>
#include <sash/partial.hpp>
#include <sash/rope.hpp>

#include <cmath>
#include <limits>

namespace sash::cpu {

/// One call, for every state. Tensors are [tokens, heads, dim]; what a call does not use is empty.
struct recurrent_call {
    input query, key, value, decay, beta, removal, replacement;
    output out;
    float* lse = nullptr;                 ///< [tokens, heads], or null
    bool reads = false, writes = false;   ///< both: token t is written, then read. reads alone: the state is constant
    const detail::turn* turns = nullptr;  ///< [tokens][pairs]: query and key are turned before the map; or null
    int64 pairs = 0;
    rotary_layout layout = rotary_layout::half_split;
    float scale = 1;                                            ///< of the output, where there is no normaliser
    int64 first = 0, last = std::numeric_limits<int64>::max();  ///< tokens of this round, of all that are there
    int64 chunked = 0;  ///< so many tokens of the call, from its first, go in chunks: see chunked_tokens
};

/// Calls of at least so many tokens go in chunks. Those are faster from 8 tokens on (1.3 to 1.7 times at 8, 16 and 64,
/// form by form, 32 states of 128 × 128); up to here drafts keep the bits of the recurrence, however they are cut.
inline constexpr int64 least_chunked = 32;

/// Tokens of a round: all states take so many before any takes more. Rows of one token lie side by side, those of one
/// state far apart; pages and lines that a round has brought in serve every state.
inline constexpr int64 tokens_of_round = 64;

// --------------------------------------------------------------------------------------------------- a block of tokens

/// Tokens packed at a time: as many as one pass over a state takes with the sums in registers; where tokens are written
/// one by one, enough that the state stays in the nearest cache for a while.
template <recurrent_policy P>
SASH_INLINE constexpr int64 tokens_of_block(int64 rows) {
    if constexpr (corrects<P>) return most_of_block;
    return rows <= 1 ? 4 : rows <= most_rows ? 2 : 1;
}

/// The normaliser: z = alpha z + phi(k), then z·phi(q), features in the lanes.
template <class Build, recurrent_policy P>
void advance_normaliser(const detail::state_store& store, float* z, bool writes, const token_block& b) {
    for (int64 t = 0; t < b.tokens; ++t) {
        if (writes) {
            const written_token& token = b.token[t];
            for (int64 f = 0; f < store.feature_pitch; f += lanes<Build>) {
                const floats old = load(z + f), key = load(token.key + f);
                if constexpr (step_of<P>::forgets == forgetting::nothing) {
                    cpu::store(z + f, old + key);
                } else {
                    const floats fade = token.fades ? load(token.fades + f) : floats(token.numbers[detail::entry_fade]);
                    cpu::store(z + f, kept(old, fade) + fma(fade, old, key));
                }
            }
        }
        for (int64 r = t * b.rows; r < (t + 1) * b.rows; ++r) {
            floats sum(0.0f);
            for (int64 f = 0; f < store.feature_pitch; f += lanes<Build>)
                sum = fma(load(b.query + r * store.feature_pitch + f), load(z + f), sum);
            b.denominator[r] = sum_of_lanes(sum);
        }
    }
}

/// Where column `column` of a state begins.
template <class Number>
SASH_INLINE float* column_of(float* state, int64 column) {
    return reinterpret_cast<float*>(reinterpret_cast<Number*>(state) + column);
}

/// A pass over columns [column, column + columns) of a state, without tokens or queries yet.
template <class Build, class Number>
state_pass pass_over(const detail::state_store& store, float* state, int64 column, int64 columns) {
    state_pass p;
    p.state = column_of<Number>(state, column);
    p.features = store.features;
    p.columns = columns;
    p.pitch = store.value_pitch;
    return p;
}

/// Points a pass over columns from `column` on at `count` queries of a block from the given one on.
template <class Build>
void point_at_queries(state_pass& p, const detail::state_store& store, const token_block& b, int64 column, int64 first,
                      int64 count) {
    for (int64 r = 0; r < count; ++r) {
        p.query[r] = b.query + (first + r) * store.feature_pitch;
        p.numerator[r] = b.numerator + (first + r) * store.value_pitch + column;
    }
}

/// The token at `at` of a pass.
template <class Build>
void point_at_token(state_pass& p, const written_token& token, int64 column, int64 at) {
    p.key[at] = token.key;
    p.value[at] = token.value + column;
    p.fade[at] = token.numbers[detail::entry_fade];
    p.fades[at] = token.fades;
    p.replacement = token.replacement;
}

/// Reads queries [first, last) of a block from columns of a state that stays as it is.
template <class Build, class Number>
void read_state(state_pass p, const detail::state_store& store, const token_block& b, int64 column, int64 first,
                int64 last) {
    for (int64 count; first < last; first += count) {
        count = detail::smaller(last - first, most_rows);
        point_at_queries<Build>(p, store, b, column, first, count);
        pass<Build, 0, kept_as<no_step, Number>>(p, count);
    }
}

/// Writes the tokens of a block into a state and reads it after each (or before): in one pass where the sums fit, else
/// one by one.
template <class Build, recurrent_policy P, class Number>
void add_to_state(const detail::state_store& store, float* state, const token_block& b) {
    using Step = kept_as<step_of<P>, Number>;
    constexpr bool one_by_one = !std::is_same_v<Number, float>;
    state_pass p = pass_over<Build, Number>(store, state, 0, store.value_pitch);
    const bool one_pass = !one_by_one && b.tokens > 1 && b.tokens == tokens_of_block<P>(b.rows);
    const int64 at_once = one_pass ? b.tokens : 1;
    if (at_once == 1) p.ahead = state + detail::round_up(1024, store.value_pitch);
    const int64 rows = detail::smaller(b.rows, most_rows);
    for (int64 t = 0; t < b.tokens; t += at_once) {
        const int64 beyond = t * b.rows + rows, end = (t + 1) * b.rows;  // readers that one pass does not take
        if (Step::reads_first && at_once == 1) read_state<Build, Number>(p, store, b, 0, beyond, end);
        for (int64 i = 0; i < at_once; ++i) point_at_token<Build>(p, b.token[t + i], 0, i);
        point_at_queries<Build>(p, store, b, 0, t * b.rows, at_once * rows);
        if constexpr (one_by_one)
            pass<Build, 1, Step>(p, rows);
        else if (at_once == 4)
            rows == 0 ? pass<Build, 4, 0, Step>(p) : pass<Build, 4, 1, Step>(p);
        else if (at_once == 2)
            pass<Build, 2, Step>(p, rows);
        else
            pass<Build, 1, Step>(p, rows);
        if (!Step::reads_first && at_once == 1) read_state<Build, Number>(p, store, b, 0, beyond, end);
    }
}

/// The same for a state of one column.
template <class Build, class Step>
void advance_column(const detail::state_store& store, float* state, bool writes, const token_block& b) {
    for (int64 t = 0; t < b.tokens; ++t) {
        const written_token& w = b.token[t];
        column_token token;
        if (writes) token = {w.key, w.fades, w.numbers[detail::entry_fade], w.value[0]};
        step_column<Build, Step>(state, store.features, writes ? &token : nullptr,
                                 b.query + t * b.rows * store.feature_pitch, store.feature_pitch, b.rows,
                                 b.numerator + t * b.rows * store.value_pitch, store.value_pitch);
    }
}

/// So few columns stay in the nearest cache from token to token.
template <class Number>
inline constexpr int64 columns_at_once = 4 * static_cast<int64>(floats::size * sizeof(float) / sizeof(Number));

/// The same for the rules that correct what is stored, on the columns from `column` on: r = S^T a is read, before the
/// first token by itself, later as one more query of the token before.
template <class Build, recurrent_policy P, class Number>
void correct_columns(const detail::state_store& store, float* state, const token_block& b, int64 column,
                     int64 columns) {
    alignas(64) float removed[columns_at_once<Number>], error[columns_at_once<Number>];
    state_pass p = pass_over<Build, Number>(store, state, column, columns);
    p.removed = removed;
    p.query[0] = b.token[0].lookup;
    p.numerator[0] = removed;
    pass<Build, 0, 1, kept_as<no_step, Number>>(p);
    const int64 rows = detail::smaller(b.rows, most_rows - 1);
    for (int64 t = 0; t < b.tokens; ++t) {
        const written_token& token = b.token[t];
        point_at_token<Build>(p, token, column, 0);
        if constexpr (P::needs_beta) {
            const floats beta(token.numbers[detail::entry_beta]);
            for (int64 c = 0; c < columns; c += lanes<Build>)
                cpu::store(error + c, beta * (load(token.value + column + c) - load(removed + c)));
            p.value[0] = error;
        }
        point_at_queries<Build>(p, store, b, column, t * b.rows, rows);
        const bool has_next = t + 1 < b.tokens;
        if (!has_next)  // the columns to the right, or the next state, which lies behind this one
            p.ahead = column + columns < store.value_pitch ? column_of<Number>(state, column + columns)
                                                           : state + store.state_floats;
        if (has_next) {
            p.query[rows] = b.token[t + 1].lookup;
            p.numerator[rows] = removed;
        }
        pass<Build, 1, kept_as<step_of<P>, Number>>(p, rows + has_next);
        read_state<Build, Number>(p, store, b, column, t * b.rows + rows, (t + 1) * b.rows);
    }
}

template <class Build, recurrent_policy P, class Number = float>
void advance_state(const detail::state_store& store, float* state, const token_block& b) {
    if constexpr (corrects<P>) {
        constexpr int64 width = columns_at_once<Number>;
        for (int64 column = 0; column < store.value_pitch; column += width)
            correct_columns<Build, P, Number>(store, state, b, column,
                                              detail::smaller(width, store.value_pitch - column));
    } else if (store.is_column) {
        advance_column<Build, step_of<P>>(store, state, true, b);
    } else {
        add_to_state<Build, P, Number>(store, state, b);
    }
}

template <class Build, recurrent_policy P>
void replay(const detail::state_store& store, int64 s, float* state, int64 first, int64 last) {
    for (token_block b; first < last; first += b.tokens) {
        b.tokens = detail::smaller(last - first, tokens_of_block<P>(0));
        for (int64 t = 0; t < b.tokens; ++t) b.token[t] = token_in<P>(store, store.entry(s, first + t));
        if constexpr (P::has_normaliser) advance_normaliser<Build, P>(store, store.normaliser(state), true, b);
        advance_state<Build, P>(store, state, b);
        const float* numbers = b.token[b.tokens - 1].numbers;
        for (int64 i = 0; i < ask::map_memory<decltype(P::map)>; ++i)
            store.map_memory(state)[i] = numbers[detail::entry_memory + i];
    }
}

// ------------------------------------------------------------------------------------------------------------ the call

/// How many tokens of a call that writes `tokens` go in chunks: a multiple of eight, none of those that may be taken
/// back.
SASH_INLINE constexpr int64 chunked_tokens(int64 tokens, int64 slack) {
    return tokens < least_chunked ? 0 : detail::larger(0, tokens - slack) / chunk_tokens * chunk_tokens;
}

/// Tokens of a block that goes in chunks, and of any.
SASH_INLINE constexpr int64 tokens_of_chunks(int64 rows) {
    return rows <= most_rows ? most_chunks * chunk_tokens : chunk_tokens;
}
static_assert(most_of_block <= chunk_tokens, "sash: what holds a chunk holds a block");

/// Scratch of one task, in floats, and how it is divided.
struct recurrent_rows {
    float* raw;          ///< [key_dim]
    float* map;          ///< what the feature map needs
    float* gate;         ///< [feature_pitch]
    float* entry;        ///< [tokens] entries, where there is no log
    float* query;        ///< [tokens · rows][feature_pitch]
    float* numerator;    ///< [tokens · rows][value_pitch]
    float* denominator;  ///< [tokens · rows]
    float* weights;      ///< [chunks][chunk_floats]
    float* packed;       ///< [features][2 registers]
    float* widened;      ///< S as floats, where it is kept in less
};

template <class P>
SASH_INLINE constexpr int64 recurrent_scratch(const P& policy, const shape& s, scalar element = scalar::f32) {
    constexpr int64 pad = detail::state_padding;
    const int64 rows = detail::heads_of_states(policy, s).readers, tokens = tokens_of_chunks(rows);
    const int64 features = detail::round_up(policy.features(s.key_dim), pad);
    const int64 values = detail::round_up(s.value_dim, pad);
    const int64 entry = detail::state_store::entry_floats(features, values, detail::entry_rows<P>::count);
    const int64 widened = element == scalar::f32 ? 0 : features * values;
    return detail::round_up(s.key_dim, pad) + map_scratch(policy.map, s.key_dim) + features + tokens * entry +
           tokens * rows * (features + values + pad) + tokens / chunk_tokens * chunk_floats(features, rows) +
           features * 2 * pad + widened;
}

template <class Build, class P>
recurrent_rows divide_scratch(float* scratch, const P& policy, const shape& s, const detail::state_store& store,
                              int64 readers) {
    const int64 tokens = tokens_of_chunks(readers), all = tokens * readers;
    recurrent_rows rows;
    rows.raw = scratch;
    rows.map = rows.raw + detail::round_up(s.key_dim, detail::state_padding);
    rows.gate = rows.map + map_scratch(policy.map, s.key_dim);
    rows.entry = rows.gate + store.feature_pitch;
    rows.query = rows.entry + tokens * store.entry_floats();
    rows.numerator = rows.query + all * store.feature_pitch;
    rows.denominator = rows.numerator + all * store.value_pitch;
    rows.weights = rows.denominator + all * detail::state_padding;
    rows.packed = rows.weights + tokens / chunk_tokens * chunk_floats(store.feature_pitch, readers);
    rows.widened = rows.packed + store.features * 2 * detail::state_padding;
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

/// Row (token, head) of query or key, turned, mapped. `keep` is for maps with a memory.
template <class Build, operand Which, class P>
void features_of(const recurrent_task<P>& at, const input& x, int64 token, int64 head, int64 map_head, float* phi,
                 float* keep = nullptr) {
    const int64 dim = at.dims.key_dim;
    const float* row = at.rows.raw;
    if (dim % detail::state_padding == 0 && !at.call.turns) {
        row = float_row<Build>(x, token, head, at.rows.raw);
    } else {
        read_row<Build>(x, token, head, at.rows.raw);
        if (at.call.turns)
            turn_row<Build>(at.rows.raw, at.call.turns + token * at.call.pairs, at.call.pairs, at.call.layout);
        for (int64 d = dim; d < detail::round_up(dim, detail::state_padding); ++d) at.rows.raw[d] = 0;
    }
    map_row<Build, Which>(at.policy.map, map_head, row, dim, phi, at.store.feature_pitch, at.rows.map,
                          at.store.length + token, at.store.map_memory(at.store.state(at.state)), keep);
}

/// A row [features] of one of the gates, zero behind its end.
template <class Build, class P>
void read_gate_row(const recurrent_task<P>& at, const input& x, int64 token, float* to) {
    read_row<Build>(x, token, at.heads.of_state(at.state, at.dims.gate_heads), to);
    for (int64 f = at.store.features; f < at.store.feature_pitch; ++f) to[f] = 0;
}

/// By how much the state fades before a token: one number, or one for each feature in `fades`, where the map may have
/// put the factors by which it shrinks what is there.
template <class Build, class P>
void pack_decay(const recurrent_task<P>& at, int64 token, float* numbers, float* fades) {
    using Decay = decltype(P::decay);
    constexpr bool map_keeps = ask::map_memory < decltype(P::map) >> 0;
    numbers[detail::entry_fade] = no_fade;
    if constexpr (map_keeps)
        for (int64 f = 0; f < at.store.feature_pitch; f += lanes<Build>) store(fades + f, fade_of(load(fades + f)));
    if constexpr (ask::per_channel<Decay>) {
        const float* gate = at.rows.gate;
        if (at.store.features == at.store.feature_pitch)
            gate =
                float_row<Build>(at.call.decay, token, at.heads.of_state(at.state, at.dims.gate_heads), at.rows.gate);
        else
            read_gate_row<Build>(at, at.call.decay, token, at.rows.gate);
        for (int64 f = 0; f < at.store.feature_pitch; f += lanes<Build>) {
            const floats fade = fade_of_log(load(gate + f));
            store(fades + f, map_keeps ? fade_of_both(fade, load(fades + f)) : fade);
        }
    } else if constexpr (!std::is_same_v<Decay, no_decay>) {
        const int64 head = at.heads.of_state(at.state, at.dims.gate_heads);
        float g = 0;
        if constexpr (ask::constant_decay<Decay>)
            g = at.policy.decay.of_head(head);
        else
            g = detail::number_at(at.call.decay, token, head);
        const float fade = fade_of_log(g);
        numbers[detail::entry_fade] = fade;
        if constexpr (map_keeps)
            for (int64 f = 0; f < at.store.feature_pitch; f += lanes<Build>)
                store(fades + f, fade_of_both(floats(fade), load(fades + f)));
    }
}

/// What the rules that correct need: beta; the vector a that is looked up, which for the delta rule is alpha ⊙ k, since
/// it takes its error from the decayed state; the vector d that is put back.
template <class Build, class P>
void pack_correction(const recurrent_task<P>& at, int64 token, const entry_parts<float>& to) {
    if constexpr (P::needs_vectors) {
        read_gate_row<Build>(at, at.call.removal, token, to.lookup);
        read_gate_row<Build>(at, at.call.replacement, token, to.replacement);
    }
    if constexpr (P::needs_beta) {
        to.numbers[detail::entry_beta] =
            detail::number_at(at.call.beta, token, at.heads.of_state(at.state, at.dims.gate_heads));
        if constexpr (detail::entry_rows<P>::looks_up)
            for (int64 f = 0; f < at.store.feature_pitch; f += lanes<Build>)
                store(to.lookup + f,
                      faded(load(to.key + f), to.fades ? load(to.fades + f) : floats(to.numbers[detail::entry_fade])));
    }
}

/// The entry of one token: all that it will do to the state.
template <class Build, class P>
written_token pack_token(const recurrent_task<P>& at, int64 token, float* entry) {
    const detail::state_store& store = at.store;
    const shape& s = at.dims;
    const int64 map_heads = ask::key_map_heads(at.policy.map, s.key_dim);
    const entry_parts<float> to = parts_of<P>(store, entry);
    for (int64 i = 0; i < detail::state_padding; ++i) to.numbers[i] = 0;

    features_of<Build, operand::key>(at, at.call.key, token, at.heads.of_state(at.state, s.key_heads),
                                     at.heads.of_state(at.state, map_heads), to.key, to.fades);
    read_row<Build>(at.call.value, token, at.heads.of_state(at.state, s.value_heads), to.value);
    for (int64 d = s.value_dim; d < store.value_pitch; ++d) to.value[d] = 0;
    pack_decay<Build>(at, token, to.numbers, to.fades);
    if constexpr (corrects<P>) pack_correction<Build>(at, token, to);
    for (int64 i = 0; i < ask::map_memory<decltype(P::map)>; ++i)
        to.numbers[detail::entry_memory + i] = store.map_memory(store.state(at.state))[i];
    return token_in<P>(store, entry);
}

/// The block's tokens, from `first` on, as entries in the log or in scratch.
template <class Build, class P>
void pack_written(const recurrent_task<P>& at, token_block& b, int64 first) {
    const detail::state_store& store = at.store;
    const bool logs = store.log_tokens > 0;
    const int64 position = store.length + first;
    if (logs) detail::make_room_in_log<Build, P>(store, at.state, position, b.tokens);
    for (int64 t = 0; t < b.tokens; ++t) {
        b.token[t] = pack_token<Build>(
            at, first + t, logs ? store.entry(at.state, position + t) : at.rows.entry + t * store.entry_floats());
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

/// u of query r of a state, in the rule that has one.
template <class P>
SASH_INLINE const float* bonus_of(const recurrent_task<P>& at, int64 r) {
    const int64 features = at.store.features, head = at.state * at.heads.readers + r;
    return at.policy.update.of_head(at.heads.of_output(head, at.policy.update.heads(features)), features);
}

/// numerator += (sum_c q_c u_c k_c) v: the token itself, in the rule that reads before it writes.
template <class Build, class P>
void add_bonus(const recurrent_task<P>& at, const token_block& b) {
    const detail::state_store& store = at.store;
    for (int64 r = 0; r < b.tokens * b.rows; ++r) {
        const written_token& token = b.token[r / b.rows];
        const floats weight(bonus_weight<Build>(b.query + r * store.feature_pitch, bonus_of(at, r % b.rows), token.key,
                                                store.features));
        float* row = b.numerator + r * store.value_pitch;
        for (int64 d = 0; d < store.value_pitch; d += lanes<Build>)
            cpu::store(row + d, fma(weight, load(token.value + d), load(row + d)));
    }
}

/// row = row / divisor, or 0 where the divisor is 0, whatever was in the row.
template <class Build>
void divide_row(float* row, int64 pitch, float divisor) {
    for (int64 d = 0; d < pitch; d += lanes<Build>)
        store(row + d, detail::is_zero(divisor) ? floats(0.0f) : quotient(load(row + d), floats(divisor)));
}
template <class Build>
void scale_row(float* row, int64 pitch, float factor) {
    for (int64 d = 0; d < pitch; d += lanes<Build>) store(row + d, floats(factor) * load(row + d));
}

/// out = numerator / denominator and lse = log(denominator), or out = scale · numerator.
template <class Build, class P>
void finish_rows(const recurrent_task<P>& at, const token_block& b, int64 first) {
    for (int64 r = 0; r < b.tokens * b.rows; ++r) {
        float* row = b.numerator + r * at.store.value_pitch;
        const int64 token = first + r / b.rows, head = at.state * at.heads.readers + r % b.rows;
        if constexpr (P::has_normaliser) {
            const auto& by = at.policy.normaliser;
            const float sum = b.denominator[r] + by.epsilon, mass = sum < by.least ? by.least : sum;
            divide_row<Build>(row, at.store.value_pitch, mass);
            if (at.call.lse)
                at.call.lse[token * at.dims.heads + head] = detail::is_zero(mass) ? minus_infinity() : ::logf(mass);
        } else {
            if (at.call.scale != 1.0f) scale_row<Build>(row, at.store.value_pitch, at.call.scale);
        }
        write_row<Build>(at.call.out, token, head, row);
    }
}

/// S as floats, in the scratch of a task; and back, rounded.
template <class Build>
void widen_matrix(const detail::state_store& store, int64 state, float* widened) {
    widen<Build>(reinterpret_cast<const bfloat16*>(store.state(state)), widened, store.matrix_numbers());
}
template <class Build>
void narrow_matrix(const detail::state_store& store, int64 state, const float* widened) {
    auto* to = reinterpret_cast<bfloat16*>(store.state(state));
    for (int64 i = 0; i < store.matrix_numbers(); i += lanes<Build>) store_normal(to + i, load(widened + i));
}

/// Writes the tokens of a block into S and reads it after each (or before), or only reads it.
template <class Build, recurrent_policy P, class Number>
void step_matrix(const detail::state_store& store, float* matrix, bool writes, const token_block& b) {
    if (writes)
        advance_state<Build, P, Number>(store, matrix, b);
    else if (store.is_column)
        advance_column<Build, step_of<P>>(store, matrix, false, b);
    else
        read_state<Build, Number>(pass_over<Build, Number>(store, matrix, 0, store.value_pitch), store, b, 0, 0,
                                  b.tokens * b.rows);
}

/// May this call take its rows where they lie? The selective scan, as layers ask for it.
template <class P>
bool scans_in_place(const recurrent_task<P>& at) {
    const auto is_ready = [](const input& x) { return x.type == scalar::f32 && x.dim_stride == 1; };
    const recurrent_call& c = at.call;
    const detail::state_store& store = at.store;
    return store.is_column && store.log_tokens == 0 && store.element == scalar::f32 &&
           store.features == store.feature_pitch && at.heads.readers == 1 && c.reads && c.writes &&
           c.turns == nullptr && is_ready(c.query) && is_ready(c.key) && is_ready(c.decay);
}

/// Tokens [first, last) of such a call.
template <class Build, class P>
void scan_in_place(const recurrent_task<P>& at, int64 first, int64 last) {
    const shape& s = at.dims;
    const recurrent_call& c = at.call;
    const int64 key_head = at.heads.of_state(at.state, s.key_heads),
                value_head = at.heads.of_state(at.state, s.value_heads),
                gate_head = at.heads.of_state(at.state, s.gate_heads),
                query_head = at.heads.of_output(at.state, s.query_heads);
    constexpr int64 heads_ahead = 4;  // a round comes back to a token's decays with the next state
    for (int64 t = first; t < last; ++t) {
        const auto row = [t](const input& x, int64 head) { return static_cast<const float*>(x.at(t, head)); };
        const float* g = row(c.decay, gate_head);
        prefetch(g + heads_ahead * c.decay.head_stride);
        const float out =
            c.scale * scan_column<Build>(at.store.state(at.state), at.store.features, row(c.key, key_head),
                                         detail::number_at(c.value, t, value_head), g, row(c.query, query_head));
        write_row<Build>(c.out, t, at.state, &out);
    }
}

/// Chunk i of a block whose entries and queries are packed.
template <class Build, class P>
chunk chunk_in(const recurrent_task<P>& at, const token_block& b, int64 i) {
    const detail::state_store& store = at.store;
    const int64 first = i * chunk_tokens, reader = first * b.rows;
    float* weights = at.rows.weights + i * chunk_floats(store.feature_pitch, b.rows);
    chunk c;
    c.entry = parts_of<P>(store, at.rows.entry + first * store.entry_floats());
    c.pitch = store.entry_floats();
    c.query = at.rows.query + reader * store.feature_pitch;
    c.numerator = b.numerator + reader * store.value_pitch;
    c.denominator = b.denominator + reader;
    c.query_weight = weights;
    c.lookup_weight = weights + chunk_tokens * b.rows * row_weights;
    c.fade_of_all = c.lookup_weight + chunk_tokens * row_weights;
    c.factor_of_all = c.fade_of_all + store.feature_pitch;
    return c;
}

/// Rows of the block of `tokens` tokens that comes next: of this state, or of the one behind it.
template <class Build, class P>
rows_ahead rows_behind(const recurrent_task<P>& at, int64 next, int64 tokens) {
    const recurrent_call& c = at.call;
    const int64 end = detail::smaller(c.last, c.chunked), turned = next >= end, state = at.state + turned;
    const int64 token = turned ? c.first : next;
    rows_ahead ahead;
    for (const char*& row : ahead.row) row = reinterpret_cast<const char*>(at.rows.packed);
    if (state == at.store.states) return ahead;
    const auto add = [&](const auto& x, int64 head) {
        ahead.add(x.at(token, head), x.token_stride * detail::bytes_of(x.type));
    };
    add(c.key, at.heads.of_state(state, at.dims.key_heads));
    add(c.value, at.heads.of_state(state, at.dims.value_heads));
    const auto add_gate = [&](const input& x) { add(x, at.heads.of_state(state, at.dims.gate_heads)); };
    if constexpr (ask::per_channel<decltype(P::decay)>) add_gate(c.decay);
    if constexpr (P::needs_vectors) add_gate(c.removal), add_gate(c.replacement);
    for (int64 r = state * at.heads.readers; c.reads && r < (state + 1) * at.heads.readers; ++r) {
        add(c.query, at.heads.of_output(r, at.dims.query_heads));
        add(c.out, r);
    }
    ahead.left = ahead.operands * detail::smaller(tokens, end - token);
    return ahead;
}

/// The block's tokens, from `first` on, in chunks. `matrix` is S as floats.
template <class Build, class P>
void advance_chunks(const recurrent_task<P>& at, float* matrix, const token_block& b, int64 first) {
    const detail::state_store& store = at.store;
    for (int64 t = 0; t < b.tokens; ++t) pack_token<Build>(at, first + t, at.rows.entry + t * store.entry_floats());
    pack_queries_of_state<Build>(at, b, first);
    chunk chunks[most_chunks];
    const int64 count = b.tokens / chunk_tokens;
    for (int64 i = 0; i < count; ++i) {
        chunks[i] = chunk_in<Build>(at, b, i);
        weigh_chunk<Build, P>(chunks[i], store, b.rows, [&](int64 r) {
            if constexpr (step_of<P>::reads_first) return bonus_of(at, r);
        });
        if constexpr (P::has_normaliser)
            advance_normaliser<Build, step_of<P>>(chunks[i], store.feature_pitch, b.rows,
                                                  store.normaliser(store.state(at.state)));
    }
    rows_ahead ahead = rows_behind<Build>(at, first + b.tokens, b.tokens);
    advance_columns<Build, P>(store, matrix, chunks, count, b.rows, at.rows.packed, ahead);
    finish_rows<Build>(at, b, first);
}

/// How many tokens wait beside each state when token t of a call has its turn: none, once some went in chunks.
SASH_INLINE int64 waiting_before(const detail::state_store& store, const recurrent_call& call, int64 t) {
    if (!call.writes) return store.waiting;
    return (call.chunked > 0 ? t - call.chunked : store.waiting + t) % detail::most_waiting;
}

/// Counts the tokens of a call that writes in, when every state has taken them.
SASH_INLINE void count_tokens(detail::state_store& store, const recurrent_call& call) {
    if (store.waiting_floats > 0) store.waiting = waiting_before(store, call, call.key.tokens);
    store.length += call.key.tokens;
}

/// Tokens from `first` on, before `last`, as many as may wait.
template <class Build, class P>
void join_waiting(const recurrent_task<P>& at, token_block& b, int64 first, int64 last) {
    const detail::state_store& store = at.store;
    const bool writes = at.call.writes;
    const int64 waiting = waiting_before(store, at.call, first);
    b.tokens = detail::smaller(last - first, detail::most_waiting - (writes ? waiting : 0));
    if (writes) pack_written<Build>(at, b, first);
    if (at.call.reads) pack_queries_of_state<Build>(at, b, first);
    if constexpr (P::has_normaliser)
        advance_normaliser<Build, P>(store, store.normaliser(store.state(at.state)), writes, b);
    float* const lookup = parts_of<P>(store, at.rows.entry).lookup;
    join_state<Build, P>(store, at.state, b, writes, waiting,
                         {at.rows.query, lookup, store.entry_floats(), at.rows.weights,
                          at.rows.weights + chunk_tokens * b.rows * row_weights});
    if (writes && waiting + b.tokens == detail::most_waiting)
        settle<Build, P>(store, at.state, store.waiting_beside(at.state), detail::most_waiting);
    if (at.call.reads) finish_rows<Build>(at, b, first);
}

/// All tokens of a round, in order, for one state and the output heads that read it. Calls for different states may
/// run at the same time. `scratch` holds recurrent_scratch(policy, shape) floats, 64-byte aligned. The caller counts
/// the tokens when every state is done.
template <class Build, class P>
void recurrent(const P& policy, const shape& s, detail::state_store& store, const recurrent_call& call, int64 state,
               float* scratch) {
    const detail::state_heads heads{store.states, s.heads / store.states};
    const int64 tokens = detail::smaller(call.last, call.reads ? call.query.tokens : call.key.tokens);
    if (call.first >= tokens) return;
    if constexpr (std::is_same_v<P, linear<identity, per_channel_and_token, additive, unscaled>>) {
        const recurrent_task<P> without_scratch{policy, s, store, call, heads, state, {}};
        if (scans_in_place(without_scratch)) return scan_in_place<Build>(without_scratch, call.first, tokens);
    }
    token_block b;
    b.rows = call.reads ? heads.readers : 0;
    const recurrent_task<P> at{
        policy, s, store, call, heads, state, divide_scratch<Build>(scratch, policy, s, store, heads.readers)};
    b.query = at.rows.query;
    b.numerator = at.rows.numerator;
    b.denominator = at.rows.denominator;
    float* z = store.normaliser(store.state(state));

    const bool is_narrow = store.element == scalar::bf16;
    // One token, as in decoding: widened and rounded on its way. Several: once for all of them.
    const bool widens = is_narrow && (tokens - call.first > 1 || store.is_column);
    float* matrix = widens ? at.rows.widened : store.state(state);
    if (widens) widen_matrix<Build>(store, state, matrix);
    int64 t = call.first;
    const int64 chunked = store.is_column ? 0 : detail::smaller(tokens, call.chunked);
    if constexpr (detail::can_wait<P>)
        if (t == 0 && chunked > 0 && store.waiting > 0)
            settle<Build, P>(store, state, store.waiting_beside(state), store.waiting);
    for (; t < chunked; t += b.tokens) {
        b.tokens = detail::smaller(chunked - t, tokens_of_chunks(heads.readers));  // as the scratch is divided
        advance_chunks<Build>(at, matrix, b, t);
        if (t + b.tokens == call.chunked) detail::move_base<Build>(store, state, store.length + call.chunked);
    }
    if constexpr (detail::can_wait<P>)
        if (store.waiting_floats > 0) {
            for (; t < tokens; t += b.tokens) join_waiting<Build>(at, b, t, tokens);
            return;
        }
    for (; t < tokens; t += b.tokens) {
        b.tokens = detail::smaller(tokens - t, tokens_of_block<P>(b.rows));
        if (call.writes) pack_written<Build>(at, b, t);
        if (call.reads) pack_queries_of_state<Build>(at, b, t);
        if constexpr (P::has_normaliser) advance_normaliser<Build, P>(store, z, call.writes, b);
        if (is_narrow && !widens) {
            if constexpr (detail::forgets<P>) step_matrix<Build, P, bfloat16>(store, matrix, call.writes, b);
        } else {
            step_matrix<Build, P, float>(store, matrix, call.writes, b);
        }
        if constexpr (decltype(P::update)::reads_first)
            if (call.reads && call.writes) add_bonus<Build>(at, b);
        if (call.reads) finish_rows<Build>(at, b, t);
    }
    if (widens && call.writes) narrow_matrix<Build>(store, state, matrix);
}

}  // namespace sash::cpu
