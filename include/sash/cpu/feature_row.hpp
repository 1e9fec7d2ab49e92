#pragma once
/// \file
/// Feature maps applied to one row, in registers. A map that works number by number is called with registers; the
/// learned ones whose cost shows have functions of their own here; any other is called as it is.
#include <sash/cpu/simd.hpp>
#include <sash/feature_map.hpp>

#include <cmath>
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
SASH_INLINE constexpr int64 map_scratch(const softmax_dim&, int64 dim) { return detail::round_up(dim, row_padding); }

/// `Vectors` registers of z = b + x^T W, from column j on.
template <class Build, int Vectors>
void project_columns(detail::affine a, const float* x, int64 dim, int64 f, int64 j, float* z) {
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
void project(detail::affine a, const float* x, int64 dim, int64 f, float* z) {
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
        const floats p = quotient(load(e + j), floats(sum));
        store(e + j, select(p < floats(least), floats(least), p));
    }
    std::memcpy(phi, e, static_cast<std::size_t>(n) * sizeof(float));
}

/// The largest and the least of x [n].
struct extent {
    float high, low;
};
template <class Build>
extent extent_of(const float* x, int64 n) {
    extent e{x[0], x[0]};
    for (int64 j = 0; j < n; ++j) {
        e.high = x[j] > e.high ? x[j] : e.high;
        e.low = x[j] < e.low ? x[j] : e.low;
    }
    return e;
}

/// Hedgehog: z, then exp(±z): as it is (h1), its softmax, jointly (h2) or each for itself (h3), or with the largest at 1
/// (h4).
template <class Build>
void map_hedgehog(const hedgehog& map, detail::affine a, const float* x, int64 dim, float* phi, float* scratch) {
    const int64 f = map.half(dim), pitch = detail::round_up(f, row_padding);
    float *z = scratch, *plus = z + pitch, *minus = plus + pitch;
    project<Build>(a, x, dim, f, z);
    for (int64 j = f; j < pitch; ++j) z[j] = z[0];
    const extent e = extent_of<Build>(z, f);
    const float largest = e.high > -e.low ? e.high : -e.low;
    const bool is_joint = map.form == hedgehog_form::h2, is_shifted = map.form != hedgehog_form::h1;
    const float stretch = is_joint ? 2.0f : 1.0f;
    const float top = !is_shifted ? 0 : is_joint ? 2 * largest : e.high;
    const float other_top = !is_shifted ? 0 : is_joint ? 2 * largest : -e.low;
    float sum = exponentials<Build>(z, stretch, top, f, plus);
    float other_sum = exponentials<Build>(z, -stretch, other_top, f, minus);
    if (is_joint) sum = other_sum = sum + other_sum;
    if (map.form == hedgehog_form::h1 || map.form == hedgehog_form::h4) sum = other_sum = 1;
    const bool is_bounded = map.form == hedgehog_form::h3 || map.form == hedgehog_form::h4;
    const float least = is_bounded ? static_cast<float>(hedgehog::least) : 0.0f;
    finish_softmax<Build>(plus, sum, least, f, phi);
    finish_softmax<Build>(minus, other_sum, least, f, phi + f);
}

/// max(x W + b, least).
template <class Build>
void map_relu_affine(const relu_affine& map, detail::affine a, const float* x, int64 dim, float* phi) {
    project<Build>(a, x, dim, map.width(dim), phi);
    for (int64 j = 0; j < map.width(dim); ++j) phi[j] = phi[j] < map.least ? map.least : phi[j];
}

template <class Build>
void map_softmax_dim(const float* x, int64 dim, float* phi, float* scratch) {
    const float sum = exponentials<Build>(x, 1, extent_of<Build>(x, dim).high, dim, scratch);
    finish_softmax<Build>(scratch, sum, 0, dim, phi);
}

/// inner(x) / |inner(x)|. Padding of x need not be mapped to zero: it does not enter.
template <class Build, class Inner>
void map_l2_normalised(const l2_normalised<Inner>& map, const float* x, int64 dim, float* phi) {
    for (int64 d = 0; d < dim; d += lanes<Build>) store(phi + d, map.inner(load(x + d)));
    for (int64 d = dim; d < detail::round_up(dim, row_padding); ++d) phi[d] = 0;
    floats squares(0.0f);
    for (int64 d = 0; d < dim; d += lanes<Build>) squares = fma(load(phi + d), load(phi + d), squares);
    const floats factor(1 / std::sqrt(sum_of_lanes(squares) + map.epsilon));
    for (int64 d = 0; d < dim; d += lanes<Build>) store(phi + d, factor * load(phi + d));
}

template <class Map>
inline constexpr bool is_l2_normalised = false;
template <class Inner>
inline constexpr bool is_l2_normalised<l2_normalised<Inner>> = true;

template <class Map>
inline constexpr bool maps_registers = requires(const Map& map) {
    { map(floats(0.0f)) } -> std::convertible_to<floats>;
};

/// phi of a row x [dim], zero behind its end up to `pitch`. x has room for whole registers and finite numbers there. For
/// maps that want them: the position of the token; the map's memory for this state; `keep` [pitch], filled up with 1.
template <class Build, operand Which, class Map>
void map_row(const Map& map, int64 map_head, const float* x, int64 dim, float* phi, int64 pitch,
             [[maybe_unused]] float* scratch, int64 position = 0, [[maybe_unused]] float* memory = nullptr,
             [[maybe_unused]] float* keep = nullptr) {
    constexpr bool is_key = Which == operand::key;
    if constexpr (std::is_same_v<Map, hedgehog>) {
        map_hedgehog<Build>(map, is_key ? map.key_affine(map_head, dim) : map.query_affine(map_head, dim), x, dim, phi,
                            scratch);
    } else if constexpr (std::is_same_v<Map, relu_affine>) {
        map_relu_affine<Build>(map, is_key ? map.key_affine(map_head, dim) : map.query_affine(map_head, dim), x, dim,
                               phi);
    } else if constexpr (std::is_same_v<Map, softmax_dim>) {
        map_softmax_dim<Build>(x, dim, phi, scratch);
    } else if constexpr (std::is_same_v<Map, favor>) {
        project<Build>({map.weights.data(), nullptr}, x, dim, map.features, phi);
        if constexpr (is_key)
            map.finish_key(x, dim, phi, memory, keep);
        else
            map.finish_query(x, dim, phi);
    } else if constexpr (maps_registers<Map>) {
        for (int64 d = 0; d < dim; d += lanes<Build>) store(phi + d, map(load(x + d)));
    } else if constexpr (is_l2_normalised<Map>) {
        map_l2_normalised<Build>(map, x, dim, phi);
    } else if constexpr (is_key) {
        ask::key_features(map, map_head, x, dim, phi, position, memory, keep);
    } else {
        ask::query_features(map, map_head, x, dim, phi, position);
    }
    const int64 width = ask::width(map, dim);
    for (int64 f = width; f < pitch; ++f) phi[f] = 0;
    if constexpr (is_key && ask::map_memory < Map >> 0)
        for (int64 f = width; keep && f < pitch; ++f) keep[f] = 1;
}

}  // namespace sash::cpu
