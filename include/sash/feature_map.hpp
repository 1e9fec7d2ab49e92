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
///     static constexpr bool unit_keys                                 |phi(k)| = 1: fit for the delta rule (optional:
///                                                                     false)
///     validate(refuse, shape)                                         calls refuse(parts...) on a bad value (optional)
///
/// A row map may want more. One that depends on where a token stands takes the position as a last argument of `query`
/// and `key`, and may bound it with `constexpr int64 positions() const`. One that depends on the keys before has
///
///     static constexpr int64 memory                                   numbers it keeps for each state, zero at first
///     template <class N> constexpr void key(int64 map_head, const N* x, int64 dim, N* phi, N* memory, N* keep) const
///
/// and says in keep [width], unless that is null, by which factor, at most 1, each feature of all earlier keys shrinks.
///
/// Query and key arrive as the caller gives them; no 1/sqrt(dim) is applied. NaN and infinities propagate.
#include <sash/shape.hpp>

#include <cmath>
#include <concepts>
#include <limits>
#include <span>
#include <type_traits>

namespace sash {

/// `condition ? a : b`, spelt so that it works on numbers here and on SIMD batches by argument-dependent lookup.
template <class N>
requires std::is_arithmetic_v<N> SASH_INLINE constexpr N select(bool condition, N a, N b) { return condition ? a : b; }

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

/// phi(x) = max(x, 0). A query may have no feature at all; its row is then 0.
struct relu {
    static constexpr bool non_negative = true;

    template <class N>
    SASH_INLINE constexpr N operator()(N x) const {
        return select(x < N(0), N(0), x);  // in this order a NaN stays one
    }
    friend constexpr bool operator==(const relu&, const relu&) = default;
};

/// phi(x) = x sigmoid(x). May be negative, down to -0.28. Lightning attention, and the delta rule before it normalises.
struct silu {
    static constexpr bool non_negative = false;

    template <class N>
    SASH_INLINE constexpr N operator()(N x) const {
        using std::exp;
        return x / (N(1) + N(exp(-x)));
    }
    friend constexpr bool operator==(const silu&, const silu&) = default;
};

/// phi(x) = x. Weights may be negative, so there is nothing to divide by: not with the normaliser `sum`.
struct identity {
    static constexpr bool non_negative = false;

    template <class N>
    SASH_INLINE constexpr N operator()(N x) const {
        return x;
    }
    friend constexpr bool operator==(const identity&, const identity&) = default;
};

/// phi(x) = x, for keys that the caller has made unit vectors already: the delta rule takes it. Keys that are not make
/// the state grow without bound.
struct normalised_by_caller : identity {
    static constexpr bool unit_keys = true;

