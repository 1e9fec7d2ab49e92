#pragma once
/// \file
/// Keys and values of a softmax policy in blocks of 64 tokens: a chain of segments that grows, or a ring that does not.
///
/// Token p lives in lane p % 64 of block p / 64, always: neither the cut of an append nor a rollback changes where it
/// is, so the kernels meet the same tiles whatever the history.
///
///     chain   [segment 0][segment 1]…   head-major inside a segment: [kv_head][blocks]. Segments double in size until
///             one head's part is 1 MiB, and never move. Copies of a cache share full segments by reference count.
///             Segments that are made together lie in one slab of memory: large enough for huge pages, where many come.
///     ring    [kv_head][blocks]          block b at b % blocks; it grows until the window fits, then never again.
///     pinned  [kv_head][blocks]          the positions a bounded policy never gives up (sinks), in order.
#include <sash/cache/codec.hpp>
#include <sash/cache/storage.hpp>
#include <sash/policy.hpp>

#include <atomic>
#include <bit>

namespace sash::detail {

/// Memory of segments that were made together. Freed with the last of them.
struct alignas(cache_line) slab {
    std::atomic<int64> segments;
    int64 bytes;
};

/// A piece of a chain: this header, then [kv_heads][blocks] blocks. Given up by its last owner.
struct alignas(cache_line) segment {
    std::atomic<int64> owners;
    int64 blocks;  // of one head
    int64 bytes;
    slab* home;

