#pragma once
/// \file
/// Rows of a caller's tensors as floats and back, whatever their type and strides. The type tag is read here, and nowhere
/// else: kernels see floats.
#include <sash/cpu/convert.hpp>
#include <sash/rope.hpp>
#include <sash/view.hpp>

namespace sash::cpu {

/// Row (token, head) of a view as floats, whatever its type and strides.
template <class Build, class T>
void read_row(const input& x, int64 token, int64 head, float* to) {
    const T* from = static_cast<const T*>(x.at(token, head));
    if (x.dim_stride == 1)
        widen<Build>(from, to, x.dim);
    else
        for (int64 d = 0; d < x.dim; ++d) to[d] = float(from[d * x.dim_stride]);
}
template <class Build>
void read_row(const input& x, int64 token, int64 head, float* to) {
    switch (x.type) {
        case scalar::f16:
            return read_row<Build, float16>(x, token, head, to);
        case scalar::bf16:
            return read_row<Build, bfloat16>(x, token, head, to);
        default:
            return read_row<Build, float>(x, token, head, to);
    }
}

/// Writes a row of floats into a view, rounding to its type.
template <class Build, class T>
void write_row(const output& x, int64 token, int64 head, const float* from) {
    T* to = static_cast<T*>(x.at(token, head));
    if (x.dim_stride == 1)
        narrow<Build>(from, to, x.dim);
    else
        for (int64 d = 0; d < x.dim; ++d) to[d * x.dim_stride] = T(from[d]);
}
template <class Build>
void write_row(const output& x, int64 token, int64 head, const float* from) {
    switch (x.type) {
        case scalar::f16:
            return write_row<Build, float16>(x, token, head, from);
        case scalar::bf16:
            return write_row<Build, bfloat16>(x, token, head, from);
        default:
            return write_row<Build, float>(x, token, head, from);
    }
}

/// A row as floats: where it lies if it is floats side by side, else converted to `scratch`, [dim].
template <class Build>
const float* float_row(const input& x, int64 token, int64 head, float* scratch) {
    if (x.type == scalar::f32 && x.dim_stride == 1) return static_cast<const float*>(x.at(token, head));
    read_row<Build>(x, token, head, scratch);
    return scratch;
}

/// sash::turn_row, whole registers at a time where the members of pairs lie apart.
template <class Build>
void turn_registers(float* row, const detail::turn* turns, int64 pairs, rotary_layout layout) {
    if (layout != rotary_layout::half_split) return sash::turn_row<Build>(row, turns, pairs, layout);
    int64 p = 0;
    for (; p + lanes<Build> <= pairs; p += lanes<Build>) {
        floats a = load(row + p), b = load(row + pairs + p), cosine, sine;
        unzip(&turns[p].cosine, cosine, sine);
        turn_pair(a, b, cosine, sine);
        store(row + p, a);
        store(row + pairs + p, b);
    }
    for (; p < pairs; ++p) turn_pair(row[p], row[p + pairs], turns[p].cosine, turns[p].sine);
}

}  // namespace sash::cpu
