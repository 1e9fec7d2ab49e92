// Feature maps: the structs in float and double, and the CPU's rows in registers, against their formulas written out
// here.
#include "support/catch.hpp"

#include <sash/cpu/feature_row.hpp>
#include <sash/gate.hpp>
#include <sash/linear.hpp>
#include <sash/tokens.hpp>

#include <algorithm>
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
    if (form == hedgehog_form::h1 || form == hedgehog_form::h4) {
        const bool is_h4 = form == hedgehog_form::h4;
        doubles phi;
        for (const doubles& side : {plus, minus})
            for (const double x : side)
                phi.push_back(is_h4 ? std::max(1e-12, std::exp(x - *std::max_element(side.begin(), side.end())))
                                    : std::exp(x));
        return phi;
    }
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
constexpr hedgehog_form all_forms[] = {hedgehog_form::h1, hedgehog_form::h2, hedgehog_form::h3, hedgehog_form::h4};

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
    } catch (const sash::error& e) { return e.what(); }
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
            for (const hedgehog_form form : all_forms) {
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
    for (const hedgehog_form form : {hedgehog_form::h2, hedgehog_form::h3, hedgehog_form::h4}) {
        const hedgehog map{.form = form};
        const doubles expected = hedgehog_by_formula(form, doubles(x.begin(), x.end()));
        const floats phi = row_on_cpu<operand::key>(map, x);
        check_close(row_by_struct(map, true, doubles(x.begin(), x.end())), expected, 1e-12);
        for (std::size_t i = 0; i < phi.size(); ++i)
            CHECK(std::abs(double(phi[i]) - expected[i]) <= 1e-6 * expected[i] + 1e-37);
        if (form != hedgehog_form::h2)
            for (const float p : phi) CHECK(p >= 1e-12f);
    }
}

