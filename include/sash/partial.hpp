#pragma once
/// \file
/// Partials: what attention over some of the keys leaves behind, so that results over disjoint keys can be merged.
///
/// With scores s_j and m = max_j s_j over the keys seen,
///
///     numerator = sum_j exp(s_j - m) v_j        denominator = sum_j exp(s_j - m)        maximum = m
///
/// and the output row is numerator / denominator. Scores are natural-log; m is exact. Merging is associative. The
/// partial of no key at all, (0, 0, -inf), is its neutral element, to the bit. Split keys, shared prefixes, sink
/// logits and sequences spread over several machines are all merges. A linear map with a normaliser leaves the same
/// triple, m = 0.
/// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, section 3.1.
#include <sash/config.hpp>

#include <bit>
#include <cmath>
#include <span>

namespace sash {

namespace detail {

/// Infinities are made and recognised by their bits: compilers told that there are none (-ffast-math) fold
/// comparisons away.
SASH_INLINE constexpr float minus_infinity() { return sash::detail::bit_cast<float>(0xff800000u); }
SASH_INLINE constexpr bool is_zero(float x) { return sash::detail::bit_cast<std::uint32_t>(x) << 1 == 0; }
SASH_INLINE constexpr bool is_minus_infinity(float x) { return sash::detail::bit_cast<std::uint32_t>(x) == 0xff800000u; }

}  // namespace detail

/// exp(from - to): the factor that brings what was counted against maximum `from` to the maximum `to` >= from. Where
/// nothing was counted (from = -inf) it is 0, never exp(-inf - -inf). Exactly 1 where the maximum stays; NaN for NaN.
SASH_INLINE constexpr float rescale(float from, float to) {
    if (detail::is_minus_infinity(from)) return 0;
    if (from == to) return 1;
    return std::exp(from - to);
}

/// The larger maximum; NaN if either is NaN.
SASH_INLINE constexpr float larger_maximum(float a, float b) { return a < b || b != b ? b : a; }

/// The common maximum of two partials and the factor that brings each to it.
struct merge_factors {
    float maximum, left, right;
};
SASH_INLINE constexpr merge_factors factors_to_merge(float left_maximum, float right_maximum) {
    const float maximum = larger_maximum(left_maximum, right_maximum);
    return {maximum, rescale(left_maximum, maximum), rescale(right_maximum, maximum)};
}

/// A partial of one query row. `numerator` is the caller's memory, [value_dim], zero at first.
/// Functions allocate nothing, cost O(value_dim), and expect rows of equal length; they run in device code too.
struct partial {
    std::span<float> numerator = {};
    float denominator = 0;
    float maximum = detail::minus_infinity();

    /// Adds one key: its score and its value row. A score of -inf weighs nothing; NaN propagates.
    SASH_INLINE constexpr void push(float score, std::span<const float> value) {
        if (detail::is_minus_infinity(score)) return;
        const merge_factors f = factors_to_merge(maximum, score);
        for (std::size_t j = 0; j < numerator.size(); ++j) numerator[j] = f.left * numerator[j] + f.right * value[j];
        denominator = f.left * denominator + f.right;
        maximum = f.maximum;
    }

    /// Adds the keys of `other`, none of which is in this one. Merging with an empty partial changes no bit.
    SASH_INLINE constexpr void merge(const partial& other) {
        if (detail::is_minus_infinity(other.maximum)) return;
        const bool was_empty = detail::is_minus_infinity(maximum);
        const merge_factors f = factors_to_merge(maximum, other.maximum);
        for (std::size_t j = 0; j < numerator.size(); ++j)
            numerator[j] = was_empty ? other.numerator[j] : f.left * numerator[j] + f.right * other.numerator[j];
        denominator = was_empty ? other.denominator : f.left * denominator + f.right * other.denominator;
        maximum = f.maximum;
    }

    /// out = numerator / denominator, [value_dim]; exactly 0 where no key was seen. A sink logit is one more key
    /// without a value: exp(sink_logit) joins the denominator, here alone, so that it counts once whatever was
    /// merged.
    SASH_INLINE constexpr void finish(std::span<float> out, float sink_logit = detail::minus_infinity()) const {
        const merge_factors f = factors_to_merge(maximum, sink_logit);
        const float mass = f.left * denominator + f.right;
        for (std::size_t j = 0; j < out.size(); ++j) out[j] = detail::is_zero(mass) ? 0 : f.left * numerator[j] / mass;
    }

    /// log sum_j exp(s_j) over the keys (a sink logit is not one): natural log, -inf where no key was seen.
    SASH_INLINE constexpr float lse() const {
        return detail::is_zero(denominator) ? detail::minus_infinity() : maximum + std::log(denominator);
    }
};

/// Merges a finished pair into another, in place: out and lse over some keys with `other_out` and `other_lse` over
/// others. An empty pair is (0, -inf): merging with it changes no bit. Rows are [value_dim]; nothing is allocated.
SASH_INLINE constexpr void merge_finished(std::span<float> out, float& lse, std::span<const float> other_out,
                                          float other_lse) {
    if (detail::is_minus_infinity(other_lse)) return;
    const bool was_empty = detail::is_minus_infinity(lse);
    const merge_factors f = factors_to_merge(lse, other_lse);
    const float mass = f.left + f.right;
    for (std::size_t j = 0; j < out.size(); ++j)
        out[j] = was_empty ? other_out[j] : (f.left * out[j] + f.right * other_out[j]) / mass;
    lse = was_empty ? other_lse : f.maximum + std::log(mass);
}

}  // namespace sash
