#pragma once
// The same attention as others would write it: the textbook loop, and compositions of matrix products, row block by row
// block so that a causal prompt costs half. They read [tokens, heads, dim] and group query heads as sash does.
#include "layer.hpp"

#include <sash/cpu/exp.hpp>

#include <Eigen/Dense>
#if defined(SASH_BENCH_OPENBLAS)
#include <cblas.h>
extern "C" void openblas_set_num_threads(int);
#endif

#include <cmath>
#include <cstdlib>
#include <limits>
#if defined(__linux__)
#include <unistd.h>
#endif

namespace bench {

/// out[t, h] = Σ_j softmax_j(scale q·k_j) v_j, j <= t: two loops and a maximum, in float.
inline void naive_attention(prompt& p) {
    const sash::shape& s = p.shape;
    const int64 dim = s.head_dim, group = s.heads / s.kv_heads;
    const float scale = 1 / std::sqrt(static_cast<float>(dim));
    std::vector<float> score(static_cast<std::size_t>(p.tokens));
    for (int64 h = 0; h < s.heads; ++h)
        for (int64 t = 0; t < p.tokens; ++t) {
            const float* q = &p.q[static_cast<std::size_t>((t * s.heads + h) * dim)];
            float* out = &p.out[static_cast<std::size_t>((t * s.heads + h) * dim)];
            const auto row = [&](const std::vector<float>& x, int64 j) {
                return &x[static_cast<std::size_t>((j * s.kv_heads + h / group) * dim)];
            };
            float top = -std::numeric_limits<float>::infinity(), sum = 0;
            for (int64 j = 0; j <= t; ++j) {
                float dot = 0;
                for (int64 c = 0; c < dim; ++c) dot += q[c] * row(p.k, j)[c];
                score[static_cast<std::size_t>(j)] = dot * scale;
                top = std::max(top, dot * scale);
            }
            std::fill(out, out + dim, 0.0f);
            for (int64 j = 0; j <= t; ++j) {
                const float weight = std::exp(score[static_cast<std::size_t>(j)] - top);
                sum += weight;
                for (int64 c = 0; c < dim; ++c) out[c] += weight * row(p.v, j)[c];
            }
            for (int64 c = 0; c < dim; ++c) out[c] /= sum;
        }
}

/// OpenBLAS takes the kernels of the machine, unless an environment variable names others; it looks when it is loaded.
/// So a program that finds one starts itself again without it.
inline void let_openblas_choose([[maybe_unused]] char** arguments) {
#if defined(SASH_BENCH_OPENBLAS) && defined(__linux__)
    if (std::getenv("OPENBLAS_CORETYPE") == nullptr && std::getenv("OPENBLAS_L2_SIZE") == nullptr) return;
    unsetenv("OPENBLAS_CORETYPE");
    unsetenv("OPENBLAS_L2_SIZE");
    execv("/proc/self/exe", arguments);
#endif
}

/// Row-major matrices whose rows may lie apart.
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using rows_in = Eigen::Map<const matrix, 0, Eigen::OuterStride<>>;
using rows_out = Eigen::Map<matrix, 0, Eigen::OuterStride<>>;

/// The matrix products of Eigen, on one thread.
struct eigen_products {
    static void use_one_thread() { Eigen::setNbThreads(1); }
    static void scores(const rows_in& q, const rows_in& k, rows_out s) { s.noalias() = q * k.transpose(); }
    static void values(const rows_out& weights, const rows_in& v, rows_out o) { o.noalias() = weights * v; }
};

#if defined(SASH_BENCH_OPENBLAS)
/// Those of OpenBLAS, on one thread.
struct openblas_products {
    static void use_one_thread() { openblas_set_num_threads(1); }
    static int in(Eigen::Index n) { return static_cast<int>(n); }

    static void scores(const rows_in& q, const rows_in& k, rows_out s) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, in(q.rows()), in(k.rows()), in(q.cols()), 1, q.data(),
                    in(q.outerStride()), k.data(), in(k.outerStride()), 0, s.data(), in(s.outerStride()));
    }
    static void values(const rows_out& weights, const rows_in& v, rows_out o) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, in(weights.rows()), in(v.cols()), in(v.rows()), 1,
                    weights.data(), in(weights.outerStride()), v.data(), in(v.outerStride()), 0, o.data(),
                    in(o.outerStride()));
    }
};
#endif

