#pragma once
/// \file
/// Gates: what a layer projects, made into a decay. Each function here takes raw numbers, as they leave a projection,
/// and gives a natural logarithm g <= 0 that `.decay` takes (Mamba's `step` and `sigmoid`, which makes a beta, apart).
///
/// Plain functions of one number; N is float, double or a SIMD batch. A NaN stays one. Gates must be formed in fp32 or
/// better: exp(A_log) of an fp16 A_log is soon infinite.
#include <sash/feature_map.hpp>

#include <cmath>
#include <limits>

namespace sash::gate {

/// log(1 + exp(x)), without overflow.
template <class N>
SASH_INLINE constexpr N softplus(N x) {
    using std::exp;
    using std::log1p;
    const N minus_magnitude = select(x > N(0), N(-x), x);
    return select(x < N(0), N(0), x) + N(log1p(exp(minus_magnitude)));
}

/// log sigmoid(x) = -softplus(-x).
template <class N>
SASH_INLINE constexpr N logsigmoid(N x) {
    return -softplus(N(-x));
}

/// 1 / (1 + exp(-x)): beta of the delta rule (twice it, where a model allows negative eigenvalues).
template <class N>
SASH_INLINE constexpr N sigmoid(N x) {
    using std::exp;
    return N(1) / (N(1) + N(exp(-x)));
}

/// GLA, simple GLA: logsigmoid(x) / 16; the division comes after the logarithm. Liger-GLA: the same, of the raw keys.
/// Source: Yang et al. 2024, "Gated linear attention transformers", section 4.
template <class N>
SASH_INLINE constexpr N gla(N x, N divisor = N(16)) {
    return logsigmoid(x) / divisor;
}

/// Mamba and Mamba-2: the step dt = clamp(softplus(raw + bias), least, most). It also scales the value: v = dt · x.
template <class N>
SASH_INLINE constexpr N mamba_step(N raw, N bias = N(0), N least = N(0),
                                   N most = N(std::numeric_limits<float>::max())) {
    const N step = softplus(N(raw + bias));
    return select(step < least, least, select(step > most, most, step));
}
/// g = dt · A with A = -exp(A_log), per head (Mamba-2), or per channel and feature (Mamba).
/// Source: Dao and Gu 2024, "Transformers are SSMs", section 7.
template <class N>
SASH_INLINE constexpr N mamba(N step, N A_log) {
    using std::exp;
    return -step * N(exp(A_log));
}

/// MOHAWK's discrete Mamba-2: alpha = sigmoid(-a), so g = -softplus(a); no A, and the value is not scaled.
/// Source: Bick et al. 2024, "Transformers to SSMs", section 3, and its public code.
template <class N>
SASH_INLINE constexpr N mohawk(N a) {
    return -softplus(a);
}

/// Gated DeltaNet, per head, and KDA, per channel: g = -exp(A_log) softplus(x + dt_bias).
/// Source: Yang et al. 2024, "Gated delta networks", section 3; Kimi team 2025, "Kimi Linear", section 3.
template <class N>
SASH_INLINE constexpr N gated_delta(N x, N A_log, N dt_bias) {
    using std::exp;
    return -N(exp(A_log)) * softplus(N(x + dt_bias));
}
template <class N>
SASH_INLINE constexpr N kda(N x, N A_log, N dt_bias) {
    return gated_delta(x, A_log, dt_bias);
}

/// KDA with a bounded gate: g = bound · sigmoid(exp(A_log) (x + dt_bias)), bound <= g < 0. Models without A_log: A_log = 0.
template <class N>
SASH_INLINE constexpr N kda_bounded(N x, N A_log, N dt_bias, N bound = N(-5)) {
    using std::exp;
    return bound * sigmoid(N(N(exp(A_log)) * (x + dt_bias)));
}

/// RWKV-6: g = -exp(w), per channel; w = lambda + tanh(x_w A) B.
/// Source: Peng et al. 2024, "Eagle and Finch", section 4.
template <class N>
SASH_INLINE constexpr N rwkv6(N w) {
    using std::exp;
    return -N(exp(w));
}

/// QRWKV6: the same, at least -5. (llama.cpp does not clamp.)
template <class N>
SASH_INLINE constexpr N qrwkv6(N w, N least = N(-5)) {
    const N g = rwkv6(w);
    return select(g < least, least, g);
}

/// RWKV-7: g = -exp(-1/2) sigmoid(w), per channel, between -0.6065 and 0; w = w0 + tanh(x_w A) B.
/// Source: Peng et al. 2025, "RWKV-7 Goose", section 4.
template <class N>
SASH_INLINE constexpr N rwkv7(N w) {
    return N(-0.60653065971263342) * sigmoid(w);
}

/// QRWKV7 writes the same as g = -exp(-1/2 - softplus(-w)).
template <class N>
SASH_INLINE constexpr N qrwkv7(N w) {
    using std::exp;
    return -N(exp(N(-0.5) - softplus(N(-w))));
}

}  // namespace sash::gate