    friend constexpr bool operator==(const normalised_by_caller&, const normalised_by_caller&) = default;
};

namespace detail {

/// One head of a learned map: matrix [dim, features] (entry (c, j) takes input c to z_j) and bias [features]; null where
/// there is none.
struct affine {
    const float* matrix = nullptr;
    const float* bias = nullptr;
};

/// Heads of matrices [heads, dim, f]; 1 without any.
SASH_INLINE constexpr int64 affine_heads(std::span<const float> weights, int64 dim, int64 f) {
    return weights.empty() ? 1 : static_cast<int64>(weights.size()) / (dim * f);
}
SASH_INLINE constexpr affine affine_of(std::span<const float> weights, std::span<const float> biases, int64 map_head,
                                       int64 dim, int64 f) {
    return {weights.empty() ? nullptr : weights.data() + map_head * dim * f,
            biases.empty() ? nullptr : biases.data() + map_head * f};
}

/// z_j = b_j + sum_c x_c W_cj.
template <class N>
SASH_INLINE constexpr void project(affine a, const N* x, int64 dim, int64 f, N* z) {
    for (int64 j = 0; j < f; ++j) {
        N sum = a.bias ? N(a.bias[j]) : N(0);
        if (a.matrix == nullptr)
            sum += x[j];
        else
            for (int64 c = 0; c < dim; ++c) sum += x[c] * N(a.matrix[c * f + j]);
        z[j] = sum;
    }
}

/// x_j = exp(x_j) / sum_i exp(x_i), with the largest subtracted first.
template <class N>
SASH_INLINE constexpr void softmax(N* x, int64 n) {
    N largest = x[0], sum = N(0);
    for (int64 j = 1; j < n; ++j) largest = largest < x[j] ? x[j] : largest;
    for (int64 j = 0; j < n; ++j) sum += x[j] = std::exp(x[j] - largest);
    for (int64 j = 0; j < n; ++j) x[j] /= sum;
}

/// Refuses matrices and biases of one side ("query" or "key") that do not fit features f and the shape.
template <class Refuse>
constexpr void check_affine(Refuse&& refuse, const char* map, const char* side, std::span<const float> weights,
                            std::span<const float> biases, int64 f, const shape& s) {
    const int64 matrix = s.key_dim * f;
    const int64 map_heads = affine_heads(weights, s.key_dim, f);
    if (map_heads < 1 || static_cast<int64>(weights.size()) % matrix != 0)
        refuse(map, " ", side, "_weights hold ", weights.size(),
               " numbers, must be a multiple of key_dim x features, "
               "which is ",
               matrix);
    else if (s.heads % map_heads != 0)
        refuse(map, " ", side, "_weights are for ", map_heads, " heads, must divide heads, which is ", s.heads);
    if (!biases.empty() && static_cast<int64>(biases.size()) != map_heads * f)
        refuse(map, " ", side, "_biases hold ", biases.size(), " numbers, must be heads x features, which is ",
               map_heads * f);
}

/// Refuses features, matrices and biases of a learned map that do not fit each other and the shape.
template <class Refuse, class Map>
constexpr void check_learned(Refuse&& refuse, const char* name, const Map& map, int64 f, const shape& s) {
    constexpr int64 most = int64{1} << 20;
    if (map.features < 0 || map.features > most) refuse(name, " features are ", map.features, ", must be 0 to ", most);
    if (map.query_weights.empty() != map.key_weights.empty())
        refuse(name, " has weights for ", map.query_weights.empty() ? "keys" : "queries",
               " only; give both, or neither for the identity");
    if (map.query_weights.empty() && f != s.key_dim)
        refuse(name, " features are ", map.features, " without weights, must be 0 or key_dim, which is ", s.key_dim);
    check_affine(refuse, name, "query", map.query_weights, map.query_biases, f, s);
    check_affine(refuse, name, "key", map.key_weights, map.key_biases, f, s);
}

}  // namespace detail

/// The maps called Hedgehog; they are not equivalent, and weights trained for one do not serve another.
enum class hedgehog_form : int {
    h1,  ///< phi = [exp(z), exp(-z)]: the paper's text. Overflows where |z| > 88
    h2,  ///< phi = softmax of the joint [2z, -2z]: the original listing, flash-linear-attention
    h3,  ///< phi = [softmax(z), softmax(-z)], each over its own half, at least 1e-12: LoLCATs
    h4   ///< phi = [exp(z - max z), exp(-z + min z)], at least 1e-12: LoLCATs's other one
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
    static constexpr double least = 1e-12;  ///< of a feature in forms h3 and h4

    SASH_INLINE constexpr int64 width(int64 dim) const { return 2 * half(dim); }
    SASH_INLINE constexpr int64 query_heads(int64 dim) const {
        return detail::affine_heads(query_weights, dim, half(dim));
    }
    SASH_INLINE constexpr int64 key_heads(int64 dim) const { return detail::affine_heads(key_weights, dim, half(dim)); }

    template <class N>
    SASH_INLINE constexpr void query(int64 map_head, const N* x, int64 dim, N* phi) const {
        detail::project(query_affine(map_head, dim), x, dim, half(dim), phi);
        finish(half(dim), phi);
    }
    template <class N>
    SASH_INLINE constexpr void key(int64 map_head, const N* x, int64 dim, N* phi) const {
        detail::project(key_affine(map_head, dim), x, dim, half(dim), phi);
        finish(half(dim), phi);
    }

