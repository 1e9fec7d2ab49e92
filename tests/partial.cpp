// Partials: push, merge, finish, log-sum-exp, against sums in double over the same keys.
#include "support/catch.hpp"

#include <sash/partial.hpp>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

namespace {

using floats = std::vector<float>;
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

// A partial with a row of its own.
struct row {
    floats numerator;
    sash::partial p;
    explicit row(std::size_t dim) : numerator(dim, 0.0f), p{numerator} {}
    row(const row& other) : numerator(other.numerator), p{numerator, other.p.denominator, other.p.maximum} {}
    row& operator=(const row&) = delete;

    floats finish(float sink = -infinity) const {
        floats out(numerator.size(), not_a_number);
        p.finish(out, sink);
        return out;
    }
};

bool same_bits(const row& a, const row& b) {
    return std::memcmp(a.numerator.data(), b.numerator.data(), a.numerator.size() * sizeof(float)) == 0 &&
           std::memcmp(&a.p.denominator, &b.p.denominator, sizeof(float)) == 0 &&
           std::memcmp(&a.p.maximum, &b.p.maximum, sizeof(float)) == 0;
}

struct keys {
    std::size_t dim;
    floats score, value;
    std::span<const float> row_of(std::size_t j) const { return {value.data() + j * dim, dim}; }
};

keys random_keys(std::mt19937& random, std::size_t count, std::size_t dim, float spread) {
    std::normal_distribution<float> normal;
    keys k{dim, floats(count), floats(count * dim)};
    for (float& s : k.score) s = spread * normal(random);
    for (float& v : k.value) v = normal(random);
    return k;
}

row pushed(const keys& k, std::size_t first, std::size_t last) {
    row r(k.dim);
    for (std::size_t j = first; j < last; ++j) r.p.push(k.score[j], k.row_of(j));
    return r;
}

// The definition, in double.
struct exact {
    std::vector<double> out;
    double lse, maximum;
};
exact by_definition(const keys& k, double sink = -INFINITY) {
    exact e{std::vector<double>(k.dim), 0, -INFINITY};
    for (const float s : k.score) e.maximum = std::max(e.maximum, double(s));
    double mass = 0;
    for (std::size_t j = 0; j < k.score.size(); ++j) {
        const double w = std::exp(k.score[j] - e.maximum);
        mass += w;
        for (std::size_t d = 0; d < k.dim; ++d) e.out[d] += w * k.value[j * k.dim + d];
    }
    e.lse = e.maximum + std::log(mass);
    for (double& o : e.out) o /= mass + std::exp(sink - e.maximum);
    return e;
}

void check_close(const floats& got, const std::vector<double>& expected) {
    REQUIRE(got.size() == expected.size());
    for (std::size_t d = 0; d < got.size(); ++d)
        CHECK(std::abs(got[d] - expected[d]) <= 1e-6 + 1e-5 * std::abs(expected[d]));
}

constexpr bool merges_at_compile_time() {
    float a[2] = {3, 4}, none[2] = {};
    sash::partial x{a, 2, 1}, empty{none};
    x.merge(empty);
    empty.merge(x);
    float out[2] = {};
    empty.finish(out);
    return empty.maximum == 1 && empty.denominator == 2 && out[0] == 1.5f && out[1] == 2;
}
static_assert(merges_at_compile_time());

}  // namespace

TEST_CASE("partial: pushing keys one by one is the softmax over them") {
    std::mt19937 random(11);
    for (const float spread : {0.0f, 1.0f, 30.0f}) {
        const keys k = random_keys(random, 50, 7, spread);
        const row r = pushed(k, 0, 50);
        const exact e = by_definition(k);
        CAPTURE(spread);
        check_close(r.finish(), e.out);
        CHECK(std::abs(r.p.lse() - e.lse) <= 1e-5 * (1 + std::abs(e.lse)));
        CHECK(double(r.p.maximum) == e.maximum);  // the exact maximum, not a bound
    }
}

TEST_CASE("R06: however keys are split, each counts once") {
    std::mt19937 random(12);
    const keys k = random_keys(random, 37, 5, 4);
    const exact e = by_definition(k);
    for (const std::size_t parts : {1u, 2u, 3u, 5u, 37u}) {
        row all(k.dim);
        for (std::size_t p = 0; p < parts; ++p) all.p.merge(pushed(k, 37 * p / parts, 37 * (p + 1) / parts).p);
        CAPTURE(parts);
        check_close(all.finish(), e.out);
        CHECK(std::abs(all.p.lse() - e.lse) <= 1e-5 * std::abs(e.lse));
    }
}

TEST_CASE("partial: merging is associative, and order does not matter beyond rounding") {
    std::mt19937 random(13);
    const keys k = random_keys(random, 30, 4, 8);
    row left = pushed(k, 0, 10), middle = pushed(k, 10, 20), right = pushed(k, 20, 30);
    row ab_c = left;
    ab_c.p.merge(middle.p);
    ab_c.p.merge(right.p);
    row bc = middle;
    bc.p.merge(right.p);
    row a_bc = left;
    a_bc.p.merge(bc.p);
    row cba = right;
    cba.p.merge(middle.p);
    cba.p.merge(left.p);
    const exact e = by_definition(k);
    for (const row* r : {&ab_c, &a_bc, &cba}) {
        check_close(r->finish(), e.out);
        CHECK(double(r->p.maximum) == e.maximum);
    }
}

