#pragma once
/// \file
/// Strided views of [tokens, heads, dim]: what goes into the verb and what comes out. Views own nothing.
#include <sash/scalar.hpp>

#include <limits>
#include <span>
#include <type_traits>
#include <utility>

namespace sash {

namespace detail {

/// A range whose elements lie side by side in memory that outlives the expression (an lvalue, a span).
template <class R, class Pointer>
concept contiguous_storage = std::ranges::contiguous_range<R> && std::ranges::borrowed_range<R> &&
    std::is_convertible_v<decltype(std::ranges::data(std::declval<R&>())), Pointer>;

/// a · b and a + b for numbers >= 0; the largest int64 where they would exceed it.
SASH_INLINE constexpr int64 product(int64 a, int64 b) {
    constexpr int64 most = std::numeric_limits<int64>::max();
    return a != 0 && b > most / a ? most : a * b;
}
SASH_INLINE constexpr int64 total(int64 a, int64 b) {
    constexpr int64 most = std::numeric_limits<int64>::max();
    return b > most - a ? most : a + b;
}

/// Elements that a view with strides >= 0 reaches from its first one: 1 + sum (extent - 1) · stride.
SASH_INLINE constexpr int64 reach(int64 tokens, int64 heads, int64 dim, int64 token_stride, int64 head_stride,
                                  int64 dim_stride) {
    if (tokens <= 0 || heads <= 0 || dim <= 0) return 0;
    return total(1, total(product(tokens - 1, token_stride),
                          total(product(heads - 1, head_stride), product(dim - 1, dim_stride))));
}

/// Extents and strides in elements. `Pointer` is `const void*` for what is read and `void*` for what is written.
template <class Pointer>
struct strided {
    Pointer data = nullptr;
    int64 tokens = 0, heads = 0, dim = 0;
    int64 token_stride = 0, head_stride = 0, dim_stride = 1;
    scalar type = scalar::f32;

    constexpr strided() = default;

    /// Contiguous [tokens, heads, dim] at `p`.
    template <class T>
        requires(std::is_pointer_v<T>&& std::is_convertible_v<T, Pointer>)
    SASH_INLINE constexpr strided(const T& p, int64 t, int64 h, int64 d = 1)
        : strided(p, t, h, d, product(larger(h, 0), larger(d, 0)), d, 1) {}

    /// Any strides, counted in elements; they may be zero (a broadcast) or negative.
    template <class T>
        requires(std::is_pointer_v<T>&& std::is_convertible_v<T, Pointer>)
    SASH_INLINE constexpr strided(const T& p, int64 t, int64 h, int64 d, int64 by_token, int64 by_head,
                                  int64 by_dim = 1)
        : data(p),
          tokens(t),
          heads(h),
          dim(d),
          token_stride(by_token),
          head_stride(by_head),
          dim_stride(by_dim),
          type(scalar_of<std::remove_pointer_t<T>>::value) {}

    /// Contiguous [tokens, heads, dim] in a vector, array or span that holds at least that many elements.
    template <contiguous_storage<Pointer> R>
    SASH_INLINE constexpr strided(R&& range, int64 t, int64 h, int64 d = 1)
        : strided(std::ranges::data(range), t, h, d) {
        const int64 reached = reach(t, h, d, product(larger(h, 0), larger(d, 0)), larger(d, 0), 1);
        require<build::here>(reached <= static_cast<int64>(std::ranges::size(range)), "a view of [", t, ", ", h, ", ",
                             d, "] needs ", reached, " elements, the range holds ", std::ranges::size(range));
    }
    template <contiguous_storage<Pointer> R>
    SASH_INLINE constexpr strided(R&& range, int64 t, int64 h, int64 d, int64 by_token, int64 by_head, int64 by_dim = 1)
        : strided(std::ranges::data(range), t, h, d, by_token, by_head, by_dim) {
        const int64 reached = reach(t, h, d, by_token, by_head, by_dim);
        require<build::here>(by_token >= 0 && by_head >= 0 && by_dim >= 0,
                             "a view of a range needs strides >= 0; they are ", by_token, ", ", by_head, ", ", by_dim,
                             " (pass a pointer for negative ones)");
        require<build::here>(reached <= static_cast<int64>(std::ranges::size(range)), "a strided view reaches element ",
                             reached, " of a range that holds ", std::ranges::size(range));
    }

    SASH_INLINE constexpr bool empty() const { return tokens == 0 || heads == 0 || dim == 0; }

    /// The same memory, tokens [first, first + count) only.
    SASH_INLINE constexpr strided tokens_from(int64 first, int64 count) const {
        strided part = *this;
        part.data = at(first, 0);
        part.tokens = count;
        return part;
    }

    /// The address of element (token, head, 0).
    SASH_INLINE constexpr Pointer at(int64 token, int64 head) const {
        using byte_pointer = std::conditional_t<std::is_same_v<Pointer, void*>, std::byte*, const std::byte*>;
        if (data == nullptr) return nullptr;
        return static_cast<byte_pointer>(data) + (token * token_stride + head * head_stride) * bytes_of(type);
    }
};

}  // namespace detail

/// A tensor that is read: query, key, value, decay. Shape [tokens, heads, dim], any strides (in elements), elements
/// float, float16 or bfloat16; the type is a tag that is read once, where the tensor is packed or stored.
struct input : detail::strided<const void*> {
    using strided::strided;
    SASH_INLINE constexpr input(const detail::strided<const void*>& s) : strided(s) {}
    /// What was written can be read.
    SASH_INLINE constexpr input(const detail::strided<void*>& s) {
        data = s.data;
        tokens = s.tokens, heads = s.heads, dim = s.dim;
        token_stride = s.token_stride, head_stride = s.head_stride, dim_stride = s.dim_stride;
        type = s.type;
    }
};

/// A tensor that is written: the rows that `attend` and `read` give back. Shape [tokens, heads, value_dim].
struct output : detail::strided<void*> {
    using strided::strided;
    SASH_INLINE constexpr output(const detail::strided<void*>& s) : strided(s) {}
};

}  // namespace sash
