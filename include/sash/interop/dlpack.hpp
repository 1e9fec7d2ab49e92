#pragma once
/// \file
/// DLPack tensors as views of [tokens, heads, dim], without a copy and without an owner: what PyTorch, NumPy, JAX and
/// others hand over in memory of the CPU. Nothing is included: any struct with the members of DLTensor will do, of
/// whatever version of dlpack.h.
///
/// The importer looks at the DLTensor alone. Whoever got it inside a DLManagedTensor keeps that alive and calls its
/// deleter.
#include <sash/view.hpp>

#include <concepts>
#include <cstdint>

namespace sash {

namespace detail {

/// DLTensor of dlpack.h, from version 0.5 (`device`) on.
template <class T>
concept dl_tensor = requires(const T& t) {
    { t.data } -> std::convertible_to<const void*>;
    static_cast<int>(t.device.device_type);
    { t.ndim } -> std::convertible_to<int>;
    static_cast<int>(t.dtype.code);
    static_cast<int>(t.dtype.bits);
    static_cast<int>(t.dtype.lanes);
    { t.shape } -> std::convertible_to<const std::int64_t*>;
    { t.strides } -> std::convertible_to<const std::int64_t*>;
    { t.byte_offset } -> std::convertible_to<std::uint64_t>;
};

/// The element type; refuses those that sash does not read. DLPack counts 2 for IEEE floats, 4 for bfloat16.
template <class Build, dl_tensor T>
scalar dl_scalar(const T& t) {
    const int code = static_cast<int>(t.dtype.code), bits = static_cast<int>(t.dtype.bits),
              lanes = static_cast<int>(t.dtype.lanes);
    constexpr int dl_float = 2, dl_bfloat = 4;
    require<Build>(lanes == 1, "the DLPack tensor has ", lanes, " lanes an element, must have 1");
    if (code == dl_float && bits == 32) return scalar::f32;
    if (code == dl_float && bits == 16) return scalar::f16;
    if (code == dl_bfloat && bits == 16) return scalar::bf16;
    refuse<Build>("the DLPack tensor has elements of type code ", code, " with ", bits,
                  " bits, must be a float of 32 or 16 bits (code 2) or a bfloat16 (code 4)");
}

/// A view of a tensor of rank 3, or of rank 2 whose second axis is cut into heads.
template <class Build, dl_tensor T>
output view_of_dl(const T& t, int64 heads) {
    constexpr int on_cpu = 1;
    const int device = static_cast<int>(t.device.device_type), rank = static_cast<int>(t.ndim),
              wanted = heads == 0 ? 3 : 2;
    require<Build>(device == on_cpu, "the DLPack tensor lies on a device of type ", device,
                   ", must lie on the CPU, which is type 1");
    require<Build>(
        rank == wanted, "the DLPack tensor has ", rank, " axes, must have ", wanted,
        heads == 0 ? ": [tokens, heads, dim] (with two, pass the number of heads)" : ": [tokens, heads * dim]");
    int64 extent[3] = {}, stride[3] = {};
    for (int i = 0; i < rank; ++i) {
        extent[i] = t.shape[i];
        require<Build>(extent[i] >= 0, "axis ", i, " of the DLPack tensor has ", extent[i],
                       " elements, must not be negative");
    }
    for (int i = rank - 1; i >= 0; --i)  // no strides: compact, the last axis fastest
        stride[i] = t.strides != nullptr ? t.strides[i] : i == rank - 1 ? 1 : product(stride[i + 1], extent[i + 1]);
    if (heads != 0) {
        require<Build>(extent[1] % heads == 0, "the DLPack tensor has ", extent[1],
                       " columns, must be a multiple of heads, which is ", heads);
        extent[2] = extent[1] / heads;
        extent[1] = heads;
        stride[2] = stride[1];
        stride[1] = extent[2] * stride[2];
    }
    output made;
    made.type = dl_scalar<Build>(t);
    made.data = t.data == nullptr ? nullptr : static_cast<std::byte*>(t.data) + t.byte_offset;
    made.tokens = extent[0], made.heads = extent[1], made.dim = extent[2];
    made.token_stride = stride[0], made.head_stride = stride[1], made.dim_stride = stride[2];
    return made;
}

}  // namespace detail

/// [tokens, heads, dim] of float, float16 or bfloat16 on the CPU. Strides and byte_offset are honoured; strides may be
/// null, which means compact. The result can be read and written: a DLTensor does not say whether writing is allowed,
/// its producer does. It owns nothing. Errors: sash::error for another device, element type or number of axes, naming
/// it.
template <detail::dl_tensor T>
SASH_INLINE output view(const T& tensor) {
    return detail::view_of_dl<build::here>(tensor, 0);
}

/// [tokens, heads · dim], cut into heads: head h has the columns [h · dim, (h + 1) · dim).
template <detail::dl_tensor T>
SASH_INLINE output view(const T& tensor, int64 heads) {
    detail::require<build::here>(heads >= 1, "heads is ", heads, ", must be at least 1");
    return detail::view_of_dl<build::here>(tensor, heads);
}

}  // namespace sash
