#pragma once
/// \file
/// Rotary positions (RoPE): which pairs turn, how fast, and who turns them.
///
/// Pair p of a query or key at position t is turned by the angle t · frequency[p]:
///
///     (a, b)  ->  (a cos - b sin,  a sin + b cos)
///
/// so that the dot product of a turned query and a turned key depends on their distance alone.
/// Source: Su et al. 2021, section 3.2.
#include <sash/config.hpp>

#include <cmath>
#include <span>

namespace sash {

/// Which two numbers of a row form pair p of n.
enum class rotary_layout : int {
    half_split,  ///< (p, p + n): GPT-NeoX, Llama in Hugging Face
    interleaved  ///< (2p, 2p + 1): GPT-J, the Llama release, GGUF files of Llama-like models
};

/// Who turns query and key at their own position.
enum class rotates : int {
    caller,  ///< they arrive turned; the frequencies serve the one extra turn of a query that reads compact sinks
    library  ///< they arrive raw and are turned while they are packed and stored
};

/// Frequencies of up to 512 pairs, in radians per position: what `rope_frequencies` gives back. A range, so it converts to a span.
struct rope_table {
    static constexpr int64 most = 512;
    double frequency[most] = {};
    int64 pairs = 0;

    SASH_INLINE constexpr const double* data() const { return frequency; }
    SASH_INLINE constexpr std::size_t size() const { return static_cast<std::size_t>(pairs); }
    SASH_INLINE constexpr const double* begin() const { return frequency; }
    SASH_INLINE constexpr const double* end() const { return frequency + pairs; }
};

/// Rotary positions as an option of the scores. Empty frequencies: none. The span is a view: the table it names must live
/// until the cache is made, which copies it (or until a call without a cache returns).
struct rotary {
    std::span<const double> frequencies = {};          ///< [dims / 2], radians per position; the cache copies them
    rotary_layout layout = rotary_layout::half_split;  ///< which numbers form a pair
    int64 dims = 0;                                    ///< leading dims that turn; 0: twice the number of frequencies
    rotates by = rotates::caller;                      ///< who turns
};

/// Parameters of the scaling that Llama 3.1 introduced: low frequencies are slowed by `factor`, high ones kept, those in
/// between blended.
struct llama3_scaling {
    double factor = 8, low_frequency_factor = 1, high_frequency_factor = 4, original_context = 8192;
};

/// frequency[p] = base^(-2p / dims), p = 0 … dims / 2 - 1. Refuses odd dims and more than 1024.
template <class Build = build::here>
rope_table rope_frequencies(int64 dims, double base = 10000) {
    detail::require<Build>(dims >= 0 && dims % 2 == 0, "rotary dims is ", dims, ", must be even and not negative");
    detail::require<Build>(dims <= 2 * rope_table::most, "rotary dims is ", dims, ", must be at most ",
                           2 * rope_table::most);
    detail::require<Build>(base > 0, "rotary base is ", base, ", must be positive");
    rope_table table;
    table.pairs = dims / 2;
    for (int64 p = 0; p < table.pairs; ++p) table.frequency[p] = std::pow(base, -2.0 * double(p) / double(dims));
    return table;
}

/// Linear position interpolation: every frequency divided by `factor`. Source: Chen et al. 2023.
template <class Build = build::here>
rope_table linear_scaled(rope_table table, double factor) {
    detail::require<Build>(factor > 0, "rotary factor is ", factor, ", must be positive");
    for (int64 p = 0; p < table.pairs; ++p) table.frequency[p] /= factor;
    return table;
}

/// The Llama 3.1 rule. With wavelength = 2π / frequency and turns = original_context / wavelength:
/// turns > high factor: kept; turns < low factor: divided by `factor`; between them: blended linearly in turns.
template <class Build = build::here>
rope_table llama3_scaled(rope_table table, llama3_scaling by = {}) {
    detail::require<Build>(by.factor > 0, "rotary factor is ", by.factor, ", must be positive");
    detail::require<Build>(by.high_frequency_factor > by.low_frequency_factor, "high_frequency_factor is ",
                           by.high_frequency_factor, ", must be above low_frequency_factor, which is ",
                           by.low_frequency_factor);
    constexpr double full_turn = 6.283185307179586476925286766559;
    for (int64 p = 0; p < table.pairs; ++p) {
        double& f = table.frequency[p];
        const double turns = by.original_context * f / full_turn;
        if (turns > by.high_frequency_factor) continue;
        const double slow = f / by.factor;
        const double blend = (turns - by.low_frequency_factor) / (by.high_frequency_factor - by.low_frequency_factor);
        f = turns < by.low_frequency_factor ? slow : (1 - blend) * slow + blend * f;
    }
    return table;
}

namespace detail {

/// A turn by one angle. The angle is formed from the 64-bit position in double and reduced there: in fp32 it would be
/// off by .03 rad after a million tokens.
struct turn {
    float cosine = 1, sine = 0;
};
template <class Build>
turn turn_by(int64 position, double frequency) {
    const double angle = static_cast<double>(position) * frequency;
    return {static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))};
}

}  // namespace detail

/// The positions of the two members of pair p in a row whose first `dims` numbers turn.
SASH_INLINE constexpr int64 pair_first(rotary_layout layout, int64 p) {
    return layout == rotary_layout::half_split ? p : 2 * p;
}
SASH_INLINE constexpr int64 pair_second(rotary_layout layout, int64 p, int64 pairs) {
    return layout == rotary_layout::half_split ? p + pairs : 2 * p + 1;
}

/// Turns one pair: the whole of RoPE. For any number type, also in device code.
template <class N>
SASH_INLINE constexpr void turn_pair(N& a, N& b, N cosine, N sine) {
    const N turned = a * cosine - b * sine;
    b = a * sine + b * cosine;
    a = turned;
}

/// Turns the first 2 · pairs numbers of a row by the given turns, [pairs].
template <class Build = build::here>
void turn_row(float* row, const detail::turn* turns, int64 pairs, rotary_layout layout) {
    if (layout == rotary_layout::half_split) {
        for (int64 p = 0; p < pairs; ++p) turn_pair(row[p], row[p + pairs], turns[p].cosine, turns[p].sine);
    } else {
        for (int64 p = 0; p < pairs; ++p) turn_pair(row[2 * p], row[2 * p + 1], turns[p].cosine, turns[p].sine);
    }
}

}  // namespace sash
