// Rule 21, last part: what must hold in a file compiled with -ffast-math, as this one is. Such a compiler takes NaN and
// infinities not to exist, so nothing here asks a float about them: they are made and recognised by their bits.
#include "support/catch.hpp"

#include <sash/sash.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

namespace {

using sash::int64;
using floats = std::vector<float>;

constexpr std::uint32_t nan_bits = 0x7fc00000u, infinity_bits = 0x7f800000u, minus_infinity_bits = 0xff800000u;

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
std::uint32_t bits_of(const float& x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
bool is_nan(const float& x) { return (bits_of(x) & 0x7fffffffu) > infinity_bits; }
bool is_finite(const float& x) { return (bits_of(x) & 0x7fffffffu) < infinity_bits; }
void put_bits(float& x, std::uint32_t bits) { std::memcpy(&x, &bits, sizeof bits); }

struct sequence {
    int64 tokens, key_dim = 3, value_dim = 5;
    floats query = floats(static_cast<std::size_t>(tokens * key_dim), .1f), key = floats(query.size(), .2f);
    floats value = floats(static_cast<std::size_t>(tokens * value_dim)), out = floats(value.size(), 7),
           lse = floats(static_cast<std::size_t>(tokens), 7);

    explicit sequence(int64 n) : tokens(n) {
        for (std::size_t i = 0; i < value.size(); ++i) value[i] = static_cast<float>(i % 7);
    }
    float& key_at(int64 token, int64 d) { return key[static_cast<std::size_t>(token * key_dim + d)]; }
    float& value_at(int64 token, int64 c) { return value[static_cast<std::size_t>(token * value_dim + c)]; }
    const float& out_at(int64 token, int64 c) const { return out[static_cast<std::size_t>(token * value_dim + c)]; }

    // Feeds the tokens, `at_a_time` in a call: prefill and decode.
    template <class Element, class Policy>
    void attend(const Policy& policy, int64 at_a_time, const sash::score& score = {}) {
        sash::kv_cache<Policy, Element> cache(policy, {.key_dim = key_dim, .value_dim = value_dim}, score);
        for (int64 at = 0; at < tokens; at += at_a_time)
            sash::attend(
                {query.data() + at * key_dim, at_a_time, 1, key_dim},
                {key.data() + at * key_dim, at_a_time, 1, key_dim},
                {value.data() + at * value_dim, at_a_time, 1, value_dim}, cache,
                {out.data() + at * value_dim, at_a_time, 1, value_dim},
                {.lse = std::span(lse).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(at_a_time))});
    }
};

}  // namespace

TEST_CASE("R21: this file is compiled with -ffast-math") {
#if defined(__FAST_MATH__)
    SUCCEED();
#else
    FAIL("it is not, so the other cases show nothing");
#endif
}

TEMPLATE_TEST_CASE("R21: under -ffast-math a visible NaN is kept, an invisible one has no influence", "", float,
                   sash::float16, sash::bfloat16) {
    for (const int64 tokens : {10, 200})
        for (const int64 at_a_time : {int64{1}, tokens})
            for (const bool in_key : {true, false}) {
                const int64 window = tokens == 10 ? 3 : 70, bad = tokens == 10 ? 2 : 90;
                sequence s(tokens);
                put_bits(in_key ? s.key_at(bad, 0) : s.value_at(bad, 1), nan_bits);
                s.attend<TestType>(sash::sliding_window{.window = window}, at_a_time);
                int64 wrong = 0;
                for (int64 i = 0; i < tokens; ++i)
                    for (int64 c = 0; c < s.value_dim; ++c) {
                        const bool reached = i >= bad && i - bad < window && (in_key || c == 1);
                        wrong += reached ? !is_nan(s.out_at(i, c)) : !is_finite(s.out_at(i, c));
                    }
                CAPTURE(tokens, at_a_time, in_key);
                CHECK(wrong == 0);
            }
}

TEST_CASE("R21: under -ffast-math a key far below weighs exactly nothing") {
    for (const int64 at_a_time : {1, 100}) {
        sequence s(100);
        std::fill(s.query.begin(), s.query.end(), 1.f);
        std::fill(s.key.begin(), s.key.end(), 0.f);
        std::fill(s.value.begin(), s.value.end(), .75f);
        for (int64 d = 0; d < 3; ++d) s.key_at(0, d) = -1e30f;
        for (int64 c = 0; c < 5; ++c) s.value_at(0, c) = 3e38f;
        s.attend<float>(sash::full{}, at_a_time);
        CHECK(s.out_at(0, 0) > 2.9e38f);
        CHECK(std::all_of(s.out.begin() + 5, s.out.end(), [](float x) { return std::abs(x - .75f) < 1e-6f; }));
    }
}

namespace {

struct nothing_at_all {  // every score is -inf
    template <class N, class Site>
    constexpr N operator()(N, const Site&) const {
        return N(std::bit_cast<float>(minus_infinity_bits));
    }
};

}  // namespace

