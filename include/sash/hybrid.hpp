#pragma once
/// \file
/// Hybrids: a softmax window for what is near, a linear state for the rest, one output row of the two.
#include <sash/linear.hpp>
#include <sash/partial.hpp>
#include <sash/sliding_window.hpp>
#include <sash/terraced_window.hpp>

#include <bit>
#include <cmath>
#include <span>

namespace sash {

// How the two rows of a query become one. A combination is a small trivially copyable struct:
//
//     static constexpr bool divides_tokens      true: what the window shows does not enter the state, what has left it
//                                               does; false: every token enters the state when it comes
//     static constexpr bool has_lse             is there a log-sum-exp of the whole row?
//     mixture operator()(int64 head, const row_masses&) const
//     validate(refuse, shape), describe(add)    optional, as in other policies

/// How much the two parts of one row have seen. A part that has seen nothing has lse -inf, and its row is 0.
struct row_masses {
    float window_lse = detail::minus_infinity();  ///< log sum exp(s_j) over the window
    float window_mass = 0;                        ///< sum exp(s_j - max s): exp(window_lse - max s)
    float linear_lse = detail::minus_infinity();  ///< log(phi(q)·z); of no meaning without a normaliser
};

/// out = window · (the window's row) + linear · (the linear part's row).
struct mixture {
    float window = 0, linear = 0;
    float lse = detail::minus_infinity();
};

/// LoLCATs: numerators and denominators are added, the window's with a learned factor.
///
///                wf sum_{j in window} exp(s_j - m) v_j  +  lf sum_{j before} phi(q)·phi(k_j) v_j
///     out    =   ------------------------------------------------------------------------------        m = max s_j
///                wf sum_{j in window} exp(s_j - m)      +  lf sum_{j before} phi(q)·phi(k_j)
///
/// The linear part is not multiplied by exp(-m): the maximum, over exactly the keys of the window (and the sinks), is
/// part of the model. So the denominator is no sum of exponentials, and there is no lse.
/// Source: Zhang et al. 2025, "LoLCATs: on low-rank linearizing of large language models", equation 6 and its public
/// code.
struct shared_denominator {
    /// [heads] or one number for all, as checkpoints hold them: wf = sigmoid(window_factors[h]). Empty: wf = 1. A view:
    /// the memory must outlive the cache.
    std::span<const float> window_factors = {};
    bool affine = false;  ///< lf = 1 - wf; else lf = 1. (An `affine_attention_factors` of the public code.)

    static constexpr bool divides_tokens = true, has_lse = false;

    SASH_INLINE constexpr float window_factor(int64 head) const {
        if (window_factors.empty()) return 1;
        return 1 / (1 + std::exp(-window_factors[static_cast<std::size_t>(window_factors.size() == 1 ? 0 : head)]));
    }
    SASH_INLINE constexpr float linear_factor(int64 head) const { return affine ? 1 - window_factor(head) : 1; }

    SASH_INLINE constexpr mixture operator()(int64 head, const row_masses& of) const {
        const float window = window_factor(head) * of.window_mass;
        const float linear = linear_factor(head) * rescale(of.linear_lse, 0);
        const float mass = window + linear;
        if (detail::is_zero(mass)) return {};
        return {window / mass, linear / mass};
    }
    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s) const {
        const auto count = static_cast<int64>(window_factors.size());
        if (count > 1 && count != s.heads)
            refuse("window_factors has ", count, " numbers, must have one for each of ", s.heads, " heads, or one");
        if (affine && window_factors.empty()) refuse("affine factors need window_factors, which is empty");
    }
    template <class Add>
    constexpr void describe(Add&& add) const {
        for (const float x : window_factors) add(x);
        add(affine);
    }
};

/// Liger: each part is finished by itself, then out = window · softmax row + linear · linear row.
/// The linear part sees every token, those of the window too, and sees query and key as the caller gives them: with
/// rotary positions turned by the library only the window's are turned.
/// Source: Lan et al. 2025, "Liger: linearizing large language models to gated recurrent structures", equation 7.
struct convex {
    float window = 0.5f, linear = 0.5f;

    static constexpr bool divides_tokens = false, has_lse = false;

    SASH_INLINE constexpr mixture operator()(int64, const row_masses&) const { return {window, linear}; }
    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape&) const {
        const auto is_finite = [](float x) { return (sash::detail::bit_cast<std::uint32_t>(x) & 0x7f800000u) != 0x7f800000u; };
        if (!is_finite(window) || !is_finite(linear))
            refuse("the parts weigh ", window, " and ", linear, ": both must be finite");
    }
    template <class Add>
    constexpr void describe(Add&& add) const {
        add(window);
        add(linear);
    }
};

/// One sum over all tokens: exp(s_j) for those in the window, phi(q)·phi(k_j) for those before it. The merge of two
/// partials, as it is for split keys; right where phi(q)·phi(k) stands for exp(q·k) itself.
struct log_sum_exp {
    static constexpr bool divides_tokens = true, has_lse = true;

