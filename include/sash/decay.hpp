#pragma once
/// \file
/// Decays: how fast a state forgets. A decay g is the natural logarithm of the factor alpha = exp(g) that the state is
/// multiplied by before a token is written; so g <= 0 always, 0 forgets nothing, -inf everything. alpha is not rounded
/// to fp32, where it would be off by 3e-8, token after token: 1 - alpha is, relative error 4e-7 (cpu/fade.hpp).
///
/// A decay is a small trivially copyable struct that says with
///
///     static constexpr bool needs_input     a token brings `.decay`
///     static constexpr bool per_channel     one g for each feature, so for each row of a state     (optional: false)
///     constexpr float of_head(int64) const  g of a gate head: the decay is constant                (optional)
///
/// Functions that make a g out of what a layer projects are in gate.hpp.
#include <sash/shape.hpp>
#include <sash/view.hpp>

#include <cmath>

namespace sash {

namespace detail {

/// Is this the logarithm of a factor? Bits are looked at, not values: a compiler told that there is no NaN must not
/// drop the check.
SASH_INLINE constexpr bool is_decay(float g) {
    const std::uint32_t bits = sash::detail::bit_cast<std::uint32_t>(g);
    return ((bits - 0x80000000u <= 0x7f800000u) | (bits == 0)) != 0;
}

}  // namespace detail

/// Nothing is ever forgotten: alpha = 1.
struct no_decay {
    static constexpr bool needs_input = false;
    friend constexpr bool operator==(const no_decay&, const no_decay&) = default;
};

/// One number per gate head, the same for every token: RetNet, lightning attention, SUPRA. Made by retnet_decays,
/// lightning_decays, alibi_decays, or from numbers of your own. `shape.gate_heads` must be `heads`: say it where the
/// decays differ between query heads that share a key head, and each of them gets a state of its own.
struct constant_per_head {
    static constexpr bool needs_input = false;
    static constexpr int64 most = 256;  ///< gate heads

    float logs[most] = {};  ///< g of each gate head, natural logarithm
    int64 heads = 0;        ///< how many there are

    constexpr constant_per_head() = default;
    /// g_h = logs[h].
    SASH_INLINE constexpr constant_per_head(std::span<const float> g) : heads(static_cast<int64>(g.size())) {
        for (int64 h = 0; h < heads && h < most; ++h) logs[h] = g[static_cast<std::size_t>(h)];
    }

    SASH_INLINE constexpr float of_head(int64 gate_head) const { return logs[gate_head]; }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s) const {
        if (heads > most) refuse("decays are for ", heads, " heads, must be for at most ", most);
        if (heads != s.gate_heads)
            refuse("decays are for ", heads, " heads, must be for gate_heads, which is ", s.gate_heads);
        for (int64 h = 0; h < heads; ++h)
            if (!detail::is_decay(logs[h])) refuse("decay of gate head ", h, " is ", logs[h], ", must be at most 0");
    }
    friend constexpr bool operator==(const constant_per_head&, const constant_per_head&) = default;
};

/// One number per token and gate head, given with the token: `.decay` [tokens, gate_heads, 1]. Mamba-2, simple GLA.
struct per_head_and_token {
    static constexpr bool needs_input = true;
    friend constexpr bool operator==(const per_head_and_token&, const per_head_and_token&) = default;
};

/// One number per token, gate head and feature: `.decay` [tokens, gate_heads, features]. Feature c of the keys, so row c
/// of the state, forgets at a pace of its own. GLA, RWKV-6 and 7, KDA.
struct per_channel_and_token {
    static constexpr bool needs_input = true;
    static constexpr bool per_channel = true;
    friend constexpr bool operator==(const per_channel_and_token&, const per_channel_and_token&) = default;
};

namespace detail {

/// g(h) for each of `heads` heads.
template <class Build, class F>
constant_per_head decays_by(int64 heads, F&& g) {
    constexpr int64 most = constant_per_head::most;
    require<Build>(heads >= 1 && heads <= most, "decays for ", heads, " heads: must be 1 to ", most);
    constant_per_head d;
    d.heads = heads;
    for (int64 h = 0; h < heads && h < most; ++h) d.logs[h] = static_cast<float>(g(h));
    return d;
}

/// The slope of head h of `heads` with linear biases: 2^(-8 (h + 1) / heads) for a power of two; else those of the power
/// of two below, then every second one of twice that power.
SASH_INLINE double alibi_slope(int64 h, int64 heads) {
    int64 power = 1;
    while (2 * power <= heads) power *= 2;
    return h < power ? std::exp2(-8.0 * double(h + 1) / double(power))
                     : std::exp2(-4.0 * double(2 * (h - power) + 1) / double(power));
}

}  // namespace detail

