#pragma once
/// \file
/// What a hybrid's cache holds: the window's tokens in blocks, and the states that remember what has left them.
///
/// The states have taken in the tokens before the first one that the last query saw, sinks left out (or, where the
/// combination does not divide the tokens, all of them). How many that is follows from the length, so that window and
/// states go back together.
#include <sash/cache/blocks.hpp>
#include <sash/cache/state.hpp>
#include <sash/hybrid.hpp>

namespace sash::detail {

/// Blocks, and states beside them.
struct hybrid_store : block_store {
    state_store states;
};

/// How many tokens the states hold when the last query stood at `query`; -1: there was none.
template <class Build, hybrid_policy P>
int64 tokens_in_states(const P& p, const pinned_set& pinned, int64 query) {
    if (!P::divides_tokens) return query + 1;
    if (query < 0) return 0;
    const int64 first = first_in_window(p.window, query);
    return first - pinned_count(pinned, first);
}
/// The same for a cache of that length.
template <class Build, hybrid_policy P>
int64 tokens_in_states_of_length(const P& p, int64 heads, int64 length) {
    return tokens_in_states<Build>(p, pinned_positions<Build>(p, heads), length - 1);
}

/// Most tokens that leave the window between one query and the next.
template <class Build, hybrid_policy P>
int64 most_leaving(const P& p, int64 heads) {
    if (!bounds_memory<Build>(p, heads)) return 1;
    const int64 window = far_away - first_in_window(p.window, far_away);
    int64 most = 1;
    for (int64 i = far_away; i < far_away + smaller(window, int64{1} << 20); ++i)
        most = larger(most, first_in_window(p.window, i + 1) - first_in_window(p.window, i));
    return most;
}

template <class Build, class Element, hybrid_policy P>
void create(hybrid_store& s, const P& p, const shape& dims, const storage& options) {
    storage how = options;  // back over the border of a step, all of the step comes back
    if (how.rollback_slack > 0) how.rollback_slack += most_leaving<Build>(p, stored_heads(dims)) - 1;
    block_store blocks;
    create<Build, Element>(blocks, p, dims, how);
    state_store states;
    create<Build>(states, p.linear, dims, how, false);
    s = {blocks, states};
}

template <class Build>
void destroy(hybrid_store& s) noexcept {
    destroy<Build>(static_cast<block_store&>(s));
    destroy<Build>(s.states);
}

template <class Build>
void copy(hybrid_store& to, const hybrid_store& from) {
    state_store states;
    copy<Build>(states, from.states);
    struct guard {
        state_store* held;
        ~guard() {
            if (held) destroy<Build>(*held);
        }
    } undo{&states};
    copy<Build>(static_cast<block_store&>(to), static_cast<const block_store&>(from));
    undo.held = nullptr;
    to.states = states;
}

template <class Build>
void reset(hybrid_store& s) {
    reset<Build>(static_cast<block_store&>(s));
    reset<Build>(s.states);
}

template <class Build>
int64 bytes_held(const hybrid_store& s) {
    return bytes_held<Build>(static_cast<const block_store&>(s)) + bytes<Build>(s.states);
}

template <class Build, hybrid_policy P>
bool can_rollback(const hybrid_store& s, const P& p, int64 tokens) {
    if (!can_rollback<Build>(static_cast<const block_store&>(s), p, tokens)) return false;
    const int64 before = tokens_in_states_of_length<Build>(p, s.heads, s.length - tokens);
    return can_rollback<Build>(s.states, s.states.length - before);
}

template <class Build, hybrid_policy P>
void rollback(hybrid_store& s, const P& p, const shape& dims, int64 tokens) {
    const int64 before = tokens_in_states_of_length<Build>(p, s.heads, s.length - tokens);
    rollback<Build>(s.states, p.linear, dims, s.states.length - before);
    rollback<Build>(static_cast<block_store&>(s), tokens);
}

// As plain bytes: the blocks, the states, how many bytes the blocks took.

template <class Build, class Element>
int64 saved_bytes(const hybrid_store& s) {
    return saved_bytes<Build, Element>(static_cast<const block_store&>(s)) +
           static_cast<int64>(saved_bytes<Build>(s.states)) + int64{sizeof(int64)};
}

template <class Build, class Element>
void save(const hybrid_store& s, std::byte* to) {
    const int64 blocks = saved_bytes<Build, Element>(static_cast<const block_store&>(s));
    save<Build, Element>(static_cast<const block_store&>(s), to);
    save<Build>(s.states, to + blocks);
    std::memcpy(to + saved_bytes<Build, Element>(s) - sizeof blocks, &blocks, sizeof blocks);
}

template <class Build, class Element, hybrid_policy P>
bool load(hybrid_store& s, const P& p, const std::byte* from, int64 bytes) {
    int64 blocks = 0;
    bytes -= int64{sizeof blocks};
    if (bytes < 0) return false;
    std::memcpy(&blocks, from + bytes, sizeof blocks);
    if (blocks < 0 || blocks > bytes) return false;
    return load<Build, decltype(P::linear)>(s.states, from + blocks, static_cast<std::size_t>(bytes - blocks)) &&
           load<Build, Element>(static_cast<block_store&>(s), p, from, blocks) &&
           s.states.length == tokens_in_states_of_length<Build>(p, s.heads, s.length);
}

}  // namespace sash::detail