    SASH_INLINE constexpr mixture operator()(int64, const row_masses& of) const {
        const merge_factors f = factors_to_merge(of.window_lse, of.linear_lse);
        const float mass = f.left + f.right;
        if (detail::is_zero(mass)) return {};
        return {f.left / mass, f.right / mass, f.maximum + std::log(mass)};
    }
};

namespace detail {

/// The first key of the stretch that ends with the query: keys before it have left the window, but for those that stay.
template <softmax_policy W>
SASH_INLINE constexpr int64 first_in_window(const W& window, int64 query) {
    for (const key_interval& i : ask::visible(window, query, query + 1, 0))
        if (i.last > query) return i.first;
    return query;
}

}  // namespace detail

/// A window and a linear policy over the same query, key and value; `combine` is one of the structs above, or yours.
///
///     hybrid<sliding_window, linear<hedgehog>, shared_denominator>{.window = {.window = 64, .sinks = 4},
///                                                                  .linear = {.map = {…}},
///                                                                  .combine = {.window_factors = factors}}
///
/// Where the combination divides the tokens, a token is in the window until the first query that no longer sees it, and
/// in the state from then on; sinks stay in the window and never enter the state. What enters is what the cache has
/// stored: rounded to its element, turned where the library turns. However the same tokens are cut into calls, the rows
/// are the same. Window and state are bounded, so memory is constant.
///
/// Scores (scale, soft cap, ALiBi, …) are the window's; the linear part takes its own default scale. A token brings what
/// the linear policy needs. `read` takes the queries behind the last token, works on a copy of the states and allocates
/// it without a workspace. `rollback` reaches as far as rollback_slack. The policy of a cache cannot be changed.
template <class Window, class Linear, class Combine>
struct hybrid {
    Window window = {};
    Linear linear = {};
    Combine combine = {};

    static_assert(
        softmax_policy<Window> &&
            requires(const Window& w, int64 i) {
                w.visible(i, i);
                w.retained(i);
            } &&
            ask::exact<Window>,
        "sash: the window of a hybrid is a softmax policy, the same for every head, that bounds its memory "
        "and whose intervals are exact: sliding_window, terraced_window or one like them");
    static_assert(recurrent_policy<Linear>, "sash: the second part of a hybrid is a linear<…>");
    static_assert(
        requires(const Combine& c, const row_masses& of) { c(int64{}, of).linear; },
        "sash: the third part of a hybrid is shared_denominator, convex, log_sum_exp or one like them");
    static constexpr bool divides_tokens = Combine::divides_tokens;
    static constexpr bool has_lse = Combine::has_lse;
    static_assert(!divides_tokens || (Linear::has_normaliser && std::is_same_v<decltype(Linear::decay), no_decay>),
                  "sash: parts that share a denominator need a linear policy that has one and forgets nothing: "
                  "linear<map>");
    static_assert(!divides_tokens || !ask::takes_position<decltype(Linear::map)>,
                  "sash: tokens enter the state of this hybrid after their turn, so its feature map cannot depend on "
                  "the position");

    static constexpr bool needs_decay = Linear::needs_decay, needs_beta = Linear::needs_beta,
                          needs_vectors = Linear::needs_vectors;
    SASH_INLINE constexpr int64 features(int64 key_dim) const { return linear.features(key_dim); }
    SASH_INLINE constexpr int64 decay_width(int64 key_dim) const { return linear.decay_width(key_dim); }

    // As a softmax policy it is its window.

    static constexpr bool exact_intervals = true;
    static constexpr bool affine_distance = ask::affine_distance<Window>;
    static constexpr int frames = ask::frames<Window>;

    SASH_INLINE constexpr bool sees(int64 query, int64 key) const { return window.sees(query, key); }
    SASH_INLINE constexpr auto visible(int64 first_query, int64 last_query) const {
        return window.visible(first_query, last_query);
    }
    SASH_INLINE constexpr auto retained(int64 next) const { return window.retained(next); }
    SASH_INLINE constexpr int64 distance(int64 query, int64 key) const { return ask::distance(window, query, key, 0); }
    SASH_INLINE constexpr int64 read_position(int64 query, int frame) const {
        return ask::read_position(window, query, frame);
    }

    template <class Refuse>
    constexpr void validate(Refuse&& refuse, const shape& s) const {
        if constexpr (requires { window.validate(refuse, s); })
            window.validate(refuse, s);
        else if constexpr (requires { window.validate(refuse); })
            window.validate(refuse);
        if (!ask::is_causal(window)) refuse("the window of a hybrid must be causal");
        linear.validate(refuse, s);
        if constexpr (divides_tokens)
            if (linear.normaliser.epsilon != 0 || linear.normaliser.least != 0)
                refuse("epsilon is ", linear.normaliser.epsilon, " and least ", linear.normaliser.least,
                       ": the denominator is shared with the window, both must be 0");
        if constexpr (requires { combine.validate(refuse, s); }) combine.validate(refuse, s);
    }
};

template <class Window, class Linear, class Combine>
hybrid(Window, Linear, Combine) -> hybrid<Window, Linear, Combine>;

}  // namespace sash
