// The recurrent kernel against the quadratic reference in double, and its promises about bits.
#include "support/catch.hpp"
#include "support/recurrent_layer.hpp"

#include <sash/reference.hpp>

#include <numeric>
#include <span>

namespace {

using namespace recurrent;
using sash::additive;
using sash::elu_plus_one;
using sash::hedgehog;
using sash::hedgehog_form;
using sash::identity;
using sash::linear;
using sash::no_decay;
using sash::no_normaliser;
using sash::per_head_and_token;
using sash::relu;

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

// One call, against the reference: |error| <= 2e-5 of the largest number expected.
template <class P>
void check_against_reference(const P& policy, const sequence& s) {
    layer<P> one(policy, s.dims);
    rows got(s);
    one.attend(s, 0, s.tokens, got);
    const auto expected =
        sash::reference::attend(policy, s.dims, s.query_view(), s.key_view(), s.value_view(), s.decay_view());
    double largest = 1e-30, error = 0, lse_error = 0;
    for (std::size_t i = 0; i < expected.out.size(); ++i) {
        largest = std::max(largest, std::abs(expected.out[i]));
        const double e = std::abs(double(got.out[i]) - expected.out[i]);
        error = e <= error ? error : e;  // NaN stays
    }
    for (std::size_t i = 0; P::has_normaliser && i < expected.lse.size(); ++i) {
        const double e = double(got.lse[i]) == expected.lse[i] ? 0 : std::abs(double(got.lse[i]) - expected.lse[i]);
        lse_error = e <= lse_error ? lse_error : e;
    }
    CHECK(error <= 2e-5 * largest);
    CHECK(lse_error <= 5e-5);
}

// Rows of a state are padded with zeros, so that a file holds nothing that was left in scratch.
template <class P>
void check_padding(const layer<P>& l, const sash::shape& dims) {
    const sash::detail::state_store& store = l.store();
    const bool is_column = store.is_column;  // then S is one row of features
    const int64 rows = is_column ? 1 : store.features, width = is_column ? store.features : dims.value_dim;
    const int64 pitch = is_column ? store.feature_pitch : store.value_pitch;
    CHECK(is_column == (dims.value_dim == 1 && !sash::cpu::corrects<P>));
    bool zero = true;
    for (int64 state = 0; state < store.states; ++state)
        for (int64 r = 0; r < rows; ++r)
            for (int64 i = width; i < pitch; ++i) zero = zero && store.state(state)[r * pitch + i] == 0;
    CHECK(zero);
}

// The same tokens in other cuts, by append and read, by one call: the same bits, rows and states, where tokens may be
// taken back, so that the recurrence alone is used.
template <class P>
void check_cuts(const P& policy, const sequence& s, std::mt19937& random) {
    layer<P> one(policy, s.dims, 1), cut(policy, s.dims, 1), appended(policy, s.dims, 1);
    rows whole(s), parts(s);
    one.attend(s, 0, s.tokens, whole);
    int64 t = 0;
    for (const int64 n : random_cut(random, s.tokens, 9)) {
        cut.attend(s, t, t + n, parts);
        appended.append(s, t, t + n);
        rows last(s);
        appended.read(s, t + n - 1, t + n, last);  // written first, read after: the row of the last token of the cut
        const std::size_t row = static_cast<std::size_t>(s.dims.heads * s.dims.value_dim),
                          at = static_cast<std::size_t>(t + n - 1) * row;
        CHECK(std::memcmp(last.out.data() + at, whole.out.data() + at, row * sizeof(float)) == 0);
        t += n;
    }
    CHECK(same_bits(whole.out, parts.out));
    if (P::has_normaliser) CHECK(same_bits(whole.lse, parts.lse));
    CHECK(same_bits(one.states(), cut.states()));
    CHECK(same_bits(one.states(), appended.states()));
    check_padding(cut, s.dims);
}

template <class P>
void check_policy(const P& policy, const sequence& s, std::mt19937& random) {
    CAPTURE(s.tokens, s.dims.heads, s.dims.query_heads, s.dims.key_heads, s.dims.value_heads, s.dims.gate_heads,
            s.dims.key_dim, s.dims.value_dim);
    check_against_reference(policy, s);
    check_cuts(policy, s, random);
}

int64 any_of(std::mt19937& random, std::initializer_list<int64> choices) {
    return choices.begin()[random() % choices.size()];
}

}  // namespace

