#pragma once
/// \file
/// The chunked kernel: eight tokens of a long call at once. Unroll the recurrence from the state S in front of a chunk;
/// with alpha_t the decays, A_t = alpha_0 ⋯ alpha_t, and u_j what token j writes along its key,
///
///     out_t = (A_t ⊙ q_t) S + sum_{j<=t} w_tj u_j        w_tj = q_t · (alpha_{j+1} ⋯ alpha_t ⊙ k_j)
///     S'    = A_7 ⊙ S + sum_j (alpha_{j+1} ⋯ alpha_7 ⊙ k_j) u_j^T
///
/// S is multiplied with the queries and written with the keys as in a product of matrices: two multiply-adds for each
/// element and token, and one to decay it for eight tokens, where the recurrence needs three. The weights w are few. A
/// rule that corrects looks S up along a_t, in front of token t:
///
///     r_t   = (A_{t-1} ⊙ a_t) S + sum_{j<t} (the same weights, of a_t) u_j
///
/// with u_t = beta_t (v_t - r_t) one after the other, or u_t = v_t and further rows d_j r_j^T written beside k_j u_j^T.
/// A decay that is one number for the head multiplies sums and values instead of queries and keys.
///
/// Every factor is at most 1 and none is divided by another, so no decay overflows, and no token meets what comes
/// behind it, not even multiplied by 0.
///
/// The lanes are columns of S. Some columns at a time pass through all chunks of a block: the first chunk reads them
/// from the state, the last writes them back, in between they lie side by side in the nearest cache. (Rows of a state
/// of 128 × 128 are 512 bytes apart: a walk down them uses an eighth of the sets of that cache.)
/// Source: Yang et al. 2024, "Gated linear attention transformers with hardware-efficient training", section 4; "…with
/// the delta rule over sequence length", section 3.2.
#include <sash/cpu/fade.hpp>
#include <sash/cpu/token_block.hpp>

namespace sash::cpu {

inline constexpr int chunk_tokens = 8;
inline constexpr int64 most_chunks = 4;  // of a block: queries and keys of so many still lie in the second cache

/// Weights of a row: of u_j, then of r_j.
inline constexpr int64 row_weights = 2 * chunk_tokens;

/// Eight tokens.
struct chunk {
    entry_parts<float> entry;  ///< of the first; those behind it are `pitch` floats apart
    int64 pitch = 0;
    float* query = nullptr;          ///< [8 · rows][feature_pitch], token-major
    float* numerator = nullptr;      ///< [8 · rows][value_pitch]
    float* denominator = nullptr;    ///< [8 · rows]
    float* query_weight = nullptr;   ///< [8 · rows][16]
    float* lookup_weight = nullptr;  ///< [8][16]
    float* fade_of_all = nullptr;    ///< of A_7, [feature_pitch], or one number
    float* factor_of_all = nullptr;  ///< A_t itself, on the way, where features have their own
    /// Where heads forget as a whole: factor[t][j] = alpha_j ⋯ alpha_{t-1}, so from behind token j - 1 to in front of
    /// t.
    float factor[chunk_tokens + 1][chunk_tokens + 1];
};

SASH_INLINE constexpr int64 chunk_floats(int64 feature_pitch, int64 rows) {
    return chunk_tokens * (rows + 1) * row_weights + 2 * feature_pitch;
}

// ------------------------------------------------------------------------------------------------------------- weights

/// to[set][j] = x · row_j, j < count rounded up to four: there are as many rows. One set of rows, or two.
template <class Build, int Sets>
void dots_with_rows(const float* x, const float* const (&rows)[Sets], int64 pitch, int64 count, int64 n, float* to) {
    for (int64 j = 0; j < count; j += 4) {
        floats sum[Sets][4];
#pragma GCC unroll 2
        for (int set = 0; set < Sets; ++set)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) sum[set][i] = floats(0.0f);
        for (int64 f = 0; f < n; f += lanes<Build>) {
            const floats part = load(x + f);
#pragma GCC unroll 2
            for (int set = 0; set < Sets; ++set) {
                const float* row = rows[set] + j * pitch + f;
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) sum[set][i] = fma(part, load(row + i * pitch), sum[set][i]);
            }
        }
#pragma GCC unroll 2
        for (int set = 0; set < Sets; ++set) store_sums_of_lanes(sum[set], to + set * chunk_tokens + j);
    }
}

/// x_f = alpha_f · x_f.
template <class Build>
SASH_INLINE void multiply_row(float* x, const float* factors, int64 n) {
    for (int64 f = 0; f < n; f += lanes<Build>) store(x + f, load(x + f) * load(factors + f));
}

