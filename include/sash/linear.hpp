#pragma once
/// \file
/// Linear attention: in place of keys and values, a state of fixed size.
#include <sash/decay.hpp>
#include <sash/feature_map.hpp>
#include <sash/policy.hpp>

#include <cmath>
#include <numeric>
#include <span>

namespace sash {

// How a token changes the state, and when it is read. (I: the identity; a, d, k, u: vectors of features; v: of values.)

/// S_t = alpha S_{t-1} + k v^T, then read: linear attention and everything gated.
struct additive {
    static constexpr bool needs_beta = false, needs_vectors = false, reads_first = false;
    friend constexpr bool operator==(const additive&, const additive&) = default;
};

/// The delta rule: what the state would answer to k is corrected towards v. A token brings `.beta` [tokens, gate_heads,
/// 1], 0 to 2.
///
///     S_t = S' + beta k (v - S'^T k)^T        S' = alpha S_{t-1}
///
/// The state is decayed before the error is taken. It stays bounded where beta |k|^2 <= 2, so the keys must be unit
/// vectors: the map has to be l2_normalised, or normalised_by_caller.
/// Source: Schlag et al. 2021, "Linear transformers are secretly fast weight programmers"; Yang et al. 2024, "Gated
/// delta networks".
struct delta {
    static constexpr bool needs_beta = true, needs_vectors = false, reads_first = false;
    friend constexpr bool operator==(const delta&, const delta&) = default;
};

/// S is read before the token is written, and the token itself weighs u instead of 1:
///
///     out_t = scale (S_{t-1} + (u ⊙ k) v^T)^T q        S_t = alpha S_{t-1} + k v^T
///
/// `bonus` is u, [bonus_heads, features] with bonus_heads a divisor of `heads`; a view: the memory must outlive the
/// cache. `read` brings no token and so has no bonus. RWKV-5 and 6.
/// Source: Peng et al. 2024, "Eagle and Finch: RWKV with matrix-valued states and dynamic recurrence", section 4.
struct exclusive_bonus {
    std::span<const float> bonus = {};  ///< u, [bonus_heads, features]

    static constexpr bool needs_beta = false, needs_vectors = false, reads_first = true;

    SASH_INLINE constexpr int64 heads(int64 features) const { return static_cast<int64>(bonus.size()) / features; }
    SASH_INLINE constexpr const float* of_head(int64 bonus_head, int64 features) const {
        return bonus.data() + bonus_head * features;
    }
    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s, int64 features) const {
        if (bonus.empty() || static_cast<int64>(bonus.size()) % features != 0)
            refuse("bonus holds ", bonus.size(), " numbers, must be a multiple of the features, which are ", features);
        else if (s.heads % heads(features) != 0)
            refuse("bonus is for ", heads(features), " heads, must divide heads, which is ", s.heads);
    }
};

/// A token also removes what the state holds along a vector a, and puts it back along a vector d. It brings `.removal`
/// a and `.replacement` d, [tokens, gate_heads, features]; neither passes through the map. a meets the state before it
/// is decayed. RWKV-7, where a = -kk and d = kk ⊙ (its "a").
///
///     S_t = alpha S_{t-1} + d (a^T S_{t-1}) + k v^T
///
/// Nothing here keeps the state bounded: that is up to a, d and the decay.
/// Source: Peng et al. 2025, "RWKV-7 Goose with expressive dynamic state evolution", equation 17.
struct diagonal_plus_low_rank {
    static constexpr bool needs_beta = false, needs_vectors = true, reads_first = false;
    friend constexpr bool operator==(const diagonal_plus_low_rank&, const diagonal_plus_low_rank&) = default;
};

// What a read is divided by.

/// phi(q)·z with z = sum of the decayed phi(k): an ordinary weighted mean of values. The divisor can be kept away from
/// zero, in the way of the code that a model was trained with: max(phi(q)·z + epsilon, least). A scale would cancel, so
/// `score.scale` is refused.
struct sum {
    float epsilon = 0;
    float least = 0;

    static constexpr bool divides = true;

    template <class Refuse>
    constexpr void validate(Refuse&& refuse) const {
        if (!(epsilon >= 0 && least >= 0))
            refuse("epsilon is ", epsilon, " and least ", least, ": neither may be negative");
    }
    friend constexpr bool operator==(const sum&, const sum&) = default;
};

/// Nothing: the read is multiplied by the scale, 1 / sqrt(key_dim) unless the scores say otherwise. (A norm over the
/// head usually follows in such models; it is no part of attention.)
struct no_normaliser {
    static constexpr bool divides = false;
    SASH_INLINE static constexpr double default_scale(int64 key_dim) { return 1 / std::sqrt(double(key_dim)); }
    friend constexpr bool operator==(const no_normaliser&, const no_normaliser&) = default;
};