    SASH_INLINE constexpr int64 half(int64 dim) const { return features > 0 ? features : dim; }
    SASH_INLINE constexpr detail::affine query_affine(int64 map_head, int64 dim) const {
        return detail::affine_of(query_weights, query_biases, map_head, dim, half(dim));
    }
    SASH_INLINE constexpr detail::affine key_affine(int64 map_head, int64 dim) const {
        return detail::affine_of(key_weights, key_biases, map_head, dim, half(dim));
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s) const {
        if (form < hedgehog_form::h1 || form > hedgehog_form::h4)
            refuse("hedgehog form is ", static_cast<int64>(form), ", must be hedgehog_form::h1 to h4");
        detail::check_learned(refuse, "hedgehog", *this, half(s.key_dim), s);
    }

private:
    /// phi from the z that lies in phi[0, f).
    template <class N>
    SASH_INLINE constexpr void finish(int64 f, N* phi) const {
        const N stretch = N(form == hedgehog_form::h2 ? 2 : 1);
        for (int64 j = 0; j < f; ++j) {
            phi[j] *= stretch;
            phi[f + j] = -phi[j];
        }
        switch (form) {
            case hedgehog_form::h1:
                return exponentials(phi, 2 * f, N(0));
            case hedgehog_form::h2:
                return detail::softmax(phi, 2 * f);
            case hedgehog_form::h3:
                detail::softmax(phi, f);
                detail::softmax(phi + f, f);
                break;
            case hedgehog_form::h4:
                exponentials(phi, f, largest(phi, f));
                exponentials(phi + f, f, largest(phi + f, f));
                break;
        }
        for (int64 j = 0; j < 2 * f; ++j) phi[j] = phi[j] < N(least) ? N(least) : phi[j];
    }
    template <class N>
    SASH_INLINE static constexpr N largest(const N* x, int64 n) {
        N top = x[0];
        for (int64 j = 1; j < n; ++j) top = top < x[j] ? x[j] : top;
        return top;
    }
    template <class N>
    SASH_INLINE static constexpr void exponentials(N* x, int64 n, N top) {
        for (int64 j = 0; j < n; ++j) x[j] = std::exp(x[j] - top);
    }
};

/// A learned map: phi = max(W_h x + b_h, least). Weights and heads as for hedgehog; without weights phi = max(x, least).
/// With `least` 0 a query may have no feature at all; its row is then 0. T2R; with 1e-12, LoLCATs' "relu".
/// Source: Kasai et al. 2021, "Finetuning pretrained transformers into RNNs" (T2R), equation 5.
struct relu_affine {
    int64 features = 0;                         ///< width of phi; 0: the key dim
    std::span<const float> query_weights = {};  ///< [map_heads, dim, features]
    std::span<const float> key_weights = {};    ///< [map_heads, dim, features]
    std::span<const float> query_biases = {};   ///< [map_heads, features], or none
    std::span<const float> key_biases = {};     ///< [map_heads, features], or none
    float least = 0;                            ///< of a feature; not negative

    static constexpr bool non_negative = true;

    SASH_INLINE constexpr int64 width(int64 dim) const { return features > 0 ? features : dim; }
    SASH_INLINE constexpr int64 query_heads(int64 dim) const {
        return detail::affine_heads(query_weights, dim, width(dim));
    }
    SASH_INLINE constexpr int64 key_heads(int64 dim) const {
        return detail::affine_heads(key_weights, dim, width(dim));
    }

    template <class N>
    SASH_INLINE constexpr void query(int64 map_head, const N* x, int64 dim, N* phi) const {
        detail::project(query_affine(map_head, dim), x, dim, width(dim), phi);
        finish(width(dim), phi);
    }
    template <class N>
    SASH_INLINE constexpr void key(int64 map_head, const N* x, int64 dim, N* phi) const {
        detail::project(key_affine(map_head, dim), x, dim, width(dim), phi);
        finish(width(dim), phi);
    }

    SASH_INLINE constexpr detail::affine query_affine(int64 map_head, int64 dim) const {
        return detail::affine_of(query_weights, query_biases, map_head, dim, width(dim));
    }
    SASH_INLINE constexpr detail::affine key_affine(int64 map_head, int64 dim) const {
        return detail::affine_of(key_weights, key_biases, map_head, dim, width(dim));
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s) const {
        if (!(least >= 0)) refuse("relu_affine least is ", least, ", must not be negative");
        detail::check_learned(refuse, "relu_affine", *this, width(s.key_dim), s);
    }

private:
    template <class N>
    SASH_INLINE constexpr void finish(int64 n, N* phi) const {
        for (int64 j = 0; j < n; ++j) phi[j] = phi[j] < N(least) ? N(least) : phi[j];
    }
};

/// phi(x) = softmax of x over its dims: no parameters. Liger.
struct softmax_dim {
    static constexpr bool non_negative = true;