/// score -> exp(scale (score - the largest)) over the first `seen` numbers of a row, 0 up to `padded`, a multiple of
/// the lanes; returns the sum. Two passes in registers, with this library's exponential: no baseline is held back by
/// its own.
inline float softmax_row(float* row, Eigen::Index seen, Eigen::Index padded, float scale) {
    using namespace sash::cpu;
    constexpr auto lanes = static_cast<Eigen::Index>(floats::size);
    std::fill(row + seen, row + padded, minus_infinity());
    const Eigen::Index end = (seen + lanes - 1) / lanes * lanes;
    floats top(minus_infinity());
    for (Eigen::Index j = 0; j < end; j += lanes) top = maximum(load(row + j), top);
    const floats factor(scale * log2_e), shift(-maximum_of_lanes(top) * scale * log2_e);
    floats sum(0.0f);
    for (Eigen::Index j = 0; j < end; j += lanes) {
        const floats weight = exp2(fma(load(row + j), factor, shift));
        store(row + j, weight);
        sum = sum + weight;
    }
    std::fill(row + end, row + padded, 0.0f);
    return sum_of_lanes(sum);
}

/// Causal attention by two matrix products for each block of `block` query rows and each head: S = Q Kᵀ over the keys
/// that the block's last row sees, a softmax of its rows, O = P V.
template <class Products>
void row_blocked_attention(prompt& p, Eigen::Index block, std::vector<float>& scratch) {
    const sash::shape& s = p.shape;
    const Eigen::Index dim = s.head_dim, group = s.heads / s.kv_heads, tokens = p.tokens;
    const float scale = 1 / std::sqrt(static_cast<float>(dim));
    const auto padded = [](Eigen::Index n) { return (n + 63) / 64 * 64; };
    scratch.resize(static_cast<std::size_t>(block * padded(tokens)));
    for (Eigen::Index h = 0; h < s.heads; ++h)
        for (Eigen::Index first = 0; first < tokens; first += block) {
            const Eigen::Index rows = std::min(block, tokens - first), keys = first + rows;
            const Eigen::OuterStride<> q_stride(s.heads * dim), kv_stride(s.kv_heads * dim);
            const rows_in q(p.q.data() + (first * s.heads + h) * dim, rows, dim, q_stride);
            const rows_in k(p.k.data() + h / group * dim, keys, dim, kv_stride);
            const rows_in v(p.v.data() + h / group * dim, keys, dim, kv_stride);
            rows_out o(p.out.data() + (first * s.heads + h) * dim, rows, dim, q_stride);
            rows_out scores(scratch.data(), rows, keys, Eigen::OuterStride<>(padded(keys)));

            Products::scores(q, k, scores);
            Eigen::VectorXf factor(rows);
            for (Eigen::Index r = 0; r < rows; ++r)
                factor[r] = 1 / softmax_row(&scores(r, 0), first + r + 1, padded(keys), scale);
            Products::values(scores, v, o);
            o.array().colwise() *= factor.array();
        }
}

/// A composition with the block of query rows that suits it best here.
template <class Products>
class composition {
public:
    explicit composition(prompt& p) : prompt_(&p) {
        Products::use_one_thread();
        double best = 1e30;
        for (const Eigen::Index block : {64, 128, 256, 512}) {
            row_blocked_attention<Products>(p, block, scratch_);
            const double s = machine::seconds_of([&] { row_blocked_attention<Products>(p, block, scratch_); });
            if (s < best) block_ = block;
            best = std::min(best, s);
        }
    }
    Eigen::Index block() const { return block_; }
    void operator()() { row_blocked_attention<Products>(*prompt_, block_, scratch_); }
    /// Thread CPU time of one prompt.
    double seconds() {
        return machine::seconds_of([this] { (*this)(); });
    }

private:
    prompt* prompt_;
    Eigen::Index block_ = 64;
    std::vector<float> scratch_;
};

}  // namespace bench
