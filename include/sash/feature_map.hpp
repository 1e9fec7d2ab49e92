#pragma once
/// \file
/// Feature maps: phi, with which linear attention writes a weight as a product, exp(q·k) ~ phi(q)·phi(k).
///
/// A feature map is a small trivially copyable struct of constexpr functions; yours is as good as these. It has one of
/// two forms. Number by number, with as many features as dims:
///
///     template <class N> constexpr N operator()(N x) const
///
/// N is double in the reference, a SIMD batch on the CPU, float elsewhere; so exp, select … are called unqualified,
/// after `using std::exp;` and `using sash::select;`. Or row by row:
///
///     constexpr int64 width(int64 dim) const                          features of a row of `dim` numbers
///     template <class N> constexpr void query(int64 map_head, const N* x, int64 dim, N* phi) const
///     template <class N> constexpr void key(int64 map_head, const N* x, int64 dim, N* phi) const
///                                                                     x is [dim], phi is [width]; they do not overlap
///     constexpr int64 query_heads(int64 dim) const                    how many different maps there are, each for
///     constexpr int64 key_heads(int64 dim) const                      a group of heads (optional: 1)
///
/// and, in both forms,
///
///     static constexpr bool non_negative                              phi >= 0: its sum may divide (optional: false)
///     validate(refuse, shape)                                         calls refuse(parts...) on a bad value (optional)
///
/// Query and key arrive as the caller gives them; no 1/sqrt(dim) is applied. NaN and infinities propagate.
#include <sash/shape.hpp>

#include <cmath>
#include <concepts>
#include <span>
#include <type_traits>

namespace sash {

/// `condition ? a : b`, spelt so that it works on numbers here and on SIMD batches by argument-dependent lookup.
template <class N>
    requires std::is_arithmetic_v<N>
SASH_INLINE constexpr N select(bool condition, N a, N b) {
    return condition ? a : b;
}

/// phi(x) = elu(x) + 1 = x + 1 for x > 0, else exp(x). Always positive.
/// Source: Katharopoulos et al. 2020, "Transformers are RNNs", equation 7.
struct elu_plus_one {
    static constexpr bool non_negative = true;

    template <class N>
    SASH_INLINE constexpr N operator()(N x) const {
        using std::exp;
        return select(x > N(0), x + N(1), N(exp(x)));
    }
    friend constexpr bool operator==(const elu_plus_one&, const elu_plus_one&) = default;
};

/// phi(x) = max(x, 0). A query may have no feature at all; its row is then 0. (T2R, Kasai et al. 2021, applies a
/// learned affine map first; it can be folded into the projections of query and key.)
struct relu {
    static constexpr bool non_negative = true;

    template <class N>
    SASH_INLINE constexpr N operator()(N x) const {
        return select(x < N(0), N(0), x);  // in this order a NaN stays one
    }
    friend constexpr bool operator==(const relu&, const relu&) = default;
};

/// phi(x) = x. Weights may be negative, so there is nothing to divide by: for `no_normaliser` only.
struct identity {
    static constexpr bool non_negative = false;

    template <class N>
    SASH_INLINE constexpr N operator()(N x) const {
        return x;
    }
    friend constexpr bool operator==(const identity&, const identity&) = default;
};

/// Two of the maps called Hedgehog; they are not equivalent, and weights trained for one do not serve the other.
enum class hedgehog_form : int {
    h2,  ///< phi = softmax of the joint [2z, -2z]: the original listing, flash-linear-attention
    h3   ///< phi = [softmax(z), softmax(-z)], each over its own half, at least 1e-12: LoLCATs
};

/// A learned map: z = W_h x (+ b_h), then phi of 2 · features numbers, none negative.
///
/// Matrices are [map_heads, dim, features] (entry (c, j) takes input c to z_j), biases [map_heads, features],
/// contiguous, fp32. There may be one for all heads, one a key head, or one a query head; output head h uses map head
/// h / (heads / map_heads). With one key matrix a query head each query head needs a state of its own. They are
/// views: the memory must outlive the cache. Without matrices W is the identity. Rotary positions, where there are
/// any, come before the map.
/// Source: Zhang et al. 2024, "The hedgehog & the porcupine"; Zhang et al. 2024, "LoLCATs".
struct hedgehog {
    hedgehog_form form = hedgehog_form::h3;
    int64 features = 0;                         ///< f: width of z; 0: the key dim
    std::span<const float> query_weights = {};  ///< [map_heads, dim, f]
    std::span<const float> key_weights = {};    ///< [map_heads, dim, f]
    std::span<const float> query_biases = {};   ///< [map_heads, f], or none
    std::span<const float> key_biases = {};     ///< [map_heads, f], or none

