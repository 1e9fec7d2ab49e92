// The reference against numbers worked out by hand: it is the oracle of everything else, so nothing of the library
// checks it.
#include "support/catch.hpp"

#include <sash/cpu/score_tile.hpp>
#include <sash/full.hpp>
#include <sash/reference.hpp>
#include <sash/sliding_window.hpp>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace {

using sash::full;
using sash::int64;
using sash::linear;
using sash::sliding_window;
using floats = std::vector<float>;
using doubles = std::vector<double>;
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

// Users' scores.
struct half_plus_distance {
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        return s / N(2) + at.distance();
    }
};
struct none_beyond {  // -inf where the distance is `limit` or more
    float limit;
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        using sash::select;
        return select(at.distance() < N(limit), s, N(-std::numeric_limits<float>::infinity()));
    }
};

floats count_up(int64 n) {
    floats x(static_cast<std::size_t>(n));
    std::iota(x.begin(), x.end(), 0.0f);
    return x;
}

// Queries and keys of zeros, values that are their own position: row i is the mean of the positions that it sees.
template <class P>
doubles means_of_positions(const P& policy, int64 tokens) {
    const floats zero(static_cast<std::size_t>(tokens)), position = count_up(tokens);
    return sash::reference::attend(policy, {.head_dim = 1}, {zero, tokens, 1}, {zero, tokens, 1}, {position, tokens, 1})
        .out;
}

// One-hot values: the row of weights.
template <class P>
doubles weights_of_row(const P& policy, int64 row, const floats& query, const floats& keys,
                       const sash::score& options = {}) {
    const int64 tokens = row + 1, dim = static_cast<int64>(query.size());
    floats one_hot(static_cast<std::size_t>(tokens * tokens));
    for (int64 j = 0; j < tokens; ++j) one_hot[static_cast<std::size_t>(j * tokens + j)] = 1;
    return sash::reference::attend(policy, {.key_dim = dim, .value_dim = tokens}, {query, 1, 1, dim},
                                   {keys, tokens, 1, dim}, {one_hot, tokens, 1, tokens}, options)
        .out;
}

void check_close(const doubles& got, const doubles& expected, double tolerance = 1e-12) {
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
        CAPTURE(i, got[i], expected[i]);
        CHECK(std::abs(got[i] - expected[i]) <= tolerance);
    }
}

}  // namespace

TEST_CASE("A01: the window counts the query's own token") {
    check_close(means_of_positions(sliding_window{.window = 4}, 10), {0, .5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5});
}

TEST_CASE("A02: sinks are an exception to the window, never to causality") {
    check_close(means_of_positions(sliding_window{.window = 2, .sinks = 4}, 8),
                {0, .5, 1, 1.5, 2, 2.5, 17. / 6, 19. / 6});
    check_close(means_of_positions(sliding_window{.window = 2, .sinks = 4}, 2), {0, .5});
}

TEST_CASE("A03: where sinks and window overlap each key counts once") {
    for (int64 i = 0; i < 12; ++i) {
        const doubles w =
            weights_of_row(sliding_window{.window = 4, .sinks = 3}, i, {0}, floats(static_cast<std::size_t>(i + 1)));
        for (int64 j = 0; j <= i; ++j) {
            const bool seen = j < 3 || i - j < 4;
            CHECK(std::abs(w[static_cast<std::size_t>(j)] - (seen ? 1.0 / double(std::min<int64>(i + 1, 7)) : 0)) <
                  1e-15);
        }
    }
}

TEST_CASE("A03: a sink logit joins the denominator once, and not the lse") {
    const floats zero{0}, value{6}, logit{0};
    const auto r = sash::reference::attend(full{}, {.head_dim = 1}, {zero, 1, 1}, {zero, 1, 1}, {value, 1, 1},
                                           {.sink_logits = logit});
    CHECK(r.out[0] == 3);
    CHECK(r.lse[0] == 0);
}

TEST_CASE("A05: rows of a wrapped window") {
    const doubles out = means_of_positions(sliding_window{.window = 6, .sinks = 2}, 14);
    CHECK(std::abs(out[13] - 8) < 1e-12);  // sees 0, 1, 8 … 13
}

