#pragma once
/// \file
/// Feature maps applied to one row, in registers. A map that works number by number is called with registers; the
/// learned ones whose cost shows have functions of their own here; any other is called as it is.
#include <sash/cpu/simd.hpp>
#include <sash/feature_map.hpp>

#include <cstring>

namespace sash::cpu {

/// Which of the two a row is.
enum class operand { query, key };

inline constexpr int64 row_padding = 16;  // floats: rows are padded to whole registers of every build

/// Floats of scratch that mapping one row takes; a multiple of 16.
template <class Map>
SASH_INLINE constexpr int64 map_scratch(const Map&, int64) {
    return 0;
}
SASH_INLINE constexpr int64 map_scratch(const hedgehog& map, int64 dim) {
    return 3 * detail::round_up(map.half(dim), row_padding);
}

/// `Vectors` registers of z = b + x^T W, from column j on.
template <class Build, int Vectors>
void project_columns(hedgehog::affine a, const float* x, int64 dim, int64 f, int64 j, float* z) {
    floats sum[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sum[v] = a.bias ? load(a.bias + j + v * lanes<Build>) : floats(0.0f);
    const float* row = a.matrix + j;
    for (int64 c = 0; c < dim; ++c, row += f) {
        const floats number(x[c]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sum[v] = fma(number, load(row + v * lanes<Build>), sum[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(z + j + v * lanes<Build>, sum[v]);
}

/// z = x^T W + b, [f]; or x + b where there is no matrix.
template <class Build>
void project(hedgehog::affine a, const float* x, int64 dim, int64 f, float* z) {
    if (a.matrix == nullptr) {
        std::memcpy(z, x, static_cast<std::size_t>(f) * sizeof(float));
        if (a.bias != nullptr)
            for (int64 j = 0; j < f; ++j) z[j] += a.bias[j];
        return;
    }
    int64 j = 0;
    for (; j + 4 * lanes<Build> <= f; j += 4 * lanes<Build>) project_columns<Build, 4>(a, x, dim, f, j, z);
    for (; j + lanes<Build> <= f; j += lanes<Build>) project_columns<Build, 1>(a, x, dim, f, j, z);
    for (; j < f; ++j) {
        float sum = a.bias ? a.bias[j] : 0;
        for (int64 c = 0; c < dim; ++c) sum += x[c] * a.matrix[c * f + j];
        z[j] = sum;
    }
}

/// e_j = exp(factor · z_j - top) for j < n, zero in the padding behind; gives their sum. z is padded with any numbers.
template <class Build>
float exponentials(const float* z, float factor, float top, int64 n, float* e) {
    const int64 padded = detail::round_up(n, row_padding);
    for (int64 j = 0; j < padded; j += lanes<Build>)
        store(e + j, xsimd::exp(fma(load(z + j), floats(factor), floats(-top))));
    for (int64 j = n; j < padded; ++j) e[j] = 0;
    floats sum(0.0f);
    for (int64 j = 0; j < padded; j += lanes<Build>) sum = sum + load(e + j);
    return sum_of_lanes(sum);
}

/// phi_j = max(e_j / sum, least).
template <class Build>
void finish_softmax(float* e, float sum, float least, int64 n, float* phi) {
    for (int64 j = 0; j < n; j += lanes<Build>) {
        const floats p = load(e + j) / floats(sum);
        store(e + j, select(p < floats(least), floats(least), p));
    }
    std::memcpy(phi, e, static_cast<std::size_t>(n) * sizeof(float));
}

/// Hedgehog: z, then exp(±z) and their softmax, jointly (h2) or each for itself (h3).
template <class Build>
void map_hedgehog(const hedgehog& map, hedgehog::affine a, const float* x, int64 dim, float* phi, float* scratch) {
    const int64 f = map.half(dim), pitch = detail::round_up(f, row_padding);
    float *z = scratch, *plus = z + pitch, *minus = plus + pitch;
    project<Build>(a, x, dim, f, z);
    for (int64 j = f; j < pitch; ++j) z[j] = z[0];
    float high = z[0], low = z[0];
    for (int64 j = 0; j < f; ++j) {
        high = z[j] > high ? z[j] : high;
        low = z[j] < low ? z[j] : low;
    }
    if (map.form == hedgehog_form::h2) {
        const float top = 2 * (high > -low ? high : -low);
        const float sum = exponentials<Build>(z, 2, top, f, plus) + exponentials<Build>(z, -2, top, f, minus);
        finish_softmax<Build>(plus, sum, 0, f, phi);
        finish_softmax<Build>(minus, sum, 0, f, phi + f);
    } else {
        const float least = static_cast<float>(hedgehog::least);
        finish_softmax<Build>(plus, exponentials<Build>(z, 1, high, f, plus), least, f, phi);
        finish_softmax<Build>(minus, exponentials<Build>(z, -1, -low, f, minus), least, f, phi + f);
    }
}

/// phi of a row x [dim], zero behind its end up to `pitch`. x has room for whole registers and finite numbers there.
template <class Build, operand Which, class Map>
void map_row(const Map& map, int64 map_head, const float* x, int64 dim, float* phi, int64 pitch,
             [[maybe_unused]] float* scratch) {
    if constexpr (std::is_same_v<Map, hedgehog>) {
        const bool is_key = Which == operand::key;
        const hedgehog::affine a = is_key ? map.key_affine(map_head, dim) : map.query_affine(map_head, dim);
        map_hedgehog<Build>(map, a, x, dim, phi, scratch);
    } else if constexpr (requires { { map(floats(0.0f)) } -> std::convertible_to<floats>; }) {
        for (int64 d = 0; d < dim; d += lanes<Build>) store(phi + d, map(load(x + d)));
    } else if constexpr (Which == operand::key) {
        ask::key_features(map, map_head, x, dim, phi);
    } else {
        ask::query_features(map, map_head, x, dim, phi);
    }
    for (int64 f = ask::width(map, dim); f < pitch; ++f) phi[f] = 0;
}

}  // namespace sash::cpu