    SASH_INLINE constexpr int64 width(int64 dim) const { return dim; }
    template <class N>
    SASH_INLINE constexpr void query(int64, const N* x, int64 dim, N* phi) const {
        for (int64 j = 0; j < dim; ++j) phi[j] = x[j];
        detail::softmax(phi, dim);
    }
    template <class N>
    SASH_INLINE constexpr void key(int64 map_head, const N* x, int64 dim, N* phi) const {
        query(map_head, x, dim, phi);
    }
    friend constexpr bool operator==(const softmax_dim&, const softmax_dim&) = default;
};

/// phi(x) = y / sqrt(|y|^2 + epsilon) with y = inner(x), number by number: unit vectors, as the delta rule wants its keys.
/// A row of zeros stays one. l2_normalised<silu> is the map of DeltaNet, Gated DeltaNet and KDA.
/// Source: Yang et al. 2024, "Parallelizing linear transformers with the delta rule over sequence length", section 3.3.
template <class Inner = identity>
struct l2_normalised {
    Inner inner = {};
    float epsilon = 1e-6f;

    static constexpr bool non_negative = false;
    static constexpr bool unit_keys = true;

    SASH_INLINE constexpr int64 width(int64 dim) const { return dim; }
    template <class N>
    SASH_INLINE constexpr void query(int64, const N* x, int64 dim, N* phi) const {
        N sum = N(epsilon);
        for (int64 j = 0; j < dim; ++j) {
            phi[j] = inner(x[j]);
            sum += phi[j] * phi[j];
        }
        const N factor = N(1) / std::sqrt(sum);
        for (int64 j = 0; j < dim; ++j) phi[j] *= factor;
    }
    template <class N>
    SASH_INLINE constexpr void key(int64 map_head, const N* x, int64 dim, N* phi) const {
        query(map_head, x, dim, phi);
    }
    friend constexpr bool operator==(const l2_normalised&, const l2_normalised&) = default;
};

/// The Taylor expansion of exp(q·k / sqrt(d)) to second order, 1 + s + s^2 / 2, which is at least 1/2:
///
///     phi(x) = [1, x / d^(1/4), x_a^2 / sqrt(2 d), x_a x_b / sqrt(d) for a < b]         1 + d + d (d + 1) / 2 features
///
/// Features may be negative, but no weight phi(q)·phi(k) is: it may be divided by.
/// Source: Arora et al. 2024, "Simple linear attention language models balance the recall-throughput tradeoff" (Based).
struct taylor_2 {
    static constexpr bool non_negative = true;  // of the weights

    SASH_INLINE constexpr int64 width(int64 dim) const { return 1 + dim + dim * (dim + 1) / 2; }
    template <class N>
    SASH_INLINE constexpr void query(int64, const N* x, int64 dim, N* phi) const {
        const N root = std::sqrt(N(dim)), fourth_root = std::sqrt(root);
        *phi++ = N(1);
        for (int64 a = 0; a < dim; ++a) *phi++ = x[a] / fourth_root;
        for (int64 a = 0; a < dim; ++a) *phi++ = x[a] * x[a] / (std::sqrt(N(2)) * root);
        for (int64 a = 0; a < dim; ++a)
            for (int64 b = a + 1; b < dim; ++b) *phi++ = x[a] * x[b] / root;
    }
    template <class N>
    SASH_INLINE constexpr void key(int64 map_head, const N* x, int64 dim, N* phi) const {
        query(map_head, x, dim, phi);
    }
    friend constexpr bool operator==(const taylor_2&, const taylor_2&) = default;
};

/// The square of a product of learned, normalised rows, (y_q·y_k)^2 / d with y = gamma ⊙ normalised(x) + beta:
///
///     phi(y) = [y_a^2 / sqrt(d), sqrt(2 / d) y_a y_b for a < b]                         d (d + 1) / 2 features
///
/// normalised(x) = (x - mean) / sqrt(variance + epsilon) over the dims. gamma and beta are [dim], for all heads, views;
/// none: 1 and 0. Features may be negative, but no weight is.
/// Source: Aksenov et al. 2024, "Linear transformers with learnable kernel functions are better in-context models".
struct rebased {
    std::span<const float> query_gamma = {}, query_beta = {}, key_gamma = {}, key_beta = {};  ///< [dim], or none
    bool normalise = true;
    float epsilon = 1e-5f;

