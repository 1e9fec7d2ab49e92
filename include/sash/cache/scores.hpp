#pragma once
/// \file
/// Options of the scores as a cache holds them: checked, defaults filled in, arrays copied and shared by forks.
#include <sash/cache/blocks.hpp>
#include <sash/score.hpp>

#include <cmath>

namespace sash::detail {

/// Per-head arrays and frequencies of a cache; shared by its copies, freed by the last.
struct alignas(cache_line) score_tables {
    std::atomic<int64> owners;
    int64 bytes;
};

/// Options of the scores, checked, with defaults filled in. The arrays live in `tables`, or in the caller's memory where
/// there is no cache.
struct score_state {
    float scale = 1, soft_cap = 0;
    const float* alibi = nullptr;
    const float* sink_logits = nullptr;
    const double* frequencies = nullptr;
    int64 pairs = 0;
    rotary_layout layout = rotary_layout::half_split;
    rotates by = rotates::caller;
    int64 steady_position = -1;    // where every late query stands in the compact frame; -1: it moves, or there is none
    const turn* steady = nullptr;  // [pairs], the turn to there, where there are tables
    custom_score custom;
    score_tables* tables = nullptr;
};

template <class Build>
void check_table(const char* name, std::size_t count, int64 heads) {
    require<Build>(count == 0 || count == static_cast<std::size_t>(heads), name, " has ", count,
                   " entries, must have one for each of ", heads, " heads");
}

template <class Build>
void check_rotary(const rotary& r, int64 key_dim) {
    const auto pairs = static_cast<int64>(r.frequencies.size());
    require<Build>(r.dims == 0 || r.dims == 2 * pairs, "rotary.dims is ", r.dims,
                   ", must be twice the number of frequencies, which is ", pairs);
    require<Build>(2 * pairs <= key_dim, "rotary turns ", 2 * pairs, " dims, must be at most key_dim, which is ",
                   key_dim);
}

/// Does this policy read any key in a frame of its own?
template <class P>
SASH_INLINE bool reads_other_frames(const P& p, int64 heads) {
    if constexpr (ask::frames < P >> 1)
        for (int64 h = 0; h < heads; ++h)
            for (const key_interval& i : ask::visible(p, far_away, far_away + 1, h))
                if (i.frame != 0) return true;
    return false;
}

template <class Build, class P>
void check_score(const P& p, const shape& dims, const score& s) {
    require<Build>(is_finite(s.scale), "scale is ", s.scale, ", must be finite");
    require<Build>(is_finite(s.soft_cap) && s.soft_cap >= 0, "soft_cap is ", s.soft_cap,
                   ", must be finite and not negative");
    check_table<Build>("alibi", s.alibi.size(), dims.heads);
    check_table<Build>("sink_logits", s.sink_logits.size(), dims.heads);
    check_rotary<Build>(s.rotary, dims.key_dim);
    if constexpr (recurrent_policy<P>) {
        require<Build>(s.soft_cap == 0, "soft_cap is ", s.soft_cap, ", but a linear policy has no scores to cap");
        require<Build>(s.scale == 0 || s.scale == 1 || !P::has_normaliser, "scale is ", s.scale,
                       ", but the rows of this policy are divided by their sum, in which a scale cancels: it must be 0 "
                       "(not said) or 1");
        require<Build>(s.alibi.empty() && s.sink_logits.empty() && !s.custom,
                       "a linear policy has no scores: alibi, sink_logits and custom must be empty");
    } else {
        require<Build>(!reads_other_frames(p, stored_heads(dims)) || !s.rotary.frequencies.empty() || !s.alibi.empty(),
                       "the compact frame turns the query that reads the sinks: it needs score.rotary.frequencies, "
                       "which is empty");
    }
}

/// What scores, or rows that are not divided, are multiplied by where nothing is said: a policy may know.
template <class P>
SASH_INLINE double default_scale(int64 key_dim) {
    if constexpr (requires { P::default_scale(key_dim); })
        return P::default_scale(key_dim);
    else
        return 1 / std::sqrt(static_cast<double>(key_dim));
}

/// Views of the caller's arrays: for calls without a cache, and the first half of making one.
template <class Build, class P>
score_state view_of_score(const P& p, const shape& dims, const score& s) {
    check_score<Build>(p, dims, s);
    score_state made;
    made.scale = s.scale != 0 ? s.scale : static_cast<float>(default_scale<P>(dims.key_dim));
    made.soft_cap = s.soft_cap;
    made.alibi = s.alibi.empty() ? nullptr : s.alibi.data();
    made.sink_logits = s.sink_logits.empty() ? nullptr : s.sink_logits.data();
    made.frequencies = s.rotary.frequencies.empty() ? nullptr : s.rotary.frequencies.data();
    made.pairs = static_cast<int64>(s.rotary.frequencies.size());
    made.layout = s.rotary.layout;
    made.by = s.rotary.by;
    if constexpr (ask::frames < P >> 1)
        if (made.pairs > 0 && made.by == rotates::library && reads_other_frames(p, stored_heads(dims)))
            made.steady_position = ask::read_position(p, far_away, 1);
    made.custom = s.custom;
    return made;
}

/// Copies the arrays that a view names, and forms the angles that every step would form again.
template <class Build>
void own_tables(score_state& s, const memory_source& memory, int64 heads) {
    const auto frequencies = static_cast<std::size_t>(s.pairs) * sizeof(double);
    const auto row = static_cast<std::size_t>(heads) * sizeof(float);
    const auto turns = s.steady_position < 0 ? 0 : static_cast<std::size_t>(s.pairs) * sizeof(turn);
    const std::size_t bytes =
        sizeof(score_tables) + frequencies + turns + (s.alibi ? row : 0) + (s.sink_logits ? row : 0);
    if (bytes == sizeof(score_tables)) return;
    s.tables = ::new (allocate<Build>(memory, bytes)) score_tables{{1}, static_cast<int64>(bytes)};
    auto* at = reinterpret_cast<std::byte*>(s.tables + 1);
    const auto keep = [&at]<class T>(const T*& view, std::size_t n) {
        if (view == nullptr) return;
        std::memcpy(at, view, n);
        view = reinterpret_cast<const T*>(at);
        at += n;
    };
    keep(s.frequencies, frequencies);
    if (turns > 0) {
        auto* steady = reinterpret_cast<turn*>(at);
        for (int64 p = 0; p < s.pairs; ++p)
            ::new (static_cast<void*>(steady + p)) turn(turn_by<Build>(s.steady_position, s.frequencies[p]));
        s.steady = steady;
        at += turns;
    }
    keep(s.alibi, row);
    keep(s.sink_logits, row);
}

template <class Build>
void let_go_tables(const score_state& s, const memory_source& memory) noexcept {
    if (s.tables && s.tables->owners.fetch_sub(1, std::memory_order_acq_rel) == 1)
        release<Build>(memory, s.tables, static_cast<std::size_t>(s.tables->bytes));
}

}  // namespace sash::detail