/// Weights of a row x that sees `count` tokens, from in front of token `at`; then x faded back to the front of the
/// chunk.
template <class Build, class Step>
void weigh_row(const chunk& c, int64 n, int64 at, int64 count, float* x, float* weight) {
    if constexpr (Step::replaces)
        dots_with_rows<Build, 2>(x, {c.entry.key, c.entry.replacement}, c.pitch, count, n, weight);
    else
        dots_with_rows<Build, 1>(x, {c.entry.key}, c.pitch, count, n, weight);
    if constexpr (Step::forgets == forgetting::by_head) {
        for (int64 j = 0; j < count; ++j) {
            weight[j] *= c.factor[at][j + 1];
            if constexpr (Step::replaces) weight[chunk_tokens + j] *= c.factor[at][j + 1];
        }
    } else if constexpr (Step::forgets == forgetting::by_channel) {
        multiply_row<Build>(x, c.factor_of_all, n);
    }
}

/// All tokens in front of token t fade by what it says. Its fades turn into factors.
template <class Build, class Step>
void fade_by_token(const chunk& c, int64 n, int64 t) {
    float* factors = c.entry.fades + t * c.pitch;
    for (int64 f = 0; f < n; f += lanes<Build>) {
        const floats fade = load(factors + f), all = fade_of_both(load(c.fade_of_all + f), fade);
        store(c.fade_of_all + f, all);
        store(c.factor_of_all + f, factor_of(all));
        store(factors + f, factor_of(fade));
    }
    for (int64 j = 0; j < t; ++j) {
        multiply_row<Build>(c.entry.key + j * c.pitch, factors, n);
        if constexpr (Step::replaces) multiply_row<Build>(c.entry.replacement + j * c.pitch, factors, n);
    }
}

/// Products of the decays of a head.
template <class Build>
void multiply_factors(chunk& c) {
    for (int t = 0; t <= chunk_tokens; ++t) {
        double product = 1;
        c.factor[t][t] = 1;
        for (int j = t - 1; j >= 0; --j) {
            product *= factor_of(c.entry.numbers[j * c.pitch + detail::entry_fade]);
            c.factor[t][j] = static_cast<float>(product);
        }
        if (t == chunk_tokens) *c.fade_of_all = fade_of(product);
    }
}

/// sum_f q_f b_f k_f, of `features` numbers.
template <class Build>
float bonus_weight(const float* query, const float* bonus, const float* key, int64 features) {
    floats sum(0.0f);
    for (int64 f = 0; f < features; f += lanes<Build>)
        sum = fma(load(query + f) * load(key + f), load_up_to(bonus + f, features - f), sum);
    return sum_of_lanes(sum);
}

/// All weights of a chunk; what fades by channel is faded, in place. bonus(r) is that of query r, [features], in the
/// rule that has one.
template <class Build, recurrent_policy P, class Bonus>
void weigh_chunk(chunk& c, const detail::state_store& store, int64 rows, [[maybe_unused]] Bonus&& bonus) {
    using Step = step_of<P>;
    constexpr bool by_channel = Step::forgets == forgetting::by_channel;
    const int64 n = store.feature_pitch;
    if constexpr (Step::forgets == forgetting::by_head) multiply_factors<Build>(c);
    if constexpr (by_channel)
        for (int64 f = 0; f < n; f += lanes<Build>) {
            cpu::store(c.fade_of_all + f, floats(no_fade));
            cpu::store(c.factor_of_all + f, floats(1.0f));
        }
    const auto weigh_queries = [&](int64 t, int64 at, int64 count) {
        for (int64 r = 0; r < rows; ++r) {
            float *query = c.query + (t * rows + r) * n, *weight = c.query_weight + (t * rows + r) * row_weights;
            [[maybe_unused]] float own = 0;
            if constexpr (Step::reads_first)
                own = bonus_weight<Build>(query, bonus(r), c.entry.key + t * c.pitch, store.features);
            weigh_row<Build, Step>(c, n, at, count, query, weight);
            if constexpr (Step::reads_first) weight[t] = own;
        }
    };
    for (int64 t = 0; t < chunk_tokens; ++t) {
        if constexpr (corrects<P>)
            weigh_row<Build, Step>(c, n, t, t, c.entry.lookup + t * c.pitch, c.lookup_weight + t * row_weights);
        if constexpr (Step::reads_first) weigh_queries(t, t, t);
        if constexpr (by_channel) fade_by_token<Build, Step>(c, n, t);
        if constexpr (!Step::reads_first) weigh_queries(t, t + 1, t + 1);
    }
}