TEST_CASE("R22: recurrence = quadratic form, whatever the cut, for random shapes and maps") {
    const unsigned seed = GENERATE(range(100u, 140u));
    std::mt19937 random(seed);
    CAPTURE(seed);
    const int64 groups = any_of(random, {1, 2, 3}), heads = groups * any_of(random, {1, 2, 3, 4, 5, 8, 12});
    sash::shape dims{.heads = heads,
                     .kv_heads = groups,
                     .key_dim = any_of(random, {1, 3, 16, 33, 64}),
                     .value_dim = any_of(random, {1, 5, 16, 48, 80, 128, 130})};
    if (random() % 3 == 0) dims.key_heads = 1;
    if (random() % 3 == 0) dims.value_heads = heads;
    if (random() % 3 == 0) dims.gate_heads = heads;
    if (random() % 3 == 0 && heads % 2 == 0) dims.query_heads = heads / 2;
    sequence s(dims, any_of(random, {1, 2, 3, 4, 7, 29, 64}));
    s.fill(random, static_cast<float>(any_of(random, {1, 5, 60})));
    check_policy(linear<>{}, s, random);
    check_policy(linear<relu>{}, s, random);
    check_policy(linear<elu_plus_one, per_head_and_token>{}, s, random);
    check_policy(linear<identity, no_decay, additive, no_normaliser>{}, s, random);
    check_policy(linear<identity, per_head_and_token, additive, no_normaliser>{}, s, random);

    const int64 f = any_of(random, {1, 7, 16, 20});
    const int64 key_maps = any_of(random, {1, s.dims.key_heads, heads});
    std::normal_distribution<float> normal(0, .3f);
    floats query_weights(static_cast<std::size_t>(heads * s.dims.key_dim * f)),
        key_weights(static_cast<std::size_t>(key_maps * s.dims.key_dim * f));
    for (float& w : query_weights) w = normal(random);
    for (float& w : key_weights) w = normal(random);
    for (const hedgehog_form form : {hedgehog_form::h2, hedgehog_form::h3}) {
        const hedgehog map{.form = form, .features = f, .query_weights = query_weights, .key_weights = key_weights};
        check_policy(linear<hedgehog>{.map = map}, s, random);
        check_policy(linear<hedgehog, per_head_and_token>{.map = map}, s, random);
    }
}

TEST_CASE("A10: every append continues the state") {
    sequence s({.head_dim = 1}, 17);
    std::iota(s.value.begin(), s.value.end(), 0.0f);
    for (const std::vector<int64>& cut : {std::vector<int64>{17}, std::vector<int64>(17, 1),
                                          std::vector<int64>{5, 5, 5, 2}, std::vector<int64>{16, 1}}) {
        layer<linear<>> l({}, s.dims);
        rows r(s);
        int64 t = 0;
        for (const int64 n : cut) l.attend(s, t, t + n, r), t += n;
        for (std::size_t i = 0; i < 17; ++i) {
            CHECK(std::abs(r.out[i] - float(i) / 2) <= 1e-6f + 1e-5f * float(i));
            CHECK(std::abs(r.lse[i] - std::log(float(i + 1))) <= 1e-6f);
        }
    }
}

TEST_CASE("R23: changing the future changes no bit of the past") {
    std::mt19937 random(150);
    sequence s({.heads = 4, .kv_heads = 2, .head_dim = 24}, 40);
    s.fill(random, 3);
    sequence other = s;
    const int64 same = 23;
    for (std::size_t i = static_cast<std::size_t>(same * s.dims.key_heads * s.dims.key_dim); i < s.key.size(); ++i)
        other.key[i] = not_a_number;
    for (std::size_t i = static_cast<std::size_t>(same * s.dims.value_heads * s.dims.value_dim); i < s.value.size();
         ++i)
        other.value[i] = infinity;
    for (std::size_t i = static_cast<std::size_t>(same * s.dims.gate_heads); i < s.decay.size(); ++i)
        other.decay[i] = -100;
    const linear<elu_plus_one, per_head_and_token> policy;
    layer<decltype(policy)> a(policy, s.dims), b(policy, s.dims);
    rows left(s), right(s);
    a.attend(s, 0, 40, left);
    b.attend(other, 0, 40, right);
    const std::size_t out = static_cast<std::size_t>(same * s.dims.heads * s.dims.value_dim),
                      lse = static_cast<std::size_t>(same * s.dims.heads);
    CHECK(std::memcmp(left.out.data(), right.out.data(), out * sizeof(float)) == 0);
    CHECK(std::memcmp(left.lse.data(), right.lse.data(), lse * sizeof(float)) == 0);
    CHECK(std::isnan(right.out[out]));  // and what a token does see reaches it
}

