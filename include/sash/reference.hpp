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
/// Linear attention is written here twice: without a state, in its quadratic form, a sum over keys too, with another
/// weight; and as the recurrence that it is.
#include <sash/hybrid.hpp>
#include <sash/linear.hpp>
#include <sash/policy.hpp>
#include <sash/score.hpp>
#include <sash/tokens.hpp>
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
        case scalar::f16:
            return double{static_cast<const float16*>(x.data)[i]};
        case scalar::bf16:
            return double{static_cast<const bfloat16*>(x.data)[i]};
        default:
            return double{static_cast<const float*>(x.data)[i]};
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

/// Rows of bytes, each with its scale in fp32:  scale · round(x / scale),  scale = max |x| / 127. A row that is not finite
/// is NaN.
template <class Build = build::here>
matrix rounded_to_byte_rows(const matrix& m) {
    matrix r(m.rows(), m.cols());
    for (Eigen::Index t = 0; t < m.rows(); ++t) {
        if (!m.row(t).allFinite()) {
            r.row(t).setConstant(std::numeric_limits<double>::quiet_NaN());
            continue;
        }
        const float scale = static_cast<float>(m.row(t).cwiseAbs().maxCoeff()) / 127;
        for (Eigen::Index c = 0; c < m.cols(); ++c) {
            const float n = scale == 0 ? 0 : std::nearbyint(static_cast<float>(m(t, c)) / scale);
            r(t, c) = double{scale} * double{std::min(127.0f, std::max(-127.0f, n))};
        }
    }
    return r;
}

