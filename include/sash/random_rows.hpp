#pragma once
/// \file
/// Random rows for FAVOR+: orthogonal in blocks, the same from the same seed. Not in the umbrella: who uses `favor`
/// without rows of a checkpoint includes it.
#include <sash/feature_map.hpp>

#include <cmath>
#include <vector>

namespace sash {

/// Lengths of the rows of a block.
enum class row_norms : int {
    chi,      ///< random, each as long as a row of independent normal numbers: unbiased, as the paper has it
    root_dim  ///< all sqrt(dim): public code's other choice ("scaling" 1). Less variance, no longer exactly the softmax
};

namespace detail {

/// Numbers that look random: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
struct splitmix64 {
    std::uint64_t state;

    SASH_INLINE constexpr std::uint64_t operator()() {
        std::uint64_t x = state += 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return x ^ (x >> 31);
    }
};

/// A normal number, by Box and Muller.
SASH_INLINE double normal(splitmix64& random) {
    constexpr double turn = 6.283185307179586476925286766559;
    const double radius = -2 * std::log((static_cast<double>(random() >> 11) + 1) / 9007199254740992.0);
    return std::sqrt(radius) * std::cos(turn * static_cast<double>(random() >> 11) / 9007199254740992.0);
}

/// Rows [count, dim], count <= dim, become orthonormal, each with what the rows before it leave of it. Twice, since what is
/// left of the last may be short.
template <class Build>
void make_orthonormal(double* rows, int64 count, int64 dim) {
    for (int64 r = 0; r < count; ++r) {
        double* row = rows + r * dim;
        for (int64 i = 0; i < 2 * r; ++i) {
            const double* other = rows + i % r * dim;
            double dot = 0;
            for (int64 c = 0; c < dim; ++c) dot += row[c] * other[c];
            for (int64 c = 0; c < dim; ++c) row[c] -= dot * other[c];
        }
        double square = 0;
        for (int64 c = 0; c < dim; ++c) square += row[c] * row[c];
        for (int64 c = 0; c < dim; ++c) row[c] /= std::sqrt(square);
    }
}

}  // namespace detail

/// w_r for `favor.weights`, [dim, features]: entry (c, r) is number c of w_r. In blocks of `dim` rows they are orthogonal,
/// uniformly distributed directions; blocks are independent, the last one may be short. The same seed gives the same rows
/// (but for the last bit of a logarithm or cosine, between C libraries); layers take different seeds.
///
/// Cost: O(features · dim^2), in double. Allocates the result and one block. Errors: sash::error for a dim or a number of
/// features outside 1 to 2^20; std::bad_alloc.
/// Source: Choromanski et al. 2020, "Rethinking attention with performers", section 2.4.
template <class Build = build::here>
std::vector<float> favor_rows(int64 dim, int64 features, std::uint64_t seed, row_norms norms = row_norms::chi) {
    constexpr int64 most = int64{1} << 20;
    detail::require<Build>(dim >= 1 && dim <= most, "dim is ", dim, ", must be 1 to ", most);
    detail::require<Build>(features >= 1 && features <= most, "features are ", features, ", must be 1 to ", most);
    detail::splitmix64 random{seed};
    std::vector<float> weights(static_cast<std::size_t>(dim * features));
    std::vector<double> block(static_cast<std::size_t>(dim * detail::smaller(dim, features)));
    for (int64 first = 0; first < features; first += dim) {
        const int64 count = detail::smaller(dim, features - first);
        for (int64 i = 0; i < count * dim; ++i) block[static_cast<std::size_t>(i)] = detail::normal(random);
        detail::make_orthonormal<Build>(block.data(), count, dim);
        for (int64 r = 0; r < count; ++r) {
            double square = norms == row_norms::chi ? 0 : static_cast<double>(dim);
            if (norms == row_norms::chi)
                for (int64 c = 0; c < dim; ++c) {
                    const double x = detail::normal(random);
                    square += x * x;
                }
            for (int64 c = 0; c < dim; ++c)
                weights[static_cast<std::size_t>(c * features + first + r)] =
                    static_cast<float>(std::sqrt(square) * block[static_cast<std::size_t>(r * dim + c)]);
        }
    }
    return weights;
}

}  // namespace sash
