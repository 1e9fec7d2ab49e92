// Feature maps: the structs in float and double, and the CPU's rows in registers, against their formulas written out
// here.
#include "support/catch.hpp"

#include <sash/cpu/feature_row.hpp>
#include <sash/linear.hpp>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

using build = sash::build::here;
using sash::hedgehog;
using sash::hedgehog_form;
using sash::int64;
using sash::cpu::operand;
using floats = std::vector<float>;
using doubles = std::vector<double>;

// phi of one row as the CPU kernel computes it. Beyond x there are other finite numbers, beyond phi NaN.
template <operand Which, class Map>
floats row_on_cpu(const Map& map, const floats& x, int64 map_head = 0) {
    const int64 dim = static_cast<int64>(x.size()), width = sash::ask::width(map, dim),
                pitch = sash::detail::round_up(width, 16);
    floats padded = x;
    padded.resize(static_cast<std::size_t>(sash::detail::round_up(dim, 16)), 3.0f);
    floats phi(static_cast<std::size_t>(pitch), std::numeric_limits<float>::quiet_NaN());
    floats scratch(static_cast<std::size_t>(sash::cpu::map_scratch(map, dim)) + 1,
                   std::numeric_limits<float>::quiet_NaN());
    sash::cpu::map_row<build, Which>(map, map_head, padded.data(), dim, phi.data(), pitch, scratch.data());
    for (int64 f = width; f < pitch; ++f) CHECK(phi[static_cast<std::size_t>(f)] == 0);
    phi.resize(static_cast<std::size_t>(width));
    return phi;
}

template <class N, class Map>
std::vector<N> row_by_struct(const Map& map, bool is_key, const std::vector<N>& x, int64 map_head = 0) {
    const int64 dim = static_cast<int64>(x.size());
    std::vector<N> phi(static_cast<std::size_t>(sash::ask::width(map, dim)));
    if (is_key)
        sash::ask::key_features(map, map_head, x.data(), dim, phi.data());
    else
        sash::ask::query_features(map, map_head, x.data(), dim, phi.data());
    return phi;
}

template <class N>
void check_close(const std::vector<N>& got, const doubles& expected, double relative) {
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
        CAPTURE(i, got[i], expected[i]);
        CHECK(std::abs(double(got[i]) - expected[i]) <= relative * std::abs(expected[i]) + 1e-30);
    }
}

// The formulas, straight from the papers' listings.
doubles softmax(const doubles& z) {
    double top = z[0], sum = 0;
    for (const double x : z) top = std::max(top, x);
    doubles p;
    for (const double x : z) p.push_back(std::exp(x - top)), sum += p.back();
    for (double& x : p) x /= sum;
    return p;
}
doubles hedgehog_by_formula(hedgehog_form form, const doubles& z) {
    doubles plus = z, minus;
    for (const double x : z) minus.push_back(-x);
    if (form == hedgehog_form::h2) {
        plus.insert(plus.end(), minus.begin(), minus.end());
        for (double& x : plus) x *= 2;
        return softmax(plus);
    }
    plus = softmax(plus);
    minus = softmax(minus);
    plus.insert(plus.end(), minus.begin(), minus.end());
    for (double& x : plus) x = std::max(x, 1e-12);
    return plus;
}
doubles affine(const floats& w, const floats& b, int64 head, const floats& x, std::size_t f) {
    doubles z(f);
    for (std::size_t j = 0; j < f; ++j) {
        z[j] = b.empty() ? 0 : double(b[static_cast<std::size_t>(head) * f + j]);
        for (std::size_t c = 0; c < x.size(); ++c)
            z[j] += double(x[c]) * double(w[(static_cast<std::size_t>(head) * x.size() + c) * f + j]);
    }
    return z;
}

floats random_floats(std::mt19937& random, std::size_t count, float spread) {
    std::normal_distribution<float> normal(0, spread);
    floats x(count);
    for (float& v : x) v = normal(random);
    return x;
}

template <class Map>
std::string complaint(const Map& map, const sash::shape& dims) {
    try {
        sash::linear<Map>{.map = map}.validate([](const auto&... parts) { sash::detail::refuse<build>(parts...); },
                                               sash::detail::resolve<build>(dims));
    } catch (const sash::error& e) {
        return e.what();
    }
    return "";
}

// A user's map, number by number: squares.
struct squared {
    static constexpr bool non_negative = true;
    template <class N>
    constexpr N operator()(N x) const {
        return x * x;
    }
};