    static constexpr bool non_negative = true;  // of the weights

    SASH_INLINE constexpr int64 width(int64 dim) const { return dim * (dim + 1) / 2; }
    template <class N>
    SASH_INLINE constexpr void query(int64, const N* x, int64 dim, N* phi) const {
        squares(query_gamma, query_beta, x, dim, phi);
    }
    template <class N>
    SASH_INLINE constexpr void key(int64, const N* x, int64 dim, N* phi) const {
        squares(key_gamma, key_beta, x, dim, phi);
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s) const {
        for (const std::span<const float> each : {query_gamma, query_beta, key_gamma, key_beta})
            if (!each.empty() && static_cast<int64>(each.size()) != s.key_dim)
                refuse("rebased gamma or beta hold ", each.size(), " numbers, must be key_dim, which is ", s.key_dim);
    }

private:
    /// y_a; at hand number by number: with a row of its own the map would need scratch.
    template <class N>
    SASH_INLINE static constexpr N learned(std::span<const float> gamma, std::span<const float> beta, N normalised,
                                           int64 a) {
        const auto i = static_cast<std::size_t>(a);
        return normalised * (gamma.empty() ? N(1) : N(gamma[i])) + (beta.empty() ? N(0) : N(beta[i]));
    }
    template <class N>
    SASH_INLINE constexpr void squares(std::span<const float> gamma, std::span<const float> beta, const N* x, int64 dim,
                                       N* phi) const {
        N mean = N(0), deviation = N(1);
        if (normalise) {
            N variance = N(0);
            for (int64 a = 0; a < dim; ++a) mean += x[a] / N(dim);
            for (int64 a = 0; a < dim; ++a) variance += (x[a] - mean) * (x[a] - mean) / N(dim);
            deviation = std::sqrt(variance + N(epsilon));
        }
        N* mixed = phi + dim;
        for (int64 a = 0; a < dim; ++a) {
            const N y = learned(gamma, beta, N((x[a] - mean) / deviation), a);
            phi[a] = y * y / std::sqrt(N(dim));
            for (int64 b = a + 1; b < dim; ++b)
                *mixed++ = std::sqrt(N(2) / N(dim)) * y * learned(gamma, beta, N((x[b] - mean) / deviation), b);
        }
    }
};

/// Random features of the softmax, FAVOR+. With x' = x / d^(1/4) and m random rows w_r (fixed, one set for all heads):
///
///     phi_r(x) = (exp(w_r·x' - |x'|^2 / 2 - c) + epsilon) / sqrt(m)
///
/// c keeps the exponentials in range: for a query max_r w_r·x'; for the keys ONE number, the largest w_r·k'_j of all
/// r and all keys j up to the present one. (The public code takes the largest of the call, later keys included, which no
/// stream can.) When a key raises it, what earlier keys have left is scaled down: the map has a memory. Its epsilon part
/// is not scaled; it is kept apart in one more feature, 1 in keys and epsilon / sqrt(m) · sum_r phi_r in queries, so
/// there are m + 1.
///
/// Rows are a checkpoint's, or made by favor_rows (random_rows.hpp). `epsilon` is 1e-4 in lucidrains's code, 1e-6 as
/// Google's constructs it; the difference is not small.
/// Source: Choromanski et al. 2020, "Rethinking attention with performers", section 2.3 and lemma 1.
struct favor {
    int64 features = 0;                   ///< m
    std::span<const float> weights = {};  ///< [dim, m]: entry (c, r) is number c of w_r; a view
    float epsilon = 1e-4f;

    static constexpr bool non_negative = true;
    static constexpr int64 memory = 2;  ///< the largest w_r·k' so far, and 1 once there is one

    SASH_INLINE constexpr int64 width(int64) const { return features + 1; }

