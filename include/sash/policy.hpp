#pragma once
/// \file
/// What an attention policy is: who sees whom, as intervals of key positions; what is kept; what a token brings.
///
/// Positions are absolute, 64-bit, counted from 0. Every range is half-open, [first, last), as in the standard library.
///
/// A softmax policy is a small trivially copyable struct of constexpr functions:
///
///     sees(query, key) -> bool                          does this query see this key?            (required)
///     visible(first_query, last_query) -> key_intervals a superset of what the queries
///                                                       [first_query, last_query) see            (required)
///     whole(queries, keys) -> bool                      every query of one interval sees every
///                                                       key of the other: the tile needs no mask (optional)
///     retained(next) -> key_intervals                   what the query at next - 1 saw and any
///                                                       later one may see: bounds the memory     (optional)
///     distance(query, key) -> int64                     for ALiBi and user scores                (optional: query - key)
///     affine_distance                                   static constexpr bool: within one interval the
///                                                       distance falls by 1 from key to key      (optional: false)
///     read_position(query, frame) -> int64              where the query stands, for rotary
///                                                       positions, when it reads that frame      (optional: query)
///     frames                                            static constexpr int: frames it reads in  (optional: 1)
///     causal                                            bool member; false: queries see later
///                                                       keys, so a cache takes append and read   (optional: true)
///     validate(refuse) or validate(refuse, shape)       calls refuse(parts...) on a bad value    (optional)
///     exact_intervals                                   static constexpr bool: the intervals of
///                                                       ONE query are exactly what it sees, so
///                                                       that `sees` need not be asked            (optional: false)
///
/// Each may take the KV head as one more, last argument: a policy can give every KV head a window of its own.
#include <sash/shape.hpp>

#include <concepts>
#include <type_traits>

namespace sash {

/// Key positions [first, last), to be read in one rotary frame (0 unless the policy says otherwise).
struct key_interval {
    int64 first = 0, last = 0;
    int frame = 0;

    friend constexpr bool operator==(const key_interval&, const key_interval&) = default;
};

namespace detail {

/// Merges what follows the interval `at` and touches it.
template <class Build>
constexpr void absorb_followers(key_interval* item, int& count, int at) {
    while (at + 1 < count && item[at + 1].frame == item[at].frame && item[at + 1].first <= item[at].last) {
        if (item[at].last < item[at + 1].last) item[at].last = item[at + 1].last;
        for (int i = at + 1; i + 1 < count; ++i) item[i] = item[i + 1];
        --count;
    }
}

/// key_intervals::add, of an array of any size.
template <class Build>
constexpr void add_interval(key_interval* item, int& count, int most, int64 first, int64 last, int frame) {
    int at = 0;  // the first interval that ends at or behind `first`, or lies behind it
    while (at < count && (item[at].last < first || (item[at].frame != frame && item[at].last <= first))) ++at;
    const bool touches = at < count && item[at].frame == frame && item[at].first <= last;
    if (!touches && count < most) {
        for (int i = count; i > at; --i) item[i] = item[i - 1];
        item[at] = {first, last, frame};
        ++count;
        return;
    }
    if (!touches) {  // it is bridged with a neighbour
        if (at == count || item[at].frame != frame) --at;
        while (at > 0 && item[at].frame != frame) --at;
        if (at < 0) at = 0;
    }
    if (first < item[at].first) item[at].first = first;
    if (item[at].last < last) item[at].last = last;
    absorb_followers<Build>(item, count, at);
}

}  // namespace detail

/// At most `Most` intervals in ascending order. Intervals of one frame that touch or overlap are merged, so that a key
/// counts once; intervals of different frames are disjoint (the policy's promise) and stay apart.
template <int Most = 4>
struct key_intervals {
    static constexpr int most = Most;
    key_interval item[Most] = {};
    int count = 0;

    SASH_INLINE constexpr const key_interval* begin() const { return item; }
    SASH_INLINE constexpr const key_interval* end() const { return item + count; }
    SASH_INLINE constexpr const key_interval& operator[](int i) const { return item[i]; }