// A user's map, row by row: the second-order Taylor features of exp without the mixed terms, [1, x, x^2].
struct powers {
    static constexpr bool non_negative = false;
    constexpr int64 width(int64 dim) const { return 1 + 2 * dim; }
    template <class N>
    constexpr void query(int64, const N* x, int64 dim, N* phi) const {
        phi[0] = N(1);
        for (int64 c = 0; c < dim; ++c) phi[1 + c] = x[c], phi[1 + dim + c] = x[c] * x[c];
    }
    template <class N>
    constexpr void key(int64 head, const N* x, int64 dim, N* phi) const {
        query(head, x, dim, phi);
    }
};

struct not_a_map {};
static_assert(sash::ask::feature_map<squared> && sash::ask::elementwise<squared> && sash::ask::non_negative<squared>);
static_assert(sash::ask::feature_map<powers> && !sash::ask::elementwise<powers>);
static_assert(!sash::ask::feature_map<not_a_map>);
static_assert(sash::ask::feature_map<hedgehog> && sash::ask::non_negative<hedgehog>);
static_assert(!sash::ask::non_negative<sash::identity> && !sash::ask::non_negative<powers>);
static_assert(sash::relu{}(-2.0f) == 0 && sash::relu{}(2.0) == 2 && sash::identity{}(-3.0f) == -3);

}  // namespace