TEST_CASE("R19: NaN in a row reaches its features, in registers too") {
    floats x(20, 1.0f);
    x[7] = std::numeric_limits<float>::quiet_NaN();
    CHECK(std::isnan(row_on_cpu<operand::key>(sash::elu_plus_one{}, x)[7]));
    CHECK(std::isnan(row_on_cpu<operand::key>(sash::relu{}, x)[7]));
    CHECK(row_on_cpu<operand::key>(sash::relu{}, x)[8] == 1);
    for (const hedgehog_form form : {hedgehog_form::h2, hedgehog_form::h3})  // h1 and h4 keep it where it is
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

// -------------------------------------------------------------------------------------------- maps without weights

namespace {

doubles as_doubles(const floats& x) { return doubles(x.begin(), x.end()); }
double dot(const doubles& a, const doubles& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}

// The row in registers, in float and in double against `expected`, as query and as key.
template <class Map>
void check_row(const Map& map, const floats& x, const doubles& expected, double relative) {
    check_close(row_on_cpu<operand::query>(map, x), expected, relative);
    check_close(row_on_cpu<operand::key>(map, x), expected, relative);
    for (const bool is_key : {false, true}) {
        check_close(row_by_struct(map, is_key, x), expected, relative);
        check_close(row_by_struct(map, is_key, as_doubles(x)), expected, 1e-12);
    }
}

}  // namespace

TEST_CASE("feature map: SiLU, softmax over the dims, unit vectors") {
    std::mt19937 random(41);
    for (const std::size_t dim : {1u, 3u, 16u, 17u, 64u, 100u}) {
        const floats x = random_floats(random, dim, 3);
        doubles silu, unit, unit_silu;
        double square = double{1e-6f}, silu_square = double{1e-6f};
        for (const float v : x) {
            silu.push_back(double(v) / (1 + std::exp(-double(v))));
            square += double(v) * double(v), silu_square += silu.back() * silu.back();
        }
        for (std::size_t i = 0; i < dim; ++i) {
            unit.push_back(double(x[i]) / std::sqrt(square));
            unit_silu.push_back(silu[i] / std::sqrt(silu_square));
        }
        CAPTURE(dim);
        check_close(row_on_cpu<operand::key>(sash::silu{}, x), silu, 1e-6);
        check_row(sash::softmax_dim{}, x, softmax(as_doubles(x)), 2e-6);
        check_row(sash::l2_normalised<>{}, x, unit, 1e-6);
        check_row(sash::l2_normalised<sash::silu>{}, x, unit_silu, 1e-6);
        CHECK(row_on_cpu<operand::key>(sash::normalised_by_caller{}, x) == x);
        CHECK(sash::normalised_by_caller{}(x[0]) == x[0]);
    }
    CHECK(row_on_cpu<operand::key>(sash::l2_normalised<>{}, {0, 0, 0}) == floats{0, 0, 0});
    const floats far = row_on_cpu<operand::query>(sash::softmax_dim{}, {300, 0, -300});
    CHECK(far[0] == 1);
    CHECK(far[2] == 0);
}

TEST_CASE("feature map: relu of an affine map, with a least feature") {
    std::mt19937 random(42);
    for (const std::size_t dim : {1u, 5u, 33u})
        for (const std::size_t f : {1u, 7u, 32u, 70u})
            for (const float least : {0.0f, 1e-12f}) {
                const floats wq = random_floats(random, 2 * dim * f, .5f), wk = random_floats(random, dim * f, .5f),
                             bk = random_floats(random, f, .5f), x = random_floats(random, dim, 1);
                const sash::relu_affine map{
                    .features = int64(f), .query_weights = wq, .key_weights = wk, .key_biases = bk, .least = least};
                const auto clipped = [&](doubles z) {
                    for (double& e : z) e = std::max(e, double{least});
                    return z;
                };
                CAPTURE(dim, f, least);
                CHECK(map.query_heads(int64(dim)) == 2);
                const doubles q = clipped(affine(wq, {}, 1, x, f)), k = clipped(affine(wk, bk, 0, x, f));
                check_close(row_by_struct(map, false, as_doubles(x), 1), q, 1e-12);
                check_close(row_by_struct(map, true, as_doubles(x)), k, 1e-12);
                const floats on_cpu = row_on_cpu<operand::query>(map, x, 1),
                             key_on_cpu = row_on_cpu<operand::key>(map, x);
                for (std::size_t j = 0; j < f; ++j) {
                    CHECK(std::abs(on_cpu[j] - q[j]) < 1e-5);
                    CHECK(std::abs(key_on_cpu[j] - k[j]) < 1e-5);
                    CHECK(on_cpu[j] >= least);
                }
            }
}

TEST_CASE("feature map: Taylor features give 1 + s + s^2 / 2 with s = q·k / sqrt(d); rebased (q·k)^2 / d") {
    std::mt19937 random(43);
    for (const std::size_t dim : {1u, 2u, 5u, 16u}) {
        const floats q = random_floats(random, dim, 1), k = random_floats(random, dim, 1);
        const double d = double(dim), s = dot(as_doubles(q), as_doubles(k)) / std::sqrt(d);
        const sash::taylor_2 taylor;
        CHECK(taylor.width(int64(dim)) == int64(1 + dim + dim * (dim + 1) / 2));
        const double expected = 1 + s + s * s / 2;
        CHECK(std::abs(dot(row_by_struct(taylor, false, as_doubles(q)), row_by_struct(taylor, true, as_doubles(k))) -
                       expected) < 1e-12 * (1 + expected));
        CHECK(std::abs(dot(as_doubles(row_on_cpu<operand::query>(taylor, q)),
                           as_doubles(row_on_cpu<operand::key>(taylor, k))) -
                       expected) < 2e-5 * (1 + expected));

        const sash::rebased square{.normalise = false};
        CHECK(std::abs(dot(row_by_struct(square, false, as_doubles(q)), row_by_struct(square, true, as_doubles(k))) -
                       s * s) < 1e-12 * (1 + s * s));

        const floats gamma = random_floats(random, dim, 1), beta = random_floats(random, dim, 1);
        const auto normalised = [&](const floats& x, bool learned) {
            double mean = 0, variance = 0;
            for (const float v : x) mean += double(v) / d;
            for (const float v : x) variance += (double(v) - mean) * (double(v) - mean) / d;
            doubles y;
            for (std::size_t i = 0; i < dim; ++i)
                y.push_back((double(x[i]) - mean) / std::sqrt(variance + double{1e-5f}) * (learned ? gamma[i] : 1) +
                            (learned ? beta[i] : 0));
            return y;
        };
        const sash::rebased map{.query_gamma = gamma, .query_beta = beta};
        const double product = dot(normalised(q, true), normalised(k, false)), weight = product * product / d;
        CHECK(std::abs(dot(row_by_struct(map, false, as_doubles(q)), row_by_struct(map, true, as_doubles(k))) -
                       weight) < 1e-11 * (1 + weight));
        CHECK(
            std::abs(dot(as_doubles(row_on_cpu<operand::query>(map, q)), as_doubles(row_on_cpu<operand::key>(map, k))) -
                     weight) < 1e-4 * (1 + weight));
    }
}

TEST_CASE("feature map: cosFormer weighs relu(q)·relu(k) with the cosine of the distance, and never below 0") {
    const sash::cosformer map{.most_positions = 40};
    const floats q{1, -2, .5f}, k{3, 1, 2};
    const auto row = [&](const floats& x, bool is_key, int64 position) {
        const doubles wide = as_doubles(x);
        doubles phi(6);
        if (is_key)
            sash::ask::key_features(map, 0, wide.data(), 3, phi.data(), position);
        else
            sash::ask::query_features(map, 0, wide.data(), 3, phi.data(), position);
        return phi;
    };
    for (int64 i = 0; i < 40; ++i)
        for (int64 j = 0; j <= i; ++j) {
            const double weight = dot(row(q, false, i), row(k, true, j));
            CHECK(std::abs(weight - 4 * std::cos(3.14159265358979 / 2 * double(i - j) / 40)) < 1e-12);
            CHECK(weight > 0);
        }
    // Positions count from 1: the first key is not all cosine.
    CHECK(std::abs(row(k, true, 0)[0] - 3 * std::sin(3.14159265358979 / 80)) < 1e-12);
}

// FAVOR as its equations say, for query i over the keys up to it, with the largest exponent of those keys.
TEST_CASE("feature map: FAVOR in a stream is the quadratic form with the largest key so far") {
    const unsigned seed = GENERATE(44u, 45u, 46u);
    std::mt19937 random(seed);
    const std::size_t dim = 6, m = 11, tokens = 23;
    const floats w = random_floats(random, dim * m, 1);
    floats q, k;
    for (std::size_t t = 0; t < tokens; ++t)  // keys that grow, so that the largest changes often
        for (std::size_t c = 0; c < dim; ++c) {
            q.push_back(random_floats(random, 1, 2)[0]);
            k.push_back(random_floats(random, 1, .2f + .2f * float(t))[0]);
        }
    const double epsilon = GENERATE(1e-4, 0.0, 1e-2);
    const sash::favor map{.features = int64(m), .weights = w, .epsilon = float(epsilon)};
    CAPTURE(seed, epsilon);

    const auto exponent = [&](const floats& x, std::size_t t, std::size_t r) {
        double sum = 0;
        for (std::size_t c = 0; c < dim; ++c) sum += double(w[c * m + r]) * double(x[t * dim + c]);
        return sum / std::pow(double(dim), .25);
    };
    const auto half_square = [&](const floats& x, std::size_t t) {
        double sum = 0;
        for (std::size_t c = 0; c < dim; ++c) sum += double(x[t * dim + c]) * double(x[t * dim + c]);
        return sum / 2 / std::sqrt(double(dim));
    };
    doubles memory(2), keep(m + 1), sums(m + 1);  // sums: of the keys' features, as the map keeps them
    for (std::size_t i = 0; i < tokens; ++i) {
        const doubles key(k.begin() + std::ptrdiff_t(i * dim), k.begin() + std::ptrdiff_t((i + 1) * dim)),
            query(q.begin() + std::ptrdiff_t(i * dim), q.begin() + std::ptrdiff_t((i + 1) * dim));
        doubles phi_k(m + 1), phi_q(m + 1);
        sash::ask::key_features(map, 0, key.data(), int64(dim), phi_k.data(), 0, memory.data(), keep.data());
        sash::ask::query_features(map, 0, query.data(), int64(dim), phi_q.data());
        for (std::size_t r = 0; r <= m; ++r) {
            CHECK(keep[r] <= 1);
            sums[r] = keep[r] * sums[r] + phi_k[r];
        }
        double top_q = -1e300, top_k = -1e300, expected = 0;
        for (std::size_t r = 0; r < m; ++r) {
            top_q = std::max(top_q, exponent(q, i, r));
            for (std::size_t j = 0; j <= i; ++j) top_k = std::max(top_k, exponent(k, j, r));
        }
        for (std::size_t j = 0; j <= i; ++j)
            for (std::size_t r = 0; r < m; ++r)
                expected += (std::exp(exponent(q, i, r) - half_square(q, i) - top_q) + double(float(epsilon))) *
                            (std::exp(exponent(k, j, r) - half_square(k, j) - top_k) + double(float(epsilon))) /
                            double(m);
        CAPTURE(i);
        CHECK(std::abs(dot(phi_q, sums) - expected) <= 1e-11 * expected);
    }
}

TEST_CASE("R04: maps that do not fit are refused with the number that is wrong") {
    const sash::shape dims{.heads = 2, .head_dim = 4};
    const auto holds = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
    const floats w(12);
    CHECK(complaint(sash::favor{.features = 3, .weights = w}, dims) == "");
    CHECK(holds(complaint(sash::favor{.features = 4, .weights = w}, dims),
                "hold 12 numbers, must be key_dim x features, which is 16"));
    CHECK(holds(complaint(sash::favor{}, dims), "features are 0"));
    CHECK(holds(complaint(sash::favor{.features = 3, .weights = w, .epsilon = -1}, dims), "epsilon is -1"));
    CHECK(holds(complaint(sash::cosformer{}, dims), "most_positions is 0"));
    CHECK(holds(complaint(sash::rebased{.key_beta = w}, dims), "hold 12 numbers, must be key_dim, which is 4"));
    CHECK(holds(complaint(sash::relu_affine{.features = 5, .query_weights = w, .key_weights = w}, dims),
                "hold 12 numbers"));
    CHECK(holds(complaint(sash::relu_affine{.least = -1}, dims), "least is -1"));
}

// --------------------------------------------------------------------------------------------------------------- gates

TEST_CASE("gate: every gate is its formula, at most 0, from -100 to 100") {
    for (double x = -100; x <= 100; x += .37) {
        const double sigmoid = 1 / (1 + std::exp(-x));
        const double softplus = x > 30 ? x : std::log1p(std::exp(x)), other = x < -30 ? -x : std::log1p(std::exp(-x));
        const double A_log = .3, bias = -.2, shifted = x + bias;
        const double shifted_softplus = shifted > 30 ? shifted : std::log1p(std::exp(shifted));
        const std::pair<double, double> cases[] = {
            {sash::gate::softplus(x), softplus},
            {sash::gate::logsigmoid(x), -other},
            {sash::gate::sigmoid(x), sigmoid},
            {sash::gate::gla(x), -other / 16},
            {sash::gate::mamba_step(x, bias), shifted_softplus},
            {sash::gate::mamba_step(x, bias, .01, 2.0), std::clamp(shifted_softplus, .01, 2.0)},
            {sash::gate::mamba(.7, A_log), -.7 * std::exp(.3)},
            {sash::gate::mohawk(x), -softplus},
            {sash::gate::gated_delta(x, A_log, bias), -std::exp(.3) * shifted_softplus},
            {sash::gate::kda(x, A_log, bias), -std::exp(.3) * shifted_softplus},
            {sash::gate::kda_bounded(x, A_log, bias), -5 / (1 + std::exp(-std::exp(.3) * shifted))},
            {sash::gate::rwkv6(x), -std::exp(x)},
            {sash::gate::qrwkv6(x), std::max(-5.0, -std::exp(x))},
            {sash::gate::rwkv7(x), -std::exp(-.5) * sigmoid},
            {sash::gate::qrwkv7(x), -std::exp(-.5) * sigmoid}};
        for (std::size_t i = 0; i < std::size(cases); ++i) {
            CAPTURE(x, i);
            CHECK(std::abs(cases[i].first - cases[i].second) <= 1e-12 * std::abs(cases[i].second) + 1e-44);
        }
        const float f = static_cast<float>(x);
        for (const float g :
             {sash::gate::gla(f), sash::gate::mohawk(f), sash::gate::gated_delta(f, .3f, -.2f),
              sash::gate::kda_bounded(f, .3f, -.2f), sash::gate::rwkv6(f), sash::gate::qrwkv6(f), sash::gate::rwkv7(f),
              sash::gate::qrwkv7(f), sash::gate::mamba(sash::gate::mamba_step(f), .3f)})
            CHECK(g <= 0);
    }
    CHECK(std::isnan(sash::gate::gla(std::numeric_limits<float>::quiet_NaN())));
    CHECK(std::isnan(sash::gate::softplus(std::numeric_limits<float>::quiet_NaN())));
    // alpha = exp(-softplus(a)) = sigmoid(-a)
    CHECK(std::abs(std::exp(sash::gate::mohawk(1.3)) - 1 / (1 + std::exp(1.3))) < 1e-15);
}
