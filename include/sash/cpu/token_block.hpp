#pragma once
/// \file
/// Tokens on their way into a recurrent state, with the queries that read it, as both kernels take them.
#include <sash/cache/state.hpp>
#include <sash/cpu/simd.hpp>

namespace sash::cpu {

enum class forgetting { nothing, by_head, by_channel };

/// What happens to an element of the state when a token is written.
template <forgetting Forgets, bool Replaces = false, bool ReadsFirst = false>
struct step {
    static constexpr forgetting forgets = Forgets;
    static constexpr bool replaces = Replaces;       ///< + d r^T
    static constexpr bool reads_first = ReadsFirst;  ///< queries see the state without the token
};

template <recurrent_policy P>
using step_of = step<detail::entry_rows<P>::decays_by_channel ? forgetting::by_channel
                     : detail::entry_rows<P>::decays          ? forgetting::by_head
                                                              : forgetting::nothing,
                     decltype(P::update)::needs_vectors, decltype(P::update)::reads_first>;

using detail::corrects;

/// The parts of an entry, in the log of a state or in scratch (see cache/state.hpp); null where the policy has no such
/// part. A token is written from them.
template <class Number>
struct entry_parts {
    Number *key = nullptr, *value = nullptr, *numbers = nullptr;
    Number *fades = nullptr, *lookup = nullptr, *replacement = nullptr;
};
using written_token = entry_parts<const float>;

template <recurrent_policy P, class Number>
SASH_INLINE entry_parts<Number> parts_of(const detail::state_store& store, Number* entry) {
    using rows = detail::entry_rows<P>;
    Number* value = entry + store.feature_pitch;
    Number* numbers = value + store.value_pitch;
    const auto row = [&](int place) {
        return place < 0 ? nullptr : numbers + detail::state_padding + place * store.feature_pitch;
    };
    return {
        entry, value, numbers, row(rows::fade), rows::lookup < 0 ? entry : row(rows::lookup), row(rows::replacement)};
}
template <recurrent_policy P>
SASH_INLINE written_token token_in(const detail::state_store& store, const float* entry) {
    return parts_of<P>(store, entry);
}

/// Up to `most_of_block` tokens and the queries that read after each, token-major.
inline constexpr int64 most_of_block = 8;
struct token_block {
    written_token token[most_of_block] = {};
    int64 tokens = 0;              ///< in a call that only reads there is nothing in `token`
    int64 rows = 0;                ///< queries a token
    const float* query = nullptr;  ///< in: phi(q) [tokens · rows][feature_pitch]
    float* numerator = nullptr;    ///< out: S^T phi(q) [tokens · rows][value_pitch]
    float* denominator = nullptr;  ///< out: z·phi(q) [tokens · rows]
};

}  // namespace sash::cpu