/// Nothing, and the scale is 1 unless the scores say otherwise: Mamba-2, lightning attention, RWKV.
struct unscaled {
    static constexpr bool divides = false;
    SASH_INLINE static constexpr double default_scale(int64) { return 1; }
    friend constexpr bool operator==(const unscaled&, const unscaled&) = default;
};

namespace detail {

template <class T, class... Choices>
inline constexpr bool one_of = (std::is_same_v<T, Choices> || ...);

}  // namespace detail

/// Linear attention with a feature map phi. For each head a state S [features, value_dim] in fp32 and, with the
/// normaliser `sum`, z [features]:
///
///     S_t = exp(g_t) S_{t-1} + phi(k_t) v_t^T          z_t = exp(g_t) z_{t-1} + phi(k_t)
///     out_t = S_t^T phi(q_t) / (z_t · phi(q_t))        or, without one,  scale · S_t^T phi(q_t)
///
/// The four arguments each say one thing: how query and key become features, how fast the state forgets, how a token is
/// written, what a read is divided by. systems.hpp names the combinations that are known as something.
///
/// The token itself is written before it is read (but for exclusive_bonus). lse is log(z·phi(q)); without a normaliser
/// there is none. Where the denominator is 0, as in an empty state, the row is 0 and its lse -inf. A NaN that is written
/// stays for ever: a state cannot forget it. Memory is constant; the work of a token is features · value_dim for each
/// state and each head.
///
/// Calls of fewer than 32 tokens are the recurrence, token by token: cut into such calls in any way, tokens give the
/// same bits. In longer ones chunks of eight tokens are taken at once (cpu/chunk.hpp), and rows of different cuts agree
/// to rounding: each is within 1e-5 of the largest |out| of the formula in double (5e-5 where decays reach -60 a
/// token). The cut is made by the call's tokens and the slack alone, so no bit depends on threads or on other
/// sequences, and within a call later tokens change no bit of earlier rows. A rollback goes back, to the bit, to the
/// state that was passed on the way: the last rollback_slack tokens of a call always take the recurrence.
///
/// Under the delta rule the last tokens, seven at most, wait beside the states and are written eight at a time
/// (cpu/waiting.hpp): for each state 8 · (features + value_dim) floats more, where S has features · value_dim, and a step
/// takes a seventh less time. A look at the states (kv_cache::state) writes them at once, and with a slack they are
/// written as they come: rows that follow are then other roundings of the same.
///
/// The states can be looked at and set (kv_cache::state). Where something is forgotten they can be kept in bfloat16
/// (storage.state), whose roundings depend on the cut.
///
/// Decays next to 1 keep their digits (cpu/fade.hpp): nothing drifts in 8192 tokens of the slowest lightning head.
/// Where there is a decay, an infinity that is written turns NaN.
///
/// There are as many states as the largest of key, value, gate and key map heads; output head h reads state
/// h / (heads / states).
///
///     linear{}                                   elu + 1, nothing forgotten, normalised: Katharopoulos et al. 2020
///     linear<hedgehog>{.map = {…}}               a learned map
///     linear<identity, per_head_and_token, additive, no_normaliser>{}     gated, not normalised: simple GLA
///     linear<l2_normalised<silu>, per_head_and_token, delta, no_normaliser>{}     Gated DeltaNet
///
/// Source: Katharopoulos et al. 2020, "Transformers are RNNs", section 3.3; Yang et al. 2024, "Gated linear attention".
template <class FeatureMap = elu_plus_one, class Decay = no_decay, class Update = additive, class Normaliser = sum>
struct linear {
    FeatureMap map = {};
    Decay decay = {};
    Update update = {};
    Normaliser normaliser = {};

    static_assert(
        ask::feature_map<FeatureMap>,
        "sash: a feature map is trivially copyable and has operator()(N) or width, query and key: see feature_map.hpp");
    static_assert(
        requires {
            { Decay::needs_input } -> std::convertible_to<bool>;
        },
        "sash: the second argument of linear is a decay: no_decay, constant_per_head, per_head_and_token or "
        "per_channel_and_token");
    static_assert(detail::one_of<Update, additive, delta, exclusive_bonus, diagonal_plus_low_rank>,
                  "sash: the third argument of linear is an update: additive, delta, exclusive_bonus or "
                  "diagonal_plus_low_rank");
    static_assert(detail::one_of<Normaliser, sum, no_normaliser, unscaled>,
                  "sash: the fourth argument of linear is a normaliser: sum, no_normaliser or unscaled");
    static_assert(!std::is_same_v<Normaliser, sum> || !std::is_same_v<Update, delta>,
                  "sash: what the delta rule stores has no weights that could be summed: use no_normaliser");
    static_assert(!std::is_same_v<Normaliser, sum> || !std::is_same_v<Update, diagonal_plus_low_rank>,
                  "sash: a state with removals has no weights that could be summed: use no_normaliser or unscaled");
    static_assert(!std::is_same_v<Normaliser, sum> || !std::is_same_v<Update, exclusive_bonus>,
                  "sash: a bonus is not part of the sum that would divide: use no_normaliser or unscaled");
    static_assert(!std::is_same_v<Normaliser, sum> || ask::non_negative<FeatureMap>,
                  "sash: the features of this map may be negative, so their sum must not divide: use no_normaliser "
                  "(or say `static constexpr bool non_negative = true` in a map that is)");
    static_assert(!std::is_same_v<Update, delta> || ask::unit_keys<FeatureMap>,
                  "sash: the delta rule is stable for unit keys only: use l2_normalised, or normalised_by_caller "
                  "where the keys are unit vectors already");

