#pragma once
/// \file
/// What a token brings to a cache: query, key and value, and what the policy needs beside them.
#include <sash/policy.hpp>
#include <sash/view.hpp>

namespace sash {

namespace detail {

// For each input that not every policy takes: a type that stands where a policy takes none (naming it does not compile),
// and the initialiser of one that is needed (leaving it out does not compile). The sentences must be literals.

struct no_decay_input {
    constexpr no_decay_input() = default;
    template <class V>
    constexpr no_decay_input(const V&) {
        static_assert(never<V>, "sash: .decay is no input of this policy");
    }
};
struct missing_decay {
    template <class V>
    constexpr operator V() const {
        static_assert(never<V>, "sash: this policy needs .decay");
        return V{};
    }
};

struct no_beta_input {
    constexpr no_beta_input() = default;
    template <class V>
    constexpr no_beta_input(const V&) {
        static_assert(never<V>, "sash: .beta is no input of this policy");
    }
};
struct missing_beta {
    template <class V>
    constexpr operator V() const {
        static_assert(never<V>, "sash: this policy needs .beta");
        return V{};
    }
};

struct no_removal_input {
    constexpr no_removal_input() = default;
    template <class V>
    constexpr no_removal_input(const V&) {
        static_assert(never<V>, "sash: .removal is no input of this policy");
    }
};
struct missing_removal {
    template <class V>
    constexpr operator V() const {
        static_assert(never<V>, "sash: this policy needs .removal");
        return V{};
    }
};

struct no_replacement_input {
    constexpr no_replacement_input() = default;
    template <class V>
    constexpr no_replacement_input(const V&) {
        static_assert(never<V>, "sash: .replacement is no input of this policy");
    }
};
struct missing_replacement {
    template <class V>
    constexpr operator V() const {
        static_assert(never<V>, "sash: this policy needs .replacement");
        return V{};
    }
};

template <class P>
inline constexpr bool takes_decay = [] {
    if constexpr (requires { P::needs_decay; })
        return static_cast<bool>(P::needs_decay);
    else
        return false;
}();
template <class P>
inline constexpr bool takes_beta = [] {
    if constexpr (requires { P::needs_beta; })
        return static_cast<bool>(P::needs_beta);
    else
        return false;
}();
template <class P>
inline constexpr bool takes_vectors = [] {
    if constexpr (requires { P::needs_vectors; })
        return static_cast<bool>(P::needs_vectors);
    else
        return false;
}();

template <bool Needed, class Missing, class None>
struct member {
    using type = None;
    using initial = None;
};
template <class Missing, class None>
struct member<true, Missing, None> {
    using type = input;
    using initial = Missing;
};

template <class P>
using decay_member = member<takes_decay<P>, missing_decay, no_decay_input>;
template <class P>
using beta_member = member<takes_beta<P>, missing_beta, no_beta_input>;
template <class P>
using removal_member = member<takes_vectors<P>, missing_removal, no_removal_input>;
template <class P>
using replacement_member = member<takes_vectors<P>, missing_replacement, no_replacement_input>;

}  // namespace detail

/// What new tokens bring: one flat aggregate for designated initialisers. What a policy needs must be there, what it does
/// not take must not; both are seen at compile time.
///
///     query [tokens, query_heads, key_dim]   key [tokens, key_heads, key_dim]   value [tokens, value_heads, value_dim]
///     decay [tokens, gate_heads, 1] or [tokens, gate_heads, features]: natural logarithm of the factor, at most 0
///     beta [tokens, gate_heads, 1]: strength of the delta rule's correction, 0 to 2
///     removal, replacement [tokens, gate_heads, features]: a and d of diagonal_plus_low_rank
template <class Policy>
struct tokens_of {
    input query = {}, key = {}, value = {};
    typename detail::decay_member<Policy>::type decay = typename detail::decay_member<Policy>::initial{};
    typename detail::beta_member<Policy>::type beta = typename detail::beta_member<Policy>::initial{};
    typename detail::removal_member<Policy>::type removal = typename detail::removal_member<Policy>::initial{};
    typename detail::replacement_member<Policy>::type replacement =
        typename detail::replacement_member<Policy>::initial{};
};

namespace detail {

/// Tokens of which only the query is there.
template <class P>
SASH_INLINE constexpr tokens_of<P> query_alone(input query) {
    return {query, {}, {}, {}, {}, {}, {}};
}

/// Calls f(name, member, width) for each input beside query, key and value that the policy takes; `in` may be const.
/// `width` is what the numbers of one token and gate head must be, for keys of key_dim.
template <class P, class Tokens, class F>
SASH_INLINE constexpr void for_each_gate([[maybe_unused]] const P& policy, [[maybe_unused]] Tokens& in,
                                         [[maybe_unused]] int64 key_dim, [[maybe_unused]] F&& f) {
    if constexpr (takes_decay<P>) {
        if constexpr (requires { policy.decay_width(key_dim); })
            f("decay", in.decay, policy.decay_width(key_dim));
        else
            f("decay", in.decay, int64{1});
    }
    if constexpr (takes_beta<P>) f("beta", in.beta, int64{1});
    if constexpr (takes_vectors<P>) {
        f("removal", in.removal, policy.features(key_dim));
        f("replacement", in.replacement, policy.features(key_dim));
    }
}

}  // namespace detail
}  // namespace sash
