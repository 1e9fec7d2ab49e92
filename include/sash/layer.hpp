#pragma once
/// \file
/// What a layer does around its recurrence: norms and gates of the heads, a skip, a short convolution, a token shift.
///
/// Functions of rows, one token at a time: how the tokens are cut into calls changes no bit. They work in place on the
/// rows that `attend` gives back (or is given), tensors [tokens, heads, dim] of any strides and float, float16 or
/// bfloat16. Sums are formed in double, everything else in fp32, and each function rounds what it writes to the type of
/// the tensor: chains of them want floats. What a function must remember from call to call is a span of floats that is
/// the caller's, zero at first; the place for it is the cache's `auxiliary()`, which forks, checkpoints and files carry
/// along.
///
///     systems::gated_deltanet     convolve (SiLU) query, key, value;   rms_norm, multiply_by_silu(z)
///     systems::mamba2             convolve (SiLU) x, B, C;             add_skip(x, D), multiply_by_silu(z), rms_norm
///     systems::retnet             rms_norm, multiply_by_silu(z)        systems::supra     group_norm
///
/// Nothing here allocates. Empty tensors are left alone; NaN and infinities go where arithmetic takes them. Weights are
/// spans that are looked at during the call only. Errors: sash::error, before anything is written, for a span or tensor
/// whose size does not fit, naming it.
#include <sash/cpu/simd.hpp>
#include <sash/feature_map.hpp>
#include <sash/gate.hpp>
#include <sash/view.hpp>

#include <cmath>
#include <span>

SASH_KERNELS_BEGIN

namespace sash::layer {

/// What a norm divides by and what it multiplies with afterwards.
struct norm {
    float epsilon = 1e-5f;               ///< added under the root
    std::span<const float> weight = {};  ///< [dim], the same for every head, or [heads, dim]; empty: 1
    std::span<const float> bias = {};    ///< likewise; empty: 0
    int64 groups = 0;                    ///< that the heads are put into, side by side; 0: every head is one
};

/// What is done to the sum of a convolution.
enum class activation : int { none, silu };

/// The taps of a depthwise convolution over time, one filter for every channel. A channel is a number of a row:
/// head · dim + d.
struct filter {
    std::span<const float> weights = {};  ///< [channels, taps], the last tap is the token's own, as PyTorch has them
    std::span<const float> bias = {};     ///< [channels]; empty: 0
    layer::activation activation = layer::activation::none;
};

inline constexpr int64 most_taps = 16;

/// Floats that `convolve` remembers: the last taps - 1 inputs.
SASH_INLINE constexpr int64 filter_state(int64 channels, int64 taps) { return channels * (taps - 1); }

}  // namespace sash::layer