TEST_CASE("A03: a sink logit counts once, whatever was merged") {
    // One key of score 0 and a sink logit of 0 share the mass: v / 2. Twice would be v / 3, never v.
    for (const int empty_parts : {0, 1, 4}) {
        row r(1);
        const float v = 6;
        for (int i = 0; i < empty_parts; ++i) r.p.merge(row(1).p);
        row key(1);
        key.p.push(0, {&v, 1});
        r.p.merge(key.p);
        for (int i = 0; i < empty_parts; ++i) r.p.merge(row(1).p);
        CHECK(r.finish(0)[0] == 3);
        CHECK(r.finish()[0] == 6);
        CHECK(r.p.lse() == 0);  // keys only
    }
}

TEST_CASE("partial: sink logits far above and far below the scores") {
    std::mt19937 random(14);
    const keys k = random_keys(random, 20, 3, 2);
    const row r = pushed(k, 0, 20);
    for (const float sink : {-200.0f, -3.0f, 0.0f, 5.0f, 60.0f}) {
        CAPTURE(sink);
        check_close(r.finish(sink), by_definition(k, sink).out);
    }
    CHECK(r.finish(500) == floats(3, 0.0f));
}

TEST_CASE("R17: nothing seen is 0 and -inf, and merging with it changes no bit") {
    const row empty(3);
    CHECK(empty.finish() == floats(3, 0.0f));
    CHECK(empty.finish(1) == floats(3, 0.0f));
    CHECK(empty.p.lse() == -infinity);

    row both = empty;
    both.p.merge(empty.p);
    CHECK(same_bits(both, empty));

    std::mt19937 random(15);
    row x = pushed(random_keys(random, 9, 3, 3), 0, 9);
    x.numerator[1] = -0.0f;  // + 0 would turn it into +0
    row left = x, right = empty;
    left.p.merge(empty.p);
    right.p.merge(x.p);
    CHECK(same_bits(left, x));
    CHECK(same_bits(right, x));
}

TEST_CASE("A08: an empty row beside full ones") {
    std::mt19937 random(16);
    const keys k = random_keys(random, 8, 2, 1);
    row total(2);
    for (std::size_t j = 0; j < 8; ++j) {
        total.p.merge(row(2).p);
        total.p.merge(pushed(k, j, j + 1).p);
    }
    const row alone = pushed(k, 0, 8);
    for (const float o : total.finish()) CHECK(std::isfinite(o));
    check_close(total.finish(), by_definition(k).out);
    check_close(alone.finish(), by_definition(k).out);
}

TEST_CASE("R18: scores of -inf weigh nothing and never meet themselves") {
    const float v[2] = {1, 2};
    row r(2);
    r.p.push(-infinity, v);
    CHECK(same_bits(r, row(2)));
    r.p.push(1, v);
    const row before = r;
    r.p.push(-infinity, v);
    CHECK(same_bits(r, before));
    CHECK(sash::rescale(-infinity, -infinity) == 0);
    CHECK(sash::rescale(-infinity, 3) == 0);
    CHECK(sash::rescale(3, 3) == 1);
    CHECK(sash::rescale(-1e30f, 1e30f) == 0);
}

TEST_CASE("R19: NaN that is seen propagates") {
    const float good[1] = {1}, bad[1] = {not_a_number};
    row score(1), value(1);
    score.p.push(0, good);
    score.p.push(not_a_number, good);
    CHECK(std::isnan(score.finish()[0]));
    value.p.push(0, bad);
    CHECK(std::isnan(value.finish()[0]));
    row first(1);
    first.p.push(not_a_number, good);  // must not pass for an empty partial
    for (const row* each : {&score, &first}) {
        row merged(1);
        merged.p.merge(each->p);
        CHECK(std::isnan(merged.finish()[0]));
    }
    row ordinary(1);
    ordinary.p.push(2, good);
    ordinary.p.merge(score.p);
    CHECK(std::isnan(ordinary.finish()[0]));
}

TEST_CASE("R17: finished pairs merge like the partials they came from") {
    std::mt19937 random(17);
    for (const float spread : {1.0f, 20.0f}) {
        const keys k = random_keys(random, 24, 6, spread);
        const row left = pushed(k, 0, 7), right = pushed(k, 7, 24);
        floats out = left.finish();
        float lse = left.p.lse();
        sash::merge_finished(out, lse, right.finish(), right.p.lse());
        const exact e = by_definition(k);
        CAPTURE(spread);
        check_close(out, e.out);
        CHECK(std::abs(lse - e.lse) <= 1e-5 * (1 + std::abs(e.lse)));

        const floats kept = out;
        const float kept_lse = lse;
        sash::merge_finished(out, lse, floats(6, 0.0f), -infinity);
        CHECK(out == kept);
        CHECK(lse == kept_lse);
        floats none(6, 0.0f);
        float none_lse = -infinity;
        sash::merge_finished(none, none_lse, kept, kept_lse);
        CHECK(none == kept);
        CHECK(none_lse == kept_lse);
    }
    floats none(2, 0.0f);
    float none_lse = -infinity, minus_zero = -infinity;
    sash::merge_finished(none, minus_zero, floats(2, 0.0f), -0.0f);
    CHECK(std::signbit(minus_zero));
    sash::merge_finished(none, none_lse, floats(2, 0.0f), -infinity);
    CHECK(none == floats(2, 0.0f));
    CHECK(none_lse == -infinity);
}
