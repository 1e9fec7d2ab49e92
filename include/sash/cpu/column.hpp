#pragma once
/// \file
/// States of one column: values are one number each, as in Mamba's selective scan. There are no columns to fill the lanes
/// with, so the features lie in them:
///
///     s = alpha ⊙ s + phi(k) v        out_r = Σ_f phi(q_r)_f s_f
///
/// Each number sees the operations of the general pass in the same order, one rounding apart: alpha s is rounded, then
/// phi(k) v is added by a multiply-add. The sum over the features is a sum of registers, then of lanes.
#include <sash/cpu/simd.hpp>

namespace sash::cpu {

/// What one token does to a column of `features` numbers, [feature_pitch] with zeros behind them.
struct column_token {
    const float* key = nullptr;     ///< phi(k), [feature_pitch]
    const float* alphas = nullptr;  ///< [feature_pitch], where each feature forgets by itself; else null
    float alpha = 1, value = 0;
};

/// Writes a token and reads `rows` queries, `query_pitch` apart, after it (or before it). Row r of `numerator`, `pitch`
/// apart, is S^T phi(q_r), then zeros. Without a token it only reads.
template <class Build, bool ReadsFirst>
void step_column(float* column, int64 features, const column_token* token, const float* query, int64 query_pitch,
                 int64 rows, float* numerator, int64 pitch) {
    constexpr int most = 4;  // readers at a time; the state is written with the first of them
    for (int64 row = 0; row == 0 || row < rows; row += most) {
        const int64 now = rows - row < most ? rows - row : most;
        floats sum[most] = {floats(0.0f), floats(0.0f), floats(0.0f), floats(0.0f)};
        const bool writes = token != nullptr && (ReadsFirst ? row + most >= rows : row == 0);
        for (int64 f = 0; f < features; f += lanes<Build>) {
            const floats before = load(column + f);
            floats s = before;
            if (writes) {
                const std::uint32_t there = features - f >= 32 ? ~0u : (1u << (features - f)) - 1;
                const floats alpha = token->alphas ? load(token->alphas + f) : floats(token->alpha);
                // behind the features 0 · infinity must not be written
                const floats value = select(mask_from(there), floats(token->value), floats(0.0f));
                s = fma(load(token->key + f), value, alpha * before);
                store(column + f, s);
            }
            for (int64 r = 0; r < now; ++r)
                sum[r] = fma(load(query + (row + r) * query_pitch + f), ReadsFirst ? before : s, sum[r]);
        }
        for (int64 r = 0; r < now; ++r) {
            float* to = numerator + (row + r) * pitch;
            for (int64 i = 0; i < pitch; i += lanes<Build>) store(to + i, floats(0.0f));
            *to = sum_of_lanes(sum[r]);
        }
    }
}

}  // namespace sash::cpu