TEST_CASE("R21: under -ffast-math empty rows are 0 and -inf, and merge as nothing") {
    for (const int64 at_a_time : {1, 100}) {
        sequence s(100);
        s.attend<float>(sash::full{}, at_a_time, {.custom = nothing_at_all{}});
        CHECK(std::all_of(s.out.begin(), s.out.end(), [](const float& x) { return bits_of(x) == 0; }));
        CHECK(
            std::all_of(s.lse.begin(), s.lse.end(), [](const float& x) { return bits_of(x) == minus_infinity_bits; }));
    }
    for (const int64 tokens : {1, 100}) {
        sequence s(tokens);
        const sash::kv_cache cache(sash::sliding_window{.window = 3}, {.key_dim = 3, .value_dim = 5});
        sash::read({s.query, tokens, 1, 3}, cache, {s.out, tokens, 1, 5}, {.lse = s.lse});
        CHECK(std::all_of(s.out.begin(), s.out.end(), [](const float& x) { return bits_of(x) == 0; }));
        CHECK(
            std::all_of(s.lse.begin(), s.lse.end(), [](const float& x) { return bits_of(x) == minus_infinity_bits; }));
    }
    floats out(3, 0.f);
    const floats other{1, 2, 3};
    float lse = from_bits(minus_infinity_bits);
    sash::merge_finished(out, lse, other, 1.5f);
    CHECK((out == other && lse == 1.5f));
    const floats empty(3, 9.f);
    sash::merge_finished(out, lse, empty, from_bits(minus_infinity_bits));
    CHECK((out == other && lse == 1.5f));
}

TEST_CASE("R21: under -ffast-math a sink logit of -inf is none") {
    float logit[1];
    put_bits(logit[0], minus_infinity_bits);
    for (const int64 at_a_time : {1, 100}) {
        sequence with(100), without(100);
        with.attend<float>(sash::sliding_window{.window = 9, .sinks = 1}, at_a_time, {.sink_logits = logit});
        without.attend<float>(sash::sliding_window{.window = 9, .sinks = 1}, at_a_time);
        int64 wrong = 0;
        for (std::size_t n = 0; n < with.out.size(); ++n)
            wrong += !is_finite(with.out[n]) || std::abs(with.out[n] - without.out[n]) > 1e-6f;
        CHECK(wrong == 0);
    }
}

TEST_CASE("R21: under -ffast-math numbers that are none are refused as ever") {
    for (const std::uint32_t bits : {nan_bits, infinity_bits, minus_infinity_bits, 0xffc00000u}) {
        CAPTURE(bits);
        CHECK_THROWS_AS(sash::kv_cache(sash::full{}, {.head_dim = 2}, {.scale = from_bits(bits)}), sash::error);
        CHECK_THROWS_AS(sash::kv_cache(sash::full{}, {.head_dim = 2}, {.soft_cap = from_bits(bits)}), sash::error);
    }
    using gated = sash::linear<sash::elu_plus_one, sash::per_head_and_token>;
    sash::kv_cache<gated> cache({}, {.head_dim = 2});
    const floats x(2, 1.f);
    floats out(2, 7.f);
    const auto attended = [&](std::uint32_t bits) {
        float decay[1];
        put_bits(decay[0], bits);
        try {
            sash::attend({.query = {x, 1, 1, 2}, .key = {x, 1, 1, 2}, .value = {x, 1, 1, 2}, .decay = {decay, 1, 1, 1}},
                         cache, {out, 1, 1, 2});
        } catch (const sash::error&) { return false; }
        return true;
    };
    CHECK_FALSE(attended(nan_bits));
    CHECK_FALSE(attended(0xffc00000u));
    CHECK_FALSE(attended(infinity_bits));
    CHECK_FALSE(attended(0x00000001u));  // above 0, by the least there is
    CHECK(out == floats(2, 7.f));
    CHECK(cache.length() == 0);
    CHECK(attended(minus_infinity_bits));  // forgets all, and is no error
    CHECK(attended(0x80000000u));          // -0
    CHECK((std::abs(out[0] - 1) < 1e-6f && std::abs(out[1] - 1) < 1e-6f));
}

TEST_CASE("R21: under -ffast-math weights are as right as ever") {
    for (float x = -86; x <= 86; x += .37f)
        for (const int64 queries : {1, 9}) {
            sash::kv_cache cache(sash::full{}, {.head_dim = 2}, {.scale = 1});
            const floats keys{0, 1, 1, 0}, values{1, 0, 0, 1};
            sash::append({keys, 2, 1, 2}, {values, 2, 1, 2}, cache);
            floats query, out(static_cast<std::size_t>(2 * queries));
            for (int64 t = 0; t < queries; ++t) query.insert(query.end(), {0.f, x});
            sash::read({query, queries, 1, 2}, cache, {out, queries, 1, 2});
            CAPTURE(x, queries);
            REQUIRE(std::abs(double{out[0]} * (1 + std::exp(-double{x})) - 1) <= 1e-5);
            REQUIRE(std::abs(double{out[1]} * (1 + std::exp(double{x})) - 1) <= 1e-5);
        }
}
