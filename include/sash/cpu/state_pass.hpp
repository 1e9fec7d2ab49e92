#pragma once
/// \file
/// One pass over some columns of a state: down its rows once, each loaded, written with up to four tokens, read by every
/// query of those tokens, and stored. Columns of S never mix, so they lie in the lanes.
#include <sash/cpu/fade.hpp>
#include <sash/cpu/token_block.hpp>

namespace sash::cpu {

/// What one pass over columns of a state works on: `Tokens` tokens to write, in order, and `Rows` queries a token.
inline constexpr int most_tokens = 4, most_rows = 4;
struct state_pass {
    float* state = nullptr;  ///< S [features][columns], `pitch` floats apart
    int64 features = 0, columns = 0, pitch = 0;
    float* ahead = nullptr;                ///< what comes next, laid out as these columns: asked for meanwhile; or null
    const float* key[most_tokens] = {};    ///< phi(k), [features]
    const float* value[most_tokens] = {};  ///< u, [columns]
    float fade[most_tokens] = {};          ///< where heads forget as a whole
    const float* fades[most_tokens] = {};  ///< [features], where each feature has its own
    const float* replacement = nullptr;    ///< d, [features], and
    const float* removed = nullptr;        ///< r, [columns], of a single token
    const float* query[2 * most_rows] = {};  ///< phi(q), [features]; token-major
    float* numerator[2 * most_rows] = {};    ///< S^T phi(q), [columns]
};

/// The same step on a state that is kept as Number: widened when it is loaded, rounded when it is stored.
template <class Step, class Number>
struct kept_as : Step {
    using number = Number;
};
/// What a pass works on: memory that a step may keep other numbers in than floats.
template <class Step>
SASH_INLINE auto* numbers_in(float* state) {
    if constexpr (requires { typename Step::number; })
        return reinterpret_cast<typename Step::number*>(state);
    else
        return state;
}

/// sum_r += phi(q_r)_f · s for one row f of the state.
template <class Build, int Rows, int Vectors>
SASH_INLINE void read_state_row(const float* const* query, int64 f, const floats (&s)[Vectors],
                                floats (*sum)[Vectors]) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const floats phi(query[r][f]);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sum[r][v] = fma(phi, s[v], sum[r][v]);
    }
}

/// Columns [column, column + Vectors registers) of a pass. Tokens = 0 reads only. (The pragmas keep the arrays in
/// registers: g++ 12 works on them in memory without.)
template <class Build, int Tokens, int Rows, int Vectors, class Step>
void pass_columns(const state_pass& p, int64 column) {
    constexpr int steps = Tokens > 0 ? Tokens : 1, readers = steps * Rows;
    floats value[steps][Vectors], removed[Vectors], fade[steps], sum[readers > 0 ? readers : 1][Vectors];
    const float *key[steps], *fades[steps], *query[readers > 0 ? readers : 1];
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) {
        key[t] = p.key[t];
        fades[t] = p.fades[t];
        fade[t] = floats(p.fade[t]);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) value[t][v] = load(p.value[t] + column + v * lanes<Build>);
    }
    if constexpr (Step::replaces && Tokens > 0) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) removed[v] = load(p.removed + column + v * lanes<Build>);
    }
#pragma GCC unroll 8
    for (int r = 0; r < readers; ++r) {
        query[r] = p.query[r];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sum[r][v] = floats(0.0f);
    }

    auto* row = numbers_in<Step>(p.state) + column;
    const auto* ahead = p.ahead ? numbers_in<Step>(p.ahead) + column : nullptr;
    for (int64 f = 0; f < p.features; ++f, row += p.pitch) {
        if (Tokens <= 1 && ahead) {
            constexpr int line = static_cast<int>(detail::cache_line / sizeof *row);
            for (int i = 0; i < Vectors * lanes<Build>; i += line)
                Tokens == 1 ? prefetch_to_write(ahead + i) : prefetch(ahead + i);
            ahead += p.pitch;
        }
        floats s[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) s[v] = load(row + v * lanes<Build>);
#pragma GCC unroll 4
        for (int t = 0; t < steps; ++t) {
            if constexpr (Step::reads_first) read_state_row<Build, Rows>(query + t * Rows, f, s, sum + t * Rows);
            if constexpr (Tokens > 0) {
                const floats phi(key[t][f]);
                const floats by = Step::forgets == forgetting::by_channel ? floats(fades[t][f]) : fade[t];
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; ++v) {
                    floats sum_of_new = Step::forgets == forgetting::nothing ? s[v] : by * s[v];
                    if constexpr (Step::replaces) sum_of_new = fma(floats(p.replacement[f]), removed[v], sum_of_new);
                    sum_of_new = fma(phi, value[t][v], sum_of_new);
                    s[v] = Step::forgets == forgetting::nothing ? sum_of_new : kept(s[v], by) + sum_of_new;
                }
            }
            if constexpr (!Step::reads_first) read_state_row<Build, Rows>(query + t * Rows, f, s, sum + t * Rows);
        }
        if constexpr (Tokens > 0) {
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) store_normal(row + v * lanes<Build>, s[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < readers; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) store(p.numerator[r] + column + v * lanes<Build>, sum[r][v]);
    }
}

/// All columns, as many at a time as the registers hold: one token wants long rows, several tokens want few columns.
template <class Build, int Tokens, int Rows, class Step>
void pass(const state_pass& p) {
    constexpr int tokens = Tokens > 0 ? Tokens : 1;
    constexpr int budget = registers<Build> / (tokens * (Rows + (Tokens > 0)) + 1 + Step::replaces);
    constexpr int wide = budget >= 8 ? 8 : budget >= 4 ? 4 : budget >= 2 ? 2 : 1;
    int64 column = 0;
    for (; column + wide * lanes<Build> <= p.columns; column += wide * lanes<Build>)
        pass_columns<Build, Tokens, Rows, wide, Step>(p, column);
    if constexpr (wide > 4)
        for (; column + 4 * lanes<Build> <= p.columns; column += 4 * lanes<Build>)
            pass_columns<Build, Tokens, Rows, 4, Step>(p, column);
    if constexpr (wide > 1)
        for (; column < p.columns; column += lanes<Build>) pass_columns<Build, Tokens, Rows, 1, Step>(p, column);
}

/// The same for a number of queries known when it runs.
template <class Build, int Tokens, class Step>
void pass(const state_pass& p, int64 rows) {
    switch (rows) {
        case 0:
            return pass<Build, Tokens, 0, Step>(p);
        case 1:
            return pass<Build, Tokens, 1, Step>(p);
        case 2:
            return pass<Build, Tokens, 2, Step>(p);
        case 3:
            return pass<Build, Tokens, 3, Step>(p);
        default:
            return pass<Build, Tokens, 4, Step>(p);
    }
}

using no_step = step<forgetting::nothing>;

}  // namespace sash::cpu
