#pragma once
/// \file
/// States of one column: values are one number each, as in Mamba's selective scan. There are no columns to fill the lanes
/// with, so the features lie in them:
///
///     s = alpha ⊙ s + phi(k) v        out_r = Σ_f phi(q_r)_f s_f
///
/// A sum over the features is one of registers, then of their lanes.
#include <sash/cpu/fade.hpp>
#include <sash/cpu/token_block.hpp>

namespace sash::cpu {

/// What one token does to a column of `features` numbers, [feature_pitch] with zeros behind them.
struct column_token {
    const float* key = nullptr;    ///< phi(k), [feature_pitch]
    const float* fades = nullptr;  ///< [feature_pitch], where each feature forgets by itself; else null
    float fade = no_fade, value = 0;
};

/// Writes a token and reads up to `Rows` queries, `query_pitch` apart, after it (or before it). Row r of `numerator`,
/// `pitch` apart, is S^T phi(q_r), then zeros. Without a token it only reads.
template <class Build, class Step, int Rows>
void step_column_for(float* column, int64 features, const column_token* token, const float* query, int64 query_pitch,
                     int64 rows, float* numerator, int64 pitch) {
    floats sum[Rows];
    for (int r = 0; r < Rows; ++r) sum[r] = floats(0.0f);
    for (int64 f = 0; f < features; f += lanes<Build>) {
        const floats before = load(column + f);
        floats s = before;
        if (token) {
            // behind the features nothing is written, not even 0 · infinity
            const std::uint32_t there = features - f >= lanes<Build> ? ~0u : (1u << (features - f)) - 1;
            const floats value = select(mask_from(there), floats(token->value), floats(0.0f));
            const floats key = load(token->key + f);
            const floats fade = token->fades ? load(token->fades + f) : floats(token->fade);
            s = Step::forgets == forgetting::nothing ? fma(key, value, before)
                                                     : kept(before, fade) + fma(key, value, fade * before);
            store(column + f, s);
        }
        for (int r = 0; r < Rows && r < rows; ++r)
            sum[r] = fma(load(query + r * query_pitch + f), Step::reads_first ? before : s, sum[r]);
    }
    for (int r = 0; r < Rows && r < rows; ++r) {
        float* to = numerator + r * pitch;
        for (int64 i = 0; i < pitch; i += lanes<Build>) store(to + i, floats(0.0f));
        *to = sum_of_lanes(sum[r]);
    }
}

/// The same for any number of queries.
template <class Build, class Step>
void step_column(float* column, int64 features, const column_token* token, const float* query, int64 query_pitch,
                 int64 rows, float* numerator, int64 pitch) {
    constexpr int most = 4;
    if (rows <= 1)
        return step_column_for<Build, Step, 1>(column, features, token, query, query_pitch, rows, numerator, pitch);
    for (int64 row = 0; row < rows; row += most) {
        const bool writes =
            Step::reads_first ? row + most >= rows : row == 0;  // the last that read, or the first, write too
        step_column_for<Build, Step, most>(column, features, writes ? token : nullptr, query + row * query_pitch,
                                           query_pitch, rows - row, numerator + row * pitch, pitch);
    }
}

/// A step of the selective scan: one row is read after the token, and each feature forgets by exp(g). The same operations
/// on rows that lie ready: whole registers of floats.
template <class Build>
SASH_INLINE float scan_column(float* column, int64 features, const float* key, float value, const float* g,
                              const float* query) {
    floats sum(0.0f);
    for (int64 f = 0; f < features; f += lanes<Build>) {
        const floats before = load(column + f), fade = fade_of_log(load(g + f));
        const floats s = kept(before, fade) + fma(load(key + f), floats(value), fade * before);
        store(column + f, s);
        sum = fma(load(query + f), s, sum);
    }
    return sum_of_lanes(sum);
}

}  // namespace sash::cpu