/// What is attended is what is stored: rounded to the element type of the cache, to nearest, ties to even.
template <class Build = build::here>
matrix rounded_to(scalar stored, const matrix& m) {
    if (stored == scalar::i8) return rounded_to_byte_rows<Build>(m);
    return m.unaryExpr([stored](double x) {
        const float narrow = static_cast<float>(x);
        switch (stored) {
            case scalar::f16:
                return double{float{float16(narrow)}};
            case scalar::bf16:
                return double{float{bfloat16(narrow)}};
            default:
                return double{narrow};
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
        static_assert(ask::has_distance<P>,
                      "sash: a policy with several rotary frames needs a distance(query, key): "
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

/// One output head of a linear layer, in features. Token t adds k_t v_t^T; before that, row c of the state shrinks by
/// exp(g_tc), a natural logarithm.
struct linear_head {
    matrix q;      ///< phi(q) [queries, features]
    matrix k;      ///< phi(k) [tokens, features]
    matrix v;      ///< [tokens, value_dim]
    matrix g;      ///< [tokens, features], or [tokens, 1] where all features decay alike
    vector beta;   ///< [tokens]: of the delta rule
    matrix a, d;   ///< [tokens, features]: what is looked up and what is put back, of diagonal_plus_low_rank
    vector bonus;  ///< [features]: u of exclusive_bonus
};

/// The query, which may stand behind the last token: then it reads all of them.
SASH_INLINE int64 last_token(const linear_head& h, int64 i) { return std::min<int64>(i, h.k.rows() - 1); }

/// phi of every query of one head, the first of which stands at `first`.
template <class Build = build::here, class Map>
matrix query_features(const Map& map, int64 map_head, const matrix& q, int64 first = 0) {
    matrix phi(q.rows(), ask::width(map, q.cols()));
    for (int64 t = 0; t < q.rows(); ++t)
        ask::query_features(map, map_head, q.row(t).data(), q.cols(), phi.row(t).data(), first + t);
    return phi;
}

/// phi of every key of one head. A map with a memory says with each key by how much the features of earlier ones
/// shrink: that is a decay, and the logarithms are added to `g`, which becomes [tokens, features].
template <class Build = build::here, class Map>
matrix key_features(const Map& map, int64 map_head, const matrix& k, matrix& g) {
    const int64 width = ask::width(map, k.cols());
    matrix phi(k.rows(), width);
    vector memory = vector::Zero(std::max<int64>(1, ask::map_memory<Map>)), keep(width);
    if (ask::map_memory < Map >> 0 && g.cols() != width) g = g.replicate(1, width).eval();
    for (int64 t = 0; t < k.rows(); ++t) {
        ask::key_features(map, map_head, k.row(t).data(), k.cols(), phi.row(t).data(), t, memory.data(), keep.data());
        if (ask::map_memory < Map >> 0) g.row(t) += keep.array().log().matrix().transpose();
    }
    return phi;
}

/// log alpha of every token of one gate head: [tokens, 1] or [tokens, features].
template <class Build = build::here, class P>
matrix decays_of(const P& policy, const tokens_of<P>& in, int64 gate_head) {
    if constexpr (P::needs_decay)
        return head_of<Build>(in.decay, gate_head);
    else if constexpr (requires { policy.decay.of_head(gate_head); })
        return matrix::Constant(in.key.tokens, 1, double{policy.decay.of_head(gate_head)});
    else
        return matrix::Zero(in.key.tokens, 1);
}

/// Everything that output head h works with.
template <class Build = build::here, recurrent_policy P>
linear_head linear_head_of(const P& policy, const shape& s, const tokens_of<P>& in, const rotary& turns, int64 h,
                           int64 first_query) {
    const int64 gate = head_for<Build>(s, h, s.gate_heads);
    linear_head made;
    matrix q = head_of<Build>(in.query, head_for<Build>(s, h, s.query_heads));
    if (!turns.frequencies.empty())
        for (int64 t = 0, i = first_query; t < q.rows(); ++t, ++i)
            q.row(t) = turned_query<Build>(q.row(t), turns, i, i).transpose();
    const matrix k = turned_keys<Build>(head_of<Build>(in.key, head_for<Build>(s, h, s.key_heads)), turns);
    made.g = decays_of<Build>(policy, in, gate);
    made.q = query_features<Build>(policy.map, head_for<Build>(s, h, ask::query_map_heads(policy.map, s.key_dim)), q,
                                   first_query);
    made.k =
        key_features<Build>(policy.map, head_for<Build>(s, h, ask::key_map_heads(policy.map, s.key_dim)), k, made.g);
    made.v = head_of<Build>(in.value, head_for<Build>(s, h, s.value_heads));
    if constexpr (detail::takes_beta<P>) made.beta = head_of<Build>(in.beta, gate).col(0);
    if constexpr (detail::takes_vectors<P>) {
        made.a = head_of<Build>(in.removal, gate);
        made.d = head_of<Build>(in.replacement, gate);
    }
    if constexpr (std::is_same_v<decltype(policy.update), exclusive_bonus>) {
        const int64 features = policy.features(s.key_dim);
        const float* u = policy.update.of_head(head_for<Build>(s, h, policy.update.heads(features)), features);
        made.bonus = Eigen::Map<const Eigen::VectorXf>(u, features).cast<double>();
    }
    return made;
}

// ---- The quadratic form: sums over tokens, no state

/// w_j = sum_c x_c y_jc exp(g_{j+1,c} + … + g_ic) for the tokens j <= i: how much of y_j is found along x after token i.
/// The sums run back from i, so that no two infinities are subtracted.
template <class Build = build::here>
vector faded_weights(const vector& x, const matrix& y, const matrix& g, int64 i) {
    vector w(i + 1);
    vector since = vector::Zero(g.cols());
    for (int64 j = i; j >= 0; --j) {
        if (g.cols() == 1)
            w(j) = y.row(j).dot(x) * std::exp(since(0));
        else
            w(j) = (y.row(j).transpose().array() * x.array() * since.array().exp()).sum();
        since += g.row(j).transpose();
    }
    return w;
}

/// sum_j w_j v_j
SASH_INLINE vector sum_of_rows(const vector& w, const matrix& v) { return v.topRows(w.size()).transpose() * w; }

/// The values that the delta rule writes, u_t = beta_t (v_t - sum_{s<t} w_ts u_s) with w_ts = k_t·k_s, faded: one
/// triangular system, solved from the top.
template <class Build = build::here>
matrix corrected_values(const linear_head& h) {
    matrix u = h.v;
    for (int64 t = 0; t < u.rows(); ++t) {
        const vector w = faded_weights<Build>(h.k.row(t), h.k, h.g, t).head(t);
        u.row(t) = h.beta(t) * (h.v.row(t) - sum_of_rows(w, u).transpose());
    }
    return u;
}

/// What is removed before token t of diagonal_plus_low_rank, r_t = a_t^T S_{t-1}:
///
///     r_t = sum_{s<t} (a_t·k_s) v_s + sum_{s<t} (a_t·d_s) r_s        each weight faded from s to t - 1
template <class Build = build::here>
matrix removed_values(const linear_head& h) {
    matrix r = matrix::Zero(h.v.rows(), h.v.cols());
    for (int64 t = 1; t < r.rows(); ++t)
        r.row(t) = (sum_of_rows(faded_weights<Build>(h.a.row(t), h.k, h.g, t - 1), h.v) +
                    sum_of_rows(faded_weights<Build>(h.a.row(t), h.d, h.g, t - 1), r))
                       .transpose();
    return r;
}

/// S_i^T phi(q) for the query t that stands at i, and its denominator z_i·phi(q).
struct linear_row {
    vector numerator;
    double denominator = 0;
};

/// Every row of one head by its sum over tokens:
///
///     additive                 sum_{j<=i} w_ij v_j                      w_ij = phi(q_i)·phi(k_j), faded
///     delta                    sum_{j<=i} w_ij u_j
///     diagonal_plus_low_rank   sum_{j<=i} w_ij v_j + sum_{j<=i} (q_i·d_j, faded) r_j
///     exclusive_bonus          sum_{j<i} w_(i-1)j v_j + (q_i·(u ⊙ k_i)) v_i
template <class Update, class Build = build::here>
std::vector<linear_row> quadratic_rows(const linear_head& h, int64 first_query) {
    matrix written = h.v, removed;
    if constexpr (Update::needs_beta) written = corrected_values<Build>(h);
    if constexpr (Update::needs_vectors) removed = removed_values<Build>(h);
    std::vector<linear_row> rows;
    for (int64 t = 0; t < h.q.rows(); ++t) {
        const int64 i = first_query + t;
        const bool brings_token = i < h.k.rows();
        const int64 last = Update::reads_first && brings_token ? i - 1 : last_token(h, i);
        const vector q = h.q.row(t), w = faded_weights<Build>(q, h.k, h.g, last);
        linear_row row{sum_of_rows(w, written), w.sum()};
        if constexpr (Update::needs_vectors)
            row.numerator += sum_of_rows(faded_weights<Build>(q, h.d, h.g, last), removed);
        if constexpr (Update::reads_first)
            if (brings_token)
                row.numerator +=
                    (q.array() * h.bonus.array() * h.k.row(i).transpose().array()).sum() * h.v.row(i).transpose();
        rows.push_back(row);
    }
    return rows;
}

// ---- The recurrence, as the textbooks write it

/// Every row of one head by its state, token after token.
template <class Update, class Build = build::here>
std::vector<linear_row> recurrent_rows(const linear_head& h, int64 first_query) {
    matrix S = matrix::Zero(h.k.cols(), h.v.cols());
    vector z = vector::Zero(h.k.cols());
    std::vector<linear_row> rows;
    const auto read = [&](int64 t) {
        const vector q = h.q.row(t);
        rows.push_back({S.transpose() * q, z.dot(q)});
    };
    int64 t = 0;  // the query that comes next
    for (int64 i = 0; i < h.k.rows(); ++i) {
        const vector k = h.k.row(i), v = h.v.row(i);
        const vector alpha = h.g.row(i).transpose().replicate(h.g.cols() == 1 ? k.size() : 1, 1).array().exp();
        const bool is_read = t < h.q.rows() && first_query + t == i;
        if constexpr (Update::reads_first)
            if (is_read) {
                read(t);
                rows.back().numerator += h.bonus.cwiseProduct(k).dot(vector(h.q.row(t))) * v;
            }
        vector looked_up;
        if constexpr (Update::needs_vectors) looked_up = S.transpose() * vector(h.a.row(i));  // before the decay
        S = alpha.asDiagonal() * S;
        z = alpha.cwiseProduct(z) + k;
        if constexpr (Update::needs_vectors) S += vector(h.d.row(i)) * looked_up.transpose();
        if constexpr (Update::needs_beta) {
            const vector error = h.beta(i) * (v - S.transpose() * k);  // after the decay
            S += k * error.transpose();
        } else {
            S += k * v.transpose();
        }
        if (is_read && !Update::reads_first) read(t);
        if (is_read) ++t;
    }
    for (; t < h.q.rows(); ++t) read(t);  // queries behind the last token
    return rows;
}

// ---- Either, for all heads

/// `rows_of` gives the rows of one head; see `attend` and `recur`.
template <class Build = build::here, recurrent_policy P, class RowsOf>
result linear_rows(const P& policy, const shape& dims, const tokens_of<P>& in, const score& options, int64 first_query,
                   RowsOf&& rows_of) {
    const shape s = detail::resolve<Build>(dims);
    check_operand<Build>("query", in.query, s.query_heads, s.key_dim, in.query.tokens);
    check_operand<Build>("key", in.key, s.key_heads, s.key_dim, in.key.tokens);
    check_operand<Build>("value", in.value, s.value_heads, s.value_dim, in.key.tokens);
    detail::for_each_gate(policy, in, s.key_dim, [&](const char* name, const input& x, int64 width) {
        check_operand<Build>(name, x, s.gate_heads, width, in.key.tokens);
    });
    if (first_query < 0) first_query = in.key.tokens - in.query.tokens;
    const double scale = options.scale != 0 ? double{options.scale} : P::default_scale(s.key_dim);

    result r;
    r.out.resize(static_cast<std::size_t>(in.query.tokens * s.heads * s.value_dim));
    r.lse.resize(static_cast<std::size_t>(in.query.tokens * s.heads));
    for (int64 h = 0; h < s.heads; ++h) {
        const std::vector<linear_row> rows =
            rows_of(linear_head_of<Build>(policy, s, in, options.rotary, h, first_query), first_query);
        for (int64 t = 0; t < in.query.tokens; ++t) {
            const linear_row& row = rows[static_cast<std::size_t>(t)];
            const std::size_t at = static_cast<std::size_t>(t * s.heads + h);
            double mass = 1 / scale;
            if constexpr (P::has_normaliser) {
                mass = std::max(row.denominator + policy.normaliser.epsilon, double{policy.normaliser.least});
                r.lse[at] = mass == 0 ? -infinity : std::log(mass);
            }
            if (mass == 0) continue;
            Eigen::Map<vector>(r.out.data() + at * static_cast<std::size_t>(s.value_dim), s.value_dim) =
                row.numerator / mass;
        }
    }
    return r;
}

/// Linear attention under any recurrent policy, by the quadratic definition:
///
///     out_i = sum_j w_ij v_j / sum_j w_ij        lse_i = log sum_j w_ij
///     out_i = scale · sum_j w_ij v_j             without a normaliser
///
/// with what takes the place of v_j in the rules that correct (see quadratic_rows). Positions and heads are as for
/// softmax policies. Of the options the scale (without a normaliser) and rotary positions turned by the library, before
/// the map, have a meaning. Inputs are not rounded: a state is fp32 or better whatever a cache stores. A row whose
/// weights sum to 0 is 0, its lse -inf; without a normaliser every lse is 0. Cost O(heads · tokens² · (features +
/// value_dim)).
template <class Build = build::here, recurrent_policy P>
result attend(const P& policy, const shape& dims, const std::type_identity_t<tokens_of<P>>& in,
              const score& options = {}, int64 first_query = -1) {
    return linear_rows<Build>(policy, dims, in, options, first_query, [](const linear_head& h, int64 first) {
        return quadratic_rows<decltype(P::update), Build>(h, first);
    });
}

/// The same by the recurrence. Cost O(heads · tokens · features · value_dim).
template <class Build = build::here, recurrent_policy P>
result recur(const P& policy, const shape& dims, const std::type_identity_t<tokens_of<P>>& in,
             const score& options = {}, int64 first_query = -1) {
    return linear_rows<Build>(policy, dims, in, options, first_query, [](const linear_head& h, int64 first) {
        return recurrent_rows<decltype(P::update), Build>(h, first);
    });
}

/// The short forms: for a policy that needs a decay at most, and for one that needs nothing; `decay` is not looked at
/// where it is not needed.
template <class Build = build::here, recurrent_policy P>
    requires(!detail::takes_beta<P> && !detail::takes_vectors<P>)
result attend(const P& policy, const shape& dims, const input& query, const input& key, const input& value,
              const input& decay, const score& options = {}, int64 first_query = -1) {
    tokens_of<P> in = detail::query_alone<P>(query);
    in.key = key;
    in.value = value;
    if constexpr (P::needs_decay) in.decay = decay;
    return attend<Build>(policy, dims, in, options, first_query);
}
template <class Build = build::here, recurrent_policy P>
    requires(!P::needs_decay && !detail::takes_beta<P> && !detail::takes_vectors<P>)
result attend(const P& policy, const shape& dims, const input& query, const input& key, const input& value,
              const score& options = {}, int64 first_query = -1) {
    return attend<Build>(policy, dims, query, key, value, input{}, options, first_query);
}

// ---------------------------------------------------------------------------------------------------------------------
// Hybrids

/// One row of a hybrid that divides the tokens: sums over the keys that the window shows, and over the others up to i.
struct hybrid_row {
    vector window;           ///< sum exp(s_j - m) v_j
    double mass = 0;         ///< sum exp(s_j - m)
    double m = -infinity;    ///< max s_j
    linear_row others = {};  ///< sum w_j v_j, sum w_j with w_j = phi(q)·phi(k_j)
};

/// A combined row and its log-sum-exp.
struct combined {
    vector out;
    double lse = -infinity;
};

/// (wf sum exp(s - m) v + lf sum w v) / (wf sum exp(s - m) + lf sum w)
SASH_INLINE combined combine(const shared_denominator& c, int64 head, const hybrid_row& row) {
    double wf = 1;
    if (!c.window_factors.empty())
        wf = 1 / (1 + std::exp(-double{c.window_factors[c.window_factors.size() == 1 ? 0 : std::size_t(head)]}));
    const double lf = c.affine ? 1 - wf : 1, mass = wf * row.mass + lf * row.others.denominator;
    if (mass == 0) return {vector::Zero(row.window.size())};
    return {(wf * row.window + lf * row.others.numerator) / mass};
}
/// (sum exp(s) v + sum w v) / (sum exp(s) + sum w)
SASH_INLINE combined combine(const log_sum_exp&, int64, const hybrid_row& row) {
    const double m = row.m == -infinity ? 0 : row.m, mass = row.mass + std::exp(-m) * row.others.denominator;
    if (mass == 0) return {vector::Zero(row.window.size())};
    return {(row.window + std::exp(-m) * row.others.numerator) / mass, m + std::log(mass)};
}

/// Everything that query t of head h, at position i, sees and does not see.
template <class Build = build::here, hybrid_policy P>
hybrid_row hybrid_row_of(const P& policy, const shape& s, const score& options, const vector& q, const matrix& k,
                         const matrix& v, int64 h, int64 i) {
    const int64 kv_head = head_for<Build>(s, h, detail::stored_heads(s));
    const double scale = options.scale != 0 ? double{options.scale} : 1 / std::sqrt(double(s.key_dim));
    const std::vector<int64> seen = seen_by<Build>(policy.window, i, k.rows(), kv_head);
    const vector scores = scores_of<Build>(policy.window, q, k, seen, options, scale, i, h, kv_head);
    hybrid_row row{vector::Zero(v.cols())};
    row.others.numerator = vector::Zero(v.cols());
    if (!seen.empty() && largest<Build>(scores) != -infinity) {
        row.m = largest<Build>(scores);
        const vector e = (scores.array() - row.m).exp();
        row.mass = e.sum();
        row.window = weighted_sum<Build>(e, v, seen);
    }
    std::vector<int64> others;
    for (int64 j = 0; j < k.rows() && j <= i; ++j)
        if (!policy.window.sees(i, j)) others.push_back(j);
    if (others.empty()) return row;
    const auto& map = policy.linear.map;
    matrix turned(1, q.size()), g = matrix::Zero(Eigen::Index(others.size()), 1);
    turned.row(0) = turned_query<Build>(q, options.rotary, i, i).transpose();
    const matrix phi_q =
        query_features<Build>(map, head_for<Build>(s, h, ask::query_map_heads(map, s.key_dim)), turned);
    const matrix phi_k =
        key_features<Build>(map, head_for<Build>(s, h, ask::key_map_heads(map, s.key_dim)), k(others, Eigen::all), g);
    const vector w = faded_weights<Build>(phi_q.row(0), phi_k, g, phi_k.rows() - 1);
    row.others = {v(others, Eigen::all).transpose() * w, w.sum()};
    return row;
}

/// A hybrid of a window and a linear policy. Where the combination divides the tokens, key and value are rounded to
/// `stored` first, for both parts, and turned where the library turns. Else the two parts are rows by themselves, the
/// linear one of the inputs as they come, and `out` is their weighted sum.
template <class Build = build::here, hybrid_policy P>
result attend(const P& policy, const shape& dims, const std::type_identity_t<tokens_of<P>>& in,
              const score& options = {}, int64 first_query = -1, scalar stored = scalar::f32) {
    const shape s = detail::resolve<Build>(dims);
    if (first_query < 0) first_query = in.key.tokens - in.query.tokens;
    result r;
    if constexpr (P::divides_tokens) {
        r.out.resize(static_cast<std::size_t>(in.query.tokens * s.heads * s.value_dim));
        r.lse.resize(static_cast<std::size_t>(in.query.tokens * s.heads));
        for (int64 h = 0; h < s.heads; ++h) {
            const matrix q = head_of<Build>(in.query, head_for<Build>(s, h, s.query_heads));
            const matrix raw = head_of<Build>(in.key, head_for<Build>(s, h, s.key_heads));
            const matrix k = rounded_to<Build>(stored, turned_keys<Build>(raw, options.rotary));
            const matrix v = rounded_to<Build>(stored, head_of<Build>(in.value, head_for<Build>(s, h, s.value_heads)));
            for (int64 t = 0; t < in.query.tokens; ++t) {
                const auto at = static_cast<std::size_t>(t * s.heads + h);
                const combined row = combine(
                    policy.combine, h, hybrid_row_of<Build>(policy, s, options, q.row(t), k, v, h, first_query + t));
                r.lse[at] = row.lse;
                Eigen::Map<vector>(r.out.data() + at * static_cast<std::size_t>(s.value_dim), s.value_dim) = row.out;
            }
        }
    } else {
        tokens_of<decltype(policy.linear)> linear_in = detail::query_alone<decltype(policy.linear)>(in.query);
        linear_in.key = in.key;
        linear_in.value = in.value;
        linear_in.decay = in.decay;
        linear_in.beta = in.beta;
        linear_in.removal = in.removal;
        linear_in.replacement = in.replacement;
        r = attend<Build>(policy.window, dims, in.query, in.key, in.value, options, first_query, stored);
        const result linear = attend<Build>(policy.linear, dims, linear_in, score{}, first_query);
        for (std::size_t i = 0; i < r.out.size(); ++i)
            r.out[i] = double{policy.combine.window} * r.out[i] + double{policy.combine.linear} * linear.out[i];
        r.lse.assign(r.lse.size(), -infinity);
    }
    return r;
}
template <class Build = build::here, hybrid_policy P>
    requires(!detail::takes_decay<P> && !detail::takes_beta<P> && !detail::takes_vectors<P>)
result attend(const P& policy, const shape& dims, const input& query, const input& key, const input& value,
              const score& options = {}, int64 first_query = -1, scalar stored = scalar::f32) {
    tokens_of<P> in = detail::query_alone<P>(query);
    in.key = key;
    in.value = value;
    return attend<Build>(policy, dims, in, options, first_query, stored);
}

}  // namespace sash::reference

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
