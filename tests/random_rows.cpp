// Random rows for FAVOR+.
#include "support/catch.hpp"

#include <sash/random_rows.hpp>
#include <sash/sash.hpp>

#include <algorithm>
#include <cmath>
#include <random>

namespace {

using namespace sash;
using floats = std::vector<float>;

double number(const floats& w, int64 features, int64 c, int64 r) {
    return w[static_cast<std::size_t>(c * features + r)];
}
double dot(const floats& w, int64 dim, int64 features, int64 a, int64 b) {
    double sum = 0;
    for (int64 c = 0; c < dim; ++c) sum += number(w, features, c, a) * number(w, features, c, b);
    return sum;
}

}  // namespace

TEST_CASE("random rows: the generator is the published one") {
    detail::splitmix64 random{0};
    CHECK(random() == 0xe220a8397b1dcdafu);
    CHECK(random() == 0x6e789e6aa1b965f4u);
    CHECK(random() == 0x06c45d188009454fu);
}

TEST_CASE("random rows: a seed is a set of rows; blocks are orthogonal; lengths are as said") {
    for (const int64 dim : {1, 2, 7, 64})
        for (const int64 features : {1, 5, 64, 150})
            for (const row_norms norms : {row_norms::chi, row_norms::root_dim}) {
                CAPTURE(dim, features, static_cast<int>(norms));
                const floats w = favor_rows(dim, features, 42, norms);
                CHECK(static_cast<int64>(w.size()) == dim * features);
                CHECK((w == favor_rows(dim, features, 42, norms)));
                CHECK_FALSE((w == favor_rows(dim, features, 43, norms)));
                double crossed = 0, length = 0;
                for (int64 a = 0; a < features; ++a) {
                    length = std::max(length, std::abs(dot(w, dim, features, a, a) / double(dim) - 1));
                    for (int64 b = a / dim * dim; b < a; ++b)
                        crossed =
                            std::max(crossed, std::abs(dot(w, dim, features, a, b)) /
                                                  std::sqrt(dot(w, dim, features, a, a) * dot(w, dim, features, b, b)));
                }
                CHECK(crossed < 1e-6);
                CHECK((length < 1e-6) == (norms == row_norms::root_dim));
            }
}

TEST_CASE("random rows: every number of a row is standard normal, and every length chi distributed") {
    const int64 dim = 16, features = 16 * 2000;
    const floats w = favor_rows(dim, features, 7);
    for (int64 c = 0; c < dim; ++c) {
        double mean = 0, square = 0, fourth = 0, with_next = 0;
        for (int64 r = 0; r < features; ++r) {
            const double x = number(w, features, c, r), next = number(w, features, (c + 1) % dim, r);
            mean += x / double(features);
            square += x * x / double(features);
            fourth += x * x * x * x / double(features);
            with_next += x * next / double(features);
        }
        CAPTURE(c);  // of 32,000: standard errors .006, .008, .055, .006
        CHECK(std::abs(mean) < .03);
        CHECK(std::abs(square - 1) < .04);
        CHECK(std::abs(fourth - 3) < .3);
        CHECK(std::abs(with_next) < .03);
    }
    double mean = 0, spread = 0;
    for (int64 r = 0; r < features; ++r) mean += dot(w, dim, features, r, r) / double(features);
    for (int64 r = 0; r < features; ++r) spread += std::pow(dot(w, dim, features, r, r) - mean, 2) / double(features);
    CHECK(std::abs(mean - 16) < .2);   // chi squared: dim,
    CHECK(std::abs(spread - 32) < 3);  // and twice dim
}

TEST_CASE("random rows: the more there are, the closer a performer is to softmax attention") {
    const int64 dim = 8, tokens = 64;
    std::mt19937 random(901);
    std::normal_distribution<float> normal(0, .5f);  // long rows have estimates with heavy tails
    floats q(static_cast<std::size_t>(tokens * dim)), k(q.size()), v(q.size()), exact(q.size()), near(q.size());
    for (floats* x : {&q, &k, &v})
        for (float& e : *x) e = normal(random);
    const input query(q, tokens, 1, dim), key(k, tokens, 1, dim), value(v, tokens, 1, dim);
    attend(full{}, query, key, value, {exact, tokens, 1, dim});
    const auto error_of = [&](int64 features, row_norms norms) {  // root of the mean square, over eight seeds
        double sum = 0;
        for (std::uint64_t seed = 0; seed < 8; ++seed) {
            const floats w = favor_rows(dim, features, seed, norms);
            attend(systems::performer{{.features = features, .weights = w, .epsilon = 0}}, query, key, value,
                   {near, tokens, 1, dim});
            for (std::size_t i = 0; i < near.size(); ++i)
                sum += std::pow(double(near[i]) - exact[i], 2) / (8 * double(near.size()));
        }
        return std::sqrt(sum);
    };
    const double few = error_of(128, row_norms::chi), many = error_of(2048, row_norms::chi);
    const double biased = error_of(2048, row_norms::root_dim);
    CAPTURE(few, many, biased);
    CHECK(many < .4 * few);  // a quarter, as a mean's error falls
    CHECK(many < .01);
    CHECK(many > 1e-3);
    CHECK(biased < .02);
}

TEST_CASE("random rows: extents that cannot be are refused") {
    CHECK_THROWS_AS(favor_rows(0, 4, 1), error);
    CHECK_THROWS_AS(favor_rows(4, 0, 1), error);
    CHECK_THROWS_AS(favor_rows(4, -1, 1), error);
    CHECK_THROWS_AS(favor_rows((int64{1} << 20) + 1, 4, 1), error);
}
