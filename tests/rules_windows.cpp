// Rules 1 to 8: who sees whom, and that every cut, form of the verb and runner agrees on it.
#include "support/catch.hpp"
#include "support/probes.hpp"

#include <numeric>
#include <random>

using namespace probes;
using sash::bfloat16;
using sash::float16;
using sash::full;
using sash::kv_cache;
using sash::sliding_window;

namespace {

constexpr int64 most = std::numeric_limits<int64>::max();

// Mean of the visible positions of each query.
floats means(int64 tokens, int64 window, int64 sinks) {
    floats m;
    for (int64 i = 0; i < tokens; ++i) {
        double sum = 0, count = 0;
        for (int64 j = 0; j <= i; ++j)
            if (window_rule{window, sinks}(i, j)) sum += double(j), count += 1;
        m.push_back(static_cast<float>(sum / count));
    }
    return m;
}

// The rows of the uniform probe, got in every way.
template <class Element>
void check_means(const sliding_window& policy, const floats& expected, sash::storage storage = {}) {
    const history h = uniform(static_cast<int64>(expected.size()));
    for (const way& w : every_way<Element>(h.tokens, {0, 1, 3})) {
        CAPTURE(policy.window, policy.sinks, w.name);
        CHECK(difference(rows_by<Element>(w, policy, h, {}, storage).out, expected) == "");
    }
}

// The weights of the one-hot probe: 1 / |V(i)| on V(i), and exactly 0 elsewhere.
template <class Policy>
void check_weights(const Policy& policy, const window_rule& sees, int64 tokens, const way& w) {
    CAPTURE(sees.window, sees.sinks, tokens, w.name);
    const rows got = rows_by<float>(w, policy, one_hot(tokens));
    int64 wrong = 0, first_query = -1, first_key = -1;
    for (int64 i = 0; i < tokens; ++i) {
        double count = 0;
        for (int64 j = 0; j < tokens; ++j) count += sees(i, j) ? 1 : 0;
        for (int64 j = 0; j < tokens; ++j) {
            const double weight = got.out[index(i * tokens + j)];
            if (sees(i, j) ? std::abs(weight - 1 / count) <= 1e-6 : weight == 0) continue;
            if (wrong++ == 0) first_query = i, first_key = j;
        }
        if (!(std::abs(double{got.lse[index(i)]} - std::log(count)) <= 1e-5)) ++wrong;
    }
    CAPTURE(first_query, first_key);
    CHECK(wrong == 0);
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------------- R01

TEMPLATE_TEST_CASE("R01: A01 the window counts the query's own token, in every form of the verb", "", float, float16,
                   bfloat16) {
    const floats expected{0, .5f, 1, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f};
    check_means<TestType>({.window = 4}, expected);
    check_means<TestType>(sliding_window::from_left(3), expected);
    const history h = uniform(10);
    for (const positions& cut : {positions{10}, positions(10, 1), positions{3, 4, 3}}) {
        kv_cache<sliding_window, TestType> cache({.window = 4}, {.head_dim = 1});
        CHECK(difference(fed(cache, h, cut).out, expected) == "");
    }
}

TEST_CASE("R01: |V(i)| = min(i + 1, sinks + window), by every answer a window gives") {
    for (int64 s = 0; s < 6; ++s)
        for (int64 w = 1; w < 8; ++w)
            for (int64 i = 0; i < 40; ++i) {
                const sliding_window p{.window = w, .sinks = s};
                CAPTURE(s, w, i);
                int64 seen = 0, in_intervals = 0;
                for (int64 j = 0; j < 48; ++j) {
                    REQUIRE(p.sees(i, j) == window_rule{w, s}(i, j));
                    seen += p.sees(i, j) ? 1 : 0;
                }
                for (const sash::key_interval& k : p.visible(i, i + 1)) in_intervals += k.last - k.first;
                REQUIRE(seen == std::min(i + 1, s + w));
                REQUIRE(in_intervals == seen);
            }
}

TEST_CASE("R01: a window of one is the token itself, a window of the length is full attention") {
    check_means<float>({.window = 1}, means(12, 1, 0));
    check_means<float>({.window = 12}, means(12, 12, 0));
    check_means<float>({.window = 11}, means(12, 11, 0));
    for (const way& w : every_way(12))
        CHECK(difference(rows_by<float>(w, full{}, uniform(12)).out, means(12, most, 0)) == "");
}

TEST_CASE("R01: from_left converts the other convention, its negative one means no limit") {
    CHECK(sliding_window::from_left(0).window == 1);
    CHECK(sliding_window::from_left(1023, 4) == sliding_window{.window = 1024, .sinks = 4});
    CHECK(sliding_window::from_left(-1).window == most);
    CHECK(sliding_window::from_left(most).window == most);
    check_means<float>(sliding_window::from_left(-1), means(9, most, 0));
}

// ----------------------------------------------------------------------------------------------------------------- R02

TEST_CASE("R02: the window's edge is exact to the token, wherever blocks, tiles and pieces end") {
    const int64 tokens = 150;
    for (const int64 window : {1, 2, 47, 48, 49, 63, 64, 65, 127, 128, 129, 149, 150, 151})
        for (const int64 sinks : {0, 1, 4, 63, 64, 65, 200}) {
            const sliding_window policy{.window = window, .sinks = sinks};
            for (const positions& cut : cuts_of(tokens))
                check_weights(policy, {window, sinks}, tokens, {"", form::attend, cut, sash::serial{}});
            check_weights(policy, {window, sinks}, tokens, {"", form::without_cache, {tokens}, sash::serial{}});
        }
}

TEST_CASE("R02: pieces of keys of any length see the same edge") {
    for (const int64 piece : {1, 2, 63, 64, 65, 100, 512})
        for (const positions& cut : cuts_of(140)) {
            check_weights(sliding_window{.window = 70, .sinks = 3}, {70, 3}, 140,
                          {"", form::attend, cut, sash::serial{}, piece});
            check_weights(full{}, {}, 140, {"", form::attend, cut, sash::serial{}, piece});
        }
}

TEST_CASE("R02: rounds of a long append see the same edge") {
    for (const int64 piece : {1, 2, 5, 64, 100}) {
        kv_cache cache(sliding_window{.window = 37, .sinks = 2}, {.head_dim = 1}, {}, {.piece = piece});
        CAPTURE(piece);
        CHECK(difference(fed(cache, uniform(250), {250}).out, means(250, 37, 2)) == "");
    }
}

// ----------------------------------------------------------------------------------------------------------------- R03

TEST_CASE("R03: queries stand where the cache says, whatever the tensors' shapes") {
    const history h = uniform(10);
    for (const int64 before : {0, 1, 5, 7}) {  // some tokens first, then three at once
        kv_cache cache(sliding_window{.window = 4, .sinks = 1}, {.head_dim = 1});
        sash::append(h.keys(0, before), h.values(0, before), cache);
        floats out(3, not_a_number);
        sash::attend(h.queries(before, 3), h.keys(before, 3), h.values(before, 3), cache, {out, 3, 1, 1});
        const floats all = means(10, 4, 1);
        CHECK(difference(out, floats(all.begin() + before, all.begin() + before + 3)) == "");
    }
}

TEST_CASE("R03: without a cache the queries are the last tokens, or stand where they are said to") {
    const history h = uniform(10);
    const floats all = means(10, 4, 2), ends = means(20, 4, 2);
    for (const int64 queries : {1, 2, 9, 10}) {
        floats out(index(queries), not_a_number);
        sash::attend(sliding_window{.window = 4, .sinks = 2}, h.queries(0, queries), h.keys(0, 10), h.values(0, 10),
                     {out, queries, 1, 1});
        CHECK(difference(out, floats(all.end() - queries, all.end())) == "");
    }
    for (const int64 first : {0, 2, 7}) {
        floats out(3, not_a_number);
        sash::attend(sliding_window{.window = 4, .sinks = 2}, h.queries(0, 3), h.keys(0, 10), h.values(0, 10),
                     {out, 3, 1, 1}, {.first_query = first});
        CHECK(difference(out, floats(all.begin() + first, all.begin() + first + 3)) == "");
    }
    SECTION("behind the keys they see what a window that far still reaches") {
        floats out(5, not_a_number);  // positions 10 … 14 over keys 0 … 9
        sash::attend(sliding_window{.window = 4, .sinks = 2}, h.queries(0, 5), h.keys(0, 10), h.values(0, 10),
                     {out, 5, 1, 1}, {.first_query = 10});
        CHECK(difference(out, floats{25.f / 5, 18.f / 4, 10.f / 3, .5f, .5f}) == "");
    }
    SECTION("more queries than keys must say where they stand") {
        floats out(10, 7.f);
        CHECK_THROWS_AS(sash::attend(full{}, h.queries(0, 10), h.keys(0, 3), h.values(0, 3), {out, 10, 1, 1}),
                        sash::error);
        CHECK(out == floats(10, 7.f));
        sash::attend(full{}, h.queries(0, 10), h.keys(0, 3), h.values(0, 3), {out, 10, 1, 1}, {.first_query = 0});
        CHECK(difference(out, floats{0, .5f, 1, 1, 1, 1, 1, 1, 1, 1}) == "");
    }
}

TEST_CASE("R03: a read stands at the cache's length, or where it is said to") {
    const history h = uniform(20);
    kv_cache cache(sliding_window{.window = 4, .sinks = 2}, {.head_dim = 1});
    sash::append(h.keys(0, 12), h.values(0, 12), cache);
    floats out(3, not_a_number);
    sash::read(h.queries(0, 3), cache, {out, 3, 1, 1});  // positions 12, 13, 14; keys to 11
    CHECK(difference(out, floats{(0 + 1 + 9 + 10 + 11) / 5.f, (0 + 1 + 10 + 11) / 4.f, (0 + 1 + 11) / 3.f}) == "");
    sash::read(h.queries(0, 1), cache, {out.data(), 1, 1, 1}, {.first_query = 11});
    CHECK(difference(floats{out[0]}, floats{(0 + 1 + 8 + 9 + 10 + 11) / 6.f}) == "");
    sash::read(h.queries(0, 1), cache, {out.data(), 1, 1, 1}, {.first_query = 1000});
    CHECK(difference(floats{out[0]}, floats{.5f}) == "");
    CHECK(cache.length() == 12);

    out.assign(3, 7.f);  // what position 10 saw has left: key 7
    CHECK_THROWS_AS(sash::read(h.queries(0, 3), cache, {out, 3, 1, 1}, {.first_query = 10}), sash::error);
    CHECK_THROWS_AS(sash::read(h.queries(0, 3), cache, {out, 3, 1, 1}, {.first_query = -1}), sash::error);
    CHECK(out == floats(3, 7.f));
    CHECK_THROWS_AS(
        sash::attend(h.queries(12, 3), h.keys(12, 3), h.values(12, 3), cache, {out, 3, 1, 1}, {.first_query = 11}),
        sash::error);
    CHECK(cache.length() == 12);
    sash::attend(h.queries(12, 3), h.keys(12, 3), h.values(12, 3), cache, {out, 3, 1, 1},
                 {.first_query = 12});  // may be said if right
    CHECK(cache.length() == 15);
}

TEST_CASE("R03: a read whose first query sees sinks alone is refused where a later one sees what has left") {
    const history h = uniform(200);
    const auto try_all = [&](const auto& policy, int64 last_that_works) {
        kv_cache cache(policy, {.head_dim = 1});
        sash::append(h.keys(0, 200), h.values(0, 200), cache);
        for (int64 tokens = 1; tokens <= 8; ++tokens) {
            floats out(8, 7.f);
            const auto read = [&] {
                sash::read(h.queries(0, tokens), cache, {out.data(), tokens, 1, 1}, {.first_query = 2});
            };
            CAPTURE(tokens);
            if (2 + tokens - 1 <= last_that_works) {
                read();
                for (int64 t = 0; t < tokens; ++t) CHECK(out[std::size_t(t)] == float(2 + t) / 2);
            } else {
                CHECK_THROWS_WITH(read(),
                                  Catch::Contains("the query at position " + std::to_string(last_that_works + 1) +
                                                  " sees key " + std::to_string(last_that_works + 1)));
                CHECK(out == floats(8, 7.f));
            }
        }
    };
    try_all(sliding_window{.window = 8, .sinks = 4}, 3);
    try_all(sash::terraced_window{.window = 4, .sinks = 4}, 3);
}

TEST_CASE("R03: two queries of a full cache read at two positions see what stood there") {
    const history h = uniform(9);
    kv_cache cache(full{}, {.head_dim = 1});
    sash::append(h.keys(0, 9), h.values(0, 9), cache);
    for (int64 first = 0; first < 8; ++first) {
        floats out(2, not_a_number);
        sash::read(h.queries(0, 2), cache, {out, 2, 1, 1}, {.first_query = first});
        CHECK(difference(out, floats{static_cast<float>(first) / 2, static_cast<float>(first + 1) / 2}) == "");
    }
}

TEST_CASE("R03: a read in the compact frame turns as the append did") {
    const history h = contents(40, {.heads = 2, .kv_heads = 1, .head_dim = 4});
    const double frequencies[] = {.5, .1};
    for (const sash::rotates by : {sash::rotates::library, sash::rotates::caller}) {
        kv_cache cache(sliding_window{.window = 5, .sinks = 3, .frame = sash::frame::compact}, h.shape,
                       {.rotary = {.frequencies = frequencies, .by = by}});
        for (int64 i = 0; i < 40; ++i) {
            floats attended(8, not_a_number), again(8, not_a_number);
            sash::attend(h.queries(i, 1), h.keys(i, 1), h.values(i, 1), cache, {attended, 1, 2, 4});
            sash::read(h.queries(i, 1), cache, {again, 1, 2, 4}, {.first_query = i});
            REQUIRE(difference_in_bits(again, attended) == "");
        }
    }
}

TEST_CASE("R03: a compact window changed in mid-stream turns to where its queries stand from then on") {
    constexpr int64 tokens = 60, change = 30, sinks = 3, dim = 70, pairs = dim / 2;  // registers of pairs, and some
    const history h = contents(tokens, {.heads = 2, .kv_heads = 1, .head_dim = dim});
    const sash::rope_table frequencies = sash::rope_frequencies(dim, 100);
    const auto turned = [&](const float* row, int64 position) {
        std::vector<double> x(row, row + dim);
        for (int64 p = 0; p < pairs; ++p) {
            const double angle = double(position) * frequencies.frequency[p];
            const double a = x[index(p)], b = x[index(p + pairs)];
            x[index(p)] = a * std::cos(angle) - b * std::sin(angle);
            x[index(p + pairs)] = a * std::sin(angle) + b * std::cos(angle);
        }
        return x;
    };
    exact_rows expected;
    for (int64 i = 0; i < tokens; ++i)
        for (int64 head = 0; head < 2; ++head) {
            const int64 window = i < change ? 9 : 5;
            const float* query = h.query.data() + (i * 2 + head) * dim;
            const auto far = turned(query, std::min(i, sinks + window - 1)), near = turned(query, i);
            std::vector<double> out(index(dim));
            double mass = 0;
            for (int64 j = 0; j <= i; ++j) {
                if (j >= sinks && i - j >= window) continue;
                const auto key = turned(h.key.data() + j * dim, j);
                const double dot = std::inner_product(key.begin(), key.end(), (j < sinks ? far : near).begin(), 0.0);
                const double weight = std::exp(dot / std::sqrt(double(dim)));
                mass += weight;
                for (int64 c = 0; c < dim; ++c) out[index(c)] += weight * double(h.value[index(j * dim + c)]);
            }
            for (const double x : out) expected.out.push_back(x / mass);
            expected.lse.push_back(std::log(mass));
        }
    for (const int64 step : {1, 7, 30}) {
        kv_cache cache(sliding_window{.window = 9, .sinks = sinks, .frame = sash::frame::compact}, h.shape,
                       {.rotary = {.frequencies = frequencies, .by = sash::rotates::library}});
        rows r = unwritten(h);
        for (int64 at = 0; at < tokens;) {
            if (at == change) cache.policy({.window = 5, .sinks = sinks, .frame = sash::frame::compact});
            const int64 n = std::min(step, (at < change ? change : tokens) - at);
            sash::attend(h.queries(at, n), h.keys(at, n), h.values(at, n), cache, h.rows(r.out, at, n),
                         {.lse = std::span(r.lse).subspan(index(at * 2), index(n * 2))});
            at += n;
        }
        CAPTURE(step);
        CHECK(difference(r, expected) == "");
    }
}

TEST_CASE("R03: in both directions every query sees every key, wherever it stands") {
    const history h = contents(90, {.heads = 2, .kv_heads = 1, .head_dim = 3});
    const exact_rows expected = softmax_rows(h, [](int64, int64) { return true; });
    for (const positions& cut : cuts_of(90)) {
        kv_cache cache(full{.causal = false}, h.shape);
        int64 at = 0;
        for (const int64 n : cut) {
            sash::append(h.keys(at, n), h.values(at, n), cache);
            at += n;
        }
        rows r = unwritten(h);
        sash::read(h.queries(0, 90), cache, h.rows(r.out, 0, 90), {.lse = r.lse});
        CHECK(difference(r, expected) == "");
        floats one(6, 7.f);
        CHECK_THROWS_AS(sash::attend(h.queries(0, 1), h.keys(0, 1), h.values(0, 1), cache, {one, 1, 2, 3}),
                        sash::error);  // it could not be cut
        CHECK(one == floats(6, 7.f));
        CHECK(cache.length() == 90);
    }
    for (const int64 queries : {1, 7, 90}) {
        rows r{floats(index(queries * 6), not_a_number), floats(index(queries * 2), not_a_number)};
        sash::attend(full{.causal = false}, h.queries(0, queries), h.keys(0, 90), h.values(0, 90),
                     {r.out, queries, 2, 3}, {.lse = r.lse});
        CHECK(difference(r, exact_rows{{expected.out.begin(), expected.out.begin() + queries * 6},
                                       {expected.lse.begin(), expected.lse.begin() + queries * 2}}) == "");
    }
}

// ----------------------------------------------------------------------------------------------------------------- R04

TEST_CASE("R04: parameters that cannot be are refused by the cache's constructor and by a call without a cache") {
    const history h = uniform(3);
    floats out(3, 7.f);
    const auto refused = [&](const sliding_window& p) {
        CAPTURE(p.window, p.sinks, static_cast<int>(p.frame));
        CHECK_THROWS_AS(kv_cache(p, {.head_dim = 1}), sash::error);
        CHECK_THROWS_AS(sash::attend(p, h.queries(0, 3), h.keys(0, 3), h.values(0, 3), {out, 3, 1, 1}), sash::error);
    };
    refused({.window = 0});
    refused({.window = -1});
    refused({.window = std::numeric_limits<int64>::min()});
    refused({.window = 4, .sinks = -1});
    refused({.window = 4, .sinks = most});
    refused({.window = 4, .frame = static_cast<sash::frame>(2)});
    refused({.window = 4, .sinks = 1, .frame = sash::frame::compact});  // without frequencies
    CHECK(out == floats(3, 7.f));
}

TEST_CASE("R04: shapes that cannot be are refused") {
    const auto refused = [](const sash::shape& s) { CHECK_THROWS_AS(kv_cache(full{}, s), sash::error); };
    refused({});
    refused({.heads = 0, .head_dim = 8});
    refused({.heads = -2, .head_dim = 8});
    refused({.heads = 4, .kv_heads = 3, .head_dim = 8});
    refused({.heads = 4, .kv_heads = 8, .head_dim = 8});
    refused({.heads = 4, .kv_heads = -1, .head_dim = 8});
    refused({.heads = 4, .kv_heads = 2, .head_dim = -8});
    refused({.heads = 4, .kv_heads = 2, .key_dim = 8});
    refused({.heads = 4, .kv_heads = 2, .value_dim = 8});
    refused({.heads = 4, .kv_heads = 2, .head_dim = 8, .query_heads = 3});
    refused({.heads = 6, .kv_heads = 2, .head_dim = 8, .key_heads = 2, .value_heads = 3});
    refused({.heads = most, .kv_heads = most, .head_dim = most});
}

TEST_CASE("R04: scores and storage options that cannot be are refused") {
    const auto refused = [](const sash::score& s, const sash::storage& o = {}) {
        CHECK_THROWS_AS(kv_cache(full{}, {.heads = 2, .head_dim = 4}, s, o), sash::error);
    };
    const float three[] = {1, 2, 3};
    const double pairs[] = {1, 1, 1};
    const auto endless = static_cast<float>(infinity);
    refused({.scale = not_a_number});
    refused({.scale = endless});
    refused({.soft_cap = -1});
    refused({.soft_cap = not_a_number});
    refused({.soft_cap = endless});
    refused({.alibi = three});
    refused({.sink_logits = three});
    refused({.rotary = {.frequencies = pairs}});                                 // six dims of four
    refused({.rotary = {.frequencies = std::span(pairs).first(2), .dims = 2}});  // two pairs, one is said
    refused({}, {.capacity = -1});
    refused({}, {.rollback_slack = -1});
    refused({}, {.rollback_slack = most});
    refused({}, {.auxiliary = -1});
    refused({}, {.piece = 0});
    refused({}, {.memory = {.allocate = [](void*, std::size_t, std::size_t) -> void* { return nullptr; }}});
}

TEMPLATE_TEST_CASE("R04: a call that cannot be writes nothing and changes nothing", "", full, sliding_window,
                   sash::linear<>) {
    const sash::shape s{.heads = 4, .kv_heads = 2, .key_dim = 3, .value_dim = 5};
    const history h = contents(6, s);
    kv_cache<TestType> cache({}, s);
    fed(cache, h, {2});
    const auto before = cache.save();
    floats out(2 * 20, 7.f), lse(2 * 4, 7.f), wide(100);

    const auto refused = [&](sash::input q, sash::input k, sash::input v, sash::output o,
                             const sash::options& how = {}) {
        CHECK(refusal([&] { sash::attend(q, k, v, cache, o, how); }).find("sash: ") == 0);
        CHECK(out == floats(40, 7.f));
        CHECK(lse == floats(8, 7.f));
        CHECK(cache.save() == before);
    };
    const sash::input q = h.queries(2, 2), k = h.keys(2, 2), v = h.values(2, 2);
    const sash::output o{out, 2, 4, 5};
    refused(h.queries(2, 1), k, v, o);  // tokens that do not agree
    refused(q, h.keys(2, 1), v, o);
    refused(q, k, h.values(2, 3), o);
    refused(q, k, v, {out, 1, 4, 5});
    refused({wide, 2, 2, 3}, k, v, o);  // heads
    refused(q, {wide, 2, 4, 3}, v, o);
    refused(q, k, {wide, 2, 1, 5}, o);
    refused(q, k, v, {out, 2, 2, 5});
    refused({wide, 2, 4, 5}, k, v, o);  // dims
    refused(q, {wide, 2, 2, 4}, v, o);
    refused(q, k, {wide, 2, 2, 3}, o);
    refused(q, k, v, {out, 2, 4, 3});
    refused({}, k, v, o);  // nothing at all
    refused(q, k, {static_cast<const float*>(nullptr), 2, 2, 5}, o);
    refused(q, k, v, {static_cast<float*>(nullptr), 2, 4, 5});
    refused(q, k, v, {out.data(), 2, 4, 5, 0, 5});  // rows that would overlap
    refused(q, k, v, {out.data(), 2, 4, 5, 20, 0});
    refused(q, k, v, {out.data(), 2, 4, 5, 20, 5, 0});
    refused(q, k, v, o, {.lse = std::span(lse).first(7)});
    refused(q, k, v, o, {.first_query = 3});
    refused(q, k, v, o, {.key_piece = -1});
}

TEST_CASE("R04: the message names the value and the limit") {
    CHECK(
        names(refusal([] { kv_cache(sliding_window{.window = 0}, {.head_dim = 1}); }), {"window is 0", "at least 1"}));
    CHECK(names(refusal([] { kv_cache(full{}, {.heads = 9, .kv_heads = 4, .head_dim = 1}); }), {"kv_heads is 4", "9"}));
    kv_cache cache(full{}, {.heads = 2, .head_dim = 8});
    const floats x(64);
    floats out(64);
    CHECK(names(refusal([&] {
                    sash::attend({x, 1, 2, 7}, {x, 1, 2, 8}, {x, 1, 2, 8}, cache, {out, 1, 2, 8});
                }),
                {"query has dim 7", "8"}));
    CHECK(names(refusal([&] {
                    sash::attend({x, 1, 2, 8}, {x, 1, 2, 8}, {x, 1, 4, 8}, cache, {out, 1, 2, 8});
                }),
                {"value has 4 heads", "2"}));
}

TEST_CASE("R04: a huge window is full attention, without overflow and without memory for it") {
    const history h = contents(90, {.heads = 2, .kv_heads = 1, .head_dim = 5});
    const way w = every_way(90)[0];
    const rows expected = rows_by<float>(w, full{}, h);
    CHECK(difference(expected, softmax_rows(h, window_rule{})) == "");
    const int64 huge[] = {90,
                          1000,
                          int64{1} << 31,
                          (int64{1} << 32) + 1,
                          (int64{1} << 39) + 3,
                          int64{1} << 40,
                          (int64{1} << 53) + 1,
                          int64{1} << 59,
                          int64{1} << 60,
                          (int64{1} << 62) - 1,
                          int64{1} << 62,
                          most - 1,
                          most};
    for (const int64 window : huge)
        for (const int64 sinks : {int64{0}, int64{4}, int64{200}, int64{1} << 40, int64{1} << 60, int64{1} << 62}) {
            CAPTURE(window, sinks);
            for (const form f : {form::attend, form::append_then_read, form::without_cache})
                CHECK(difference(rows_by<float>({"", f, positions(90, 1), sash::serial{}},
                                                sliding_window{.window = window, .sinks = sinks}, h),
                                 expected) == "");
            kv_cache cache(sliding_window{.window = window, .sinks = sinks}, h.shape);
            sash::append(h.keys(0, 90), h.values(0, 90), cache);
            CHECK(held(cache) == range(0, 90));
            CHECK(cache.bytes() < 1 << 20);
        }
    for (const int64 sinks : {int64{90}, int64{1} << 32, int64{1} << 62}) {  // or nothing but sinks
        CAPTURE(sinks);
        CHECK(difference(rows_by<float>(w, sliding_window{.window = 1, .sinks = sinks}, h), expected) == "");
    }
}

TEST_CASE("R04: a huge compact window turns nothing") {
    const history h = contents(40, {.head_dim = 4});
    const double frequencies[] = {.5, .1};
    const sash::score turned{.rotary = {.frequencies = frequencies, .by = sash::rotates::library}};
    const way w = every_way(40)[0];
    const rows expected = rows_by<float>(w, full{}, h, turned);
    for (const int64 window : {int64{40}, int64{1} << 40, int64{1} << 62, most})
        for (const int64 sinks : {int64{2}, int64{1} << 62})
            CHECK(difference(
                      rows_by<float>(w, sliding_window{.window = window, .sinks = sinks, .frame = sash::frame::compact},
                                     h, turned),
                      expected) == "");
}

// ----------------------------------------------------------------------------------------------------------------- R05

TEST_CASE("R05: a row that sees nothing is written, on every path") {
    for (const int64 queries : {1, 2, 7, 8, 30, 200})
        for (const int64 heads : {1, 6}) {
            const history h(queries, {.heads = heads, .kv_heads = 1, .key_dim = 3, .value_dim = 20});
            const rows nothing{floats(index(queries * h.row_floats()), 0.f),
                               floats(index(queries * heads), static_cast<float>(-infinity))};
            const auto gives_nothing = [&](const char* path, auto&& act) {
                CAPTURE(queries, heads, path);
                rows r = unwritten(h);
                act(h.rows(r.out, 0, queries), std::span(r.lse));
                CHECK(difference_in_bits(r, nothing) == "");
            };
            gives_nothing("reading an empty cache", [&](sash::output out, std::span<float> lse) {
                sash::read(h.queries(0, queries), kv_cache(sliding_window{.window = 4, .sinks = 2}, h.shape), out,
                           {.lse = lse});
            });
            gives_nothing("reading an empty state", [&](sash::output out, std::span<float> lse) {
                sash::read(h.queries(0, queries), kv_cache(sash::linear{}, h.shape), out, {.lse = lse});
            });
            gives_nothing("reading far behind the last key", [&](sash::output out, std::span<float> lse) {
                kv_cache cache(sliding_window{.window = 4}, h.shape);
                sash::append(h.keys(0, 1), h.values(0, 1), cache);
                sash::read(h.queries(0, queries), cache, out, {.lse = lse, .first_query = 1000});
            });
            gives_nothing("far behind the last key, without a cache", [&](sash::output out, std::span<float> lse) {
                sash::attend(sliding_window{.window = 4}, h.queries(0, queries), h.keys(0, 1), h.values(0, 1), out,
                             {.lse = lse, .first_query = 1000});
            });
            gives_nothing("no key at all, without a cache", [&](sash::output out, std::span<float> lse) {
                sash::attend(full{}, h.queries(0, queries), h.keys(0, 0), h.values(0, 0), out,
                             {.lse = lse, .first_query = 0});
            });
            gives_nothing("no key at all, in both directions", [&](sash::output out, std::span<float> lse) {
                sash::attend(full{.causal = false}, h.queries(0, queries), h.keys(0, 0), h.values(0, 0), out,
                             {.lse = lse});
            });
        }
}

TEMPLATE_TEST_CASE("R05: rows land where the strides say and nowhere else, in every element type", "", float, float16,
                   bfloat16) {
    const history h = contents(50, {.heads = 3, .kv_heads = 1, .key_dim = 2, .value_dim = 5});
    const exact_rows expected = softmax_rows(h, window_rule{9, 2});
    const int64 by_token = 3 * 11 * 3 + 4, by_head = 33, by_dim = 3;
    for (const positions& cut : cuts_of(50)) {
        std::vector<TestType> out(index(50 * by_token), TestType(77.f));
        kv_cache cache(sliding_window{.window = 9, .sinks = 2}, h.shape);
        int64 first = 0;
        for (const int64 n : cut) {
            sash::attend(h.queries(first, n), h.keys(first, n), h.values(first, n), cache,
                         {out.data() + first * by_token, n, 3, 5, by_token, by_head, by_dim});
            first += n;
        }
        for (int64 t = 0; t < 50; ++t)
            for (int64 head = 0; head < 3; ++head)
                for (int64 c = 0; c < 5; ++c) {
                    TestType& at = out[index(t * by_token + head * by_head + c * by_dim)];
                    const double want = expected.out[index((t * 3 + head) * 5 + c)];
                    const double unit = std::is_same_v<TestType, float>     ? 1e-5
                                        : std::is_same_v<TestType, float16> ? 0x1p-11
                                                                            : 0x1p-8;
                    REQUIRE(std::abs(double{float{at}} - want) <= 2e-6 + unit * std::abs(want));
                    at = TestType(77.f);
                }
        CHECK(std::all_of(out.begin(), out.end(), [](TestType x) { return float{x} == 77; }));
    }
}

TEST_CASE("R05: with poison in every output, lse and scratch, every row of every length is written") {
    for (const int64 tokens : {1, 2, 3, 15, 16, 17, 23, 24, 25, 47, 48, 49, 63, 64, 65, 130, 257})
        for (const int64 heads : {1, 3, 8}) {
            const history h = contents(tokens, {.heads = heads, .kv_heads = 1, .key_dim = 3, .value_dim = 2});
            for (const positions& cut : cuts_of(tokens)) {
                CAPTURE(tokens, heads, cut.size());
                CHECK(difference(rows_by<float>({"", form::attend, cut, sash::serial{}},
                                                sliding_window{.window = 20, .sinks = 1}, h),
                                 softmax_rows(h, window_rule{20, 1})) == "");
            }
        }
}

// ----------------------------------------------------------------------------------------------------------------- R06

TEMPLATE_TEST_CASE("R06: A02 sinks are no exception to causality", "", float, float16, bfloat16) {
    check_means<TestType>({.window = 2, .sinks = 4}, {0, .5f, 1, 1.5f, 2, 2.5f, 17.f / 6, 19.f / 6});
    check_means<TestType>({.window = 2, .sinks = 4}, {0, .5f});  // fewer tokens than sinks
    check_means<TestType>({.window = 1, .sinks = 8}, means(6, 1, 8));
}

TEST_CASE("R06: A03 where sinks and window overlap, a key counts once, however the keys are split") {
    for (const way& w : every_way(12, {1, 2, 3, 5, 12}))
        check_weights(sliding_window{.window = 4, .sinks = 3}, {4, 3}, 12, w);
    const rows r = rows_by<float>(every_way(12)[0], sliding_window{.window = 4, .sinks = 3}, one_hot(12));
    for (int64 j = 0; j < 12; ++j) CHECK(std::abs(r.out[index(4 * 12 + j)] - (j <= 4 ? .2f : 0.f)) <= 1e-6f);
}

TEST_CASE("R06: A03 a sink logit counts once, for any number of splits") {
    const float logits[] = {0};
    history h(13, {.head_dim = 1});  // keys of score 0, and the value 3
    std::fill(h.value.begin(), h.value.end(), 3.f);
    SECTION("one visible key and one logit share the weight") {
        for (const way& w : every_way(13, {0, 1, 2, 3, 5, 13})) {
            CAPTURE(w.name);
            const rows r = rows_by<float>(w, sliding_window{.window = 1}, h, {.sink_logits = logits});
            CHECK(difference(r.out, floats(13, 1.5f)) == "");
            CHECK(difference(r.lse, floats(13, 0.f)) == "");  // of the keys alone
        }
    }
    SECTION("n visible keys leave it one part in n + 1") {
        floats expected;
        for (int64 i = 0; i < 13; ++i) expected.push_back(3.f * static_cast<float>(i + 1) / static_cast<float>(i + 2));
        for (const way& w : every_way(13, {0, 1, 2, 3, 5, 13})) {
            CAPTURE(w.name);
            CHECK(difference(rows_by<float>(w, full{}, h, {.sink_logits = logits}).out, expected) == "");
        }
    }
}

TEST_CASE("R06: sink logits of each head, over contents, splits and long decodes") {
    const float logits[] = {-2, 0, 1.5f, 40, -1000, 3};
    const history h = contents(150, {.heads = 6, .kv_heads = 2, .head_dim = 3});
    const exact_rows expected = softmax_rows<float>(
        h, window_rule{40, 3}, [](double s, int64, int64, int64) { return s; },
        [&](int64 head) { return double{logits[head]}; }, 1 / std::sqrt(3.0));
    for (const way& w : every_way(150, {0, 7})) {
        CAPTURE(w.name);
        CHECK(difference(rows_by<float>(w, sliding_window{.window = 40, .sinks = 3}, h, {.sink_logits = logits}),
                         expected) == "");
    }
}

TEST_CASE("R06: a row that sees no key but has a sink logit is 0, and its lse is -inf") {
    const float logits[] = {2};
    const kv_cache cache(full{}, {.head_dim = 2}, {.sink_logits = logits});
    const floats q(2, 1.f);
    floats out(2, not_a_number), lse(1, not_a_number);
    sash::read({q, 1, 1, 2}, cache, {out, 1, 1, 2}, {.lse = lse});
    CHECK(out == floats(2, 0.f));
    CHECK(lse[0] == -infinity);
}

TEST_CASE("R06: unfinished rows leave the logit out; merged over disjoint keys and finished, it counts once") {
    const float logits[] = {.7f};
    const history h = contents(30, {.head_dim = 4});
    const int64 parts[] = {0, 11, 12, 30};
    floats out(4, 0.f);
    float lse = static_cast<float>(-infinity);
    for (int part = 0; part < 3; ++part) {
        floats one(4, not_a_number), one_lse(1, not_a_number);
        const int64 first = parts[part], count = parts[part + 1] - first;
        sash::attend(full{}, h.queries(29, 1), h.keys(first, count), h.values(first, count), {one, 1, 1, 4},
                     {.lse = one_lse, .finish = false}, {.sink_logits = logits});
        sash::merge_finished(out, lse, one, one_lse[0]);
    }
    floats finished(4);
    sash::partial{.numerator = out, .denominator = 1, .maximum = lse}.finish(finished, logits[0]);
    const exact_rows expected = softmax_rows<float>(
        h, window_rule{}, [](double s, int64, int64, int64) { return s; }, [&](int64) { return double{logits[0]}; },
        .5);
    CHECK(difference(finished, std::vector<double>(expected.out.end() - 4, expected.out.end())) == "");
    CHECK(std::abs(lse - expected.lse.back()) <= 1e-5);
}

// ----------------------------------------------------------------------------------------------------------------- R07

TEMPLATE_TEST_CASE("R07: the sinks are the first positions, for ever, and the oldest of the others leaves", "", float,
                   float16, bfloat16) {
    poisoned_memory memory;
    const int64 tokens = 3000;
    history h(tokens, {.head_dim = 1});
    for (int64 j = 0; j < tokens; ++j) *h.value_row(j) = static_cast<float>(j < 3 ? 200 + j : j % 100);
    kv_cache<sliding_window, TestType> cache({.window = 5, .sinks = 3}, h.shape, {}, {.memory = memory.source()});
    const exact_rows expected = softmax_rows(h, window_rule{5, 3});
    const positions cut = cuts_of(tokens)[2];
    rows r = unwritten(h);
    int64 first = 0;
    for (const int64 n : cut) {
        sash::attend(h.queries(first, n), h.keys(first, n), h.values(first, n), cache, h.rows(r.out, first, n));
        first += n;
        positions stay = range(0, std::min<int64>(first, 3));
        for (int64 j = std::max<int64>(3, first - 5); j < first; ++j) stay.push_back(j);
        REQUIRE(held(cache) == stay);
        REQUIRE(cache.stored() == static_cast<int64>(stay.size()));
    }
    CHECK(difference(r.out, expected.out) == "");
}

TEST_CASE("R07: sinks survive copy, move, checkpoint, save, rollback and a change of the window") {
    using cache_type = kv_cache<sliding_window>;
    const history h = contents(300, {.heads = 2, .kv_heads = 1, .head_dim = 3});
    const exact_rows expected = softmax_rows(h, window_rule{20, 70});
    const auto goes_on = [&](cache_type& cache) {  // tokens 200 …: every row sees the sinks
        rows r = unwritten(h);
        sash::attend(h.queries(200, 100), h.keys(200, 100), h.values(200, 100), cache, h.rows(r.out, 200, 100));
        CHECK(difference(floats(r.out.begin() + 200 * 6, r.out.end()),
                         std::vector<double>(expected.out.begin() + 200 * 6, expected.out.end())) == "");
        positions stay = range(0, 70);
        for (int64 j = 280; j < 300; ++j) stay.push_back(j);
        CHECK(held(cache) == stay);
    };
    cache_type cache({.window = 20, .sinks = 70}, h.shape);
    fed(cache, h, {150, 1, 49});
    SECTION("itself") { goes_on(cache); }
    SECTION("copy") {
        cache_type fork = cache;
        goes_on(fork);
        goes_on(cache);
    }
    SECTION("move") {
        cache_type moved = std::move(cache);
        goes_on(moved);
    }
    SECTION("checkpoint") {
        const cache_type then = cache.checkpoint();
        sash::append(h.keys(0, 100), h.values(0, 100), cache);
        cache.restore(then);
        goes_on(cache);
    }
    SECTION("save") {
        cache_type loaded({.window = 20, .sinks = 70}, h.shape);
        loaded.load(cache.save());
        goes_on(loaded);
    }
    SECTION("rollback") {
        cache_type slack({.window = 20, .sinks = 70}, h.shape, {}, {.rollback_slack = 30});
        fed(slack, h, {200});
        sash::append(h.keys(0, 30), h.values(0, 30), slack);
        slack.rollback(30);
        rows r = unwritten(h);
        sash::attend(h.queries(200, 100), h.keys(200, 100), h.values(200, 100), slack, h.rows(r.out, 200, 100));
        CHECK(difference(floats(r.out.begin() + 200 * 6, r.out.end()),
                         std::vector<double>(expected.out.begin() + 200 * 6, expected.out.end())) == "");
    }
    SECTION("a change of the window") {
        cache.policy({.window = 3, .sinks = 70});
        CHECK(held(cache).front() == 0);
        CHECK(cache.stored() == 73);
        cache.policy({.window = 20, .sinks = 70});
        CHECK(cache.stored() == 73);  // grows only as tokens arrive
        CHECK_THROWS_AS(cache.policy({.window = 20, .sinks = 71}), sash::error);
        CHECK(cache.policy().sinks == 70);
    }
    SECTION("a reset begins with new ones") {
        cache.reset();
        CHECK(cache.length() == 0);
        CHECK(held(cache).empty());
        CHECK(difference(fed(cache, h, {299, 1}), expected) == "");
    }
}

// ----------------------------------------------------------------------------------------------------------------- R08

TEMPLATE_TEST_CASE("R08: A04 an append longer than the window reads nothing that it has overwritten", "", float,
                   float16, bfloat16) {
    const floats expected = means(14, 4, 1);
    CHECK(difference(floats{expected[6], expected[12], expected[13]}, floats{3.6f, 8.4f, 9.2f}) == "");
    const history h = uniform(14);
    kv_cache<sliding_window, TestType> cache({.window = 4, .sinks = 1}, h.shape, {}, {.capacity = 5});
    CHECK(difference(fed(cache, h, {13, 1}).out, expected) == "");
    check_means<TestType>({.window = 4, .sinks = 1}, expected, {.capacity = 5});

    const rows first =
        rows_by<TestType>({"", form::attend, {13, 1}, sash::serial{}}, sliding_window{.window = 4, .sinks = 1}, h);
    for (int again = 0; again < 50; ++again)  // nothing is left to the order in which threads come
        REQUIRE(difference_in_bits(rows_by<TestType>({"", form::attend, {13, 1}, threads{4}},
                                                     sliding_window{.window = 4, .sinks = 1}, h),
                                   first) == "");
}

TEMPLATE_TEST_CASE("R08: A05 however the tokens are cut, the rows are the same", "", float, float16, bfloat16) {
    positions alternating;
    for (int64 left = 40; left > 0; left -= alternating.back())
        alternating.push_back(alternating.size() % 2 == 0 ? 1 : std::min<int64>(5, left));
    const history h = contents(40, {.heads = 2, .kv_heads = 1, .head_dim = 7}), probe = uniform(40);
    const exact_rows expected = softmax_rows<TestType>(h, window_rule{6, 2});
    for (const positions& cut :
         {positions(40, 1), positions{40}, positions{7, 7, 7, 7, 7, 5}, positions{3, 1, 9, 1, 6, 20}, alternating})
        for (const named_runner& by : runners()) {
            CAPTURE(cut.size(), by.name);
            kv_cache<sliding_window, TestType> cache({.window = 6, .sinks = 2}, h.shape),
                other({.window = 6, .sinks = 2}, probe.shape);
            CHECK(difference(fed(cache, h, cut, {.run = by.run}), expected) == "");
            CHECK(difference(floats{fed(other, probe, cut, {.run = by.run}).out[13]}, floats{8}) ==
                  "");  // sees 0, 1, 8 … 13
        }
    for (const way& w : every_way<TestType>(40)) {
        CAPTURE(w.name);
        CHECK(difference(rows_by<TestType>(w, sliding_window{.window = 6, .sinks = 2}, h), expected) == "");
        CHECK(difference(rows_by<TestType>(w, full{}, h), softmax_rows<TestType>(h, window_rule{})) == "");
    }
}

TEST_CASE("R08: random cuts, windows, sinks and rounds") {
    const unsigned seed = 20240131;
    std::mt19937 random(seed);
    const auto pick = [&](int64 low, int64 high) { return std::uniform_int_distribution<int64>(low, high)(random); };
    for (int n = 0; n < 150; ++n) {
        const int64 tokens = pick(1, 400), window = pick(1, pick(1, 300)), sinks = pick(0, pick(0, 140));
        const sash::storage storage{.rollback_slack = pick(0, 1) * pick(0, 90), .piece = pick(1, pick(1, 300))};
        const history h = contents(tokens, {.heads = 2, .kv_heads = 1, .key_dim = 3, .value_dim = 2}, n);
        positions cut;
        for (int64 left = tokens; left > 0; left -= cut.back()) cut.push_back(std::min(left, pick(1, pick(1, 200))));
        CAPTURE(seed, n, tokens, window, sinks, storage.rollback_slack, storage.piece, cut);
        REQUIRE(difference(rows_by<float>({"", form::attend, cut, sash::serial{}},
                                          sliding_window{.window = window, .sinks = sinks}, h, {}, storage),
                           softmax_rows(h, window_rule{window, sinks})) == "");
    }
}
