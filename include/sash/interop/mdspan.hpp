#pragma once
/// \file
/// Any mdspan as a view of [tokens, heads, dim]: std::mdspan, those of Kokkos and of CUDA, or one of your own. Nothing
/// is included: what counts are the members data_handle(), rank(), extent(i) and stride(i), as C++23 names them.
#include <sash/view.hpp>

#include <concepts>
#include <type_traits>
#include <utility>

namespace sash {

namespace detail {

/// Multidimensional memory at strides, behind a plain pointer.
template <class M>
concept mdspan_like = requires(const M& m) {
    *m.data_handle();
    requires std::is_pointer_v<std::remove_cvref_t<decltype(m.data_handle())>>;
    { M::rank() } -> std::integral;
    { m.extent(0) } -> std::integral;
    { m.stride(0) } -> std::integral;
};

template <mdspan_like M>
using view_of_mdspan =
    std::conditional_t<std::is_const_v<std::remove_reference_t<decltype(*std::declval<const M&>().data_handle())>>,
                       input, output>;

template <mdspan_like M>
inline constexpr int rank_of = static_cast<int>(M::rank());

}  // namespace detail

/// [tokens, heads, dim] of float, sash::float16 or sash::bfloat16, with any strides. An `output`, which can be read
/// too, where the elements may be written; else an `input`. It owns nothing.
template <detail::mdspan_like M>
SASH_INLINE constexpr detail::view_of_mdspan<M> view(const M& m) {
    static_assert(detail::rank_of<M> == 3,
                  "sash: an mdspan of rank 3 is [tokens, heads, dim]; of rank 2 it needs the number of heads");
    return {m.data_handle(),
            static_cast<int64>(m.extent(0)),
            static_cast<int64>(m.extent(1)),
            static_cast<int64>(m.extent(2)),
            static_cast<int64>(m.stride(0)),
            static_cast<int64>(m.stride(1)),
            static_cast<int64>(m.stride(2))};
}

/// [tokens, heads · dim], cut into heads: head h has the columns [h · dim, (h + 1) · dim). Errors: sash::error where
/// the columns are no multiple of `heads`.
template <detail::mdspan_like M>
SASH_INLINE constexpr detail::view_of_mdspan<M> view(const M& m, int64 heads) {
    static_assert(detail::rank_of<M> == 2,
                  "sash: the number of heads goes with an mdspan of rank 2: [tokens, heads * dim]");
    const auto tokens = static_cast<int64>(m.extent(0)), columns = static_cast<int64>(m.extent(1));
    const auto by_token = static_cast<int64>(m.stride(0)), by_column = static_cast<int64>(m.stride(1));
    detail::require<build::here>(heads >= 1, "heads is ", heads, ", must be at least 1");
    detail::require<build::here>(columns % heads == 0, "the mdspan has ", columns,
                                 " columns, must be a multiple of heads, which is ", heads);
    return {m.data_handle(), tokens, heads, columns / heads, by_token, columns / heads * by_column, by_column};
}

}  // namespace sash
