#pragma once
/// \file
/// Tokens that wait beside a state, under the delta rule. It looks up what S holds along a_t before it writes, so the
/// recurrence goes through S twice for a token: once to look up, once to write and to read. A chunk (chunk.hpp) looks
/// everything up at once, in S as it was in front of it. So decoding grows a chunk, token by token: S stays as it is, D
/// says how far it has faded, and what the tokens will write stands beside it, fading along:
///
///     S_t   = D_t ⊙ S + sum_{j<=t} k_j u_j^T        D_t = alpha_1 ⋯ alpha_t,  k_j = alpha_{j+1} ⋯ alpha_t ⊙ phi(k)_j
///     r_t   = (D_{t-1} ⊙ a_t) S + sum_{j<t} (a_t · k_j) u_j        a_t = alpha_t ⊙ phi(k)_t,  u_t = beta_t (v_t - r_t)
///     out_t = (D_t ⊙ q_t) S + sum_{j<=t} (q_t · k_j) u_j
///
/// Both products with S are one reading of it, and nothing is written, until the eighth token: then all eight settle, as
/// a chunk does, and S_8 takes the place of S. (Under a rule that only adds the recurrence goes through S once, which is
/// as fast: memory takes what is written meanwhile.)
///
/// The operations and their order are the same whichever short calls the tokens come in. A look at the states settles
/// what waits, and begins to count to eight anew.
#include <sash/cpu/chunk.hpp>
#include <sash/cpu/state_pass.hpp>

namespace sash::cpu {

/// Weights of a row x on the first `count` tokens that wait; then x faded as S has since. Returns what the product of x
/// and S is still to be multiplied by.
template <class Build, recurrent_policy P>
float weigh_waiting(const detail::waiting_rows<P>& w, int64 n, int64 count, float* x, float* weight) {
    using Step = step_of<P>;
    if (count == 0) return 1;
    dots_with_rows<Build, 1>(x, {w.key}, w.pitch, count, n, weight);
    if constexpr (Step::forgets == forgetting::by_head) {
        for (int64 j = 0; j < count; ++j) weight[j] *= w.factor[j];
        return static_cast<float>(factor_of(*w.fade));
    }
    if constexpr (Step::forgets == forgetting::by_channel)
        for (int64 f = 0; f < n; f += lanes<Build>) store(x + f, faded(load(x + f), load(w.fade + f)));
    return 1;
}

/// S, and the `count` tokens that wait, fade by what the next token says.
template <class Build, recurrent_policy P>
void fade_waiting(const detail::waiting_rows<P>& w, int64 n, int64 count, const written_token& token) {
    using Step = step_of<P>;
    if constexpr (Step::forgets == forgetting::by_head) {
        const float fade = token.numbers[detail::entry_fade];
        const double alpha = factor_of(fade);
        for (int64 j = 0; j < w.most; ++j) w.factor[j] = j < count ? static_cast<float>(alpha * w.factor[j]) : 0.0f;
        w.factor[count] = 1;
        *w.fade = count == 0 ? fade : fade_of(alpha * factor_of(*w.fade));
    } else if constexpr (Step::forgets == forgetting::by_channel) {
        for (int64 f = 0; f < n; f += lanes<Build>) {
            const floats fade = load(token.fades + f), alpha = factor_of(fade);
            store(w.fade + f, count == 0 ? fade : fade_of_both(load(w.fade + f), fade));
            for (int64 j = 0; j < count; ++j) {
                float* key = w.key + j * w.pitch + f;
                store(key, load(key) * alpha);
            }
        }
    }
}

/// row = factor · row + sum_{j<count} weight_j u_j, [columns].
template <class Build, recurrent_policy P>
void add_waiting(const detail::waiting_rows<P>& w, int64 count, const float* weight, float factor, float* row,
                 int64 columns) {
    using Step = step_of<P>;
    for (int64 c = 0; c < columns; c += lanes<Build>) {
        floats sum = load(row + c);
        if constexpr (Step::forgets == forgetting::by_head) sum = floats(factor) * sum;
        for (int64 j = 0; j < count; ++j) sum = fma(floats(weight[j]), load(w.value + j * w.pitch + c), sum);
        store(row + c, sum);
    }
}

/// The state that is read next: with each row of a strip as many lines of it, so that all is asked for by the last strip.
template <int64 Width>
struct state_ahead {
    const float* at;