/// The normaliser, which is one more column, of u_j = 1: z·phi(q), then z as the chunk leaves it.
template <class Build, class Step>
void advance_normaliser(const chunk& c, int64 n, int64 rows, float* z) {
    constexpr bool by_head = Step::forgets == forgetting::by_head;
    for (int64 r = 0; r < chunk_tokens * rows; r += 4)
        dots_with_rows<Build, 1>(z, {c.query + r * n}, n, 4, n, c.denominator + r);
    for (int64 r = 0; r < chunk_tokens * rows; ++r) {
        const int64 t = r / rows;
        float sum = by_head ? c.factor[t + 1][0] * c.denominator[r] : c.denominator[r];
        for (int64 j = 0; j <= t; ++j) sum += c.query_weight[r * row_weights + j];
        c.denominator[r] = sum;
    }
    for (int64 f = 0; f < n; f += lanes<Build>) {
        const floats old = load(z + f);
        floats fade(no_fade), sum = old;
        if constexpr (Step::forgets != forgetting::nothing) {
            fade = by_head ? floats(*c.fade_of_all) : load(c.fade_of_all + f);
            sum = fade * old;
        }
        for (int64 j = 0; j < chunk_tokens; ++j) {
            const floats key = load(c.entry.key + j * c.pitch + f);
            sum = by_head ? fma(floats(c.factor[chunk_tokens][j + 1]), key, sum) : sum + key;
        }
        if constexpr (Step::forgets != forgetting::nothing) sum = kept(old, fade) + sum;
        store(z + f, sum);
    }
}

// --------------------------------------------------------------------------------------------------- columns of a state

/// Columns of a state, where they are read from and where they go: `pitch` floats from row to row.
struct strip {
    const float* from = nullptr;
    float* to = nullptr;
    int64 from_pitch = 0, to_pitch = 0, features = 0;
};

/// Rows of the caller's tensors that come next. They lie far apart, where no machine looks for them by itself, and what
/// is asked for at once is not all served: so a line at a time, four rows of up to 512 bytes in 128 steps.
struct rows_ahead {
    static constexpr int most = 16;
    const char* row[4] = {};
    const char* at[most] = {};  ///< the next row of each operand
    int64 stride[most] = {};    ///< bytes
    int operands = 0, operand = 0;
    int64 left = 0;  ///< rows

    SASH_INLINE void add(const void* first, int64 bytes) {
        if (operands == most) return;
        at[operands] = static_cast<const char*>(first);
        stride[operands++] = bytes;
    }
    /// Turns to the next four rows; where there are none it stays.
    SASH_INLINE const rows_ahead& next() {
        for (int i = 0; i < 4 && left > 0; ++i, --left) {
            row[i] = at[operand];
            at[operand] += stride[operand];
            if (++operand == operands) operand = 0;
        }
        return *this;
    }
    SASH_INLINE void ask(int64 step) const { prefetch_early(row[step >> 5 & 3] + (step >> 2 & 7) * 64); }
};

/// Number f of each row of a tile, in four addresses: x86 has few registers for them.
template <int Rows>
struct tile_rows {
    const float *low, *high;
    int64 pitch, thrice;

    SASH_INLINE tile_rows(const float* x, int64 x_pitch)
        : low(x), high(x + 4 * x_pitch), pitch(x_pitch), thrice(3 * x_pitch) {}
    SASH_INLINE float operator[](int i) const {
        const float* const four = i < 4 ? low : high;
        return i % 4 == 0 ? *four : i % 4 == 1 ? four[pitch] : i % 4 == 2 ? four[2 * pitch] : four[thrice];
    }
    SASH_INLINE void next() {
        ++low;
        if (Rows > 4) ++high;
    }
};

/// Rows and tokens of a tile: as many as leave registers for what they are multiplied with.
template <class Build>
inline constexpr int chunk_tile = registers<Build> / 4;

/// sum_i = x_i S for a tile of rows x.
template <class Build, int Vectors>
SASH_INLINE void multiply_strip(const strip& s, const float* x, int64 x_pitch, const rows_ahead& ahead,
                                floats (&sum)[chunk_tile<Build>][Vectors]) {
    constexpr int rows = chunk_tile<Build>;
    tile_rows<rows> row(x, x_pitch);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) sum[i][v] = floats(0.0f);
    const float* from = s.from;
    for (int64 f = 0; f < s.features; ++f, from += s.from_pitch, row.next()) {
        ahead.ask(f);
        floats state[Vectors];
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) state[v] = load(from + v * lanes<Build>);
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) {
            const floats factor(row[i]);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v) sum[i][v] = fma(factor, state[v], sum[i][v]);
        }
    }
}

