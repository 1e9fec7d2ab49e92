#pragma once
/// \file
/// Linear attention: in place of keys and values, a state of fixed size.
#include <sash/decay.hpp>
#include <sash/feature_map.hpp>
#include <sash/policy.hpp>

#include <numeric>

namespace sash {

/// How a token is written: S = alpha S + phi(k) v^T.
struct additive {};

/// What a read is divided by: phi(q)·z with z = sum of the decayed phi(k); an ordinary weighted mean of values.
struct sum {};

/// Nothing: the read is multiplied by the scale, 1 / sqrt(key_dim) unless the scores say otherwise. (A norm over the
/// head usually follows in such models; it is no part of attention.)
struct no_normaliser {};

/// Linear attention with a feature map phi. For each head a state S [features, value_dim] in fp32 and, with a
/// normaliser, z [features]:
///
///     S_t = exp(g_t) S_{t-1} + phi(k_t) v_t^T          z_t = exp(g_t) z_{t-1} + phi(k_t)
///     out_t = S_t^T phi(q_t) / (z_t · phi(q_t))        or, with no_normaliser,  scale · S_t^T phi(q_t)
///
/// The token itself is written before it is read. lse is log(z·phi(q)); without a normaliser there is none. Where the
/// denominator is 0, as in an empty state, the row is 0 and its lse -inf. A NaN that is written stays for ever: a state
/// cannot forget it. Memory is constant; the work of a token is features · value_dim for each state and each head.
///
/// There are as many states as the largest of key, value, gate and key map heads; output head h reads state
/// h / (heads / states).
///
///     linear{}                                   elu + 1, nothing forgotten, normalised: Katharopoulos et al. 2020
///     linear<hedgehog>{.map = {…}}               a learned map
///     linear<identity, per_head_and_token, additive, no_normaliser>{}     gated, not normalised: Mamba-2, simple GLA
///
/// Source: Katharopoulos et al. 2020, "Transformers are RNNs", section 3.3; Yang et al. 2024, "Gated linear attention".
template <class FeatureMap = elu_plus_one, class Decay = no_decay, class Update = additive, class Normaliser = sum>
struct linear {
    FeatureMap map = {};
    Decay decay = {};

    static_assert(
        ask::feature_map<FeatureMap>,
        "sash: a feature map is trivially copyable and has operator()(N) or width, query and key: see feature_map.hpp");
    static_assert(requires { { Decay::needs_input } -> std::convertible_to<bool>; },
                  "sash: the second argument of linear is a decay: no_decay or per_head_and_token");
    static_assert(std::is_same_v<Update, additive>, "sash: the third argument of linear is an update: additive");
    static_assert(std::is_same_v<Normaliser, sum> || std::is_same_v<Normaliser, no_normaliser>,
                  "sash: the fourth argument of linear is a normaliser: sum or no_normaliser");
    static_assert(std::is_same_v<Normaliser, no_normaliser> || ask::non_negative<FeatureMap>,
                  "sash: the features of this map may be negative, so their sum must not divide: use no_normaliser "
                  "(or say `static constexpr bool non_negative = true` in a map that is)");

    static constexpr bool has_normaliser = std::is_same_v<Normaliser, sum>;
    static constexpr bool needs_decay = Decay::needs_input;

    /// Rows of a state.
    SASH_INLINE constexpr int64 features(int64 key_dim) const { return ask::width(map, key_dim); }

    /// States of a resolved shape: the least number that every operand's heads divide (so the largest, if all divide
    /// it).
    SASH_INLINE constexpr int64 states(const shape& s) const {
        int64 n = std::lcm(std::lcm(s.key_heads, s.value_heads), ask::key_map_heads(map, s.key_dim));
        if constexpr (needs_decay) n = std::lcm(n, s.gate_heads);
        return n;
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s) const {
        if constexpr (requires { map.validate(refuse, s); }) map.validate(refuse, s);
        if (features(s.key_dim) < 1) refuse("the feature map is ", features(s.key_dim), " wide, must be at least 1");
    }
};

linear() -> linear<>;
template <class FeatureMap>
linear(FeatureMap) -> linear<FeatureMap>;
template <class FeatureMap, class Decay>
linear(FeatureMap, Decay) -> linear<FeatureMap, Decay>;

namespace detail {

/// The heads of one layer around a recurrent state: which operand head serves which state, and who reads it.
struct state_heads {
    int64 states = 1;   ///< number of states
    int64 readers = 1;  ///< output heads that read one state: state s serves [s · readers, (s + 1) · readers)

    /// The head of an operand with `count` heads that state s is written with.
    SASH_INLINE constexpr int64 of_state(int64 s, int64 count) const { return s / (states / count); }
    /// The head of an operand with `count` heads that output head h is read with.
    SASH_INLINE constexpr int64 of_output(int64 h, int64 count) const { return h / (states * readers / count); }
};

template <recurrent_policy P>
SASH_INLINE constexpr state_heads heads_of_states(const P& p, const shape& s) {
    const int64 states = p.states(s);
    return {states, s.heads / states};
}

}  // namespace detail
}  // namespace sash