    static constexpr bool has_normaliser = std::is_same_v<Normaliser, sum>;
    static constexpr bool needs_decay = Decay::needs_input;
    static constexpr bool needs_beta = Update::needs_beta;
    static constexpr bool needs_vectors = Update::needs_vectors;  ///< .removal and .replacement

    /// Rows of a state.
    SASH_INLINE constexpr int64 features(int64 key_dim) const { return ask::width(map, key_dim); }

    /// Numbers of `.decay` for one token and gate head.
    SASH_INLINE constexpr int64 decay_width(int64 key_dim) const {
        return ask::per_channel<Decay> ? features(key_dim) : 1;
    }

    /// What a row that is not divided is multiplied by, unless the scores say.
    SASH_INLINE static constexpr double default_scale(int64 key_dim) {
        if constexpr (has_normaliser)
            return 1;
        else
            return Normaliser::default_scale(key_dim);
    }

    /// States of a resolved shape: the least number that every operand's heads divide (so the largest, if all divide
    /// it).
    SASH_INLINE constexpr int64 states(const shape& s) const {
        constexpr bool is_gated = needs_decay || needs_beta || needs_vectors || ask::constant_decay<Decay>;
        const int64 n = std::lcm(std::lcm(s.key_heads, s.value_heads), ask::key_map_heads(map, s.key_dim));
        return is_gated ? std::lcm(n, s.gate_heads) : n;
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s) const {
        if constexpr (requires { map.validate(refuse, s); }) map.validate(refuse, s);
        if (features(s.key_dim) < 1) refuse("the feature map is ", features(s.key_dim), " wide, must be at least 1");
        if constexpr (requires { decay.validate(refuse, s); }) decay.validate(refuse, s);
        if constexpr (requires { update.validate(refuse, s, s.heads); })
            update.validate(refuse, s, features(s.key_dim));
        if constexpr (has_normaliser) normaliser.validate(refuse);
    }

    /// Calls add(x) for every number, beside the features, by which the results of two policies may differ.
    template <class Add>
    constexpr void describe(Add&& add, const shape& s) const {
        add(Update::needs_beta + 2 * Update::needs_vectors + 4 * Update::reads_first + 8 * ask::per_channel<Decay>);
        if constexpr (ask::constant_decay<Decay>)
            for (int64 h = 0; h < s.gate_heads; ++h) add(decay.of_head(h));
        if constexpr (std::is_same_v<Update, exclusive_bonus>)
            for (const float u : update.bonus) add(u);
        if constexpr (has_normaliser) {
            add(normaliser.epsilon);
            add(normaliser.least);
        }
    }
};

linear()->linear<>;
template <class FeatureMap>
linear(FeatureMap) -> linear<FeatureMap>;
template <class FeatureMap, class Decay>
linear(FeatureMap, Decay) -> linear<FeatureMap, Decay>;
template <class FeatureMap, class Decay, class Update>
linear(FeatureMap, Decay, Update) -> linear<FeatureMap, Decay, Update>;
template <class FeatureMap, class Decay, class Update, class Normaliser>
linear(FeatureMap, Decay, Update, Normaliser) -> linear<FeatureMap, Decay, Update, Normaliser>;

namespace detail {

/// The heads of one layer around a recurrent state: which operand head serves which state, and who reads it.
struct state_heads {
    int64 states = 1;   ///< number of states
    int64 readers = 1;  ///< output heads that read one state: state s serves [s · readers, (s + 1) · readers)

    /// The head of an operand with `count` heads that state s is written with.
    SASH_INLINE constexpr int64 of_state(int64 s, int64 count) const {
        return count == 1 ? 0 : count == states ? s : s / (states / count);  // without a division where that can be
    }
    /// The head of an operand with `count` heads that output head h is read with.
    SASH_INLINE constexpr int64 of_output(int64 h, int64 count) const {
        return count == 1 ? 0 : count == states * readers ? h : h / (states * readers / count);
    }
};

template <recurrent_policy P>
SASH_INLINE constexpr state_heads heads_of_states(const P& p, const shape& s) {
    const int64 states = p.states(s);
    return {states, s.heads / states};
}

}  // namespace detail
}  // namespace sash