TEST_CASE("R23: a call of no tokens adds and decays nothing") {
    std::mt19937 random(151);
    sequence s({.head_dim = 8}, 5);
    s.fill(random);
    layer<linear<elu_plus_one, per_head_and_token>> l({}, s.dims, 3);
    rows r(s);
    l.attend(s, 0, 4, r);
    const floats before = l.states();
    l.attend(s, 4, 4, r);
    l.append(s, 4, 4);
    l.read(s, 4, 4, r);
    CHECK(same_bits(l.states(), before));
    CHECK(l.store().length == 4);
    CHECK(std::isnan(r.out.back()));
}

TEST_CASE("R24: 100000 positive tokens: the normaliser neither saturates nor drifts") {
    sequence s({.key_dim = 3, .value_dim = 2}, 1000);
    for (std::size_t i = 0; i < s.value.size(); ++i) s.value[i] = i % 2 ? 3.0f : -1.0f;
    layer<linear<>> l({}, s.dims);
    rows r(s);
    for (int i = 0; i < 100; ++i) l.attend(s, 0, 1000, r);
    CHECK(r.out[1998] == -1);
    CHECK(r.out[1999] == 3);
    CHECK(std::abs(r.lse[999] - std::log(300000.0)) < 1e-6);
}

TEST_CASE("R24: decays of 0 and -inf: all is kept, all is forgotten") {
    sequence s({.head_dim = 1}, 4);
    s.value = {1, 2, 3, 4};
    s.decay = {0, 0, -infinity, -infinity};
    layer<linear<elu_plus_one, per_head_and_token>> l({}, s.dims);
    rows r(s);
    l.attend(s, 0, 4, r);
    CHECK(r.out == floats{1, 1.5f, 3, 4});
}

TEST_CASE("R17: an empty state, and a query without a feature, give 0 and -inf") {
    sequence s({.heads = 2, .kv_heads = 1, .head_dim = 3}, 2);
    s.query = {1, 2, 3, -1, -2, -3, 1, 2, 3, -1, -2, -3};  // head 1 has no positive number
    s.key = {1, 1, 1, 1, 1, 1};
    s.value = {5, 6, 7, 5, 6, 7};
    layer<linear<relu>> l({}, s.dims);
    rows r(s);
    l.read(s, 0, 2, r);
    CHECK(r.out == floats(12, 0.0f));
    CHECK(r.lse == floats(4, -infinity));
    l.attend(s, 0, 2, r);
    CHECK(r.out == floats{5, 6, 7, 0, 0, 0, 5, 6, 7, 0, 0, 0});
    CHECK(r.lse[1] == -infinity);
    CHECK(std::abs(r.lse[2] - std::log(12.0f)) < 1e-6f);

    s.value[3] = not_a_number;  // a row without a denominator is 0 even then
    l.append(s, 1, 2);
    l.read(s, 1, 2, r);
    CHECK(std::isnan(r.out[6]));
    CHECK(r.out[9] == 0);
    CHECK(r.out[10] == 0);
}

TEST_CASE("R19: a NaN stays in its own head, and is never left behind in scratch") {
    std::mt19937 random(152);
    sequence s({.heads = 4, .kv_heads = 2, .head_dim = 20}, 12);
    s.fill(random);
    sequence bad = s;
    bad.value[static_cast<std::size_t>(3 * 2 * 20 + 20 + 4)] = not_a_number;  // token 3, head 1, column 4
    layer<linear<>> a({}, s.dims), b({}, s.dims);
    rows clean(s), dirty(s);
    a.attend(s, 0, 12, clean);
    b.attend(bad, 0, 12, dirty);
    for (std::size_t i = 0; i < clean.out.size(); ++i) {
        const std::size_t column = i % 20, head = i / 20 % 4, token = i / 80;
        if (token >= 3 && head >= 2 && column == 4)
            CHECK(std::isnan(dirty.out[i]));
        else
            CHECK(std::memcmp(&clean.out[i], &dirty.out[i], sizeof(float)) == 0);
    }
}

