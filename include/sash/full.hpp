#pragma once
/// \file
/// Full attention: every earlier key, or every key.
#include <sash/policy.hpp>

namespace sash {

/// Causal: query i sees keys 0 … i. Bidirectional (`causal = false`): every key there is; a cache then takes `append`
/// and `read` only, since an append that also reads could not be cut into parts with the same result.
/// Memory grows with the sequence: 2 · dim numbers per token and KV head. Work per token: proportional to its position.
/// Source: Vaswani et al. 2017, section 3.2.1.
struct full {
    bool causal = true;

    static constexpr bool exact_intervals = true;
    static constexpr int64 everywhere = int64{1} << 62;

    SASH_INLINE constexpr bool sees(int64 query, int64 key) const { return !causal || key <= query; }

    SASH_INLINE constexpr key_intervals<1> visible(int64, int64 last_query) const {
        key_intervals<1> keys;
        keys.add(0, causal ? last_query : everywhere);
        return keys;
    }

    SASH_INLINE constexpr bool whole(key_interval queries, key_interval keys) const {
        return !causal || keys.last <= queries.first + 1;
    }

    friend constexpr bool operator==(const full&, const full&) = default;
};

}  // namespace sash
