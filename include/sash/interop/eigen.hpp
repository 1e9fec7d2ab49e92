#pragma once
/// \file
/// Eigen matrices as views of [tokens, heads, dim], without a copy.
///
/// A row is a token; head h has the columns [h · dim, (h + 1) · dim). That is what a projection `x * weights` gives,
/// and what the next one takes:
///
///     const MatrixXf qkv = x * weights;                               // [tokens, (8 + 2 + 2) · 64]
///     const auto q = qkv.leftCols(512), k = qkv.middleCols(512, 128), v = qkv.rightCols(128);
///     sash::attend(sash::view(q, 8), sash::view(k, 2), sash::view(v, 2), cache, sash::view(rows, 8));
///     y = rows * out_weights;
///
/// Where columns are tokens, pass `matrix.transpose()`. A single token is a row vector.
#include <sash/view.hpp>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns of its own AVX-512 header
#endif
#include <Eigen/Core>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <type_traits>
#include <utility>

namespace sash {

namespace detail {

template <>
struct scalar_of<Eigen::half> {
    static constexpr scalar value = scalar::f16;
};
template <>
struct scalar_of<Eigen::bfloat16> {
    static constexpr scalar value = scalar::bf16;
};

template <class M>
concept eigen_dense = std::is_base_of_v<Eigen::DenseBase<M>, M>;

/// Has its numbers in memory, at strides: a matrix, a map, a block or a transpose of one; not a product or a sum.
template <class M>
inline constexpr bool eigen_in_memory = (int(M::Flags) & int(Eigen::DirectAccessBit)) != 0;

/// Owns them.
template <class M>
inline constexpr bool eigen_owner = std::is_base_of_v<Eigen::PlainObjectBase<M>, M>;

template <class M>
inline constexpr bool eigen_writable = !std::is_const_v<M> && (int(M::Flags) & int(Eigen::LvalueBit)) != 0;

}  // namespace detail

/// A view of a matrix, map, block or transpose of float, Eigen::half or Eigen::bfloat16: [rows, heads, cols / heads],
/// any storage order and strides. An `output`, which can be read too, where the matrix may be written; else an `input`.
/// It owns nothing: the matrix must outlive it and keep its size. Errors: sash::error where the columns are no multiple
/// of `heads`.
template <class M>
    requires detail::eigen_dense<std::remove_cvref_t<M>>
SASH_INLINE auto view(M&& matrix, int64 heads) {
    using plain = std::remove_cvref_t<M>;
    static_assert(detail::eigen_in_memory<plain>,
                  "sash: this Eigen expression has no memory of its own; evaluate it into a matrix first");
    static_assert(std::is_lvalue_reference_v<M> || !detail::eigen_owner<plain>,
                  "sash: this Eigen matrix is a temporary and would be gone before it is read; give it a name");
    const int64 tokens = matrix.rows(), columns = matrix.cols();
    detail::require<build::here>(heads >= 1, "heads is ", heads, ", must be at least 1");
    detail::require<build::here>(columns % heads == 0, "the matrix has ", columns,
                                 " columns, must be a multiple of heads, which is ", heads);
    const int64 dim = columns / heads, by_row = matrix.rowStride(), by_column = matrix.colStride();
    if constexpr (detail::eigen_writable<std::remove_reference_t<M>>)
        return output(matrix.data(), tokens, heads, dim, by_row, dim * by_column, by_column);
    else
        return input(std::as_const(matrix).data(), tokens, heads, dim, by_row, dim * by_column, by_column);
}

}  // namespace sash
