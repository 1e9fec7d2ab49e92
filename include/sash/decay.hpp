#pragma once
/// \file
/// Decays: how fast a state forgets. A decay g is the natural logarithm of the factor alpha = exp(g) that the state
/// is multiplied by before a token is written; so g <= 0 always, 0 forgets nothing, -inf everything.
///
/// A decay is a small trivially copyable struct; it says with `needs_input` whether a token brings `.decay`.
#include <sash/view.hpp>

namespace sash {

/// Nothing is ever forgotten: alpha = 1.
struct no_decay {
    static constexpr bool needs_input = false;
    friend constexpr bool operator==(const no_decay&, const no_decay&) = default;
};

/// One number per token and gate head, given with the token: `.decay` [tokens, gate_heads, 1]. Mamba-2, simple GLA.
struct per_head_and_token {
    static constexpr bool needs_input = true;
    friend constexpr bool operator==(const per_head_and_token&, const per_head_and_token&) = default;
};

namespace detail {

/// Number (token, head) of a decay tensor, whatever its type and strides.
SASH_INLINE constexpr float decay_at(const input& decay, int64 token, int64 head) {
    const void* p = decay.at(token, head);
    switch (decay.type) {
        case scalar::f16: return *static_cast<const float16*>(p);
        case scalar::bf16: return *static_cast<const bfloat16*>(p);
        default: return *static_cast<const float*>(p);
    }
}

/// Refuses a decay above 0 (a factor above 1, or a factor given where its logarithm is due) and NaN, before anything
/// is written. Bits are looked at, not values: a compiler told that there is no NaN must not drop the check. Cost
/// O(tokens · gate_heads).
template <class Build>
void check_decay(const input& decay) {
    for (int64 t = 0; t < decay.tokens; ++t)
        for (int64 h = 0; h < decay.heads; ++h) {
            const float g = decay_at(decay, t, h);
            const std::uint32_t bits = std::bit_cast<std::uint32_t>(g);
            const bool negative_or_zero = (bits >> 31 != 0 && bits <= 0xff800000u) || bits == 0;
            require<Build>(negative_or_zero, "decay of token ", t, ", gate head ", h, " is ", g,
                           ", must be at most 0: it is the natural logarithm of a factor between 0 and 1");
        }
}

}  // namespace detail
}  // namespace sash