    template <class N>
    SASH_INLINE constexpr void query(int64, const N* x, int64 dim, N* phi) const {
        detail::project({weights.data(), nullptr}, x, dim, features, phi);
        finish_query(x, dim, phi);
    }
    template <class N>
    SASH_INLINE constexpr void key(int64, const N* x, int64 dim, N* phi, N* largest, N* keep) const {
        detail::project({weights.data(), nullptr}, x, dim, features, phi);
        finish_key(x, dim, phi, largest, keep);
    }

    /// phi from the w_r·x that lie in phi[0, m).
    template <class N>
    SASH_INLINE constexpr void finish_query(const N* x, int64 dim, N* phi) const {
        N top = turn_to_logs(x, dim, phi), sum = N(0);
        exponentials(x, dim, top, phi);
        for (int64 r = 0; r < features; ++r) {
            phi[r] += N(epsilon) / std::sqrt(N(features));
            sum += phi[r];
        }
        phi[features] = sum * N(epsilon) / std::sqrt(N(features));
    }
    template <class N>
    SASH_INLINE constexpr void finish_key(const N* x, int64 dim, N* phi, N* largest, N* keep) const {
        N top = turn_to_logs(x, dim, phi);
        const bool is_first = largest[1] == N(0);
        if (!is_first && !(largest[0] < top)) top = largest[0];
        if (keep)
            for (int64 r = 0; r <= features; ++r)
                keep[r] = r == features || is_first ? N(1) : N(std::exp(largest[0] - top));
        largest[0] = top;
        largest[1] = N(1);
        exponentials(x, dim, top, phi);
        phi[features] = N(1);
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s) const {
        constexpr int64 most = int64{1} << 20;
        if (features < 1 || features > most) refuse("favor features are ", features, ", must be 1 to ", most);
        if (static_cast<int64>(weights.size()) != s.key_dim * features)
            refuse("favor weights hold ", weights.size(), " numbers, must be key_dim x features, which is ",
                   s.key_dim * features);
        if (!(epsilon >= 0)) refuse("favor epsilon is ", epsilon, ", must not be negative");
    }

private:
    /// w_r·x becomes w_r·x'; gives the largest.
    template <class N>
    SASH_INLINE constexpr N turn_to_logs(const N*, int64 dim, N* phi) const {
        const N fourth_root = std::sqrt(std::sqrt(N(dim)));
        N top = phi[0] / fourth_root;
        for (int64 r = 0; r < features; ++r) {
            phi[r] /= fourth_root;
            top = top < phi[r] ? phi[r] : top;
        }
        return top;
    }
    template <class N>
    SASH_INLINE constexpr void exponentials(const N* x, int64 dim, N top, N* phi) const {
        N square = N(0);
        for (int64 c = 0; c < dim; ++c) square += x[c] * x[c];
        const N shift = square / (N(2) * std::sqrt(N(dim))) + top, root = std::sqrt(N(features));
        for (int64 r = 0; r < features; ++r) phi[r] = std::exp(phi[r] - shift) / root;
    }
};

/// ReLU, weighted by the distance of the tokens: with theta_i = (pi / 2) (i + 1) / M for the token at position i,
///
///     phi_i(x) = [relu(x) sin theta_i, relu(x) cos theta_i]        phi_i(q)·phi_j(k) = relu(q)·relu(k) cos(theta_i - theta_j)
///
/// M bounds the position: beyond it weights would turn negative, so tokens past M are refused. (The public code takes
/// the length of the call for M, and so gives other numbers for another prompt.)
/// Source: Qin et al. 2022, "cosFormer: rethinking softmax in attention", equation 10.
struct cosformer {
    int64 most_positions = 0;  ///< M

    static constexpr bool non_negative = true;  // of the weights, up to M

