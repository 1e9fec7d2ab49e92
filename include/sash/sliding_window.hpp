#pragma once
/// \file
/// Sliding-window attention with sinks: constant memory for a stream that never ends.
#include <sash/policy.hpp>

#include <limits>

namespace sash {

/// The rotary frame in which a query reads the sinks.
enum class frame : int {
    original,  ///< at their absolute positions: only the mask differs from full attention
    compact    ///< at the positions they have inside the cache (StreamingLLM): never further than window + sinks away
};

/// Query i sees
///
///     V(i) = { j <= i :  i - j < window   or   j < sinks },       |V(i)| = min(i + 1, sinks + window)
///
/// `window` counts the query's own token. `sinks` are extra: the first positions of the sequence, never evicted, and
/// causality holds for them too. Memory is constant: sinks + window tokens (and room for one piece of an append).
///
/// In the compact frame the sinks are read as if the tokens between them and the window did not exist: the query that
/// reads them stands at min(i, sinks + window - 1). Window keys keep their true distance in both frames, so no key is
/// ever rotated twice; only the query is, once more, for the sinks.
///
/// What it is for: streams without end, dialogue, local tasks. What it is not for: questions about text that has left
/// the window; that text is gone.
/// Source: Beltagy et al. 2020 (window); Xiao et al. 2024, "Efficient streaming language models with attention sinks".
struct sliding_window {
    int64 window = 1;                           ///< keys seen, the query's own token included; at least 1
    int64 sinks = 0;                            ///< first positions that stay visible, beside the window
    sash::frame frame = sash::frame::original;  ///< see above

    static constexpr bool exact_intervals = true;
    static constexpr bool affine_distance = true;
    static constexpr int frames = 2;

    /// From the other convention: `left` keys before the query's own (FlashAttention's window_left), so left + 1 keys.
    /// A negative `left` means unlimited there, and here.
    SASH_INLINE static constexpr sliding_window from_left(int64 left, int64 sinks = 0) {
        constexpr int64 unlimited = std::numeric_limits<int64>::max();
        return {.window = left < 0 || left == unlimited ? unlimited : left + 1, .sinks = sinks};
    }

    SASH_INLINE constexpr bool sees(int64 query, int64 key) const {
        return key <= query && (query - key < window || key < sinks);
    }

    SASH_INLINE constexpr key_intervals<2> visible(int64 first_query, int64 last_query) const {
        key_intervals<2> keys;
        const int64 sinks_seen = sinks < last_query ? sinks : last_query;
        keys.add(0, sinks_seen, sink_frame());
        const int64 first = first_query - window + 1;
        keys.add(first < sinks ? sinks : first, last_query);
        return keys;
    }

    SASH_INLINE constexpr bool whole(key_interval queries, key_interval keys) const {
        return keys.last <= queries.first + 1 && (queries.last - keys.first <= window || keys.last <= sinks);
    }

    SASH_INLINE constexpr key_intervals<2> retained(int64 next) const {
        key_intervals<2> keys;
        keys.add(0, sinks < next ? sinks : next);
        keys.add(next - window, next);
        return keys;
    }

    SASH_INLINE constexpr int64 distance(int64 query, int64 key) const {
        return (key < sinks ? read_position(query, sink_frame()) : query) - key;
    }

    SASH_INLINE constexpr int64 read_position(int64 query, int in_frame) const {
        if (in_frame == 0) return query;
        const int64 room =
            window > full_length - sinks ? full_length : window + sinks;  // no overflow for a huge window
        return query < room - 1 ? query : room - 1;
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse) const {
        if (window < 1) refuse("window is ", window, ", must be at least 1: it counts the query's own token");
        if (sinks < 0) refuse("sinks is ", sinks, ", must not be negative");
        if (sinks > full_length) refuse("sinks is ", sinks, ", must be at most ", full_length);
        if (frame != sash::frame::original && frame != sash::frame::compact)
            refuse("frame is ", static_cast<int64>(frame), ", must be frame::original or frame::compact");
    }

    friend constexpr bool operator==(const sliding_window&, const sliding_window&) = default;

private:
    static constexpr int64 full_length = int64{1} << 62;
    SASH_INLINE constexpr int sink_frame() const { return frame == sash::frame::compact ? 1 : 0; }
};

}  // namespace sash
