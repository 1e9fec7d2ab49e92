#pragma once
/// \file
/// Linear attention, sixteen tokens at once: what the recurrence does one by one, as products of small matrices.
///
/// Unroll the recurrence over the tokens 0 … 15 of a chunk, from the state S in front of it. With alpha_j the decays,
///
///     out_i = q~_i S + sum_{j<=i} A_ij u_j             A_ij = (q_i faded from i back to j)·k_j
///     S'    = diag(alpha_0 … alpha_15) S + sum_j k~_j u_j^T
///
/// where "faded back to j" is q_i ⊙ alpha_i ⊙ … ⊙ alpha_{j+1}; q~_i is q_i faded back to the front of the chunk, and
/// k~_j = k_j ⊙ alpha_{j+1} ⊙ … ⊙ alpha_15. A rule that corrects looks the state up along a_t, in front of token t:
///
///     r_t = a~_t S + sum_{j<t} (a_t faded back to j)·k_j u_j          u_t = beta_t (v_t - r_t): the delta rule,
///
/// one triangular system, solved from the top; or u_t = v_t and the rows d_j r_j^T written beside k_j u_j^T.
///
/// No exponential is taken of a sum of logarithms: rows fade by factors, each at most 1, so no decay, however strong,
/// can overflow, and none needs an anchor. With sixteen tokens that costs little beside the products with S.
/// Source: Yang et al. 2024, "Gated linear attention transformers with hardware-efficient training", section 4; "…with
/// the delta rule over sequence length", section 3.2.
#include <sash/cpu/token_block.hpp>

