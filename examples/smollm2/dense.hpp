#pragma once
/// \file
/// The dense layers: matrix products with Eigen, cut into tasks over the columns of the result.
///
/// Eigen computes one task on one thread (EIGEN_DONT_PARALLELIZE). Tasks are small and taken one by one, so that a core
/// that is busy elsewhere holds nobody up.
#include <Eigen/Dense>
#include <sash/sash.hpp>

namespace smollm2 {

/// Row-major, so that a row is one token or one output of a layer, and rows lie side by side.
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using vector = Eigen::RowVectorXf;
using index = Eigen::Index;

/// What runs tasks, for the dense layers here and for attention in sash, which takes any runner: whoever is free takes
/// the next task. `concurrency` tells sash how many run at a time.
struct crew {
    int threads = 1;

    sash::int64 concurrency() const { return threads; }
    template <class F>
    void operator()(sash::int64 tasks, F&& f) const {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (tasks > 1)
        for (sash::int64 i = 0; i < tasks; ++i) f(i);
    }
};

/// Calls f(first, count) for parts of [0, size). A part holds `step` items, the last one perhaps fewer.
template <class F>
void in_parts(const crew& run, index size, index step, const F& f) {
    run((size + step - 1) / step, [&](sash::int64 part) {
        const index first = part * step;
        f(first, std::min(step, size - first));
    });
}

/// Columns of a product that make one task. Eigen packs the left side once per task, which wide tasks pay less for;
/// narrow products need tasks for every thread all the same.
inline index columns_per_task(index columns) { return columns < 2048 ? 96 : 192; }

/// to = columns [first, first + count) of x · wᵀ. For a single token that is a matrix-vector product.
template <class To>
void multiply_columns(const matrix& x, const matrix& w, index first, index count, To&& to) {
    if (x.rows() == 1)
        to.row(0).transpose().noalias() = w.middleRows(first, count) * x.row(0).transpose();
    else
        to.noalias() = x * w.middleRows(first, count).transpose();
}

/// y = x · wᵀ with x [tokens, in], w [out, in], y [tokens, out].
inline void multiply(const matrix& x, const matrix& w, matrix& y, const crew& run) {
    y.resize(x.rows(), w.rows());
    in_parts(run, w.rows(), columns_per_task(w.rows()),
             [&](index first, index count) { multiply_columns(x, w, first, count, y.middleCols(first, count)); });
}

/// y += x · wᵀ
inline void multiply_add(const matrix& x, const matrix& w, matrix& y, const crew& run) {
    in_parts(run, w.rows(), columns_per_task(w.rows()), [&](index first, index count) {
        if (x.rows() == 1)
            y.row(0).segment(first, count).transpose().noalias() += w.middleRows(first, count) * x.row(0).transpose();
        else
            y.middleCols(first, count).noalias() += x * w.middleRows(first, count).transpose();
    });
}

}  // namespace smollm2