    SASH_INLINE constexpr int64 positions() const { return most_positions; }
    SASH_INLINE constexpr int64 width(int64 dim) const { return 2 * dim; }
    template <class N>
    SASH_INLINE constexpr void query(int64, const N* x, int64 dim, N* phi, int64 position) const {
        constexpr double quarter_turn = 1.5707963267948966192313216916398;
        const double theta = quarter_turn * double(position + 1) / double(most_positions);
        const N sine = N(std::sin(theta)), cosine = N(std::cos(theta));
        for (int64 c = 0; c < dim; ++c) {
            const N positive = relu{}(x[c]);
            phi[c] = positive * sine;
            phi[dim + c] = positive * cosine;
        }
    }
    template <class N>
    SASH_INLINE constexpr void key(int64 map_head, const N* x, int64 dim, N* phi, int64 position) const {
        query(map_head, x, dim, phi, position);
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape&) const {
        if (most_positions < 1) refuse("cosformer most_positions is ", most_positions, ", must be at least 1");
    }
    friend constexpr bool operator==(const cosformer&, const cosformer&) = default;
};

/// The questions put to a feature map, with its optional parts filled in.
namespace ask {

/// Does the map work number by number?
template <class M>
inline constexpr bool elementwise = requires(const M& m, float x) {
    { m(x) } -> std::convertible_to<float>;
};

/// Numbers that a map keeps for each state.
template <class M>
inline constexpr int64 map_memory = [] {
    if constexpr (requires { M::memory; })
        return static_cast<int64>(M::memory);
    else
        return 0;
}();

/// Does it matter to the map where a token stands?
template <class M>
inline constexpr bool takes_position = requires(const M& m, const float* x, float* phi, int64 n) {
    m.query(n, x, n, phi, n);
    m.key(n, x, n, phi, n);
};

template <class M>
concept row_map = requires(const M& m, const float* x, float* phi, int64 n) {
    m.query(n, x, n, phi);
    m.key(n, x, n, phi);
}
|| requires(const M& m, const float* x, float* phi, int64 n) {
    m.query(n, x, n, phi);
    m.key(n, x, n, phi, phi, phi);
}
|| takes_position<M>;

template <class M>
concept feature_map = std::is_trivially_copyable_v<M> &&
    (elementwise<M> || (row_map<M> && requires(const M& m, int64 n) {
         { m.width(n) } -> std::convertible_to<int64>;
     }));

template <class M>
inline constexpr bool non_negative = [] {
    if constexpr (requires { M::non_negative; })
        return static_cast<bool>(M::non_negative);
    else
        return false;
}();

/// Are keys unit vectors?
template <class M>
inline constexpr bool unit_keys = [] {
    if constexpr (requires { M::unit_keys; })
        return static_cast<bool>(M::unit_keys);
    else
        return false;
}();

/// Positions that the map can tell apart; the largest int64 where there is no limit.
template <class M>
SASH_INLINE constexpr int64 map_positions([[maybe_unused]] const M& m) {
    if constexpr (requires { m.positions(); })
        return m.positions();
    else
        return std::numeric_limits<int64>::max();
}

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

/// phi of one query row at a position; map_head counts the map's own heads.
template <class N, feature_map M>
SASH_INLINE constexpr void query_features(const M& m, [[maybe_unused]] int64 map_head, const N* x, int64 dim, N* phi,
                                          [[maybe_unused]] int64 position = 0) {
    if constexpr (elementwise<M>)
        for (int64 j = 0; j < dim; ++j) phi[j] = m(x[j]);
    else if constexpr (takes_position<M>)
        m.query(map_head, x, dim, phi, position);
    else
        m.query(map_head, x, dim, phi);
}

/// phi of one key row. A map with a memory changes `memory` and fills `keep`, which may be null; without `memory` the
/// key is the first of its sequence.
template <class N, feature_map M>
SASH_INLINE constexpr void key_features(const M& m, [[maybe_unused]] int64 map_head, const N* x, int64 dim, N* phi,
                                        [[maybe_unused]] int64 position = 0, [[maybe_unused]] N* memory = nullptr,
                                        [[maybe_unused]] N* keep = nullptr) {
    if constexpr (elementwise<M>) {
        for (int64 j = 0; j < dim; ++j) phi[j] = m(x[j]);
    } else if constexpr (map_memory<M> > 0) {
        N fresh[map_memory<M>] = {};
        m.key(map_head, x, dim, phi, memory ? memory : fresh, keep);
    } else if constexpr (takes_position<M>) {
        m.key(map_head, x, dim, phi, position);
    } else {
        m.key(map_head, x, dim, phi);
    }
}

}  // namespace ask
}  // namespace sash