/// What the tokens write into a strip: u_j, and r_j.
struct strip_values {
    const float* u = nullptr;
    int64 pitch = 0;
    const float* removed = nullptr;
    int64 removed_pitch = 0;
};

/// sum += weight_j u_j + weight'_j r_j.
template <class Build, bool Replaces, int Vectors>
SASH_INLINE void add_token(const strip_values& values, const float* weight, int64 j, floats (&sum)[Vectors]) {
    const floats of_value(weight[j]);
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v)
        sum[v] = fma(of_value, load(values.u + j * values.pitch + v * lanes<Build>), sum[v]);
    if constexpr (Replaces) {
        const floats of_removed(weight[chunk_tokens + j]);
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v)
            sum[v] = fma(of_removed, load(values.removed + j * values.removed_pitch + v * lanes<Build>), sum[v]);
    }
}

/// Numerators of query r of each token.
template <class Build, class Step, int Vectors>
void read_strip(const chunk& c, const strip& s, const strip_values& values, int64 feature_pitch, int64 rows, int64 r,
                int64 column, int64 value_pitch, rows_ahead& ahead) {
    constexpr int tile = chunk_tile<Build>;
#pragma GCC unroll 2
    for (int first = 0; first < chunk_tokens; first += tile) {
        floats sum[tile][Vectors];
        multiply_strip<Build>(s, c.query + (first * rows + r) * feature_pitch, rows * feature_pitch, ahead.next(), sum);
#pragma GCC unroll 8
        for (int i = 0; i < tile; ++i) {
            const int t = first + i;
            const int64 at = t * rows + r;
            if constexpr (Step::forgets == forgetting::by_head) {
                const floats factor(c.factor[Step::reads_first ? t : t + 1][0]);
#pragma GCC unroll 2
                for (int v = 0; v < Vectors; ++v) sum[i][v] = factor * sum[i][v];
            }
#pragma GCC unroll 8
            for (int j = 0; j <= t; ++j)
                add_token<Build, Step::replaces>(values, c.query_weight + at * row_weights, j, sum[i]);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v)
                store(c.numerator + at * value_pitch + column + v * lanes<Build>, sum[i][v]);
        }
    }
}

/// r_t, and u_t where the rule writes an error: into `removed` and `error`, [8][Vectors registers].
template <class Build, recurrent_policy P, int Vectors>
void correct_strip(const chunk& c, const strip& s, const float* value, float* removed, float* error,
                   rows_ahead& ahead) {
    using Step = step_of<P>;
    constexpr int tile = chunk_tile<Build>;
    constexpr int64 width = Vectors * lanes<Build>;
    const strip_values values =
        P::needs_beta ? strip_values{error, width} : strip_values{value, c.pitch, removed, width};
#pragma GCC unroll 2
    for (int first = 0; first < chunk_tokens; first += tile) {
        floats sum[tile][Vectors];
        multiply_strip<Build>(s, c.entry.lookup + first * c.pitch, c.pitch, ahead.next(), sum);
#pragma GCC unroll 8
        for (int i = 0; i < tile; ++i) {
            const int t = first + i;
            if constexpr (Step::forgets == forgetting::by_head) {
                const floats factor(c.factor[t][0]);
#pragma GCC unroll 2
                for (int v = 0; v < Vectors; ++v) sum[i][v] = factor * sum[i][v];
            }
#pragma GCC unroll 8
            for (int j = 0; j < t; ++j)
                add_token<Build, Step::replaces>(values, c.lookup_weight + t * row_weights, j, sum[i]);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v) {
                float* const to = (P::needs_beta ? error : removed) + t * width + v * lanes<Build>;
                if constexpr (P::needs_beta)
                    store(to, floats(c.entry.numbers[t * c.pitch + detail::entry_beta]) *
                                  (load(value + t * c.pitch + v * lanes<Build>) - sum[i][v]));
                else
                    store(to, sum[i][v]);
            }
        }
    }
}

/// S_f = alpha S_f + sum_j key_jf u_j for a tile of tokens; `scale` is a factor of each u_j, or null.
template <class Build, forgetting Forgets, int Vectors, class Ahead>
void write_strip(const strip& s, const float* key, int64 key_pitch, const float* u, int64 u_pitch, const float* scale,
                 const float* fades, const Ahead& ahead) {
    constexpr int tokens = chunk_tile<Build>;
    tile_rows<tokens> row(key, key_pitch);
    floats value[tokens][Vectors];
#pragma GCC unroll 8
    for (int j = 0; j < tokens; ++j) {
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) {
            value[j][v] = load(u + j * u_pitch + v * lanes<Build>);
            if (scale) value[j][v] = floats(scale[j]) * value[j][v];
        }
    }
    const float of_head = Forgets == forgetting::by_head ? *fades : 0;
    const float* from = s.from;
    float* to = s.to;
    for (int64 f = 0; f < s.features; ++f, from += s.from_pitch, to += s.to_pitch, row.next()) {
        ahead.ask(f);
        const floats fade(Forgets == forgetting::by_channel ? fades[f] : of_head);
        floats old[Vectors], sum[Vectors];
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) {
            old[v] = load_once(from + v * lanes<Build>);
            sum[v] = Forgets == forgetting::nothing ? old[v] : fade * old[v];
        }