    SASH_INLINE const state_ahead& next() const { return *this; }
    SASH_INLINE void ask(int64 step) const {
        for (int64 i = 0; i < Width; i += detail::state_padding) prefetch_early(at + step * Width + i);
    }
};

/// The first `count` tokens that wait are written into state s, as a chunk of eight: the others are zeros.
template <class Build, recurrent_policy P>
void settle(const detail::state_store& store, int64 s, float* waiting, int64 count) {
    const detail::waiting_rows<P> w(waiting, store.feature_pitch, store.value_pitch);
    std::memset(w.key + count * w.pitch, 0, static_cast<std::size_t>((w.most - count) * w.pitch) * sizeof(float));
    chunk c;
    c.entry.key = w.key;
    c.pitch = w.pitch;
    c.fade_of_all = w.fade;
    for (int64 j = 0; j < w.most; ++j) c.factor[chunk_tokens][j + 1] = j < count ? w.factor[j] : 1.0f;
    float* const state = store.state(s);
    const float* const next = store.state(s + 1 < store.states ? s + 1 : s);
    for_each_strip<Build>(store.value_pitch, [&]<int Vectors>(int64 column) {
        state_ahead<Vectors * lanes<Build>> ahead{next + column * store.features};
        const strip of{state + column, state + column, store.value_pitch, store.value_pitch, store.features};
        write_tokens<Build, P, Vectors>(c, of, {w.value + column, w.pitch}, ahead);
    });
}

/// Rows that are multiplied with a state, a few at a time.
template <class Build>
class readers {
public:
    SASH_INLINE readers(const detail::state_store& store, float* state) {
        pass_.state = state;
        pass_.features = store.features;
        pass_.columns = pass_.pitch = store.value_pitch;
        pass_.ahead = state + detail::round_up(1024, store.value_pitch);
    }
    /// to = S^T row.
    SASH_INLINE void add(const float* row, float* to) {
        pass_.query[count_] = row;
        pass_.numerator[count_] = to;
        if (++count_ == most_rows) read();
    }
    SASH_INLINE void read() {
        if (count_ > 0) pass<Build, 0, no_step>(pass_, count_);
        count_ = 0;
    }

private:
    state_pass pass_;
    int64 count_ = 0;
};

/// A block of tokens that join, in scratch. Rows of queries and lookups are faded in place.
struct joining_rows {
    float* query;   ///< phi(q) [tokens · rows][feature_pitch]
    float* lookup;  ///< a, of token after token `pitch` floats apart
    int64 pitch;
    float* query_weight;   ///< [tokens · rows][16]
    float* lookup_weight;  ///< [tokens][16]
};

/// Weights and fades of a block, token by token; its keys join those of the `waiting` tokens that wait already. The
/// factors are what products with S are to be multiplied by.
template <class Build, recurrent_policy P>
void weigh_block(const detail::state_store& store, const detail::waiting_rows<P>& w, const token_block& b, bool writes,
                 int64 waiting, const joining_rows& rows, float* query_factor, float* lookup_factor) {
    const int64 n = store.feature_pitch;
    for (int64 t = 0; t < b.tokens; ++t) {
        const int64 slot = waiting + t;
        if (writes) {
            lookup_factor[t] =
                weigh_waiting<Build, P>(w, n, slot, rows.lookup + t * rows.pitch, rows.lookup_weight + t * row_weights);
            fade_waiting<Build, P>(w, n, slot, b.token[t]);
            std::memcpy(w.key + slot * w.pitch, b.token[t].key, static_cast<std::size_t>(n) * sizeof(float));
        }
        for (int64 r = t * b.rows; r < (t + 1) * b.rows; ++r)
            query_factor[t] = weigh_waiting<Build, P>(w, n, writes ? slot + 1 : waiting, rows.query + r * n,
                                                      rows.query_weight + r * row_weights);
    }
}

/// Asks for the first `count` tokens that wait beside state s, or will: they lie far from the states, and are the first of
/// what it needs.
SASH_INLINE void ask_for_waiting(const detail::state_store& store, int64 s, int64 count) {
    if (s == store.states) return;
    const float* const at = store.waiting_beside(s);
    const int64 numbers = store.waiting_head + count * store.waiting_pitch;
    for (int64 i = 0; i < numbers; i += detail::state_padding) prefetch(at + i);
}

/// The tokens of a block, at most as many as may still wait, join state s and are read after each; or, where none is
/// written, the queries read what is there.
template <class Build, recurrent_policy P>
void join_state(const detail::state_store& store, int64 s, const token_block& b, bool writes, int64 waiting,
                const joining_rows& rows) {
    const int64 columns = store.value_pitch;
    const detail::waiting_rows<P> w(store.waiting_beside(s), store.feature_pitch, columns);
    float query_factor[most_of_block], lookup_factor[most_of_block];
    weigh_block<Build, P>(store, w, b, writes, waiting, rows, query_factor, lookup_factor);

    readers<Build> of_state(store, store.state(s));
    for (int64 t = 0; t < b.tokens; ++t) {
        if (writes) of_state.add(rows.lookup + t * rows.pitch, w.value + (waiting + t) * w.pitch);
        for (int64 r = t * b.rows; r < (t + 1) * b.rows; ++r)
            of_state.add(rows.query + r * store.feature_pitch, b.numerator + r * columns);
    }
    ask_for_waiting(store, s + 1, writes ? waiting + b.tokens : waiting);
    of_state.read();

    for (int64 t = 0; t < b.tokens; ++t) {
        const int64 slot = waiting + t;
        if (writes) {
            float* const u = w.value + slot * w.pitch;  // r_t at first
            add_waiting<Build, P>(w, slot, rows.lookup_weight + t * row_weights, lookup_factor[t], u, columns);
            const floats beta(b.token[t].numbers[detail::entry_beta]);
            for (int64 c = 0; c < columns; c += lanes<Build>)
                cpu::store(u + c, beta * (load(b.token[t].value + c) - load(u + c)));
        }
        for (int64 r = t * b.rows; r < (t + 1) * b.rows; ++r)
            add_waiting<Build, P>(w, writes ? slot + 1 : waiting, rows.query_weight + r * row_weights, query_factor[t],
                                  b.numerator + r * columns, columns);
    }
}

}  // namespace sash::cpu
