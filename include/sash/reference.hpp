#pragma once
/// \file
/// Every policy as the textbook writes it, in double, over the whole history, with Eigen: the oracle of the tests and
/// the text to read first. Nothing here is fast. Nothing here knows tiles, caches, runs or intervals.
///
/// One output row, for query i of one head, over the keys j that it sees:
///
///     s_j = score(i, j)         scale, soft cap, ALiBi, a user's function, in this order
///     p_j = exp(s_j - m) / (sum_j exp(s_j - m) + exp(sink - m))        m = max_j s_j
///     out = sum_j p_j v_j       lse = log sum_j exp(s_j)
///
/// Keys that i does not see do not enter, whatever their bits. A row that sees nothing is 0, and its lse is -inf.
///
/// Linear attention is written here without a state, in its quadratic form: a sum over keys too, with another weight.
#include <sash/linear.hpp>
#include <sash/policy.hpp>
#include <sash/score.hpp>
#include <sash/view.hpp>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns of its own AVX-512 header
#endif

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace sash::reference {

using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using vector = Eigen::VectorXd;

inline constexpr double infinity = std::numeric_limits<double>::infinity();

/// What attention gives back, contiguous.
struct result {
    std::vector<double> out;  ///< [tokens, heads, value_dim]
    std::vector<double> lse;  ///< [tokens, heads], natural log, over keys only
};

// ---------------------------------------------------------------------------------------------------------------------
// Reading operands

/// Element (token, head, d) of a view, exactly.
template <class Build = build::here>
double element(const input& x, int64 token, int64 head, int64 d) {
    const int64 i = token * x.token_stride + head * x.head_stride + d * x.dim_stride;
    switch (x.type) {
        case scalar::f16: return double{static_cast<const float16*>(x.data)[i]};
        case scalar::bf16: return double{static_cast<const bfloat16*>(x.data)[i]};
        default: return double{static_cast<const float*>(x.data)[i]};
    }
}

/// One head of a view, as the matrix [tokens, dim] that the formulas speak of.
template <class Build = build::here>
matrix head_of(const input& x, int64 head) {
    matrix m(x.tokens, x.dim);
    for (int64 t = 0; t < x.tokens; ++t)
        for (int64 d = 0; d < x.dim; ++d) m(t, d) = element<Build>(x, t, head, d);
    return m;
}

/// What is attended is what is stored: rounded to the element type of the cache, to nearest, ties to even.
template <class Build = build::here>
matrix rounded_to(scalar stored, const matrix& m) {
    return m.unaryExpr([stored](double x) {
        const float narrow = static_cast<float>(x);
        switch (stored) {
            case scalar::f16: return double{float{float16(narrow)}};
            case scalar::bf16: return double{float{bfloat16(narrow)}};
            default: return double{narrow};
        }
    });
}

/// The head of an operand with `count` heads that output head h uses.
template <class Build = build::here>
int64 head_for(const shape& s, int64 h, int64 count) {
    return h / (s.heads / count);
}

/// Refuses operands that do not have the shape's heads and widths.
template <class Build = build::here>
void check_operand(const char* name, const input& x, int64 heads, int64 dim, int64 tokens) {
    detail::require<Build>(x.heads == heads, name, " has ", x.heads, " heads, the shape says ", heads);
    detail::require<Build>(x.dim == dim, name, " has dim ", x.dim, ", the shape says ", dim);
    detail::require<Build>(x.tokens == tokens, name, " has ", x.tokens, " tokens, must have ", tokens);
}

// ---------------------------------------------------------------------------------------------------------------------
// Rotary positions

/// R(position) x: pair p of the row turned by position · frequency[p].
template <class Build = build::here>
vector turned(vector x, const rotary& r, double position) {
    const int64 pairs = r.dims > 0 ? r.dims / 2 : static_cast<int64>(r.frequencies.size());
    for (int64 p = 0; p < pairs; ++p) {
        const double angle = position * r.frequencies[static_cast<std::size_t>(p)];
        turn_pair(x(pair_first(r.layout, p)), x(pair_second(r.layout, p, pairs)), std::cos(angle), std::sin(angle));
    }
    return x;
}

/// Keys as they are attended: turned at their absolute position, 0, 1, 2 …, unless they arrived so.
template <class Build = build::here>
matrix turned_keys(matrix keys, const rotary& r) {
    if (r.by == rotates::library)
        for (int64 j = 0; j < keys.rows(); ++j) keys.row(j) = turned<Build>(keys.row(j), r, double(j)).transpose();
    return keys;
}

/// Query `position` as it reads a key from `standing`: the same place, unless the policy lets it read some keys from
/// elsewhere (the sinks of a compact window). A query that arrived turned is turned by the difference.
template <class Build = build::here>
vector turned_query(const vector& q, const rotary& r, int64 position, int64 standing) {
    return turned<Build>(q, r, double(r.by == rotates::library ? standing : standing - position));
}

// ---------------------------------------------------------------------------------------------------------------------
// Softmax policies

/// Where query i stands when it reads key j: as far behind j as the policy says they are apart, if it reads in several
/// rotary frames, else at i.
template <class Build = build::here, softmax_policy P>
int64 standing(const P& policy, int64 i, int64 j, int64 kv_head) {
    if constexpr (ask::frames<P> == 1) {
        return i;
    } else {
        static_assert(ask::has_distance<P>, "sash: a policy with several rotary frames needs a distance(query, key): "
                                            "it says where the query stands");
        return j + ask::distance(policy, i, j, kv_head);
    }
}

/// V(i): the keys j < stored that query i sees, in ascending order.
template <class Build = build::here, softmax_policy P>
std::vector<int64> seen_by(const P& policy, int64 i, int64 stored, int64 kv_head) {
    std::vector<int64> keys;
    for (int64 j = 0; j < stored; ++j)
        if (ask::sees(policy, i, j, kv_head)) keys.push_back(j);
    return keys;
}

/// What happens to a score on its way from the dot product to the softmax.
///
///     s = scale · q·k ;   s = cap · tanh(s / cap) ;   s = s - slope_h · distance ;   s = custom(s)
///
/// A user's function is called with float: that is the number type it has in scalar code.
template <class Build = build::here>
double scored(double dot, const score& options, double scale, int64 head, int64 distance) {
    double s = scale * dot;
    if (options.soft_cap > 0) s = options.soft_cap * std::tanh(s / options.soft_cap);
    if (!options.alibi.empty()) s -= double{options.alibi[static_cast<std::size_t>(head)]} * double(distance);
    if (options.custom)
        s = double{
            options.custom.one(options.custom.functor, static_cast<float>(s), {static_cast<float>(distance), head})};
    return s;
}

/// One head of one query: s_j for the keys it sees.
template <class Build = build::here, softmax_policy P>
vector scores_of(const P& policy, const vector& q, const matrix& keys, const std::vector<int64>& seen,
                 const score& options, double scale, int64 i, int64 head, int64 kv_head) {
    vector s(static_cast<Eigen::Index>(seen.size()));
    vector turned_q = q;
    int64 stood = -1;
    for (Eigen::Index n = 0; n < s.size(); ++n) {
        const int64 j = seen[static_cast<std::size_t>(n)];
        const int64 stands = standing<Build>(policy, i, j, kv_head);
        if (!options.rotary.frequencies.empty() && stands != stood)
            turned_q = turned_query<Build>(q, options.rotary, i, stands);
        stood = stands;
        s(n) = scored<Build>(keys.row(j).dot(turned_q), options, scale, head, ask::distance(policy, i, j, kv_head));
    }
    return s;
}

/// max_j s_j; NaN if one of them is.
template <class Build = build::here>
double largest(const vector& s) {
    double m = s(0);
    for (const double x : s) m = m < x || std::isnan(x) ? x : m;
    return m;
}

/// The softmax of the scores, with one more exp(sink) in the denominator, and the log-sum-exp of the scores alone.
/// Scores of -inf weigh nothing; where there is nothing but them, the row is empty.
struct weighted {
    vector weights;
    double lse;
};
template <class Build = build::here>
weighted softmax(const vector& s, double sink) {
    if (s.size() == 0) return {s, -infinity};
    const double m = largest<Build>(s);
    if (m == -infinity) return {vector::Zero(s.size()), -infinity};
    const vector e = (s.array() - m).exp();
    const double sum = e.sum();
    return {e / (sum + std::exp(sink - m)), m + std::log(sum)};
}

/// sum_j p_j v_j over the keys seen; keys that weigh exactly nothing because their score is -inf stay in the sum.
template <class Build = build::here>
vector weighted_sum(const vector& p, const matrix& values, const std::vector<int64>& seen) {
    return values(seen, Eigen::all).transpose() * p;
}

/// Softmax attention under any policy, by the definition.
///
/// Query t stands at position first_query + t (default: the queries are the last ones); key j stands at position j.
/// Output head h reads query head h / (heads / query_heads), and key and value heads likewise. `stored` rounds keys
/// and values first, as a cache of that element type does. Cost O(heads · tokens · keys · dim); allocates as it
/// likes.
template <class Build = build::here, softmax_policy P>
result attend(const P& policy, const shape& dims, const input& query, const input& key, const input& value,
              const score& options = {}, int64 first_query = -1, scalar stored = scalar::f32) {
    const shape s = detail::resolve<Build>(dims);
    check_operand<Build>("query", query, s.query_heads, s.key_dim, query.tokens);
    check_operand<Build>("key", key, s.key_heads, s.key_dim, key.tokens);
    check_operand<Build>("value", value, s.value_heads, s.value_dim, key.tokens);
    if (first_query < 0) first_query = key.tokens - query.tokens;
    const double scale = options.scale != 0 ? double{options.scale} : 1 / std::sqrt(double(s.key_dim));

    result r;
    r.out.resize(static_cast<std::size_t>(query.tokens * s.heads * s.value_dim));
    r.lse.resize(static_cast<std::size_t>(query.tokens * s.heads));
    for (int64 h = 0; h < s.heads; ++h) {
        const int64 kv_head = head_for<Build>(s, h, detail::stored_heads(s));
        const matrix q = head_of<Build>(query, head_for<Build>(s, h, s.query_heads));
        const matrix raw_k = head_of<Build>(key, head_for<Build>(s, h, s.key_heads));
        const matrix k = rounded_to<Build>(stored, turned_keys<Build>(raw_k, options.rotary));
        const matrix v = rounded_to<Build>(stored, head_of<Build>(value, head_for<Build>(s, h, s.value_heads)));
        const bool has_sink = !options.sink_logits.empty();
        const double sink = has_sink ? double{options.sink_logits[static_cast<std::size_t>(h)]} : -infinity;
        for (int64 t = 0; t < query.tokens; ++t) {
            const int64 i = first_query + t;
            const std::vector<int64> seen = seen_by<Build>(policy, i, key.tokens, kv_head);
            const vector scores = scores_of<Build>(policy, q.row(t), k, seen, options, scale, i, h, kv_head);
            const weighted p = softmax<Build>(scores, sink);
            const std::size_t row = static_cast<std::size_t>(t * s.heads + h);
            r.lse[row] = p.lse;
            if (p.lse == -infinity) continue;  // sees nothing: the row stays 0
            Eigen::Map<vector>(r.out.data() + row * static_cast<std::size_t>(s.value_dim), s.value_dim) =
                weighted_sum<Build>(p.weights, v, seen);
        }
    }
    return r;
}

// ---------------------------------------------------------------------------------------------------------------------
// Linear attention

/// phi of every row of one head: [tokens, dim] -> [tokens, features].
template <class Build = build::here, class Map>
matrix query_features(const Map& map, int64 map_head, const matrix& q) {
    matrix phi(q.rows(), ask::width(map, q.cols()));
    for (int64 t = 0; t < q.rows(); ++t)
        ask::query_features(map, map_head, q.row(t).data(), q.cols(), phi.row(t).data());
    return phi;
}
template <class Build = build::here, class Map>
matrix key_features(const Map& map, int64 map_head, const matrix& k) {
    matrix phi(k.rows(), ask::width(map, k.cols()));
    for (int64 t = 0; t < k.rows(); ++t) ask::key_features(map, map_head, k.row(t).data(), k.cols(), phi.row(t).data());
    return phi;
}

/// a_j = phi(q)·phi(k_j) exp(g_{j+1} + … + g_i) for the keys j <= i: what has been forgotten since j was written. The
/// sum runs back from i, so that no two infinities are subtracted.
template <class Build = build::here>
vector linear_weights(const vector& query, const matrix& keys, const vector& decay, int64 i) {
    vector a = keys.topRows(std::min<int64>(i + 1, keys.rows())) * query;
    double since = 0;
    for (Eigen::Index j = a.size() - 1; j >= 0; --j) {
        a(j) *= std::exp(since);
        since += decay(j);
    }
    return a;
}

/// Linear attention under any recurrent policy, by the quadratic definition:
///
///     out_i = sum_j a_j v_j / sum_j a_j        lse_i = log sum_j a_j
///     out_i = scale · sum_j a_j v_j            without a normaliser
///
/// `decay` is [tokens, gate_heads, 1], natural log. Positions and heads are as for softmax policies. Of the options
/// the scale (without a normaliser) and rotary positions turned by the library, before the map, have a meaning.
/// Inputs are not rounded: a state is fp32 or better whatever a cache stores. A row whose weights sum to 0 is 0, its
/// lse -inf; without a normaliser every lse is 0.
template <class Build = build::here, recurrent_policy P>
result attend(const P& policy, const shape& dims, const input& query, const input& key, const input& value,
              const input& decay, const score& options = {}, int64 first_query = -1) {
    const shape s = detail::resolve<Build>(dims);
    check_operand<Build>("query", query, s.query_heads, s.key_dim, query.tokens);
    check_operand<Build>("key", key, s.key_heads, s.key_dim, key.tokens);
    check_operand<Build>("value", value, s.value_heads, s.value_dim, key.tokens);
    if (P::needs_decay) check_operand<Build>("decay", decay, s.gate_heads, 1, key.tokens);
    if (first_query < 0) first_query = key.tokens - query.tokens;
    const double scale = options.scale != 0 ? double{options.scale} : 1 / std::sqrt(double(s.key_dim));

    result r;
    r.out.resize(static_cast<std::size_t>(query.tokens * s.heads * s.value_dim));
    r.lse.resize(static_cast<std::size_t>(query.tokens * s.heads));
    for (int64 h = 0; h < s.heads; ++h) {
        matrix q = head_of<Build>(query, head_for<Build>(s, h, s.query_heads));
        if (!options.rotary.frequencies.empty())
            for (int64 t = 0, i = first_query; t < q.rows(); ++t, ++i)
                q.row(t) = turned_query<Build>(q.row(t), options.rotary, i, i).transpose();
        const matrix k = turned_keys<Build>(head_of<Build>(key, head_for<Build>(s, h, s.key_heads)), options.rotary);
        const matrix v = head_of<Build>(value, head_for<Build>(s, h, s.value_heads));
        const int64 query_map = head_for<Build>(s, h, ask::query_map_heads(policy.map, s.key_dim));
        const int64 key_map = head_for<Build>(s, h, ask::key_map_heads(policy.map, s.key_dim));
        const matrix phi_q = query_features<Build>(policy.map, query_map, q);
        const matrix phi_k = key_features<Build>(policy.map, key_map, k);
        vector g = vector::Zero(key.tokens);
        if (P::needs_decay) g = head_of<Build>(decay, head_for<Build>(s, h, s.gate_heads)).col(0);
        for (int64 t = 0; t < query.tokens; ++t) {
            const vector a = linear_weights<Build>(phi_q.row(t), phi_k, g, first_query + t);
            const double mass = P::has_normaliser ? a.sum() : 1 / scale;
            const std::size_t row = static_cast<std::size_t>(t * s.heads + h);
            r.lse[row] = P::has_normaliser ? (mass == 0 ? -infinity : std::log(mass)) : 0;
            if (mass == 0) continue;
            Eigen::Map<vector>(r.out.data() + row * static_cast<std::size_t>(s.value_dim), s.value_dim) =
                v.topRows(a.size()).transpose() * a / mass;
        }
    }
    return r;
}

/// The same for a policy that forgets nothing.
template <class Build = build::here, recurrent_policy P>
    requires(!P::needs_decay)
result attend(const P& policy, const shape& dims, const input& query, const input& key, const input& value,
              const score& options = {}, int64 first_query = -1) {
    return attend<Build>(policy, dims, query, key, value, input{}, options, first_query);
}

}  // namespace sash::reference

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