    static constexpr bool non_negative = true;
    static constexpr double least = 1e-12;  ///< of a feature in form h3

    SASH_INLINE constexpr int64 width(int64 dim) const { return 2 * half(dim); }
    SASH_INLINE constexpr int64 query_heads(int64 dim) const { return heads_of(query_weights, dim); }
    SASH_INLINE constexpr int64 key_heads(int64 dim) const { return heads_of(key_weights, dim); }

    template <class N>
    SASH_INLINE constexpr void query(int64 map_head, const N* x, int64 dim, N* phi) const {
        project(query_affine(map_head, dim), x, dim, half(dim), phi);
        finish(half(dim), phi);
    }
    template <class N>
    SASH_INLINE constexpr void key(int64 map_head, const N* x, int64 dim, N* phi) const {
        project(key_affine(map_head, dim), x, dim, half(dim), phi);
        finish(half(dim), phi);
    }

    /// f, and the matrix [dim, f] and bias [f] of one map head; null where there is none.
    SASH_INLINE constexpr int64 half(int64 dim) const { return features > 0 ? features : dim; }
    struct affine {
        const float* matrix = nullptr;
        const float* bias = nullptr;
    };
    SASH_INLINE constexpr affine query_affine(int64 map_head, int64 dim) const {
        return affine_of(query_weights, query_biases, map_head, dim);
    }
    SASH_INLINE constexpr affine key_affine(int64 map_head, int64 dim) const {
        return affine_of(key_weights, key_biases, map_head, dim);
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s) const {
        if (form != hedgehog_form::h2 && form != hedgehog_form::h3)
            refuse("hedgehog form is ", static_cast<int64>(form), ", must be hedgehog_form::h2 or hedgehog_form::h3");
        constexpr int64 most = int64{1} << 20;
        if (features < 0 || features > most) refuse("hedgehog features are ", features, ", must be 0 to ", most);
        if (query_weights.empty() != key_weights.empty())
            refuse("hedgehog has weights for ", query_weights.empty() ? "keys" : "queries",
                   " only; give both, or neither for the identity");
        if (query_weights.empty() && half(s.key_dim) != s.key_dim)
            refuse("hedgehog features are ", features, " without weights, must be 0 or key_dim, which is ", s.key_dim);
        check_map(refuse, "query", query_weights, query_biases, s);
        check_map(refuse, "key", key_weights, key_biases, s);
    }

private:
    SASH_INLINE constexpr int64 heads_of(std::span<const float> weights, int64 dim) const {
        return weights.empty() ? 1 : static_cast<int64>(weights.size()) / (dim * half(dim));
    }
    SASH_INLINE constexpr affine affine_of(std::span<const float> weights, std::span<const float> biases,
                                           int64 map_head, int64 dim) const {
        return {weights.empty() ? nullptr : weights.data() + map_head * dim * half(dim),
                biases.empty() ? nullptr : biases.data() + map_head * half(dim)};
    }

    /// z into phi[0, f): z_j = b_j + sum_c x_c W_cj.
    template <class N>
    SASH_INLINE static constexpr void project(affine a, const N* x, int64 dim, int64 f, N* z) {
        for (int64 j = 0; j < f; ++j) {
            N sum = a.bias ? N(a.bias[j]) : N(0);
            if (a.matrix == nullptr)
                sum += x[j];
            else
                for (int64 c = 0; c < dim; ++c) sum += x[c] * N(a.matrix[c * f + j]);
            z[j] = sum;
        }
    }

