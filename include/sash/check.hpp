#pragma once
/// \file
/// Everything that can be wrong with a call, looked at before anything is written. Messages name the value and the limit.
#include <sash/options.hpp>

namespace sash::detail {

enum class verb { attend, append, read };

/// A request with its cache opened: what all forms of the verb are brought to.
template <class P, class E>
struct call {
    const tokens_of<P>* tokens = nullptr;
    cache_data<P, E>* cache = nullptr;  // not written by verb::read
    output out;
    std::span<float> lse;
    int64 first_query = options::automatic;
};

template <class Build, class Pointer>
void check_extents(const char* name, const strided<Pointer>& t, int64 tokens, int64 heads, int64 dim) {
    require<Build>(t.tokens == tokens, name, " has ", t.tokens, " tokens, must have ", tokens);
    require<Build>(t.heads == heads, name, " has ", t.heads, " heads, must have ", heads);
    require<Build>(t.dim == dim, name, " has dim ", t.dim, ", must have ", dim);
    require<Build>(t.empty() || t.data != nullptr, name, " has no memory");
    const auto element = static_cast<std::uintptr_t>(bytes_of(t.type));
    require<Build>(reinterpret_cast<std::uintptr_t>(t.data) % element == 0, name,
                   " begins at an address that is no multiple of its element's ", static_cast<int64>(element),
                   " bytes");
}

/// No two numbers of an output may lie in the same place. Axes in the order of their strides: each must step over all that the
/// smaller ones reach. (Contiguous, transposed, padded and reversed layouts do.)
template <class Build>
void check_written(const output& t) {
    if (t.empty()) return;
    struct axis {
        const char* name;
        int64 extent, stride;
    };
    axis axes[3] = {
        {"token", t.tokens, t.token_stride}, {"head", t.heads, t.head_stride}, {"dim", t.dim, t.dim_stride}};
    for (axis& a : axes) a.stride = a.stride < 0 ? -a.stride : a.stride;
    const auto in_order = [&](int i, int j) {
        if (axes[j].stride < axes[i].stride) std::swap(axes[i], axes[j]);
    };
    in_order(0, 1);
    in_order(1, 2);
    in_order(0, 1);
    int64 reached = 0;
    for (const axis& a : axes) {
        if (a.extent <= 1) continue;
        require<Build>(a.stride > reached, "out has ", a.name, " stride ", a.stride, ", but what lies between reaches ",
                       reached, ": its rows would overlap");
        reached = total(reached, product(a.extent - 1, a.stride));
    }
}

template <class Build>
void check_lse(std::span<float> lse, int64 tokens, int64 heads) {
    require<Build>(lse.empty() || static_cast<int64>(lse.size()) == tokens * heads, "lse has ", lse.size(),
                   " entries, must have ", tokens * heads, ": [tokens, heads]");
}

/// The numbers of a gate: decays and betas have a range.
template <class Build>
void check_gate(std::string_view name, const input& x) {
    if (name == "decay") check_decay<Build>(x);
    if (name == "beta") check_beta<Build>(x);
}

template <class Build, class P>
void check_inputs(const P& policy, const tokens_of<P>& in, const shape& dims, verb what, int64 tokens) {
    if (what != verb::append) check_extents<Build>("query", in.query, tokens, dims.query_heads, dims.key_dim);
    if (what == verb::read) return;
    check_extents<Build>("key", in.key, tokens, dims.key_heads, dims.key_dim);
    check_extents<Build>("value", in.value, tokens, dims.value_heads, dims.value_dim);
    for_each_gate(policy, in, dims.key_dim, [&](const char* name, const input& x, int64 width) {
        check_extents<Build>(name, x, tokens, dims.gate_heads, width);
        check_gate<Build>(name, x);
    });
}

/// Tokens of a call: those of its key, or of its query where nothing is stored.
template <class P>
SASH_INLINE int64 tokens_in(const tokens_of<P>& in, verb what) {
    return what == verb::read ? in.query.tokens : in.key.tokens;
}

/// Refuses a query that sees a key which has left the cache.
template <class Build, class P>
void check_keys_are_held(const P& p, const block_store& s, int64 query, int64 head) {
    for (const key_interval& i : ask::visible(p, query, query + 1, head))
        for (int64 key = i.first; key < smaller(i.last, s.oldest);) {
            require<Build>(next_held(s, key) == key, "the query at position ", query, " sees key ", key,
                           ", which has left the cache; the oldest key there is ", s.oldest);
            for (const key_interval& stay : s.pinned)
                if (key >= stay.first && key < stay.last) key = stay.last;
        }
}

/// Each query is asked for: the first may see sinks alone, and a later one what is gone.
template <class Build, class P>
void check_first_query(const P& p, const block_store& s, int64 first, int64 tokens) {
    require<Build>(first >= 0 && first <= far_away, "first_query is ", first, ", must not be negative");
    const int64 heads = ask::visible_by_head<P> ? s.heads : 1;
    for (int64 query = first; s.oldest > 0 && query < smaller(first + tokens, s.length); ++query)
        for (int64 h = 0; h < heads; ++h) check_keys_are_held<Build>(p, s, query, h);
}

template <class Build, class P, class E>
void check_position(const call<P, E>& c, verb what, int64 tokens) {
    const int64 length = c.cache->store.length;
    require<Build>(tokens < far_away - length, "the cache has seen ", length, " tokens, ", tokens,
                   " more are too many");
    if (what != verb::read) {
        require<Build>(c.first_query == options::automatic || c.first_query == length, "first_query is ", c.first_query,
                       ", but these tokens stand at ", length, ", the length of the cache");
        if constexpr (softmax_policy<P>)
            require<Build>(what == verb::append || ask::is_causal(c.cache->policy),
                           "a bidirectional policy takes append, then read: an append that also reads could not be cut "
                           "into parts");
    } else if constexpr (hybrid_policy<P>) {
        require<Build>(c.first_query == options::automatic || c.first_query >= length,
                       "a hybrid cache is read from where it stands, at ", length, ", on; first_query is ",
                       c.first_query);
    } else if constexpr (softmax_policy<P>) {
        if (c.first_query != options::automatic)
            check_first_query<Build>(c.cache->policy, c.cache->store, c.first_query, tokens);
    } else {
        require<Build>(c.first_query == options::automatic || c.first_query == length,
                       "a recurrent cache is read where it stands, at ", length, "; first_query is ", c.first_query);
    }
    const auto check_map = [&](const auto& map) {
        require<Build>(tokens <= ask::map_positions(map) - length, "the cache has seen ", length, " tokens, ", tokens,
                       " more are past the ", ask::map_positions(map), " positions of its feature map");
    };
    if constexpr (recurrent_policy<P>) check_map(c.cache->policy.map);
    if constexpr (hybrid_policy<P>) check_map(c.cache->policy.linear.map);
}

/// Would the tokens exceed a hard capacity? Counts what is held afterwards.
template <class Build, class P, class E>
void check_capacity(const cache_data<P, E>& c, int64 tokens) {
    if constexpr (softmax_policy<P>) {
        if (c.options.capacity == 0) return;
        block_store after = c.store;
        advance<Build>(after, c.policy, tokens);
        int64 held = 0;
        for (const key_interval& i : held_positions(after)) held += i.last - i.first;
        require<Build>(held <= c.options.capacity, "the cache would hold ", held, " tokens, its capacity is ",
                       c.options.capacity);
    }
}

template <class Build, class P, class E>
void check_call(const call<P, E>& c, verb what) {
    const shape& dims = c.cache->dims;
    const int64 tokens = tokens_in<P>(*c.tokens, what);
    require<Build>(tokens >= 0, "the call brings ", tokens, " tokens");
    check_inputs<Build, P>(c.cache->policy, *c.tokens, dims, what, tokens);
    if (what != verb::append) {
        check_extents<Build>("out", c.out, tokens, dims.heads, dims.value_dim);
        check_written<Build>(c.out);
        check_lse<Build>(c.lse, tokens, dims.heads);
        if constexpr (recurrent_policy<P>)
            require<Build>(c.lse.empty() || P::has_normaliser, "this policy has no normaliser, so there is no lse");
        if constexpr (hybrid_policy<P>)
            require<Build>(c.lse.empty() || P::has_lse,
                           "the rows of this hybrid are no sums of exponentials, so there is no lse");
    }
    check_position<Build>(c, what, tokens);
    if (what != verb::read) check_capacity<Build>(*c.cache, tokens);
}

}  // namespace sash::detail
