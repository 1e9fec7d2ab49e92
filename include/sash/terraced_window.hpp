#pragma once
/// \file
/// A window in steps: blocks of tokens, each query seeing its own block and the whole one before.
#include <sash/policy.hpp>

namespace sash {

/// Query i sees, with blocks of `window` tokens counted from the first token of the sequence,
///
///     V(i) = { j <= i :  ⌊i / window⌋ - ⌊j / window⌋ <= 1   or   j < sinks }
///
/// that is `window` to 2 · window keys in front of it, itself included, and the sinks. A query never sees less than
/// sliding_window{window} does, and what leaves leaves a block at a time: what remembers it (a hybrid's state) changes
/// once a block. Memory is constant: sinks + 2 · window tokens and room for one piece of an append.
///
/// LoLCATs' "tk" layers are trained so, their public code then decodes with sliding_window{window}; blocks there are
/// counted from the END of each call where its length is no multiple of `window`, so that rows change with the length.
/// Source: Zhang et al. 2025, "LoLCATs: on low-rank linearizing of large language models", appendix A.
struct terraced_window {
    int64 window = 1;  ///< tokens of a block; at least 1
    int64 sinks = 0;   ///< first positions that stay visible

    static constexpr bool exact_intervals = true;

    SASH_INLINE constexpr bool sees(int64 query, int64 key) const {
        return key <= query && (key >= first_of(query) || key < sinks);
    }

    SASH_INLINE constexpr key_intervals<2> visible(int64 first_query, int64 last_query) const {
        key_intervals<2> keys;
        keys.add(0, sinks < last_query ? sinks : last_query);
        keys.add(first_of(first_query), last_query);
        return keys;
    }

    SASH_INLINE constexpr bool whole(key_interval queries, key_interval keys) const {
        return keys.last <= queries.first + 1 && (keys.first >= first_of(queries.last - 1) || keys.last <= sinks);
    }

    SASH_INLINE constexpr key_intervals<2> retained(int64 next) const {
        key_intervals<2> keys;
        keys.add(0, sinks < next ? sinks : next);
        keys.add(next == 0 ? 0 : first_of(next - 1), next);
        return keys;
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse) const {
        constexpr int64 most = int64{1} << 60;
        if (window < 1 || window > most) refuse("window is ", window, ", must be 1 to ", most);
        if (sinks < 0 || sinks > most) refuse("sinks is ", sinks, ", must be 0 to ", most);
    }

    friend constexpr bool operator==(const terraced_window&, const terraced_window&) = default;

private:
    /// The first key of the block before the query's; at most 0 where there is none.
    SASH_INLINE constexpr int64 first_of(int64 query) const { return (query / window - 1) * window; }
};

}  // namespace sash