    /// phi from the z that lies in phi[0, f).
    template <class N>
    SASH_INLINE constexpr void finish(int64 f, N* phi) const {
        const N stretch = N(form == hedgehog_form::h2 ? 2 : 1);
        for (int64 j = 0; j < f; ++j) {
            phi[j] *= stretch;
            phi[f + j] = -phi[j];
        }
        if (form == hedgehog_form::h2) {
            softmax(phi, 2 * f);
            return;
        }
        softmax(phi, f);
        softmax(phi + f, f);
        for (int64 j = 0; j < 2 * f; ++j) phi[j] = phi[j] < N(least) ? N(least) : phi[j];
    }

    template <class N>
    SASH_INLINE static constexpr void softmax(N* x, int64 n) {
        N largest = x[0], sum = N(0);
        for (int64 j = 1; j < n; ++j) largest = largest < x[j] ? x[j] : largest;
        for (int64 j = 0; j < n; ++j) sum += x[j] = std::exp(x[j] - largest);
        for (int64 j = 0; j < n; ++j) x[j] /= sum;
    }

    template <class Refuse>
    constexpr void check_map(Refuse&& refuse, const char* name, std::span<const float> weights,
                             std::span<const float> biases, const shape& s) const {
        const int64 f = half(s.key_dim), matrix = s.key_dim * f;
        const int64 map_heads = heads_of(weights, s.key_dim);
        if (map_heads < 1 || static_cast<int64>(weights.size()) % matrix != 0)
            refuse("hedgehog ", name, "_weights hold ", weights.size(),
                   " numbers, must be a multiple of key_dim x features, which is ", matrix);
        else if (s.heads % map_heads != 0)
            refuse("hedgehog ", name, "_weights are for ", map_heads, " heads, must divide heads, which is ", s.heads);
        if (!biases.empty() && static_cast<int64>(biases.size()) != map_heads * f)
            refuse("hedgehog ", name, "_biases hold ", biases.size(), " numbers, must be heads x features, which is ",
                   map_heads * f);
    }
};

/// The questions put to a feature map, with its optional parts filled in.
namespace ask {

/// Does the map work number by number?
template <class M>
inline constexpr bool elementwise = requires(const M& m, float x) { { m(x) } -> std::convertible_to<float>; };

template <class M>
concept feature_map = std::is_trivially_copyable_v<M> &&
                      (elementwise<M> || requires(const M& m, const float* x, float* phi, int64 n) {
                          { m.width(n) } -> std::convertible_to<int64>;
                          m.query(n, x, n, phi);
                          m.key(n, x, n, phi);
                      });

template <class M>
inline constexpr bool non_negative = [] {
    if constexpr (requires { M::non_negative; })
        return static_cast<bool>(M::non_negative);
    else
        return false;
}();

template <feature_map M>
SASH_INLINE constexpr int64 width(const M& m, int64 dim) {
    if constexpr (elementwise<M>)
        return dim;
    else
        return m.width(dim);
}

template <feature_map M>
SASH_INLINE constexpr int64 query_map_heads([[maybe_unused]] const M& m, [[maybe_unused]] int64 dim) {
    if constexpr (requires { m.query_heads(dim); })
        return m.query_heads(dim);
    else
        return 1;
}

template <feature_map M>
SASH_INLINE constexpr int64 key_map_heads([[maybe_unused]] const M& m, [[maybe_unused]] int64 dim) {
    if constexpr (requires { m.key_heads(dim); })
        return m.key_heads(dim);
    else
        return 1;
}

/// phi of one query row; map_head counts the map's own heads.
template <class N, feature_map M>
SASH_INLINE constexpr void query_features(const M& m, [[maybe_unused]] int64 map_head, const N* x, int64 dim, N* phi) {
    if constexpr (elementwise<M>)
        for (int64 j = 0; j < dim; ++j) phi[j] = m(x[j]);
    else
        m.query(map_head, x, dim, phi);
}

/// phi of one key row.
template <class N, feature_map M>
SASH_INLINE constexpr void key_features(const M& m, [[maybe_unused]] int64 map_head, const N* x, int64 dim, N* phi) {
    if constexpr (elementwise<M>)
        for (int64 j = 0; j < dim; ++j) phi[j] = m(x[j]);
    else
        m.key(map_head, x, dim, phi);
}

}  // namespace ask
}  // namespace sash