TEST_CASE("feature map: elu + 1 is x + 1 above 0 and exp(x) below") {
    const sash::elu_plus_one phi;
    CHECK(phi(2.0f) == 3);
    CHECK(phi(0.0f) == 1);
    CHECK(phi(0.0) == 1);
    CHECK(std::abs(phi(-1.0) - std::exp(-1.0)) < 1e-15);
    CHECK(phi(-1e30f) == 0);
    CHECK(phi(1e30f) == 1e30f);
    CHECK(std::isnan(phi(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("feature map: number by number, in registers as by the formula, for every width") {
    std::mt19937 random(21);
    for (const std::size_t dim : {1u, 3u, 15u, 16u, 17u, 64u, 65u, 128u}) {
        floats x = random_floats(random, dim, 4);
        x[0] = 0;
        doubles elu, positive, square;
        for (const float v : x) {
            elu.push_back(v > 0 ? double(v) + 1 : std::exp(double(v)));
            positive.push_back(v > 0 ? double(v) : 0);
            square.push_back(double(v) * double(v));
        }
        CAPTURE(dim);
        check_close(row_on_cpu<operand::key>(sash::elu_plus_one{}, x), elu, 1e-6);
        check_close(row_on_cpu<operand::query>(sash::relu{}, x), positive, 0);
        check_close(row_on_cpu<operand::key>(squared{}, x), square, 1e-6);
        CHECK(row_on_cpu<operand::query>(sash::identity{}, x) == x);
    }
}

TEST_CASE("feature map: a user's map row by row") {
    const floats x{1, -2, 3};
    const floats expected{1, 1, -2, 3, 1, 4, 9};
    CHECK(row_on_cpu<operand::key>(powers{}, x) == expected);
    CHECK(row_on_cpu<operand::query>(powers{}, x) == expected);
    CHECK(row_by_struct<double>(powers{}, true, {1, -2, 3}) == doubles{1, 1, -2, 3, 1, 4, 9});
}

TEST_CASE("feature map: hedgehog, values by hand") {
    // z = (0, ln 2) without a matrix. h3: (1, 2) / 3 and (1, 1/2) / 1.5; h2: (1, 4, 1, 1/4) / 6.25.
    const doubles z{0, std::log(2.0)};
    check_close(row_by_struct(hedgehog{.form = hedgehog_form::h3}, true, z), {1. / 3, 2. / 3, 2. / 3, 1. / 3}, 1e-14);
    check_close(row_by_struct(hedgehog{.form = hedgehog_form::h2}, false, z), {.16, .64, .16, .04}, 1e-14);
    check_close(row_on_cpu<operand::key>(hedgehog{}, {0, std::log(2.0f)}), {1. / 3, 2. / 3, 2. / 3, 1. / 3}, 1e-6);
}

TEST_CASE("feature map: hedgehog against its formula, one matrix or one a head, with and without bias") {
    const unsigned seed = GENERATE(31u, 32u, 33u);
    std::mt19937 random(seed);
    for (const std::size_t dim : {1u, 4u, 33u, 64u})
        for (const std::size_t f : {1u, 5u, 16u, 31u, 64u, 70u}) {
            const floats wq = random_floats(random, 3 * dim * f, .5f), wk = random_floats(random, dim * f, .5f);
            const floats bq = random_floats(random, 3 * f, 1), x = random_floats(random, dim, 1);
            for (const hedgehog_form form : {hedgehog_form::h2, hedgehog_form::h3}) {
                const hedgehog map{
                    .form = form, .features = int64(f), .query_weights = wq, .key_weights = wk, .query_biases = bq};
                CAPTURE(seed, dim, f, int(form));
                CHECK(map.query_heads(int64(dim)) == 3);
                CHECK(map.key_heads(int64(dim)) == 1);
                for (const int64 head : {0, 2}) {
                    const doubles expected = hedgehog_by_formula(form, affine(wq, bq, head, x, f));
                    check_close(row_on_cpu<operand::query>(map, x, head), expected, 2e-5);
                    check_close(row_by_struct(map, false, x, head), expected, 2e-5);
                    check_close(row_by_struct(map, false, doubles(x.begin(), x.end()), head), expected, 1e-12);
                }
                const doubles expected = hedgehog_by_formula(form, affine(wk, {}, 0, x, f));
                check_close(row_on_cpu<operand::key>(map, x), expected, 2e-5);
                check_close(row_by_struct(map, true, doubles(x.begin(), x.end())), expected, 1e-12);
            }
        }
}

TEST_CASE("R18: hedgehog subtracts its own maximum: large z neither overflow nor vanish") {
    const floats x{300, -300, 0, 299};
    for (const hedgehog_form form : {hedgehog_form::h2, hedgehog_form::h3}) {
        const hedgehog map{.form = form};
        const doubles expected = hedgehog_by_formula(form, doubles(x.begin(), x.end()));
        const floats phi = row_on_cpu<operand::key>(map, x);
        check_close(row_by_struct(map, true, doubles(x.begin(), x.end())), expected, 1e-12);
        for (std::size_t i = 0; i < phi.size(); ++i)
            CHECK(std::abs(double(phi[i]) - expected[i]) <= 1e-6 * expected[i] + 1e-37);
        if (form == hedgehog_form::h3)
            for (const float p : phi) CHECK(p >= 1e-12f);
    }
}

TEST_CASE("R19: NaN in a row reaches its features, in registers too") {
    floats x(20, 1.0f);
    x[7] = std::numeric_limits<float>::quiet_NaN();
    CHECK(std::isnan(row_on_cpu<operand::key>(sash::elu_plus_one{}, x)[7]));
    CHECK(std::isnan(row_on_cpu<operand::key>(sash::relu{}, x)[7]));
    CHECK(row_on_cpu<operand::key>(sash::relu{}, x)[8] == 1);
    for (const hedgehog_form form : {hedgehog_form::h2, hedgehog_form::h3})
        for (const float p : row_on_cpu<operand::key>(hedgehog{.form = form}, x)) CHECK(std::isnan(p));
}

TEST_CASE("R04: hedgehog weights that do not fit are refused with the number that is wrong") {
    const sash::shape dims{.heads = 6, .kv_heads = 2, .head_dim = 4};
    const floats w(2 * 4 * 5);
    CHECK(complaint(hedgehog{.features = 5, .query_weights = w, .key_weights = w}, dims) == "");
    CHECK(complaint(hedgehog{}, dims) == "");
    const auto holds = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
    CHECK(holds(complaint(hedgehog{.features = 7, .query_weights = w, .key_weights = w}, dims),
                "hold 40 numbers, must be a multiple of"));
    CHECK(holds(complaint(hedgehog{.features = 5, .query_weights = w}, dims), "weights for queries only"));
    CHECK(holds(complaint(hedgehog{.features = 5}, dims), "features are 5 without weights"));
    CHECK(holds(complaint(hedgehog{.features = -1, .query_weights = w, .key_weights = w}, dims), "features are -1"));
    CHECK(holds(
        complaint(hedgehog{.features = 5, .query_weights = w, .key_weights = w, .key_biases = std::span(w).first(5)},
                  dims),
        "key_biases hold 5 numbers, must be heads x features, which is 10"));
    const floats four_heads(4 * 4 * 5);
    CHECK(holds(complaint(hedgehog{.features = 5, .query_weights = four_heads, .key_weights = w}, dims),
                "4 heads, must divide heads, which is 6"));
    CHECK(holds(complaint(hedgehog{.form = static_cast<hedgehog_form>(9)}, dims), "form is 9"));
}
