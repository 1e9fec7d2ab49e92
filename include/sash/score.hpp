#pragma once
/// \file
/// What happens to a score between the dot product and the softmax: scale, soft cap, ALiBi, a function of the user's.
///
///     s = scale · q·k ;   s = cap · tanh(s / cap) ;   s = s - slope_h · distance ;   s = custom(s) ;   then visibility, softmax
#include <sash/rope.hpp>

#include <new>
#include <type_traits>

namespace sash {

/// A table of one number per query head, for use inside a score function: `at.of_head(table)`. It is a view: the table
/// must outlive the cache.
struct per_head {
    const float* data = nullptr;
};

/// Where one score stands: the scalar form of the site that a score function is given.
struct scalar_site {
    float distance_ = 0;  ///< from the query back to the key, in tokens, as the policy counts it
    int64 head = 0;       ///< query head

    SASH_INLINE constexpr float distance() const { return distance_; }
    SASH_INLINE constexpr float of_head(per_head table) const { return table.data[head]; }
};

namespace cpu {

/// A tile of scores handed to a user's function. `pitch` floats lie between two keys (rows in lanes, prefill) or between
/// two rows (keys in lanes, decode). The distance of row r to key lane l is distance[r] - l, or it is looked up in
/// distance_table, which is laid out as the scores are.
struct score_tile {
    float* scores = nullptr;
    std::int32_t keys = 0, rows = 0, pitch = 0;
    std::int32_t first_lane = 0;  ///< key lane of scores[0]
    const std::int32_t* head = nullptr;
    const float* distance = nullptr;
    const float* distance_table = nullptr;
};

template <class Build, class F>
void score_rows(const void* functor, const score_tile&);
template <class Build, class F>
void score_keys(const void* functor, const score_tile&);

}  // namespace cpu

namespace detail {

template <class Build, class F>
float score_one(const void* functor, float s, scalar_site at) {
    return static_cast<float>((*static_cast<const F*>(functor))(s, at));
}

}  // namespace detail

/// A user's score function, held by value. Any trivially copyable struct of up to 64 bytes with
///
///     template <class N, class Site> constexpr N operator()(N s, const Site& at) const;
///
/// N is float in the reference and on a GPU, a SIMD batch on the CPU: write `using std::tanh;` and call unqualified.
/// `at.distance()` and `at.of_head(per_head{…})` give N. The call is erased once per tile of scores, so that kernels are
/// not compiled anew for every function, and costs nothing per score.
struct custom_score {
    alignas(16) std::byte functor[64] = {};
    void (*rows)(const void*, const cpu::score_tile&) = nullptr;
    void (*keys)(const void*, const cpu::score_tile&) = nullptr;
    float (*one)(const void*, float, scalar_site) = nullptr;

    SASH_INLINE constexpr custom_score() {}

    template <class F>
        requires(!std::is_same_v<std::remove_cvref_t<F>, custom_score>)
    SASH_INLINE custom_score(const F& f) {
        static_assert(std::is_trivially_copyable_v<F>,
                      "sash: a score function must be trivially copyable (hold views, not containers)");
        static_assert(sizeof(F) <= sizeof functor,
                      "sash: a score function holds at most 64 bytes; keep tables outside and hold per_head views");
        ::new (static_cast<void*>(functor)) F(f);
        rows = &cpu::score_rows<build::here, F>;
        keys = &cpu::score_keys<build::here, F>;
        one = &detail::score_one<build::here, F>;
    }

    SASH_INLINE constexpr explicit operator bool() const { return one != nullptr; }
};

/// Options of the scores: the third argument of a cache. The cache copies every array.
struct score {
    float scale = 0;                    ///< 0: 1 / sqrt(key_dim)
    float soft_cap = 0;                 ///< 0: none; Gemma 2 uses 50
    std::span<const float> alibi = {};  ///< [heads] slopes; the score falls by slope · distance. Press et al. 2022
    std::span<const float> sink_logits = {};  ///< [heads] learned logits that join the denominator alone (gpt-oss)
    sash::rotary rotary = {};                 ///< positions, see rope.hpp
    custom_score custom = {};                 ///< a function of the user's
};

}  // namespace sash