TEST_CASE("A07: rotary frames, both ways of saying who turns") {
    const double by = .5;
    const floats frequency_row{1, 0};
    const doubles original{.180199, .117808, .095214, .152276, .213359, .241144};
    const doubles compact{.049749, .073112, .118970, .190269, .266592, .301309};
    for (const sash::rotates who : {sash::rotates::caller, sash::rotates::library}) {
        const auto row = [&](int64 i, sash::frame frame) {
            const auto unit = [&](int64 position) {
                const double angle = who == sash::rotates::caller ? by * double(position) : 0;
                return floats{static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))};
            };
            floats keys;
            for (int64 j = 0; j <= i; ++j)
                for (const float x : unit(j)) keys.push_back(x);
            doubles w = weights_of_row(sliding_window{.window = 4, .sinks = 2, .frame = frame}, i, unit(i), keys,
                                       {.scale = 1, .rotary = {.frequencies = {&by, 1}, .by = who}});
            std::erase(w, 0.0);
            return w;
        };
        check_close(row(11, sash::frame::original), original, 1e-6);
        check_close(row(11, sash::frame::compact), compact, 1e-6);
        check_close(row(1011, sash::frame::compact), row(11, sash::frame::compact), 1e-5);
    }
}

TEST_CASE("reference: scale, soft cap, ALiBi and a user's score, in this order") {
    const floats slope{.25f};
    const sash::score options{.scale = 2, .soft_cap = 3, .alibi = slope, .custom = half_plus_distance{}};
    const auto score = [](double dot, double distance) {
        return (3 * std::tanh(2 * dot / 3) - .25 * distance) / 2 + distance;
    };
    const double a = std::exp(score(1, 2)), b = std::exp(score(-2, 1)), c = std::exp(score(.5, 0));
    check_close(weights_of_row(full{}, 2, {1}, {1, -2, .5f}, options),
                {a / (a + b + c), b / (a + b + c), c / (a + b + c)}, 1e-7);
}

TEST_CASE("R15: ALiBi and user scores take the compact distance") {
    const floats slope{1};
    // Row 9 of window 2 + sinks 1 stands at 2 when it reads the sink: distances 2, 1, 0.
    const double sum = std::exp(-2) + std::exp(-1) + 1;
    doubles w = weights_of_row(sliding_window{.window = 2, .sinks = 1, .frame = sash::frame::compact}, 9, {0},
                               floats(10), {.alibi = slope});
    std::erase(w, 0.0);
    check_close(w, {std::exp(-2) / sum, std::exp(-1) / sum, 1 / sum});
}

TEST_CASE("reference: the scale is 1 / sqrt(key_dim) unless said otherwise") {
    const double a = std::exp(4 / std::sqrt(4.0));
    check_close(weights_of_row(full{}, 1, {1, 1, 1, 1}, {1, 1, 1, 1, 0, 0, 0, 0}), {a / (a + 1), 1 / (a + 1)});
}

TEST_CASE("R17: a row that sees nothing is 0 and -inf") {
    struct nobody {
        constexpr bool sees(int64, int64) const { return false; }
        constexpr sash::key_intervals<1> visible(int64, int64) const { return {}; }
    };
    const floats x{1, 2}, logit{3};
    for (const bool with_sink : {false, true}) {
        const auto r = sash::reference::attend(
            nobody{}, {.head_dim = 1}, {x, 2, 1}, {x, 2, 1}, {x, 2, 1},
            {.sink_logits = with_sink ? std::span<const float>(logit) : std::span<const float>()});
        CHECK(r.out == doubles{0, 0});
        CHECK(r.lse == doubles{-INFINITY, -INFINITY});
    }
    const auto none = sash::reference::attend(full{}, {.head_dim = 1}, {x, 2, 1}, {x, 0, 1}, {x, 0, 1}, {}, 0);
    CHECK(none.out == doubles{0, 0});
    CHECK(none.lse == doubles{-INFINITY, -INFINITY});
}

TEST_CASE("R18: scores of -inf weigh nothing") {
    check_close(weights_of_row(full{}, 3, {0}, floats(4), {.custom = none_beyond{2}}), {0, 0, .5, .5});
    CHECK(weights_of_row(full{}, 3, {0}, floats(4), {.custom = none_beyond{0}}) == doubles(4, 0.0));
}

TEST_CASE("R19: what is not seen has no influence, what is seen has") {
    const floats zero(6);
    floats keys(6), values = count_up(6);
    keys[2] = values[2] = not_a_number;
    const doubles out = sash::reference::attend(sliding_window{.window = 2}, {.head_dim = 1}, {zero, 6, 1},
                                                {keys, 6, 1}, {values, 6, 1})
                            .out;
    check_close({out[0], out[1], out[4], out[5]}, {0, .5, 3.5, 4.5});
    CHECK(std::isnan(out[2]));
    CHECK(std::isnan(out[3]));
}