#pragma GCC unroll 8
        for (int j = 0; j < tokens; ++j) {
            const floats factor(row[j]);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v) sum[v] = fma(factor, value[j][v], sum[v]);
        }
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v)
            store(to + v * lanes<Build>, Forgets == forgetting::nothing ? sum[v] : kept(old[v], fade) + sum[v]);
    }
}

/// Writes what all tokens of a chunk write, in tiles of tokens; the first of them decays.
template <class Build, recurrent_policy P, int Vectors, class Ahead>
void write_tokens(const chunk& c, strip s, const strip_values& values, Ahead& ahead) {
    constexpr forgetting forgets = step_of<P>::forgets;
    constexpr int tile = chunk_tile<Build>;
    const float* const scaled = forgets == forgetting::by_head ? c.factor[chunk_tokens] + 1 : nullptr;
    const auto write = [&]<forgetting Forgets>(const float* key, const float* u, int64 pitch, int first) {
        write_strip<Build, Forgets, Vectors>(s, key + first * c.pitch, c.pitch, u + first * pitch, pitch,
                                             scaled ? scaled + first : nullptr, c.fade_of_all, ahead.next());
        s.from = s.to;
        s.from_pitch = s.to_pitch;
    };
    write.template operator()<forgets>(c.entry.key, values.u, values.pitch, 0);
    for (int first = tile; first < chunk_tokens; first += tile)
        write.template operator()<forgetting::nothing>(c.entry.key, values.u, values.pitch, first);
    if constexpr (step_of<P>::replaces)
        for (int first = 0; first < chunk_tokens; first += tile)
            write.template operator()<forgetting::nothing>(c.entry.replacement, values.removed, values.removed_pitch,
                                                           first);
}

/// Columns [column, column + Vectors registers) through all chunks of a block. `packed` holds as many of every row.
template <class Build, recurrent_policy P, int Vectors>
void advance_strip(const detail::state_store& store, float* state, const chunk* chunks, int64 count, int64 rows,
                   int64 column, float* packed, rows_ahead& ahead) {
    constexpr int64 width = Vectors * lanes<Build>;
    alignas(64) float removed[chunk_tokens * width], error[chunk_tokens * width];
    strip s{state + column, packed, store.value_pitch, width, store.features};
    for (int64 i = 0; i < count; ++i) {
        const chunk& c = chunks[i];
        strip_values values{c.entry.value + column, c.pitch, removed, width};
        if constexpr (corrects<P>)
            correct_strip<Build, P, Vectors>(c, s, c.entry.value + column, removed, error, ahead);
        if constexpr (P::needs_beta) values = {error, width};
        for (int64 r = 0; r < rows; ++r)
            read_strip<Build, step_of<P>, Vectors>(c, s, values, store.feature_pitch, rows, r, column,
                                                   store.value_pitch, ahead);
        if (i + 1 == count) s.to = state + column, s.to_pitch = store.value_pitch;
        write_tokens<Build, P, Vectors>(c, s, values, ahead);
        s.from = packed;
        s.from_pitch = width;
    }
}

/// Calls f<Vectors>(column) for strips of `columns` columns from left to right: two registers each, or the one that is left.
template <class Build, class F>
SASH_INLINE void for_each_strip(int64 columns, const F& f) {
    constexpr int64 wide = 2 * lanes<Build>;
    int64 column = 0;
    for (; column + wide <= columns; column += wide) f.template operator()<2>(column);
    if (column < columns) f.template operator()<1>(column);
}

/// All columns of a state through all chunks of a block, whose weights are there.
template <class Build, recurrent_policy P>
void advance_columns(const detail::state_store& store, float* state, const chunk* chunks, int64 count, int64 rows,
                     float* packed, rows_ahead& ahead) {
    for_each_strip<Build>(store.value_pitch, [&]<int Vectors>(int64 column) {
        advance_strip<Build, P, Vectors>(store, state, chunks, count, rows, column, packed, ahead);
    });
}

}  // namespace sash::cpu