/// alpha_h = 1 - 2^(-5 - h). Source: Sun et al. 2023, "Retentive network", section 2.3.
template <class Build = build::here>
constant_per_head retnet_decays(int64 heads) {
    return detail::decays_by<Build>(heads, [](int64 h) { return std::log1p(-std::exp2(-5.0 - double(h))); });
}

/// g_h = -2^(-8 (h + 1) / heads), the slopes of ALiBi: SUPRA. (Heads that are no power of two: as in ALiBi's code.)
/// Source: Press et al. 2021, "Train short, test long"; Mercat et al. 2024, "Linearizing large language models".
template <class Build = build::here>
constant_per_head alibi_decays(int64 heads) {
    return detail::decays_by<Build>(heads, [heads](int64 h) { return -detail::alibi_slope(h, heads); });
}

/// g_h = -2^(-8 (h + 1) / heads) · (1 - layer / (layers - 1 + 1e-5) + 1e-5): lightning attention as in MiniMax-01; the
/// last layer forgets almost nothing. (flash-linear-attention uses -(8 / heads) (1 - layer / layers) h: another model.)
/// Source: MiniMax 2025, "MiniMax-01: scaling foundation models with lightning attention", and its public code.
template <class Build = build::here>
constant_per_head lightning_decays(int64 heads, int64 layer, int64 layers) {
    detail::require<Build>(layer >= 0 && layer < layers, "layer is ", layer, ", must be 0 to ", layers - 1);
    const double slower = 1 - double(layer) / (double(layers) - 1 + 1e-5) + 1e-5;
    return detail::decays_by<Build>(heads,
                                    [=](int64 h) { return -std::exp2(-8.0 * double(h + 1) / double(heads)) * slower; });
}

namespace ask {

/// Is there a g for each feature?
template <class Decay>
inline constexpr bool per_channel = [] {
    if constexpr (requires { Decay::per_channel; })
        return static_cast<bool>(Decay::per_channel);
    else
        return false;
}();

/// Is g the same for all tokens?
template <class Decay>
inline constexpr bool constant_decay = requires(const Decay& d, int64 h) {
    { d.of_head(h) } -> std::convertible_to<float>;
};

}  // namespace ask

namespace detail {

/// Number (token, head, i) of a tensor, whatever its type and strides.
SASH_INLINE constexpr float number_at(const input& x, int64 token, int64 head, int64 i = 0) {
    const void* p = x.at(token, head);
    switch (x.type) {
        case scalar::f16:
            return static_cast<const float16*>(p)[i * x.dim_stride];
        case scalar::bf16:
            return static_cast<const bfloat16*>(p)[i * x.dim_stride];
        default:
            return static_cast<const float*>(p)[i * x.dim_stride];
    }
}

/// Refuses number i of a row of decays.
template <class Build>
[[noreturn]] SASH_COLD void refuse_decay(const input& decay, int64 t, int64 h, int64 i) {
    const float g = number_at(decay, t, h, i);
    constexpr const char* meaning = ", must be at most 0: it is the natural logarithm of a factor between 0 and 1";
    if (decay.dim == 1) refuse<Build>("decay of token ", t, ", gate head ", h, " is ", g, meaning);
    refuse<Build>("decay of token ", t, ", gate head ", h, ", feature ", i, " is ", g, meaning);
}

/// Refuses a decay above 0 (a factor above 1, or a factor given where its logarithm is due) and NaN, before anything
/// is written. Cost O(tokens · gate_heads · dim): eight at a time where they lie side by side.
template <class Build>
void check_decay(const input& decay) {
    const bool is_plain = decay.type == scalar::f32 && decay.dim_stride == 1;
    for (int64 t = 0; t < decay.tokens; ++t)
        for (int64 h = 0; h < decay.heads; ++h) {
            int64 i = 0;
            if (is_plain)
                for (const float* g = static_cast<const float*>(decay.at(t, h)); i + 8 <= decay.dim; i += 8) {
                    int good = 0;
                    for (int64 j = 0; j < 8; ++j) good += is_decay(g[i + j]);
                    if (good != 8) break;
                }
            for (; i < decay.dim; ++i)
                if (!is_decay(number_at(decay, t, h, i))) refuse_decay<Build>(decay, t, h, i);
        }
}

/// Refuses a beta outside [0, 2], the range in which the delta rule neither grows nor flips what it stores.
template <class Build>
void check_beta(const input& beta) {
    for (int64 t = 0; t < beta.tokens; ++t)
        for (int64 h = 0; h < beta.heads; ++h) {
            const float b = number_at(beta, t, h);
            const std::uint32_t bits = sash::detail::bit_cast<std::uint32_t>(b);
            require<Build>(bits <= 0x40000000u || bits == 0x80000000u, "beta of token ", t, ", gate head ", h, " is ",
                           b, ", must be 0 to 2");
        }
}

}  // namespace detail
}  // namespace sash
