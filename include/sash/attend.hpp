#pragma once
/// \file
/// The verb, in all its forms.
#include <sash/perform.hpp>

namespace sash {

/// Appends T new tokens and computes their T output rows: T = 1 is decoding, T = the prompt's length is prefill, anything
/// between is chunked prefill or verification of drafts. However the same tokens are cut into calls, the rows are the same.
///
///     query [T, query_heads, key_dim]   key [T, key_heads, key_dim]   value [T, value_heads, value_dim]
///     out   [T, heads, value_dim]       each float, float16 or bfloat16, with any strides
///
///     out[t, h] = Σ_j softmax_j(score(q[t, h], k[j])) v[j]     over the keys j that the policy shows to position length + t
///
/// What is attended is what is stored: key and value rounded to the cache's element. Scores and sums are fp32; against the same
/// formula in double the error stays below 1e-6 + 1e-5 · |out| for scores of moderate size. (Queries in bfloat16 over a cache
/// in bfloat16, many at once, on a processor that multiplies bfloat16: weights are rounded to it, and a row is within 2^-8 of
/// the weighted mean of |v|. Its lse is as exact as ever.) A row that sees no key is exactly 0.
/// A key that a row does not see has no influence on it, whatever its bits; a visible NaN propagates. T = 0 does nothing.
///
/// Cost: O(visible keys · heads · (key_dim + value_dim)). Allocates: storage as the cache grows, scratch until its largest call;
/// nothing in steady-state decoding. Errors: sash::error for a shape, stride, position or capacity that cannot be, naming the
/// value and the limit, and std::bad_alloc; both before anything is written.
template <class Policy, class Element>
SASH_INLINE void attend(const tokens_of<std::type_identity_t<Policy>>& tokens, kv_cache<Policy, Element>& cache,
                        output out, const options& how = {}) {
    detail::perform_one<build::here>(tokens, cache, out, detail::verb::attend, how);
}

/// The short form, for policies that need query, key and value alone.
template <class Policy, class Element>
SASH_INLINE void attend(input query, input key, input value, kv_cache<Policy, Element>& cache, output out,
                        const options& how = {}) {
    detail::perform_one<build::here, kv_cache<Policy, Element>>({.query = query, .key = key, .value = value}, cache,
                                                                out, detail::verb::attend, how);
}

/// A batch: every sequence has its own cache and its own number of tokens. All or nothing: one request that cannot be leaves
/// every cache as it was. The same cache twice is refused. The rows are, bit for bit, those of one call for each.
/// `requests`: a contiguous range of request<Cache>.
template <std::ranges::contiguous_range R>
    requires requires(R& r) { std::ranges::data(r)->cache->length(); }
SASH_INLINE void attend(R&& requests, const options& how = {}) {
    detail::perform_requests<build::here>(std::ranges::data(requests), static_cast<int64>(std::ranges::size(requests)),
                                          how);
}

/// Appends tokens and computes no rows.
template <class Policy, class Element>
SASH_INLINE void append(const tokens_of<std::type_identity_t<Policy>>& tokens, kv_cache<Policy, Element>& cache,
                        const options& how = {}) {
    detail::perform_one<build::here>(tokens, cache, {}, detail::verb::append, how);
}
template <class Policy, class Element>
SASH_INLINE void append(input key, input value, kv_cache<Policy, Element>& cache, const options& how = {}) {
    detail::perform_one<build::here, kv_cache<Policy, Element>>({.query = {}, .key = key, .value = value}, cache, {},
                                                                detail::verb::append, how);
}

/// Computes rows for queries that bring no keys: cross attention, a shared prefix. Stores nothing. The first query stands at
/// `how.first_query`, by default at the cache's length. Without `how.workspace` it allocates scratch, since the cache is const;
/// many threads may read one cache at a time, each with a workspace of its own.
template <class Policy, class Element>
SASH_INLINE void read(input query, const kv_cache<Policy, Element>& cache, output out, const options& how = {}) {
    auto& opened = const_cast<kv_cache<Policy, Element>&>(cache);  // verb::read writes none of it
    tokens_of<Policy> tokens = detail::query_alone<Policy>(query);
    detail::perform_one<build::here>(tokens, opened, out, detail::verb::read, how);
}

/// Attention without a cache: encoders, benchmarks, teaching, keys and values in memory of your own, with any strides.
///
///     query [T, query_heads, key_dim]   key [n, key_heads, key_dim]   value [n, value_heads, value_dim]   out [T, heads, value_dim]
///
/// Key j stands at position j; the queries are the last T of n tokens, or stand where `how.first_query` says. Keys and values
/// that some query sees are packed into scratch: `how.workspace`, or memory allocated for the call.
template <attention_policy Policy>
SASH_INLINE void attend(const Policy& policy, input query, input key, input value, output out, const options& how = {},
                        const score& scores = {}) {
    detail::perform_without_cache<build::here, Policy>(policy, {.query = query, .key = key, .value = value}, out, how,
                                                       scores);
}
template <attention_policy Policy>
SASH_INLINE void attend(const Policy& policy, const tokens_of<std::type_identity_t<Policy>>& tokens, output out,
                        const options& how = {}, const score& scores = {}) {
    detail::perform_without_cache<build::here, Policy>(policy, tokens, out, how, scores);
}

/// Scratch that a call of `tokens` tokens on this cache takes as it stands now, for a workspace made beforehand.
template <class Policy, class Element>
SASH_INLINE std::size_t workspace_bytes(const kv_cache<Policy, Element>& cache, int64 tokens, const options& how = {}) {
    return detail::count_workspace<build::here>(detail::access::data(cache), tokens, how);
}

}  // namespace sash