    SASH_INLINE std::byte* data() { return reinterpret_cast<std::byte*>(this + 1); }
};

SASH_INLINE constexpr int64 blocks_for(int64 tokens) { return (tokens + block_tokens - 1) / block_tokens; }

inline constexpr int64 far_away = int64{1} << 60;  // a position no stream reaches
inline constexpr int64 segment_bytes_a_head = int64{1} << 20;
using pinned_set = key_intervals<8>;

/// Blocks of one cache. Plain data: a move copies the members and empties the source.
struct block_store {
    memory_source memory;
    int64 heads = 0, key_dim = 0, value_dim = 0, block_bytes = 0;
    int64 length = 0;  // tokens appended so far: the position of the next one
    int64 oldest = 0;  // first position outside `pinned` that is still whole
    int64 slack = 0, piece = 0;
    bool bounded = false;     // a ring, else a chain
    pinned_set pinned;        // positions never given up, where bounded
    int64 pinned_blocks = 0;  // room for them, of one head
    std::byte* pinned_data = nullptr;
    int64 ring_blocks = 0;
    std::byte* ring_data = nullptr;
    array<segment*> segments;
    int64 chain_unit = 1;  // blocks of a full-grown segment, a power of two
};

// ------------------------------------------------------------------------------------------------ which positions are kept

/// Calls f(intervals) for each head's answer; once, where the policy does not take the head.
template <class P, class F>
SASH_INLINE void for_each_retained(const P& p, int64 next, int64 heads, F&& f) {
    constexpr bool by_head = requires { p.retained(next, next); };
    for (int64 h = 0; h < (by_head ? heads : 1); ++h) f(ask::retained(p, next, h));
}

/// The positions that stay for ever: those a query far away still retains and that do not move along with it.
template <class Build, class P>
pinned_set pinned_positions(const P& p, int64 heads) {
    pinned_set pinned;
    for_each_retained(p, far_away, heads, [&](const auto& kept) {
        for (const key_interval& i : kept)
            if (i.last <= far_away / 2) pinned.add(i.first, i.last);
    });
    return pinned;
}

/// The first position outside `pinned` that the policy still retains when `next` is the next one.
template <class Build, class P>
int64 first_retained(const P& p, int64 next, int64 heads, const pinned_set& pinned) {
    int64 first = next;
    for_each_retained(p, next, heads, [&](const auto& kept) {
        for (const key_interval& i : kept) {
            int64 from = i.first;
            for (const key_interval& stay : pinned)
                if (from >= stay.first && from < stay.last) from = stay.last;
            if (from < i.last) first = smaller(first, from);
        }
    });
    return first;
}

/// The first position outside `pinned` that must stay when `next` is the next one: for that query and later ones, and
/// for those that come again when up to `slack` tokens are taken back.
template <class Build, class P>
int64 first_kept(const block_store& s, const P& p, int64 next) {
    return first_retained<Build>(p, larger(0, next - s.slack), s.heads, s.pinned);
}

/// Does this policy bound what is kept? Then a ring holds it.
template <class Build, class P>
bool bounds_memory(const P& p, int64 heads) {
    if constexpr (!ask::has_retained<P>) return false;
    constexpr int64 most = int64{1} << 40;  // a window this long is as good as full attention
    return far_away - first_retained<Build>(p, far_away, heads, pinned_positions<Build>(p, heads)) < most;
}

SASH_INLINE int64 pinned_count(const pinned_set& pinned, int64 below) {
    int64 n = 0;
    for (const key_interval& i : pinned) n += larger(0, smaller(i.last, below) - i.first);
    return n;
}

// ---------------------------------------------------------------------------------------------------- where a token lies

SASH_INLINE int64 bits_in(int64 n) { return static_cast<int64>(std::bit_width(static_cast<std::uint64_t>(n))); }

/// Segment and offset of block b of a chain: sizes 1, 1, 2, 4, … up to `unit`, then `unit` each.
struct chain_place {
    int64 segment, offset;
};
SASH_INLINE chain_place place_in_chain(int64 block, int64 unit) {
    const int64 grown = bits_in(unit);  // segments before the full-grown ones
    if (block >= unit) return {grown + (block - unit) / unit, (block - unit) % unit};
    const int64 s = bits_in(block);
    return {s, s == 0 ? 0 : block - (int64{1} << (s - 1))};
}
SASH_INLINE int64 segment_blocks(int64 s, int64 unit) {
    const int64 grown = bits_in(unit);
    return s >= grown ? unit : s == 0 ? 1 : int64{1} << (s - 1);
}

/// A token's block, its lane there, and how many tokens from it on lie in the lanes behind it.
struct token_place {
    std::byte* block;
    int64 lane, together;
};

template <class Build>
std::byte* block_address(const block_store& s, int64 head, int64 block) {
    if (s.bounded) return s.ring_data + (head * s.ring_blocks + block % s.ring_blocks) * s.block_bytes;
    const chain_place at = place_in_chain(block, s.chain_unit);
    segment* in = s.segments[at.segment];
    return in->data() + (head * in->blocks + at.offset) * s.block_bytes;
}

/// Where position p lies. `together` counts up to the end of the block or of its pinned stretch.
template <class Build>
token_place locate(const block_store& s, int64 head, int64 p) {
    if (s.bounded) {
        int64 before = 0;  // pinned positions below the interval
        for (const key_interval& stay : s.pinned) {
            if (p < stay.first) break;
            if (p < stay.last) {
                const int64 ordinal = before + p - stay.first;
                const int64 lane = ordinal % block_tokens;
                return {s.pinned_data + (head * s.pinned_blocks + ordinal / block_tokens) * s.block_bytes, lane,
                        smaller(block_tokens - lane, stay.last - p)};
            }
            before += stay.last - stay.first;
        }
    }
    const int64 lane = p % block_tokens;
    int64 together = block_tokens - lane;
    for (const key_interval& stay : s.pinned)
        if (p < stay.first) together = smaller(together, stay.first - p);
    return {block_address<Build>(s, head, p / block_tokens), lane, together};
}

/// The first position from p on that is held: p itself, unless it has left the ring.
SASH_INLINE int64 next_held(const block_store& s, int64 p) {
    if (!s.bounded || p >= s.oldest) return p;
    int64 next = s.oldest;
    for (const key_interval& stay : s.pinned)
        if (p < stay.last) next = smaller(next, larger(p, stay.first));
    return next;
}

/// The positions held: pinned ones below `length`, then [oldest, length).
SASH_INLINE key_intervals<9> held_positions(const block_store& s) {
    key_intervals<9> held;
    for (const key_interval& i : s.pinned) held.add(i.first, smaller(i.last, s.length));
    held.add(s.oldest, s.length);
    return held;
}

// ---------------------------------------------------------------------------------------------------------- create, destroy

template <class Build, class Element, class P>
void create(block_store& s, const P& p, const shape& dims, const storage& options) {
    s = {};
    s.memory = options.memory;
    s.heads = stored_heads(dims);
    s.key_dim = dims.key_dim;
    s.value_dim = dims.value_dim;
    s.block_bytes = codec<Element>::block_bytes(dims.key_dim, dims.value_dim);
    s.slack = options.rollback_slack;
    s.piece = options.piece;
    s.bounded = bounds_memory<Build>(p, s.heads);
    if (s.bounded) s.pinned = pinned_positions<Build>(p, s.heads);
    while (s.chain_unit * s.block_bytes < segment_bytes_a_head) s.chain_unit *= 2;
}

template <class Build>
void let_go(const block_store& s, segment* in) noexcept {
    if (in->owners.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    slab* home = in->home;
    if (home->segments.fetch_sub(1, std::memory_order_acq_rel) == 1)
        release<Build>(s.memory, home, static_cast<std::size_t>(home->bytes));
}

template <class Build>
void destroy(block_store& s) noexcept {
    for (segment* in : s.segments) let_go<Build>(s, in);
    free<Build>(s.segments, s.memory);
    release<Build>(s.memory, s.ring_data, static_cast<std::size_t>(s.heads * s.ring_blocks * s.block_bytes));
    release<Build>(s.memory, s.pinned_data, static_cast<std::size_t>(s.heads * s.pinned_blocks * s.block_bytes));
    s.ring_data = s.pinned_data = nullptr;
    s.ring_blocks = s.pinned_blocks = 0;
}

/// New blocks come uninitialised but for their last line (codec.hpp): any lane may hold a NaN.
template <class Build>
std::byte* mark_unknown(const block_store& s, std::byte* blocks, int64 count) {
    for (int64 b = 1; b <= count; ++b)
        std::memset(blocks + b * s.block_bytes - cache_line, 0xff, sizeof(std::uint64_t));
    return blocks;
}

/// Memory for `blocks` blocks of every head.
template <class Build>
std::byte* new_blocks(const block_store& s, int64 blocks) {
    const auto bytes = static_cast<std::size_t>(s.heads * blocks * s.block_bytes);
    return mark_unknown<Build>(s, static_cast<std::byte*>(allocate<Build>(s.memory, bytes)), s.heads * blocks);
}

/// Makes `count` segments in one slab, of blocks_of(i) blocks a head each, into list[0, count).
template <class Build, class F>
void new_segments(const block_store& s, segment** list, int64 count, const F& blocks_of) {
    const auto bytes_of = [&](int64 i) {
        return static_cast<int64>(sizeof(segment)) + s.heads * blocks_of(i) * s.block_bytes;
    };
    int64 bytes = sizeof(slab);
    for (int64 i = 0; i < count; ++i) bytes += bytes_of(i);
    slab* home = ::new (allocate<Build>(s.memory, static_cast<std::size_t>(bytes))) slab{{count}, bytes};
    auto* at = reinterpret_cast<std::byte*>(home + 1);
    for (int64 i = 0; i < count; at += bytes_of(i), ++i) {
        list[i] = ::new (static_cast<void*>(at)) segment{{1}, blocks_of(i), bytes_of(i), home};
        mark_unknown<Build>(s, list[i]->data(), s.heads * blocks_of(i));
    }
}

/// Copies the first `used` blocks of every head.
template <class Build>
segment* clone(const block_store& s, segment* from, int64 used) {
    segment* to;
    new_segments<Build>(s, &to, 1, [&](int64) { return from->blocks; });
    for (int64 h = 0; h < s.heads; ++h)
        std::memcpy(to->data() + h * to->blocks * s.block_bytes, from->data() + h * from->blocks * s.block_bytes,
                    static_cast<std::size_t>(used * s.block_bytes));
    return to;
}

template <class Build>
std::byte* copy_flat(const block_store& s, const std::byte* from, int64 blocks) {
    if (from == nullptr) return nullptr;
    const auto size = static_cast<std::size_t>(s.heads * blocks * s.block_bytes);
    void* to = allocate<Build>(s.memory, size);
    std::memcpy(to, from, size);
    return static_cast<std::byte*>(to);
}

/// Forks: full segments are shared, the one that `length` stands in is copied, a ring is copied. `to` holds nothing.
template <class Build>
void copy(block_store& to, const block_store& from) {
    block_store made = from;
    made.segments = {};
    made.ring_data = made.pinned_data = nullptr;
    made.ring_blocks = made.pinned_blocks = 0;
    struct guard {  // frees what was made when an allocation fails halfway
        block_store* held;
        ~guard() {
            if (held) destroy<Build>(*held);
        }
    } undo{&made};
    made.ring_data = copy_flat<Build>(from, from.ring_data, from.ring_blocks);
    made.ring_blocks = from.ring_blocks;
    made.pinned_data = copy_flat<Build>(from, from.pinned_data, from.pinned_blocks);
    made.pinned_blocks = from.pinned_blocks;
    reserve<Build>(made.segments, made.memory, from.segments.size);
    int64 first_block = 0;
    for (segment* in : from.segments) {
        const int64 used = blocks_for(from.length) - first_block;
        if (used <= 0) break;
        if (from.length >= (first_block + in->blocks) * block_tokens) {
            in->owners.fetch_add(1, std::memory_order_relaxed);
            made.segments[made.segments.size++] = in;
        } else {
            made.segments[made.segments.size++] = clone<Build>(from, in, used);
        }
        first_block += in->blocks;
    }
    undo.held = nullptr;
    to = made;
}

// ------------------------------------------------------------------------------------------------------------- room to grow

/// A ring of `blocks` blocks a head with the tokens of the old one in their new places.
template <class Build>
void grow_ring(block_store& s, int64 blocks) {
    std::byte* data = new_blocks<Build>(s, blocks);
    if (s.ring_data != nullptr && s.length > s.oldest) {
        for (int64 h = 0; h < s.heads; ++h)
            for (int64 b = s.oldest / block_tokens; b <= (s.length - 1) / block_tokens; ++b)
                std::memcpy(data + (h * blocks + b % blocks) * s.block_bytes, block_address<Build>(s, h, b),
                            static_cast<std::size_t>(s.block_bytes));
    }
    release<Build>(s.memory, s.ring_data, static_cast<std::size_t>(s.heads * s.ring_blocks * s.block_bytes));
    s.ring_data = data;
    s.ring_blocks = blocks;
}

/// Blocks that a ring needs while tokens [length, next) are appended: everything the first of them may see, and
/// everything that must still be there afterwards.
template <class Build, class P>
int64 ring_need(const block_store& s, const P& p, int64 next) {
    const int64 seen = first_retained<Build>(p, s.length, s.heads, s.pinned);
    const int64 kept = first_kept<Build>(s, p, next);
    const int64 first = larger(0, larger(s.oldest, smaller(seen, kept)));
    return (next - 1) / block_tokens - first / block_tokens + 1;
}

/// Room for the pinned positions below `next`. It doubles up to all of them: a million sinks cost nothing before they come.
template <class Build>
void grow_pinned(block_store& s, int64 next) {
    const int64 need = blocks_for(pinned_count(s.pinned, next));
    if (need <= s.pinned_blocks) return;
    const int64 blocks = larger(need, smaller(2 * s.pinned_blocks, blocks_for(pinned_count(s.pinned, far_away))));
    std::byte* data = new_blocks<Build>(s, blocks);
    if (s.pinned_data != nullptr)
        for (int64 h = 0; h < s.heads; ++h)
            std::memcpy(data + h * blocks * s.block_bytes, s.pinned_data + h * s.pinned_blocks * s.block_bytes,
                        static_cast<std::size_t>(s.pinned_blocks * s.block_bytes));
    release<Build>(s.memory, s.pinned_data, static_cast<std::size_t>(s.heads * s.pinned_blocks * s.block_bytes));
    s.pinned_data = data;
    s.pinned_blocks = blocks;
}

/// Blocks with which a ring never grows again: the window, one piece of an append, and any alignment of the two.
template <class Build, class P>
int64 steady_blocks(const block_store& s, const P& p) {
    const int64 window = far_away - first_retained<Build>(p, far_away, s.heads, s.pinned);
    return (window + larger(s.piece, s.slack) - 1) / block_tokens + 2;
}

/// Tokens that a chain has room for.
SASH_INLINE int64 chain_room(const block_store& s) {
    int64 blocks = 0;
    for (const segment* in : s.segments) blocks += in->blocks;
    return blocks * block_tokens;
}

/// Counts `tokens` stored tokens in: what no later query sees leaves.
template <class Build, class P>
void advance(block_store& s, const P& p, int64 tokens) {
    s.length += tokens;
    if (s.bounded) s.oldest = larger(s.oldest, first_kept<Build>(s, p, s.length));
}

/// Room for `tokens` more tokens that come `piece` at a time.
template <class Build, class P>
void make_room_in_ring(block_store& s, const P& p, int64 tokens, int64 piece) {
    grow_pinned<Build>(s, s.length + tokens);
    int64 need = 0;
    block_store imagined = s;
    for (const int64 last = s.length + tokens; imagined.length < last;) {
        const int64 next = smaller(last, imagined.length + piece);
        need = larger(need, ring_need<Build>(imagined, p, next));
        advance<Build>(imagined, p, next - imagined.length);
    }
    if (need > s.ring_blocks) grow_ring<Build>(s, larger(need, smaller(2 * s.ring_blocks, steady_blocks<Build>(s, p))));
}

template <class Build>
void make_room_in_chain(block_store& s, int64 next, bool will_write) {
    const chain_place last = place_in_chain((next - 1) / block_tokens, s.chain_unit);
    reserve<Build>(s.segments, s.memory, last.segment + 1);
    const int64 there = s.segments.size, missing = last.segment + 1 - there;
    if (missing > 0) {
        new_segments<Build>(s, s.segments.data + there, missing,
                            [&](int64 i) { return segment_blocks(there + i, s.chain_unit); });
        s.segments.size += missing;
    }
    if (!will_write) return;
    const chain_place first = place_in_chain(s.length / block_tokens, s.chain_unit);
    for (int64 i = first.segment; i <= last.segment;
         ++i) {  // a segment that somebody else reads is copied before it is written
        segment*& in = s.segments[i];
        if (in->owners.load(std::memory_order_acquire) == 1) continue;
        const int64 used = i == first.segment ? first.offset + (s.length % block_tokens != 0) : 0;
        segment* mine = clone<Build>(s, in, used);
        let_go<Build>(s, in);
        in = mine;
    }
}

/// Makes room for `tokens` more tokens that are appended `piece` at a time; all that can fail. Changes no token.
template <class Build, class P>
void make_room(block_store& s, const P& p, int64 tokens, int64 piece) {
    if (tokens == 0) return;
    if (s.bounded)
        make_room_in_ring<Build>(s, p, tokens, piece);
    else
        make_room_in_chain<Build>(s, s.length + tokens, true);
}

/// Makes room for `tokens` tokens in all, so that later appends up to there allocate nothing.
template <class Build, class P>
void reserve_tokens(block_store& s, const P& p, int64 tokens) {
    if (tokens <= 0) return;
    if (!s.bounded) return make_room_in_chain<Build>(s, larger(tokens, s.length), false);
    grow_pinned<Build>(s, larger(tokens, s.length));
    const int64 blocks = smaller(steady_blocks<Build>(s, p), blocks_for(tokens));
    if (blocks > s.ring_blocks) grow_ring<Build>(s, blocks);
}

// -------------------------------------------------------------------------------------------------------------- going back

/// Exact, or not at all: every token that a later query may see must still be there.
template <class Build, class P>
bool can_rollback(const block_store& s, const P& p, int64 tokens) {
    if (tokens < 0 || tokens > s.length) return false;
    if (tokens == 0 || !s.bounded) return true;
    const int64 target = s.length - tokens, first = first_retained<Build>(p, target, s.heads, s.pinned);
    return first >= s.oldest || first == target;  // first == target: it needs pinned tokens only
}

template <class Build>
void rollback(block_store& s, int64 tokens) {
    s.length -= tokens;
    s.oldest = smaller(s.oldest, s.length);
}

template <class Build>
void reset(block_store& s) {
    s.length = s.oldest = 0;
}

template <class Build>
int64 bytes_held(const block_store& s) {
    int64 bytes = s.heads * (s.ring_blocks + s.pinned_blocks) * s.block_bytes;
    for (segment* in : s.segments) bytes += in->bytes;
    return bytes + s.segments.room * static_cast<int64>(sizeof(segment*));
}

// ------------------------------------------------------------------------------------------------------------- as plain bytes

/// [length, oldest], then every held position in order, head by head, as the codec writes a token.
template <class Build, class Element>
int64 saved_bytes(const block_store& s) {
    int64 tokens = 0;
    for (const key_interval& i : held_positions(s)) tokens += i.last - i.first;
    return 2 * static_cast<int64>(sizeof(int64)) +
           tokens * s.heads * codec<Element>::token_bytes(s.key_dim, s.value_dim);
}

template <class Build, class Element>
void save(const block_store& s, std::byte* to) {
    const int64 header[2] = {s.length, s.oldest};
    std::memcpy(to, header, sizeof header);
    to += sizeof header;
    const int64 bytes = codec<Element>::token_bytes(s.key_dim, s.value_dim);
    for (const key_interval& i : held_positions(s))
        for (int64 p = i.first; p < i.last; ++p)
            for (int64 h = 0; h < s.heads; ++h, to += bytes) {
                const token_place at = locate<Build>(s, h, p);
                codec<Element>::template save_token<Build>(at.block, at.lane, s.key_dim, s.value_dim, to);
            }
}

/// Fills a fresh store; false where the numbers cannot be those of such a cache.
template <class Build, class Element, class P>
bool load(block_store& s, const P& p, const std::byte* from, int64 bytes) {
    int64 header[2];
    if (bytes < static_cast<int64>(sizeof header)) return false;
    std::memcpy(header, from, sizeof header);
    if (header[0] < 0 || header[0] >= far_away || header[1] < 0 || header[1] > header[0]) return false;
    if (!s.bounded && header[1] != 0) return false;
    block_store placed = s;  // sizes first: nothing is allocated for a file that is too short
    placed.length = header[0];
    placed.oldest = header[1];
    if (saved_bytes<Build, Element>(placed) != bytes) return false;
    if (header[0] == 0) return true;
    from += sizeof header;
    if (s.bounded) {
        s.length = s.oldest = header[1];
        const int64 need = (header[0] - 1) / block_tokens - header[1] / block_tokens + 1;
        make_room<Build>(s, p, header[0] - header[1], header[0] - header[1]);
        grow_pinned<Build>(s, header[0]);
        if (need > s.ring_blocks) grow_ring<Build>(s, need);
    } else {
        make_room<Build>(s, p, header[0], header[0]);
    }
    s.length = header[0];
    s.oldest = header[1];
    const int64 token = codec<Element>::token_bytes(s.key_dim, s.value_dim);
    for (const key_interval& i : held_positions(s))
        for (int64 at = i.first; at < i.last; ++at)
            for (int64 h = 0; h < s.heads; ++h, from += token) {
                const token_place place = locate<Build>(s, h, at);
                codec<Element>::template load_token<Build>(place.block, place.lane, s.key_dim, s.value_dim, from);
            }
    return true;
}

}  // namespace sash::detail
