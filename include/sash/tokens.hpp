#pragma once
/// \file
/// What a token brings to a cache: query, key and value, and what the policy needs beside them.
#include <sash/policy.hpp>
#include <sash/view.hpp>

namespace sash {

namespace detail {

/// Stands where a policy takes no such input: naming it does not compile.
struct no_decay_input {
    constexpr no_decay_input() = default;
    template <class V>
    constexpr no_decay_input(const V&) {
        static_assert(never<V>, "sash: .decay is no input of this policy");
    }
};
/// The initialiser of a needed input: leaving it out does not compile.
struct missing_decay {
    template <class V>
    constexpr operator V() const {
        static_assert(never<V>, "sash: this policy needs .decay");
        return V{};
    }
};

template <class P>
inline constexpr bool takes_decay = [] {
    if constexpr (recurrent_policy<P>)
        return static_cast<bool>(P::needs_decay);
    else
        return false;
}();

template <bool Needed>
struct decay_member {
    using type = no_decay_input;
    using initial = no_decay_input;
};
template <>
struct decay_member<true> {
    using type = input;
    using initial = missing_decay;
};

}  // namespace detail

/// What new tokens bring: one flat aggregate for designated initialisers. A policy with a data-dependent decay needs
/// `.decay`, the others refuse it, both at compile time.
///
///     query [tokens, query_heads, key_dim]   key [tokens, key_heads, key_dim]   value [tokens, value_heads, value_dim]
///     decay [tokens, gate_heads, 1]: natural logarithm of the factor, at most 0
template <class Policy>
struct tokens_of {
    input query = {}, key = {}, value = {};
    typename detail::decay_member<detail::takes_decay<Policy>>::type decay =
        typename detail::decay_member<detail::takes_decay<Policy>>::initial{};
};

}  // namespace sash
