// Linear attention as a user meets it: the policy, its checks, and the verb over a cache of it.
#include "support/catch.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

using build = sash::build::here;
using sash::additive;
using sash::elu_plus_one;
using sash::hedgehog;
using sash::identity;
using sash::int64;
using sash::linear;
using sash::no_normaliser;
using sash::per_head_and_token;
using floats = std::vector<float>;

using gated = linear<elu_plus_one, per_head_and_token>;
using plain = linear<identity, per_head_and_token, additive, no_normaliser>;

static_assert(sash::recurrent_policy<linear<>> && !sash::softmax_policy<linear<>>);
static_assert(sash::recurrent_policy<linear<hedgehog>> && sash::recurrent_policy<gated> &&
              sash::recurrent_policy<plain>);
static_assert(std::is_same_v<decltype(linear{}), linear<>>);
static_assert(std::is_same_v<decltype(linear{sash::relu{}}), linear<sash::relu>>);
static_assert(std::is_same_v<decltype(linear{hedgehog{}, per_head_and_token{}}), linear<hedgehog, per_head_and_token>>);
static_assert(linear<>::has_normaliser && !plain::has_normaliser && gated::needs_decay && !linear<>::needs_decay);
static_assert(linear<>{}.features(64) == 64 && linear<hedgehog>{}.features(64) == 128);

int64 states_of(const auto& policy, const sash::shape& dims) {
    return policy.states(sash::detail::resolve<build>(dims));
}

template <class F>
std::string complaint(F&& f) {
    try {
        f();
    } catch (const sash::error& e) {
        return e.what();
    }
    return "";
}
bool holds(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

floats random_floats(std::mt19937& random, int64 n) {
    std::normal_distribution<float> normal;
    floats x(static_cast<std::size_t>(n));
    for (float& v : x) v = normal(random);
    return x;
}

// Tokens of 4 query heads over 2 key/value heads.
struct text {
    static constexpr sash::shape dims{.heads = 4, .kv_heads = 2, .key_dim = 12, .value_dim = 20};
    int64 tokens;
    floats q, k, v, g;
    text(std::mt19937& random, int64 n)
        : tokens(n),
          q(random_floats(random, n * 4 * 12)),
          k(random_floats(random, n * 2 * 12)),
          v(random_floats(random, n * 2 * 20)),
          g(random_floats(random, n * 2)) {
        for (float& x : g) x = -std::abs(x);
    }
    sash::input query(int64 t, int64 n) const { return sash::input(q, tokens, 4, 12).tokens_from(t, n); }
    sash::input key(int64 t, int64 n) const { return sash::input(k, tokens, 2, 12).tokens_from(t, n); }
    sash::input value(int64 t, int64 n) const { return sash::input(v, tokens, 2, 20).tokens_from(t, n); }
    sash::input decay(int64 t, int64 n) const { return sash::input(g, tokens, 2).tokens_from(t, n); }
};

template <class P>
void attend(sash::kv_cache<P>& cache, const text& x, int64 t, int64 n, floats& out, floats& lse) {
    const sash::output rows = sash::output(out, x.tokens, 4, 20).tokens_from(t, n);
    sash::options how;
    if (P::has_normaliser)
        how.lse = std::span(lse).subspan(static_cast<std::size_t>(4 * t), static_cast<std::size_t>(4 * n));
    if constexpr (P::needs_decay)
        sash::attend({.query = x.query(t, n), .key = x.key(t, n), .value = x.value(t, n), .decay = x.decay(t, n)},
                     cache, rows, how);
    else
        sash::attend(x.query(t, n), x.key(t, n), x.value(t, n), cache, rows, how);
}

template <class P>
void check_through_the_verb(const P& policy, std::mt19937& random) {
    const text x(random, 33);
    const auto expected =
        sash::reference::attend(policy, text::dims, x.query(0, 33), x.key(0, 33), x.value(0, 33), x.decay(0, 33));
    double largest = 0;
    for (const double e : expected.out) largest = std::max(largest, std::abs(e));
    for (const std::vector<int64>& cut :
         {std::vector<int64>{33}, std::vector<int64>(33, 1), std::vector<int64>{1, 13, 2, 17}}) {
        sash::kv_cache<P> cache(policy, text::dims);
        floats out(33 * 4 * 20), lse(33 * 4);
        int64 t = 0;
        for (const int64 n : cut) attend(cache, x, t, n, out, lse), t += n;
        CHECK(cache.length() == 33);
        CHECK(cache.stored() == 0);
        for (std::size_t i = 0; i < out.size(); ++i)
            CHECK(std::abs(double(out[i]) - expected.out[i]) <= 2e-5 * largest);
        for (std::size_t i = 0; P::has_normaliser && i < lse.size(); ++i)
            CHECK(std::abs(double(lse[i]) - expected.lse[i]) <= 2e-5);
    }
}

}  // namespace

TEST_CASE("linear: as many states as the largest of key, value, gate and key map heads") {
    const sash::shape gqa{.heads = 8, .kv_heads = 2, .head_dim = 4};
    CHECK(states_of(linear<>{}, gqa) == 2);
    CHECK(states_of(linear<>{}, {.heads = 32, .head_dim = 4, .query_heads = 16, .key_heads = 16, .value_heads = 32}) ==
          32);
    CHECK(states_of(gated{}, {.heads = 8, .kv_heads = 2, .head_dim = 4, .gate_heads = 8}) == 8);
    CHECK(states_of(linear<>{}, {.heads = 8, .kv_heads = 2, .head_dim = 4, .gate_heads = 8}) ==
          2);  // no gate, no state for it
    CHECK(states_of(linear<>{}, {.heads = 6, .head_dim = 4, .key_heads = 2, .value_heads = 3}) == 6);
    const floats one(4 * 3), eight(8 * 4 * 3);
    CHECK(states_of(linear<hedgehog>{.map = {.features = 3, .query_weights = eight, .key_weights = one}}, gqa) == 2);
    CHECK(states_of(linear<hedgehog>{.map = {.features = 3, .query_weights = eight, .key_weights = eight}}, gqa) == 8);
}