TEST_CASE("R26: output head h reads key and value head h / group") {
    const floats zero(6), value{1, 11};
    const auto r = sash::reference::attend(full{}, {.heads = 6, .kv_heads = 2, .head_dim = 1}, {zero, 1, 6},
                                           {zero, 1, 2}, {value, 1, 2});
    CHECK(r.out == doubles{1, 1, 1, 11, 11, 11});
    // Grouped values: four value heads, two query and key heads. Key head 1 prefers the second token.
    const floats q{1, 1}, k{0, 0, 0, 1}, v{0, 1, 2, 3, 10, 11, 12, 13};
    const auto g = sash::reference::attend(full{}, {.heads = 4, .head_dim = 1, .query_heads = 2, .key_heads = 2},
                                           {q, 1, 2}, {k, 2, 2}, {v, 2, 4});
    const double e = std::exp(1.0), near = e / (1 + e);
    check_close(g.out, {5, 6, 2 + 10 * near, 3 + 10 * near});
}

TEST_CASE("reference: keys and values are rounded to what is stored, queries are not") {
    const float fine = 1 + 1.0f / 4096;  // between two numbers of 11 bits, ties to 1
    const floats q{1}, v{fine}, k{0};
    CHECK(sash::reference::attend(full{}, {.head_dim = 1}, {q, 1, 1}, {k, 1, 1}, {v, 1, 1}, {}, -1, sash::scalar::f16)
              .out[0] == 1);
    CHECK(sash::reference::attend(full{}, {.head_dim = 1}, {q, 1, 1}, {k, 1, 1}, {v, 1, 1}).out[0] == double(fine));
    const floats k2{1, 0}, v2{1, 0}, q2{fine};
    const double a = std::exp(double(fine));
    check_close(
        sash::reference::attend(full{}, {.head_dim = 1}, {q2, 1, 1}, {k2, 2, 1}, {v2, 2, 1}, {}, -1, sash::scalar::bf16)
            .out,
        {a / (a + 1)});
}

TEST_CASE("A10: linear attention with equal features is the mean so far") {
    const floats zero(17), position = count_up(17);
    const auto r = sash::reference::attend(linear{}, {.head_dim = 1}, {zero, 17, 1}, {zero, 17, 1}, {position, 17, 1});
    for (std::size_t i = 0; i < 17; ++i) {
        CHECK(std::abs(r.out[i] - double(i) / 2) < 1e-12);
        CHECK(std::abs(r.lse[i] - std::log(double(i + 1))) < 1e-12);
    }
}

TEST_CASE("reference: linear attention by hand, with decay, with and without normaliser") {
    // Features are q = 2; k = 1, 3; decays ln 1/2 and ln 1/4: the first key has lost 3/4 when the second token reads.
    const floats q{2, 2}, k{1, 3}, v{10, 20}, g{std::log(.5f), std::log(.25f)};
    const sash::shape dims{.head_dim = 1};
    const auto normalised = sash::reference::attend(linear<sash::relu, sash::per_head_and_token>{}, dims, {q, 2, 1},
                                                    {k, 2, 1}, {v, 2, 1}, {g, 2, 1});
    check_close(normalised.out, {10, (.5 * 10 + 6 * 20) / 6.5}, 1e-6);
    check_close(normalised.lse, {std::log(2.0), std::log(6.5)}, 1e-6);
    const linear<sash::identity, sash::per_head_and_token, sash::additive, sash::no_normaliser> plain;
    check_close(sash::reference::attend(plain, dims, {q, 2, 1}, {k, 2, 1}, {v, 2, 1}, {g, 2, 1}, {.scale = .5f}).out,
                {10, 62.5}, 1e-5);
}

TEST_CASE("R17: linear attention over nothing, and with no feature in common") {
    const floats q{-1, 1}, k{1}, v{7};
    const auto r =
        sash::reference::attend(linear<sash::relu>{}, {.head_dim = 1}, {q, 2, 1}, {k, 1, 1}, {v, 1, 1}, {}, 0);
    CHECK(r.out == doubles{0, 7});
    CHECK(r.lse == doubles{-INFINITY, 0});
    const auto none = sash::reference::attend(linear{}, {.head_dim = 1}, {q, 2, 1}, {k, 0, 1}, {v, 0, 1}, {}, 0);
    CHECK(none.out == doubles{0, 0});
    CHECK(none.lse == doubles{-INFINITY, -INFINITY});
}

TEST_CASE("reference: a decay of -inf forgets everything and gives no NaN") {
    const floats zero(3), v{1, 2, 3},
        g{0, -std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()};
    const auto r = sash::reference::attend(linear<sash::elu_plus_one, sash::per_head_and_token>{}, {.head_dim = 1},
                                           {zero, 3, 1}, {zero, 3, 1}, {v, 3, 1}, {g, 3, 1});
    CHECK(r.out == doubles{1, 2, 3});
}