TEST_CASE("R26: output head h reads the state h / group; keys, values and gates may each have heads of their own") {
    // Two key heads, four value heads, four output heads, gates per output head; every query and key is equal.
    sequence s({.heads = 4, .head_dim = 1, .key_heads = 2, .value_heads = 4, .gate_heads = 4}, 2);
    s.value = {1, 2, 3, 4, 11, 12, 13, 14};
    s.decay = {0, 0, 0, 0, 0, -infinity, 0, -infinity};
    layer<linear<elu_plus_one, per_head_and_token>> l({}, s.dims);
    rows r(s);
    l.attend(s, 0, 2, r);
    CHECK(r.out == floats{1, 2, 3, 4, 6, 12, 8, 14});
    CHECK(l.store().states == 4);
}

TEST_CASE("R27: inputs and outputs of every type, with strides, come out as their rounded contiguous selves") {
    std::mt19937 random(153);
    sequence s({.heads = 2, .kv_heads = 1, .key_dim = 17, .value_dim = 19}, 6);
    s.fill(random);
    const linear<> policy;
    std::vector<sash::float16> q;
    std::vector<sash::bfloat16> v;
    for (float& x : s.query) q.emplace_back(x), x = q.back();
    for (float& x : s.value) v.emplace_back(x), x = v.back();
    floats key_backwards(s.key.rbegin(), s.key.rend());  // dim stride -1, token stride -17
    layer<linear<>> plain(policy, s.dims), odd(policy, s.dims);
    rows r(s);
    plain.attend(s, 0, 6, r);

    std::vector<sash::float16> out(static_cast<std::size_t>(6 * 2 * 19 * 3), sash::float16(-7.0f));
    sash::cpu::recurrent_call c;
    c.query = {q, 6, 2, 17};
    c.key = {key_backwards.data() + key_backwards.size() - 1, 6, 1, 17, -17, 0, -1};
    c.value = {v, 6, 1, 19};
    c.out = {out.data(), 6, 2, 19, 2 * 19 * 3, 19 * 3, 3};
    c.reads = c.writes = true;
    floats scratch(static_cast<std::size_t>(sash::cpu::recurrent_scratch(policy, s.dims)));
    sash::cpu::recurrent<build>(policy, s.dims, odd.store(), c, 0, scratch.data());
    for (std::size_t i = 0; i < r.out.size(); ++i) {
        CHECK(out[3 * i].bits == sash::float16(r.out[i]).bits);
        CHECK(float(out[3 * i + 1]) == -7);
        CHECK(float(out[3 * i + 2]) == -7);
    }
}

TEST_CASE("recurrent: query and key are turned before the map") {
    std::mt19937 random(154);
    sequence s({.heads = 2, .kv_heads = 1, .head_dim = 10}, 9);
    s.fill(random);
    const sash::rope_table table = sash::rope_frequencies(6);
    for (const sash::rotary_layout layout : {sash::rotary_layout::half_split, sash::rotary_layout::interleaved}) {
        std::vector<sash::detail::turn> turns;
        for (int64 t = 0; t < 9; ++t)
            for (const double f : table) turns.push_back(sash::detail::turn_by<build>(t, f));
        layer<linear<>> l({}, s.dims);
        rows r(s);
        sash::cpu::recurrent_call c;
        c.query = s.query_view();
        c.key = s.key_view();
        c.value = s.value_view();
        c.out = {r.out, 9, 2, 10};
        c.reads = c.writes = true;
        c.turns = turns.data();
        c.pairs = 3;
        c.layout = layout;
        floats scratch(static_cast<std::size_t>(sash::cpu::recurrent_scratch(linear<>{}, s.dims)));
        sash::cpu::recurrent<build>(linear<>{}, s.dims, l.store(), c, 0, scratch.data());
        const auto expected = sash::reference::attend(
            linear<>{}, s.dims, s.query_view(), s.key_view(), s.value_view(),
            {.rotary = {.frequencies = {table.data(), table.size()}, .layout = layout, .by = sash::rotates::library}});
        for (std::size_t i = 0; i < r.out.size(); ++i)
            CHECK(std::abs(double(r.out[i]) - expected.out[i]) <= 1e-6 + 1e-5 * std::abs(expected.out[i]));
    }
}