TEST_CASE("R22: linear policies through the verb are the quadratic form, in any cut") {
    const unsigned seed = GENERATE(301u, 302u, 303u);
    std::mt19937 random(seed);
    CAPTURE(seed);
    check_through_the_verb(linear<>{}, random);
    check_through_the_verb(linear<sash::relu>{}, random);
    check_through_the_verb(gated{}, random);
    check_through_the_verb(plain{}, random);
    const floats wq = random_floats(random, 4 * 12 * 10), wk = random_floats(random, 2 * 12 * 10);
    check_through_the_verb(linear<hedgehog>{.map = {.features = 10, .query_weights = wq, .key_weights = wk}}, random);
    check_through_the_verb(
        linear<hedgehog>{
            .map = {.form = sash::hedgehog_form::h2, .features = 10, .query_weights = wq, .key_weights = wq}},
        random);
}

TEST_CASE("R04: a decay above 0 and NaN are refused by token and head, and nothing changes") {
    std::mt19937 random(304);
    text x(random, 6);
    sash::kv_cache<gated> cache({}, text::dims);
    floats out(6 * 4 * 20, -7.0f), lse(6 * 4);
    attend(cache, x, 0, 3, out, lse);
    const std::vector<std::byte> before = cache.save();
    const floats rows_before = out;
    for (const float wrong : {1e-6f, .9f, std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()}) {
        text bad = x;
        bad.g[9] = wrong;  // token 4 of the text, token 1 of the call, head 1
        const std::string text_of_error = complaint([&] { attend(cache, bad, 3, 3, out, lse); });
        CAPTURE(wrong, text_of_error);
        CHECK(holds(text_of_error, "decay of token 1, gate head 1"));
        CHECK(holds(text_of_error, "must be at most 0"));
        CHECK((cache.save() == before));
        CHECK(out == rows_before);
    }
    for (const float right : {0.0f, -0.0f, -std::numeric_limits<float>::infinity(), -1e-30f}) {
        text good = x;
        good.g[9] = right;
        sash::kv_cache<gated> fork = cache;
        CHECK(complaint([&] { attend(fork, good, 3, 3, out, lse); }) == "");
    }
}

TEST_CASE("R25: a cache of states rolls back within its slack, and refuses beyond with nothing changed") {
    std::mt19937 random(305);
    const text x(random, 40);
    floats out(40 * 4 * 20), lse(40 * 4), again = out;
    sash::kv_cache cache(gated{}, text::dims, {}, {.rollback_slack = 4});
    attend(cache, x, 0, 40, out, lse);
    const std::vector<std::byte> before = cache.save();
    CHECK_FALSE(cache.can_rollback(5));
    CHECK_THROWS_AS(cache.rollback(5), sash::error);
    CHECK((cache.save() == before));
    cache.rollback(4);
    CHECK(cache.length() == 36);
    attend(cache, x, 36, 4, again, lse);
    CHECK(std::memcmp(again.data() + 36 * 80, out.data() + 36 * 80, 4 * 80 * sizeof(float)) == 0);

    sash::kv_cache<gated> without({}, text::dims);
    attend(without, x, 0, 40, out, lse);
    CHECK_FALSE(without.can_rollback(1));
    CHECK(without.can_rollback(0));
}

TEST_CASE("R13: forks, checkpoints and files of a cache of states") {
    std::mt19937 random(306);
    const text x(random, 30);
    floats out(30 * 4 * 20), lse(30 * 4), other = out;
    sash::kv_cache<linear<>> cache({}, text::dims);
    attend(cache, x, 0, 20, out, lse);
    sash::kv_cache<linear<>> fork = cache, loaded({}, text::dims);
    loaded.load(cache.save());
    const auto at_20 = cache.checkpoint();
    attend(cache, x, 20, 10, out, lse);
    for (auto* each : {&fork, &loaded}) {
        CHECK(each->length() == 20);
        attend(*each, x, 20, 10, other, lse);
        CHECK(std::memcmp(other.data() + 20 * 80, out.data() + 20 * 80, 10 * 80 * sizeof(float)) == 0);
    }
    cache.restore(at_20);
    attend(cache, x, 20, 10, other, lse);
    CHECK(std::memcmp(other.data() + 20 * 80, out.data() + 20 * 80, 10 * 80 * sizeof(float)) == 0);
    sash::kv_cache<linear<>> moved = std::move(cache);
    CHECK(moved.length() == 30);
    CHECK(cache.length() == 0);  // NOLINT: a moved-from cache is an empty one of the same shape
    attend(cache, x, 0, 20, other, lse);
    CHECK(std::memcmp(other.data(), out.data(), 20 * 80 * sizeof(float)) == 0);
}

TEST_CASE("linear: memory is constant however long the stream") {
    std::mt19937 random(307);
    const text x(random, 50);
    floats out(50 * 4 * 20), lse(50 * 4);
    sash::kv_cache<linear<>> cache({}, text::dims);
    attend(cache, x, 0, 50, out, lse);
    const int64 bytes = cache.bytes();
    for (int i = 0; i < 20; ++i) attend(cache, x, 0, 50, out, lse);
    CHECK(cache.length() == 21 * 50);
    CHECK(cache.bytes() == bytes);
}