namespace sash::detail {

// Rows are worked on in pieces on the stack. A piece is whole registers, so that every number meets the same
// instructions wherever it stands.
inline constexpr int64 row_piece = 64;
using piece_of_row = float[row_piece];

template <class Build, class T>
void get_piece(const T* from, int64 stride, int64 count, float* to) {
    for (int64 i = 0; i < count; ++i) to[i] = float(from[i * stride]);
    for (int64 i = count; i < row_piece; ++i) to[i] = 0;
}
/// Numbers [first, first + count) of row (token, head), zeros behind them.
template <class Build>
void get_piece(const input& x, int64 token, int64 head, int64 first, int64 count, float* to) {
    const int64 at = first * x.dim_stride;
    switch (x.type) {
        case scalar::f16:
            return get_piece<Build>(static_cast<const float16*>(x.at(token, head)) + at, x.dim_stride, count, to);
        case scalar::bf16:
            return get_piece<Build>(static_cast<const bfloat16*>(x.at(token, head)) + at, x.dim_stride, count, to);
        default:
            return get_piece<Build>(static_cast<const float*>(x.at(token, head)) + at, x.dim_stride, count, to);
    }
}

template <class Build, class T>
void put_piece(T* to, int64 stride, int64 count, const float* from) {
    for (int64 i = 0; i < count; ++i) to[i * stride] = T(from[i]);
}
template <class Build>
void put_piece(const output& x, int64 token, int64 head, int64 first, int64 count, const float* from) {
    const int64 at = first * x.dim_stride;
    switch (x.type) {
        case scalar::f16:
            return put_piece<Build>(static_cast<float16*>(x.at(token, head)) + at, x.dim_stride, count, from);
        case scalar::bf16:
            return put_piece<Build>(static_cast<bfloat16*>(x.at(token, head)) + at, x.dim_stride, count, from);
        default:
            return put_piece<Build>(static_cast<float*>(x.at(token, head)) + at, x.dim_stride, count, from);
    }
}

/// Calls f(first, count) for the pieces of a row of `dim` numbers.
template <class F>
SASH_INLINE void for_each_piece_of_row(int64 dim, F&& f) {
    for (int64 first = 0; first < dim; first += row_piece) f(first, smaller(row_piece, dim - first));
}

/// Changes every piece of a tensor in place: f(piece, token, head, first, count).
template <class Build, class F>
SASH_INLINE void change_rows(const output& x, F&& f) {
    for (int64 t = 0; t < x.tokens; ++t)
        for (int64 h = 0; h < x.heads; ++h)
            for_each_piece_of_row(x.dim, [&](int64 first, int64 count) {
                piece_of_row piece;
                get_piece<Build>(x, t, h, first, count, piece);
                f(piece, t, h, first, count);
                put_piece<Build>(x, t, h, first, count, piece);
            });
}

/// sum f(x) over a row, in double, in eight running sums.
template <class Build, class F>
double sum_over_row(const input& x, int64 token, int64 head, F&& f) {
    double sums[8] = {};
    for_each_piece_of_row(x.dim, [&](int64 first, int64 count) {
        piece_of_row piece;
        get_piece<Build>(x, token, head, first, count, piece);
        for (int64 i = 0; i < count; ++i) sums[i % 8] += f(double{piece[i]});
    });
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// A table [dim] or [heads, dim]: what stands there for a head; null where it is empty.
SASH_INLINE const float* row_of_table(std::span<const float> table, int64 dim, int64 head) {
    if (table.empty()) return nullptr;
    return table.data() + (static_cast<int64>(table.size()) == dim ? 0 : head * dim);
}
template <class Build>
void check_row_table(const char* name, std::span<const float> table, int64 heads, int64 dim) {
    const auto size = static_cast<int64>(table.size());
    require<Build>(size == 0 || size == dim || size == heads * dim, name, " has ", size, " numbers, must have ", dim,
                   " or ", heads * dim, ", or none");
}
template <class Build>
void check_same_extents(const char* name, const input& x, const input& y) {
    require<Build>(x.tokens == y.tokens && x.heads == y.heads && x.dim == y.dim, name, " is [", x.tokens, ", ", x.heads,
                   ", ", x.dim, "], must be [", y.tokens, ", ", y.heads, ", ", y.dim, "]");
}

/// x = (x - mean) / sqrt(mean of (x - mean)² + epsilon) · weight + bias over each group of heads; `centred` or mean = 0.
template <class Build>
void normalise(const output& x, const layer::norm& how, bool centred) {
    const int64 groups = how.groups == 0 ? x.heads : how.groups;
    require<Build>(x.heads == 0 || (groups >= 1 && x.heads % groups == 0), "groups is ", how.groups,
                   ", must divide heads, which is ", x.heads);
    check_row_table<Build>("weight", how.weight, x.heads, x.dim);
    check_row_table<Build>("bias", how.bias, x.heads, x.dim);
    if (x.empty()) return;
    const int64 together = x.heads / groups;
    const double count = double(together * x.dim);
    for (int64 t = 0; t < x.tokens; ++t)
        for (int64 first_head = 0; first_head < x.heads; first_head += together) {
            output group = x.tokens_from(t, 1);
            group.data = x.at(t, first_head);
            group.heads = together;
            const auto mean_of = [&](auto&& f) {
                double sum = 0;
                for (int64 h = 0; h < together; ++h) sum += sum_over_row<Build>(group, 0, h, f);
                return sum / count;
            };
            const double mean = centred ? mean_of([](double a) { return a; }) : 0;
            const double scale =
                1 / std::sqrt(mean_of([&](double a) { return (a - mean) * (a - mean); }) + double{how.epsilon});
            change_rows<Build>(group, [&](float* piece, int64, int64 head, int64 first, int64 n) {
                const float* weight = row_of_table(how.weight, x.dim, first_head + head);
                const float* bias = row_of_table(how.bias, x.dim, first_head + head);
                for (int64 i = 0; i < n; ++i) {
                    double y = (double{piece[i]} - mean) * scale;
                    if (weight) y *= double{weight[first + i]};
                    if (bias) y += double{bias[first + i]};
                    piece[i] = static_cast<float>(y);
                }
            });
        }
}

template <class Build>
void normalise_to_unit(const output& x, float epsilon, float least) {
    for (int64 t = 0; t < x.tokens; ++t)
        for (int64 h = 0; h < x.heads; ++h) {
            output row = x.tokens_from(t, 1);
            row.data = x.at(t, h);
            row.heads = 1;
            const double length =
                std::sqrt(sum_over_row<Build>(row, 0, 0, [](double a) { return a * a; }) + double{epsilon});
            const double divisor = length < double{least} ? double{least} : length;
            change_rows<Build>(row, [&](float* piece, int64, int64, int64, int64 n) {
                for (int64 i = 0; i < n; ++i) piece[i] = static_cast<float>(double{piece[i]} / divisor);
            });
        }
}

struct sigmoid_of_registers {
    SASH_INLINE cpu::floats operator()(const cpu::floats& x) const { return gate::sigmoid(x); }
};

/// x = x · f(gate + bias), f applied to registers.
template <class Build, class F>
void multiply_by(const output& x, const input& gate, std::span<const float> bias, const F& f) {
    check_same_extents<Build>("gate", gate, input(x));
    check_row_table<Build>("bias", bias, x.heads, x.dim);
    change_rows<Build>(x, [&](float* piece, int64 token, int64 head, int64 first, int64 count) {
        piece_of_row by;
        get_piece<Build>(gate, token, head, first, count, by);
        const float* shift = row_of_table(bias, x.dim, head);
        for (int64 i = 0; shift && i < count; ++i) by[i] += shift[first + i];
        for (int64 i = 0; i < row_piece; i += cpu::lanes<Build>)
            cpu::store(piece + i, cpu::load(piece + i) * f(cpu::load(by + i)));
    });
}

template <class Build>
void add_skip(const output& y, const input& x, std::span<const float> factors) {
    check_same_extents<Build>("x", x, input(y));
    const auto size = static_cast<int64>(factors.size());
    require<Build>(size == y.heads || size == y.heads * y.dim, "factors has ", size, " numbers, must have ", y.heads,
                   " or ", y.heads * y.dim);
    const bool by_head = size == y.heads;
    change_rows<Build>(y, [&](float* piece, int64 token, int64 head, int64 first, int64 count) {
        piece_of_row from;
        get_piece<Build>(x, token, head, first, count, from);
        for (int64 i = 0; i < count; ++i)
            piece[i] += factors[static_cast<std::size_t>(by_head ? head : head * y.dim + first + i)] * from[i];
    });
}

/// y += (sum_c query_c key_c weight_c) value
template <class Build>
void add_current(const output& y, const input& query, const input& key, const input& value,
                 std::span<const float> weight) {
    check_same_extents<Build>("key", key, query);
    check_same_extents<Build>("value", value, input(y));
    require<Build>(query.tokens == y.tokens && query.heads == y.heads, "query is [", query.tokens, ", ", query.heads,
                   ", …], must be [", y.tokens, ", ", y.heads, ", …]");
    check_row_table<Build>("weight", weight, query.heads, query.dim);
    for (int64 t = 0; t < y.tokens; ++t)
        for (int64 h = 0; h < y.heads; ++h) {
            const float* by = row_of_table(weight, query.dim, h);
            double sum = 0;
            for_each_piece_of_row(query.dim, [&](int64 first, int64 count) {
                piece_of_row q, k;
                get_piece<Build>(query, t, h, first, count, q);
                get_piece<Build>(key, t, h, first, count, k);
                for (int64 i = 0; i < count; ++i) sum += double{q[i]} * double{k[i]} * (by ? double{by[first + i]} : 1);
            });
            for_each_piece_of_row(y.dim, [&](int64 first, int64 count) {
                piece_of_row piece, v;
                get_piece<Build>(y, t, h, first, count, piece);
                get_piece<Build>(value, t, h, first, count, v);
                for (int64 i = 0; i < count; ++i) piece[i] += static_cast<float>(sum) * v[i];
                put_piece<Build>(y, t, h, first, count, piece);
            });
        }
}

/// One piece of channels of a convolution: its taps, what it remembers, and the tokens run through.
template <class Build>
void convolve_piece(const output& x, const layer::filter& by, int64 taps, std::span<float> state, int64 head,
                    int64 first, int64 count) {
    const int64 channels = x.heads * x.dim, channel = head * x.dim + first;
    piece_of_row weight[layer::most_taps], past[layer::most_taps], bias;
    for (int64 i = 0; i < row_piece; ++i) {
        bias[i] = i < count && !by.bias.empty() ? by.bias[static_cast<std::size_t>(channel + i)] : 0;
        for (int64 j = 0; j < taps; ++j) {
            weight[j][i] = i < count ? by.weights[static_cast<std::size_t>((channel + i) * taps + j)] : 0;
            past[j][i] = i < count && j + 1 < taps ? state[static_cast<std::size_t>(j * channels + channel + i)] : 0;
        }
    }
    // past[(oldest + j) % taps] is the input that tap j meets
    int64 oldest = 0;
    for (int64 t = 0; t < x.tokens; ++t, oldest = (oldest + 1) % taps) {
        get_piece<Build>(x, t, head, first, count, past[(oldest + taps - 1) % taps]);
        piece_of_row y;
        for (int64 i = 0; i < row_piece; i += cpu::lanes<Build>) {
            cpu::floats sum = cpu::load(bias + i);
            for (int64 j = 0; j < taps; ++j)
                sum = cpu::fma(cpu::load(weight[j] + i), cpu::load(past[(oldest + j) % taps] + i), sum);
            cpu::store(y + i, by.activation == layer::activation::silu ? silu{}(sum) : sum);
        }
        put_piece<Build>(x, t, head, first, count, y);
    }
    for (int64 j = 0; j + 1 < taps; ++j)
        for (int64 i = 0; i < count; ++i)
            state[static_cast<std::size_t>(j * channels + channel + i)] = past[(oldest + j) % taps][i];
}

template <class Build>
void convolve(const output& x, const layer::filter& by, std::span<float> state) {
    const int64 channels = x.heads * x.dim;
    if (channels == 0) return;
    const auto size = static_cast<int64>(by.weights.size());
    const int64 taps = size / channels;
    require<Build>(size > 0 && size % channels == 0, "weights has ", size, " numbers, must have some for each of ",
                   channels, " channels");
    require<Build>(taps <= layer::most_taps, "the filter has ", taps, " taps, must have at most ", layer::most_taps);
    require<Build>(by.bias.empty() || static_cast<int64>(by.bias.size()) == channels, "bias has ", by.bias.size(),
                   " numbers, must have ", channels, ", or none");
    require<Build>(static_cast<int64>(state.size()) == layer::filter_state(channels, taps), "state has ", state.size(),
                   " numbers, must have ", layer::filter_state(channels, taps), ": channels times taps - 1");
    for (int64 h = 0; h < x.heads; ++h)
        for_each_piece_of_row(
            x.dim, [&](int64 first, int64 count) { convolve_piece<Build>(x, by, taps, state, h, first, count); });
}

template <class Build>
void token_shift(const input& x, const input& mix, std::span<const float> last, const output& y) {
    check_same_extents<Build>("mix", mix, x);
    check_same_extents<Build>("y", input(y), x);
    require<Build>(static_cast<int64>(last.size()) == x.heads * x.dim, "last has ", last.size(), " numbers, must have ",
                   x.heads * x.dim);
    for (int64 t = 0; t < x.tokens; ++t)
        for (int64 h = 0; h < x.heads; ++h)
            for_each_piece_of_row(x.dim, [&](int64 first, int64 count) {
                piece_of_row now, before, mu;
                get_piece<Build>(x, t, h, first, count, now);
                get_piece<Build>(mix, t, h, first, count, mu);
                if (t > 0)
                    get_piece<Build>(x, t - 1, h, first, count, before);
                else
                    get_piece<Build>(last.data() + h * x.dim + first, 1, count, before);
                for (int64 i = 0; i < count; ++i) now[i] += (before[i] - now[i]) * mu[i];
                put_piece<Build>(y, t, h, first, count, now);
            });
}

template <class Build>
void keep_last(const input& x, std::span<float> last) {
    require<Build>(static_cast<int64>(last.size()) == x.heads * x.dim, "last has ", last.size(), " numbers, must have ",
                   x.heads * x.dim);
    if (x.empty()) return;
    for (int64 h = 0; h < x.heads; ++h)
        for_each_piece_of_row(x.dim, [&](int64 first, int64 count) {
            piece_of_row now;
            get_piece<Build>(x, x.tokens - 1, h, first, count, now);
            put_piece<Build>(last.data() + h * x.dim + first, 1, count, now);
        });
}

}  // namespace sash::detail

namespace sash::layer {

// ------------------------------------------------------------------------------------------------------------- norms

/// x = x / sqrt(mean(x²) + epsilon) · weight + bias, in place, over each head, or over each of `groups` groups of heads
/// ({.groups = 1}: over all heads, as lightning attention has it). Error below 1e-6 of the largest number of a row.
/// Source: Zhang and Sennrich 2019, "Root mean square layer normalization".
SASH_INLINE void rms_norm(const output& x, const norm& how = {}) { detail::normalise<build::here>(x, how, false); }

/// x = (x - mean(x)) / sqrt(variance(x) + epsilon) · weight + bias, in place; groups as above. The variance is that of
/// the row itself (divided by its count). RWKV: epsilon 64e-5; SUPRA: no weight.
/// Source: Wu and He 2018, "Group normalization".
SASH_INLINE void group_norm(const output& x, const norm& how = {}) { detail::normalise<build::here>(x, how, true); }

/// x = x / max(sqrt(sum(x²) + epsilon), least), in place, each head by itself: unit vectors for the delta rule. A row
/// of zeros stays so. PyTorch's normalize: epsilon 0, least 1e-12; the kernels of DeltaNet: epsilon 1e-6.
SASH_INLINE void unit_norm(const output& x, float epsilon = 1e-6f, float least = 0) {
    detail::normalise_to_unit<build::here>(x, epsilon, least);
}

// ------------------------------------------------------------------------------------------------------------- gates

/// x = x · silu(gate + bias), in place; gate [tokens, heads, dim], bias [dim] or [heads, dim]. A gate that comes before
/// the norm is called before it.
SASH_INLINE void multiply_by_silu(const output& x, const input& gate, std::span<const float> bias = {}) {
    detail::multiply_by<build::here>(x, gate, bias, silu{});
}

/// x = x · sigmoid(gate + bias), in place.
SASH_INLINE void multiply_by_sigmoid(const output& x, const input& gate, std::span<const float> bias = {}) {
    detail::multiply_by<build::here>(x, gate, bias, detail::sigmoid_of_registers{});
}

/// y = y + D ⊙ x, in place; D [heads] or [heads, dim]. The skip of the state-space models.
SASH_INLINE void add_skip(const output& y, const input& x, std::span<const float> factors) {
    detail::add_skip<build::here>(y, x, factors);
}

/// y = y + (sum_c query_c key_c weight_c) value, in place; weight [dim] or [heads, dim], empty: 1. The token's own value
/// once more, behind the norm: RWKV-7.
SASH_INLINE void add_current(const output& y, const input& query, const input& key, const input& value,
                             std::span<const float> weight) {
    detail::add_current<build::here>(y, query, key, value, weight);
}

// --------------------------------------------------------------------------------------------------- a look at the past

/// y[t, c] = activation(bias_c + sum_j weights[c, j] x[t - (taps - 1) + j, c]), in place: x becomes y. Before the first
/// token there are zeros. `state` [taps - 1, channels] holds the last inputs, oldest first, and is brought up to date.
/// At most 16 taps. Cost: O(tokens · channels · taps).
/// Source: Poli et al. 2023, "Hyena hierarchy", section 3.1 (short convolution).
SASH_INLINE void convolve(const output& x, const filter& by, std::span<float> state) {
    detail::convolve<build::here>(x, by, state);
}

/// y[t] = x[t] + (x[t - 1] - x[t]) ⊙ mix[t]: RWKV's token shift. `last` [heads, dim] is the input before the first one
/// here and is only read: several shifts of one x can follow each other, then keep_last. `mix` is a tensor like x (one
/// row for all tokens is a token stride of 0). y must not overlap x.
/// Source: Peng et al. 2023, "RWKV: reinventing RNNs for the transformer era", section 3.1.
SASH_INLINE void token_shift(const input& x, const input& mix, std::span<const float> last, const output& y) {
    detail::token_shift<build::here>(x, mix, last, y);
}
/// The same with one row of factors, [heads, dim], for every token.
SASH_INLINE void token_shift(const input& x, std::span<const float> mix, std::span<const float> last, const output& y) {
    detail::require<build::here>(static_cast<int64>(mix.size()) == x.heads * x.dim, "mix has ", mix.size(),
                                 " numbers, must have ", x.heads * x.dim);
    token_shift(x, input(mix.data(), x.tokens, x.heads, x.dim, 0, x.dim), last, y);
}
/// last = the last token's input, [heads, dim]; no token: it stays.
SASH_INLINE void keep_last(const input& x, std::span<float> last) { detail::keep_last<build::here>(x, last); }

}  // namespace sash::layer

SASH_KERNELS_END