    /// Adds [first, last); empty ones are dropped, negative positions cut off. One interval too many is bridged with its
    /// neighbour: the set stays a superset, and `sees` cuts it back.
    template <class Build = build::here>
    SASH_INLINE constexpr void add(int64 first, int64 last, int frame = 0) {
        if (first < 0) first = 0;
        if (first < last) detail::add_interval<Build>(item, count, Most, first, last, frame);
    }
};

/// A policy that weighs keys with a softmax.
template <class P>
concept softmax_policy = std::is_trivially_copyable_v<P> &&(
                             requires(const P& p, int64 i) { p.visible(i, i).count; } ||
                             requires(const P& p, int64 i) { p.visible(i, i, i).count; }) &&
                         (
                             requires(const P& p, int64 i) {
                                 { p.sees(i, i) } -> std::convertible_to<bool>;
                             } ||
                             requires(const P& p, int64 i) {
                                 { p.sees(i, i, i) } -> std::convertible_to<bool>;
                             });

/// A policy that keeps a state of fixed size in place of keys and values.
template <class P>
concept recurrent_policy = std::is_trivially_copyable_v<P> && requires(const P& p, int64 dim) {
    { p.features(dim) } -> std::convertible_to<int64>;
    { P::has_normaliser } -> std::convertible_to<bool>;
    { P::needs_decay } -> std::convertible_to<bool>;
};

/// A softmax policy with a recurrent one beside it: see hybrid.hpp.
template <class P>
concept hybrid_policy = softmax_policy<P> && requires(const P& p) {
    p.window;
    p.linear.features(int64{});
    p.combine;
};

/// Anything that can stand as the first argument of a cache.
template <class P>
concept attention_policy = softmax_policy<P> || recurrent_policy<P>;

/// The questions put to a softmax policy, with its optional parts filled in and the KV head passed where it is taken.
namespace ask {

template <softmax_policy P>
SASH_INLINE constexpr auto visible(const P& p, int64 first_query, int64 last_query, [[maybe_unused]] int64 kv_head) {
    if constexpr (requires { p.visible(first_query, last_query, kv_head); })
        return p.visible(first_query, last_query, kv_head);
    else
        return p.visible(first_query, last_query);
}

/// Does what is visible depend on the KV head?
template <class P>
inline constexpr bool visible_by_head = requires(const P& p, int64 i) {
    p.visible(i, i, i);
};

template <softmax_policy P>
SASH_INLINE constexpr bool sees(const P& p, int64 query, int64 key, [[maybe_unused]] int64 kv_head) {
    if constexpr (requires { p.sees(query, key, kv_head); })
        return static_cast<bool>(p.sees(query, key, kv_head));
    else
        return static_cast<bool>(p.sees(query, key));
}

template <class P>
inline constexpr bool has_whole = requires(const P& p, key_interval i) {
    p.whole(i, i);
}
|| requires(const P& p, key_interval i, int64 h) { p.whole(i, i, h); };

template <softmax_policy P>
SASH_INLINE constexpr bool whole(const P& p, key_interval queries, key_interval keys, [[maybe_unused]] int64 kv_head) {
    if constexpr (requires { p.whole(queries, keys, kv_head); })
        return p.whole(queries, keys, kv_head);
    else if constexpr (requires { p.whole(queries, keys); })
        return p.whole(queries, keys);
    else
        return false;
}

template <class P>
inline constexpr bool has_retained = requires(const P& p, int64 next) {
    p.retained(next);
}
|| requires(const P& p, int64 next) { p.retained(next, next); };

template <softmax_policy P>
SASH_INLINE constexpr auto retained(const P& p, int64 next, [[maybe_unused]] int64 kv_head) {
    if constexpr (requires { p.retained(next, kv_head); }) {
        return p.retained(next, kv_head);
    } else if constexpr (requires { p.retained(next); }) {
        return p.retained(next);
    } else {
        key_intervals<1> everything;
        everything.add(0, next);
        return everything;
    }
}

template <class P>
inline constexpr bool has_distance = requires(const P& p, int64 i) {
    p.distance(i, i);
}
|| requires(const P& p, int64 i) { p.distance(i, i, i); };

template <softmax_policy P>
SASH_INLINE constexpr int64 distance(const P& p, int64 query, int64 key, [[maybe_unused]] int64 kv_head) {
    if constexpr (requires { p.distance(query, key, kv_head); })
        return static_cast<int64>(p.distance(query, key, kv_head));
    else if constexpr (requires { p.distance(query, key); })
        return static_cast<int64>(p.distance(query, key));
    else
        return query - key;
}

/// Does the distance fall by one from each key of an interval to the next?
template <class P>
inline constexpr bool affine_distance = [] {
    if constexpr (requires { P::affine_distance; })
        return static_cast<bool>(P::affine_distance);
    else
        return !has_distance<P>;
}();

template <softmax_policy P>
SASH_INLINE constexpr int64 read_position(const P& p, int64 query, int frame) {
    if constexpr (requires { p.read_position(query, frame); })
        return p.read_position(query, frame);
    else
        return query;
}

/// Rotary frames the policy reads keys in: 1 unless it says more.
template <class P>
inline constexpr int frames = [] {
    if constexpr (requires { P::frames; })
        return static_cast<int>(P::frames);
    else
        return 1;
}();

/// May caches of this policy append and read in one call? (Not where a query sees later keys: cutting would show.)
template <class P>
SASH_INLINE constexpr bool is_causal(const P& p) {
    if constexpr (requires {
                      { p.causal } -> std::convertible_to<bool>;
                  })
        return p.causal;
    else
        return true;
}

template <class P>
inline constexpr bool exact = [] {
    if constexpr (requires { P::exact_intervals; })
        return static_cast<bool>(P::exact_intervals);
    else
        return false;
}();

}  // namespace ask

namespace detail {

/// Calls the policy's own validation, if it has one; it may take the shape as well.
template <class Build, class P>
void validate(const P& p, const shape& s) {
    const auto refuse_with = [](const auto&... parts) { refuse<Build>(parts...); };
    if constexpr (requires { p.validate(refuse_with, s); })
        p.validate(refuse_with, s);
    else if constexpr (requires { p.validate(refuse_with); })
        p.validate(refuse_with);
}

}  // namespace detail
}  // namespace sash