namespace sash::cpu {

inline constexpr int64 chunk_tokens = 16;

/// Scratch of one chunk; rows are feature_pitch or value_pitch floats.
struct chunk_scratch {
    float* query = nullptr;          ///< q~ [16 · rows]
    float* lookup = nullptr;         ///< a~ [16]
    float* key = nullptr;            ///< k~ [16]
    float* replacement = nullptr;    ///< d~ [16]
    float* kept = nullptr;           ///< product of all decays, [feature_pitch]
    float* corrected = nullptr;      ///< u of the delta rule, else r [16]
    float* query_weight = nullptr;   ///< A [16 · rows][2][16]: of k_j, of d_j
    float* lookup_weight = nullptr;  ///< of a_t [16][2][16]
};

SASH_INLINE constexpr int64 chunk_floats(int64 feature_pitch, int64 value_pitch, int64 rows) {
    return chunk_tokens * ((rows + 3) * feature_pitch + value_pitch + (rows + 1) * 2 * chunk_tokens) + feature_pitch;
}
template <class Build>
chunk_scratch divide_chunk_scratch(float* at, int64 feature_pitch, int64 value_pitch, int64 rows) {
    const auto take = [&](int64 count) {
        float* part = at;
        at += count;
        return part;
    };
    chunk_scratch s;
    s.query = take(chunk_tokens * rows * feature_pitch);
    s.lookup = take(chunk_tokens * feature_pitch);
    s.key = take(chunk_tokens * feature_pitch);
    s.replacement = take(chunk_tokens * feature_pitch);
    s.kept = take(feature_pitch);
    s.corrected = take(chunk_tokens * value_pitch);
    s.query_weight = take(chunk_tokens * rows * 2 * chunk_tokens);
    s.lookup_weight = take(chunk_tokens * 2 * chunk_tokens);
    return s;
}

// --------------------------------------------------------------------------------------------------------------- fading

/// Lanes that add up to x·y, [n], n a multiple of 16.
template <class Build>
SASH_INLINE floats lanes_of_dot(const float* x, const float* y, int64 n) {
    floats even(0.0f), odd(0.0f);
    int64 f = 0;
    for (; f + 2 * lanes<Build> <= n; f += 2 * lanes<Build>) {
        even = fma(load(x + f), load(y + f), even);
        odd = fma(load(x + f + lanes<Build>), load(y + f + lanes<Build>), odd);
    }
    for (; f < n; f += lanes<Build>) even = fma(load(x + f), load(y + f), even);
    return even + odd;
}

/// x_f = factor · x_f, or by the factor of each feature.
template <class Build, class Step>
void fade_row(const written_token& token, float* x, int64 n) {
    if constexpr (Step::forgets == forgetting::nothing) return;
    const floats alpha(token.numbers[detail::entry_alpha]);
    for (int64 f = 0; f < n; f += lanes<Build>)
        store(x + f, load(x + f) * (Step::forgets == forgetting::by_channel ? load(token.alphas + f) : alpha));
}

/// Lanes that add up to x·k and x·d for one token, and x faded by it, in one go.
template <class Build, class Step>
void meet_token(const written_token& token, float* x, int64 n, floats& of_key, floats& of_replacement) {
    floats with_key(0.0f), with_replacement(0.0f);
    for (int64 f = 0; f < n; f += lanes<Build>) {
        const floats number = load(x + f);
        with_key = fma(number, load(token.key + f), with_key);
        if constexpr (Step::replaces) with_replacement = fma(number, load(token.replacement + f), with_replacement);
        store(x + f, number * load(token.alphas + f));
    }
    of_key = with_key;
    of_replacement = with_replacement;
}

/// Takes a row x back from behind token `last` to the front of the chunk, into `faded`. On its way it meets k_j and d_j:
/// weight[0][j] and weight[1][j], 0 behind `last`.
template <class Build, class Step>
void fade_back(const token_block& b, int64 last, const float* x, int64 n, float* faded, float* weight) {
    floats of_key[chunk_tokens], of_replacement[chunk_tokens];
    alignas(64) float factor[chunk_tokens];  // that scalar decays have in common is multiplied at the end
    float left = 1;
    for (int64 j = chunk_tokens - 1; j > last; --j) {
        of_key[j] = of_replacement[j] = floats(0.0f);
        factor[j] = 1;
    }
    std::memcpy(faded, x, static_cast<std::size_t>(n) * sizeof(float));
    for (int64 j = last; j >= 0; --j) {
        const written_token& token = b.token[j];
        factor[j] = left;
        if constexpr (Step::forgets == forgetting::by_channel) {
            meet_token<Build, Step>(token, faded, n, of_key[j], of_replacement[j]);
        } else {
            of_key[j] = lanes_of_dot<Build>(faded, token.key, n);
            if constexpr (Step::replaces) of_replacement[j] = lanes_of_dot<Build>(faded, token.replacement, n);
            if constexpr (Step::forgets == forgetting::by_head) left *= token.numbers[detail::entry_alpha];
        }
    }
    if constexpr (Step::forgets == forgetting::by_head)
        for (int64 f = 0; f < n; f += lanes<Build>) store(faded + f, floats(left) * load(faded + f));
    for (int64 j = 0; j < chunk_tokens; j += lanes<Build>) {
        store(weight + j, load(factor + j) * sums_of_lanes(of_key + j));
        if constexpr (Step::replaces)
            store(weight + chunk_tokens + j, load(factor + j) * sums_of_lanes(of_replacement + j));
    }
}

/// k~, d~ and the product of all decays, from the end of the chunk.
template <class Build, class Step>
void fade_forward(const token_block& b, int64 n, const chunk_scratch& s) {
    const auto times_kept = [&](const float* x, float* to) {
        for (int64 f = 0; f < n; f += lanes<Build>) store(to + f, load(s.kept + f) * load(x + f));
    };
    for (int64 f = 0; f < n; ++f) s.kept[f] = 1;
    for (int64 j = chunk_tokens - 1; j >= 0; --j) {
        times_kept(b.token[j].key, s.key + j * n);
        if constexpr (Step::replaces) times_kept(b.token[j].replacement, s.replacement + j * n);
        fade_row<Build, Step>(b.token[j], s.kept, n);
    }
}

// ------------------------------------------------------------------------------------------------- products with the state

/// to_i = x_i S for `Rows` rows and `Vectors` registers of columns.
template <class Build, int Rows, int Vectors>
void multiply_tile(const float* x, int64 x_pitch, const float* state, int64 features, int64 pitch, float* to) {
    floats sum[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sum[r][v] = floats(0.0f);
    for (int64 f = 0; f < features; ++f, state += pitch) {
        floats s[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) s[v] = load(state + v * lanes<Build>);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const floats factor(x[r * x_pitch + f]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sum[r][v] = fma(factor, s[v], sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) store(to + r * pitch + v * lanes<Build>, sum[r][v]);
}

/// Rows of a tile: as many as leave room for one more register of each column beside the sums.
template <class Build>
inline constexpr int chunk_rows = registers<Build> / 4;

/// to = x S, for `rows` rows, a multiple of 16. `ahead` is called between tiles: it asks for memory that comes later.
template <class Build, class Ahead>
void multiply_state(const float* x, int64 rows, const detail::state_store& store, const float* state, float* to,
                    Ahead& ahead) {
    constexpr int tile = chunk_rows<Build>;
    const int64 pitch = store.value_pitch, x_pitch = store.feature_pitch;
    int64 column = 0;
    for (; column + 2 * lanes<Build> <= pitch; column += 2 * lanes<Build>)
        for (int64 r = 0; r < rows; r += tile) {
            ahead();
            multiply_tile<Build, tile, 2>(x + r * x_pitch, x_pitch, state + column, store.features, pitch,
                                          to + r * pitch + column);
        }
    for (; column < pitch; column += lanes<Build>)
        for (int64 r = 0; r < rows; r += tile)
            multiply_tile<Build, tile, 1>(x + r * x_pitch, x_pitch, state + column, store.features, pitch,
                                          to + r * pitch + column);
}

/// Rows that are written into a state: y_j u_j^T for each token.
struct written_rows {
    const float* y = nullptr;           ///< [16][feature_pitch]
    const float* u[chunk_tokens] = {};  ///< [value_pitch]
};

/// S_f = kept_f S_f + sum_j y_jf u_j for `Rows` rows and `Vectors` registers of columns.
template <class Build, int Rows, int Vectors, class Step>
void update_tile(float* state, int64 pitch, int64 feature_pitch, const float* kept, const written_rows* sets, int64 row,
                 int64 column) {
    floats s[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
            s[r][v] = load(state + r * pitch + v * lanes<Build>);
            if constexpr (Step::forgets != forgetting::nothing) s[r][v] = floats(kept[row + r]) * s[r][v];
        }
    for (int set = 0; set <= Step::replaces; ++set) {
        const float* y = sets[set].y + row;
        for (int64 j = 0; j < chunk_tokens; ++j, y += feature_pitch) {
            floats u[Vectors];
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) u[v] = load(sets[set].u[j] + column + v * lanes<Build>);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const floats factor(y[r]);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) s[r][v] = fma(factor, u[v], s[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) store(state + r * pitch + v * lanes<Build>, s[r][v]);
}

template <class Build, int Vectors, class Step, class Ahead>
void update_columns(const detail::state_store& store, float* state, const float* kept, const written_rows* sets,
                    int64 column, Ahead& ahead) {
    constexpr int tile = chunk_rows<Build>;
    int64 row = 0;
    for (; row + tile <= store.features; row += tile) {
        ahead();
        update_tile<Build, tile, Vectors, Step>(state + row * store.value_pitch + column, store.value_pitch,
                                                store.feature_pitch, kept, sets, row, column);
    }
    for (; row < store.features; ++row)
        update_tile<Build, 1, Vectors, Step>(state + row * store.value_pitch + column, store.value_pitch,
                                             store.feature_pitch, kept, sets, row, column);
}

template <class Build, class Step, class Ahead>
void update_state(const detail::state_store& store, float* state, const float* kept, const written_rows* sets,
                  Ahead& ahead) {
    int64 column = 0;
    for (; column + 2 * lanes<Build> <= store.value_pitch; column += 2 * lanes<Build>)
        update_columns<Build, 2, Step>(store, state, kept, sets, column, ahead);
    for (; column < store.value_pitch; column += lanes<Build>)
        update_columns<Build, 1, Step>(store, state, kept, sets, column, ahead);
}

// ------------------------------------------------------------------------------------------------------ within the chunk

/// to += sum_{j<count} weight_j row_j over `Vectors` registers of columns.
template <class Build, int Vectors>
void add_weighted_columns(const float* weight, const float* const* row, int64 count, int64 column, float* to) {
    floats sum[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) sum[v] = load(to + column + v * lanes<Build>);
    for (int64 j = 0; j < count; ++j) {
        const floats factor(weight[j]);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sum[v] = fma(factor, load(row[j] + column + v * lanes<Build>), sum[v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) store(to + column + v * lanes<Build>, sum[v]);
}
template <class Build>
void add_weighted(const float* weight, const float* const* row, int64 count, int64 n, float* to) {
    int64 column = 0;
    for (; column + 8 * lanes<Build> <= n; column += 8 * lanes<Build>)
        add_weighted_columns<Build, 8>(weight, row, count, column, to);
    for (; column < n; column += lanes<Build>) add_weighted_columns<Build, 1>(weight, row, count, column, to);
}

/// What each token looks up, and from it u of the delta rule or r of the low-rank rule: `corrected`.
template <class Build, recurrent_policy P, class Ahead>
void correct_chunk(const detail::state_store& store, const float* state, const token_block& b, const chunk_scratch& s,
                   Ahead& ahead) {
    const int64 n = store.value_pitch;
    for (int64 t = 0; t < chunk_tokens; ++t)
        fade_back<Build, step_of<P>>(b, t - 1, b.token[t].lookup, store.feature_pitch, s.lookup + t * store.feature_pitch,
                                     s.lookup_weight + t * 2 * chunk_tokens);
    multiply_state<Build>(s.lookup, chunk_tokens, store, state, s.corrected, ahead);
    const float *value[chunk_tokens], *corrected[chunk_tokens];
    for (int64 t = 0; t < chunk_tokens; ++t) {
        const float* weight = s.lookup_weight + t * 2 * chunk_tokens;
        float* row = s.corrected + t * n;
        value[t] = b.token[t].value;
        corrected[t] = row;
        if constexpr (P::needs_vectors) {
            add_weighted<Build>(weight, value, t, n, row);
            add_weighted<Build>(weight + chunk_tokens, corrected, t, n, row);
        } else {
            add_weighted<Build>(weight, corrected, t, n, row);
            const floats beta(b.token[t].numbers[detail::entry_beta]);
            for (int64 c = 0; c < n; c += lanes<Build>) cpu::store(row + c, beta * (load(value[t] + c) - load(row + c)));
        }
    }
}

/// Numerators of all queries of the chunk.
template <class Build, class Step, class Ahead>
void read_chunk(const detail::state_store& store, const float* state, const token_block& b, const chunk_scratch& s,
                const written_rows* sets, Ahead& ahead) {
    for (int64 r = 0; r < chunk_tokens * b.rows; ++r)
        fade_back<Build, Step>(b, r / b.rows - Step::reads_first, b.query + r * store.feature_pitch, store.feature_pitch,
                               s.query + r * store.feature_pitch, s.query_weight + r * 2 * chunk_tokens);
    multiply_state<Build>(s.query, chunk_tokens * b.rows, store, state, b.numerator, ahead);
    for (int64 r = 0; r < chunk_tokens * b.rows; ++r)
        for (int set = 0; set <= Step::replaces; ++set)
            add_weighted<Build>(s.query_weight + (2 * r + set) * chunk_tokens, sets[set].u,
                                r / b.rows + !Step::reads_first, store.value_pitch, b.numerator + r * store.value_pitch);
}

/// Writes the sixteen tokens of a block into a state, and reads it after (or before) each.
template <class Build, recurrent_policy P, class Ahead>
void advance_chunk(const detail::state_store& store, float* state, const token_block& b, const chunk_scratch& s,
                   Ahead&& ahead) {
    using Step = step_of<P>;
    if constexpr (corrects<P>) correct_chunk<Build, P>(store, state, b, s, ahead);
    written_rows sets[2];
    sets[0].y = s.key;
    sets[1].y = s.replacement;
    for (int64 j = 0; j < chunk_tokens; ++j) {
        sets[0].u[j] = P::needs_beta ? s.corrected + j * store.value_pitch : b.token[j].value;
        sets[1].u[j] = s.corrected + j * store.value_pitch;
    }
    if (b.rows > 0) read_chunk<Build, Step>(store, state, b, s, sets, ahead);
    fade_forward<Build, Step>(b, store.feature_pitch, s);
    update_state<Build, Step>(store, state, s.kept, sets, ahead);
}

}  // namespace sash::cpu
