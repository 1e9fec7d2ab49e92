#pragma once
/// \file
/// The inside of a cache, and what its special members do: create, destroy, fork, move, go back.
#include <sash/cache/hybrid.hpp>
#include <sash/cache/scores.hpp>

namespace sash::detail {

template <class P>
using store_for = std::conditional_t<hybrid_policy<P>, hybrid_store,
                                     std::conditional_t<softmax_policy<P>, block_store, state_store>>;

/// Everything a cache holds. One name and one layout under all compiler flags.
template <class P, class Element>
struct cache_data {
    P policy;
    shape dims;
    storage options;
    score_state scores;
    store_for<P> store;
    array<float> auxiliary;
    workspace scratch;

    SASH_INLINE ~cache_data() = default;
};

template <class Build, class P, class E>
void create_store(cache_data<P, E>& c) {
    if constexpr (softmax_policy<P>)
        create<Build, E>(c.store, c.policy, c.dims, c.options);
    else
        create<Build>(c.store, c.policy, c.dims, c.options);
}

template <class P>
inline constexpr bool state_forgets = [] {
    if constexpr (hybrid_policy<P>)
        return forgets<decltype(P::linear)>;
    else if constexpr (recurrent_policy<P>)
        return forgets<P>;
    else
        return false;
}();

template <class Build, class P>
void check_state_element(const storage& s) {
    if (s.state == scalar::f32) return;
    require<Build>(s.state == scalar::bf16, "storage.state is scalar number ", static_cast<int64>(s.state),
                   ", must be scalar::f32 or scalar::bf16: nothing else has the range of a state");
    require<Build>(hybrid_policy<P> || recurrent_policy<P>, "storage.state is bf16, but this policy keeps no state");
    require<Build>(state_forgets<P>,
                   "storage.state is bf16, but this policy has no decay: rounded after each token, what is never "
                   "forgotten stops growing (a sum of 2,048 numbers has lost 44 %)");
    require<Build>(s.rollback_slack == 0, "rollback_slack is ", s.rollback_slack,
                   ", must be 0 with states in bfloat16: done again, tokens would be rounded elsewhere");
}

template <class Build, class P>
void check_storage(const storage& s) {
    require<Build>(s.capacity >= 0, "capacity is ", s.capacity, ", must not be negative (0: no limit)");
    require<Build>(s.rollback_slack >= 0, "rollback_slack is ", s.rollback_slack, ", must not be negative");
    require<Build>(s.rollback_slack <= int64{1} << 32, "rollback_slack is ", s.rollback_slack, ", must be at most ",
                   int64{1} << 32);
    require<Build>(s.auxiliary >= 0, "auxiliary is ", s.auxiliary, ", must not be negative");
    require<Build>(s.piece >= 1, "piece is ", s.piece, ", must be at least 1");
    check_state_element<Build, P>(s);
    require<Build>((s.memory.allocate == nullptr) == (s.memory.release == nullptr),
                   "memory needs both allocate and release, or neither");
}

/// Zeroed, on first use: a cache that was moved from gets it back here.
template <class Build, class P, class E>
float* auxiliary(cache_data<P, E>& c) {
    if (c.auxiliary.size < c.options.auxiliary) {
        reserve<Build>(c.auxiliary, c.options.memory, c.options.auxiliary);
        for (int64 i = 0; i < c.options.auxiliary; ++i) c.auxiliary.data[i] = 0;
        c.auxiliary.size = c.options.auxiliary;
    }
    return c.auxiliary.data;
}

template <class Build, class P, class E>
void destroy_cache(cache_data<P, E>& c) noexcept {
    destroy<Build>(c.store);
    free<Build>(c.auxiliary, c.options.memory);
    let_go_tables<Build>(c.scores, c.options.memory);
}

template <class Build, class P, class E>
void create(cache_data<P, E>& c, const score& s) {
    c.dims = resolve<Build>(c.dims);
    if constexpr (softmax_policy<P>) {
        const int64 stored = stored_heads(c.dims);
        require<Build>(stored % c.dims.key_heads == 0 && stored % c.dims.value_heads == 0, "key_heads is ",
                       c.dims.key_heads, " and value_heads ", c.dims.value_heads, ": one must divide the other");
    }
    validate<Build>(c.policy, c.dims);
    if constexpr (hybrid_policy<P>)
        require<Build>(!P::divides_tokens || s.sink_logits.empty(),
                       "sink_logits belong to a softmax by itself: with a shared denominator they must be empty");
    check_storage<Build, P>(c.options);
    c.scores = view_of_score<Build>(c.policy, c.dims, s);
    c.scratch = workspace(0, c.options.memory);
    own_tables<Build>(c.scores, c.options.memory, c.dims.heads);
    struct guard {
        cache_data<P, E>* held;
        ~guard() {
            if (held) destroy_cache<Build>(*held);
        }
    } undo{&c};
    create_store<Build>(c);
    auxiliary<Build>(c);
    undo.held = nullptr;
}

/// Forks `from` into `to`, whose store and tables hold nothing yet.
template <class Build, class P, class E>
void copy_cache(cache_data<P, E>& to, const cache_data<P, E>& from) {
    copy<Build>(to.store, from.store);
    struct guard {
        cache_data<P, E>* held;
        ~guard() {
            if (held) destroy<Build>(held->store);
        }
    } undo{&to};
    if (from.auxiliary.size > 0) {
        reserve<Build>(to.auxiliary, from.options.memory, from.auxiliary.size);
        std::memcpy(to.auxiliary.data, from.auxiliary.data,
                    static_cast<std::size_t>(from.auxiliary.size) * sizeof(float));
        to.auxiliary.size = from.auxiliary.size;
    }
    undo.held = nullptr;
    to.scores = from.scores;
    if (to.scores.tables) to.scores.tables->owners.fetch_add(1, std::memory_order_relaxed);
    to.policy = from.policy;
    to.dims = from.dims;
    to.options = from.options;
    to.scratch = workspace(0, from.options.memory);
}

/// What a moved-from cache keeps: policy, shape, options; no token.
SASH_INLINE block_store emptied(const block_store& s) {
    block_store e = s;
    e.length = e.oldest = 0;
    e.pinned_blocks = e.ring_blocks = 0;
    e.pinned_data = e.ring_data = nullptr;
    e.segments = {};
    return e;
}
SASH_INLINE state_store emptied(const state_store& s) {
    state_store e = s;
    e.length = e.floor = e.waiting = 0;
    e.was_set = false;
    e.data = nullptr;
    e.base_at = nullptr;
    return e;
}
SASH_INLINE hybrid_store emptied(const hybrid_store& s) {
    return {emptied(static_cast<const block_store&>(s)), emptied(s.states)};
}
/// States of a cache that was moved from come back, as zeros, when they are needed.
template <class Build>
void ensure_states(state_store& s) {
    if (s.data != nullptr || s.states == 0) return;
    allocate_states<Build>(s);
    reset<Build>(s);
}

SASH_INLINE const state_store& states_of(const state_store& s) { return s; }
SASH_INLINE state_store& states_of(state_store& s) { return s; }
SASH_INLINE const state_store& states_of(const hybrid_store& s) { return s.states; }
SASH_INLINE state_store& states_of(hybrid_store& s) { return s.states; }

/// Begins from states of elsewhere; in a hybrid they must stand for as many tokens as its window leaves them.
template <class Build, class P, class E>
void set_states_of_cache(cache_data<P, E>& c, const recurrent_state& x) {
    state_store& s = states_of(c.store);
    if constexpr (hybrid_policy<P>) {
        require<Build>(x.length == s.length, "the states' length is ", x.length, ", must be that of this hybrid's, ",
                       s.length, ": it follows from the window");
        check_states<Build>(s, c.policy.linear, x);
    } else {
        check_states<Build>(s, c.policy, x);
    }
    ensure_states<Build>(s);
    set_states<Build>(s, x);
}

template <class Build, class P, class E>
void move_cache(cache_data<P, E>& to, cache_data<P, E>& from) noexcept {
    to.policy = from.policy;
    to.dims = from.dims;
    to.options = from.options;
    to.scores = from.scores;
    if (to.scores.tables) to.scores.tables->owners.fetch_add(1, std::memory_order_relaxed);
    to.store = from.store;
    from.store = emptied(from.store);
    to.auxiliary = from.auxiliary;
    from.auxiliary = {};
    to.scratch = static_cast<workspace&&>(from.scratch);
    from.scratch = workspace(0, from.options.memory);
}

template <class Build, class P, class E>
void reset_cache(cache_data<P, E>& c) {
    reset<Build>(c.store);
    for (int64 i = 0; i < c.auxiliary.size; ++i) c.auxiliary.data[i] = 0;
}

template <class Build, class P, class E>
bool can_rollback_cache(const cache_data<P, E>& c, int64 tokens) {
    if constexpr (softmax_policy<P>)
        return can_rollback<Build>(c.store, c.policy, tokens);
    else
        return can_rollback<Build>(c.store, tokens);
}

template <class Build, class P, class E>
void rollback_cache(cache_data<P, E>& c, int64 tokens) {
    if constexpr (softmax_policy<P> && !hybrid_policy<P>)
        rollback<Build>(c.store, tokens);
    else
        rollback<Build>(c.store, c.policy, c.dims, tokens);
}

template <class Build>
[[noreturn]] SASH_COLD void refuse_rollback(int64 tokens, int64 length, int64 slack) {
    if (tokens < 0) refuse<Build>("rollback of ", tokens, " tokens: must not be negative");
    if (tokens > length) refuse<Build>("rollback of ", tokens, " tokens: the cache holds only ", length);
    refuse<Build>("rollback of ", tokens, " tokens needs what has already left the cache; rollback_slack is ", slack);
}

/// Moves the tokens that `p` retains from a chain into a ring.
template <class Build, class E, class P>
void bound(block_store& s, const P& p, const shape& dims, const storage& options) {
    block_store made;
    create<Build, E>(made, p, dims, options);
    struct guard {
        block_store* held;
        ~guard() { destroy<Build>(*held); }
    } undo{&made};
    made.length = made.oldest = first_kept<Build>(made, p, s.length);
    make_room<Build>(made, p, s.length - made.oldest, s.length - made.oldest);
    grow_pinned<Build>(made, s.length);
    made.length = s.length;
    row_buffer<Build> buffer(s.memory, codec<E>::token_bytes(s.key_dim, s.value_dim) / int64{sizeof(float)} + 1);
    auto* token = reinterpret_cast<std::byte*>(buffer.row.data);
    for (const key_interval& i : held_positions(made))
        for (int64 at = i.first; at < i.last; ++at)
            for (int64 h = 0; h < s.heads; ++h) {
                const token_place from = locate<Build>(s, h, at), to = locate<Build>(made, h, at);
                codec<E>::template save_token<Build>(from.block, from.lane, s.key_dim, s.value_dim, token);
                codec<E>::template load_token<Build>(to.block, to.lane, s.key_dim, s.value_dim, token);
            }
    std::swap(s, made);
}

/// Another policy of the same type from the next token on: a window that grows or shrinks. What a ring pins stays
/// pinned.
template <class Build, class P, class E>
void change_policy(cache_data<P, E>& c, const P& p) {
    static_assert(softmax_policy<P> && !hybrid_policy<P>,
                  "sash: the policy of a recurrent cache cannot change: its state was made with it");
    validate<Build>(p, c.dims);
    block_store& s = c.store;
    const bool bounded = bounds_memory<Build>(p, s.heads);
    if (s.bounded && bounded) {
        const pinned_set pinned = pinned_positions<Build>(p, s.heads);
        bool same = pinned.count == s.pinned.count;
        for (int i = 0; same && i < pinned.count; ++i) same = pinned[i] == s.pinned[i];
        require<Build>(same || s.length == 0, "the positions a cache pins (", pinned_count(s.pinned, far_away),
                       " sinks) can change only while it is empty; it holds ", s.length, " tokens, the new policy pins ",
                       pinned_count(pinned, far_away));
        s.pinned = pinned;
    }
    if (!s.bounded && bounded) bound<Build, E>(s, p, c.dims, c.options);
    c.policy = p;
    if (s.bounded) s.oldest = larger(s.oldest, first_kept<Build>(s, p, s.length));
}

}  // namespace sash::detail
