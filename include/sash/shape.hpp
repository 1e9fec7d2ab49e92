#pragma once
/// \file
/// Heads and dimensions of one attention layer, and their validation.
#include <sash/config.hpp>

namespace sash {

/// How many heads and how wide. `heads` counts output rows per token; every other head count divides it, and head h of
/// the output uses head h / (heads / x_heads) of operand x: grouped-query, multi-query and grouped-value models and
/// per-query-head gates are all said here. Zero means "not said": the default beside each member.
///
///     {.heads = 32, .kv_heads = 8, .head_dim = 128}          grouped-query attention, four query heads a KV head
///     {.heads = 32, .kv_heads = 32, .query_heads = 16, …}    grouped values
struct shape {
    int64 heads = 1;        ///< output rows per token
    int64 kv_heads = 0;     ///< heads of key and value; default: heads
    int64 head_dim = 0;     ///< sets key_dim and value_dim
    int64 key_dim = 0;      ///< width of query and key; default: head_dim
    int64 value_dim = 0;    ///< width of value and output; default: head_dim
    int64 query_heads = 0;  ///< default: heads
    int64 key_heads = 0;    ///< default: kv_heads
    int64 value_heads = 0;  ///< default: kv_heads
    int64 gate_heads = 0;   ///< heads of decay and beta; default: kv_heads

    friend constexpr bool operator==(const shape&, const shape&) = default;
};

namespace detail {

template <class Build>
void check_heads(const char* name, int64 count, int64 heads) {
    require<Build>(count >= 1, name, " is ", count, ", must be at least 1");
    require<Build>(heads % count == 0, name, " is ", count, ", must divide heads, which is ", heads);
}

/// Fills in the defaults and refuses what cannot be; every member of the result is at least 1.
template <class Build>
shape resolve(shape s) {
    const auto fill = [](int64& member, int64 value) {
        if (member == 0) member = value;
    };
    fill(s.kv_heads, s.heads);
    fill(s.key_dim, s.head_dim);
    fill(s.value_dim, s.head_dim);
    fill(s.query_heads, s.heads);
    fill(s.key_heads, s.kv_heads);
    fill(s.value_heads, s.kv_heads);
    fill(s.gate_heads, s.kv_heads);
    require<Build>(s.heads >= 1, "heads is ", s.heads, ", must be at least 1");
    check_heads<Build>("kv_heads", s.kv_heads, s.heads);
    check_heads<Build>("query_heads", s.query_heads, s.heads);
    check_heads<Build>("key_heads", s.key_heads, s.heads);
    check_heads<Build>("value_heads", s.value_heads, s.heads);
    check_heads<Build>("gate_heads", s.gate_heads, s.heads);
    require<Build>(s.head_dim >= 0, "head_dim is ", s.head_dim, ", must not be negative");
    require<Build>(s.key_dim >= 1, "key_dim is ", s.key_dim,
                   ", must be at least 1 (set head_dim, or key_dim and value_dim)");
    require<Build>(s.value_dim >= 1, "value_dim is ", s.value_dim,
                   ", must be at least 1 (set head_dim, or key_dim and value_dim)");
    constexpr int64 most = int64{1} << 20;  // keeps every product of extents far inside 64 bits
    require<Build>(s.heads <= most, "heads is ", s.heads, ", must be at most ", most);
    require<Build>(s.key_dim <= most, "key_dim is ", s.key_dim, ", must be at most ", most);
    require<Build>(s.value_dim <= most, "value_dim is ", s.value_dim, ", must be at most ", most);
    s.head_dim = s.key_dim == s.value_dim ? s.key_dim : 0;
    return s;
}

/// Heads that a softmax cache stores: the larger of key and value heads, each holding one key and one value row a token.
SASH_INLINE constexpr int64 stored_heads(const shape& s) { return larger(s.key_heads, s.value_heads); }

}  // namespace detail
}  // namespace sash
