// Hybrids of a window and a state: golden values, the double formula, any cut, narrow storage, and what a cache can do.
#include "support/any_cache.hpp"
#include "support/catch.hpp"
#include "support/golden_compare.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

namespace {

using golden::disagreement;
using golden::test_case;
using sash::int64;
using floats = std::vector<float>;
namespace systems = sash::systems;

// ---------------------------------------------------------------------------------------------------------------------
// Golden values

// Rows of every cut of a case, of a call without a cache, and of the reference.
template <class P, class Tokens>
void check_golden(const test_case& c, const P& policy, const sash::shape& shape, const sash::score& score,
                  const Tokens& part, double within) {
    const int64 tokens = c["key"].extent(0);
    const golden::tolerance fp32{within * golden::largest(c["output"]), 0};
    {
        INFO(c.name << ": reference");
        const auto r = sash::reference::attend(policy, shape, part(0, tokens), score);
        // angles, and what is stored, are fp32
        CHECK(disagreement(r.out, c["output"],
                           {(c.has("frequencies") ? 1e-6 : 2e-8) * golden::largest(c["output"]), 0}) == "");
    }
    {
        INFO(c.name << ": no cache");
        floats out(c["output"].values.size(), NAN);
        sash::attend(policy, part(0, tokens), golden::rows(out, c["output"], 0, tokens), {}, score);
        CHECK(disagreement(out, c["output"], fp32) == "");
    }
    auto cuts = golden::cuts_of(tokens);
    cuts.push_back({c.integer("cut"), tokens - c.integer("cut")});
    for (const auto& cut : cuts) {
        INFO(c.name << ": " << cut.size() << " calls");
        sash::kv_cache<P> cache(policy, shape, score, {.piece = 40});
        floats out(c["output"].values.size(), NAN);
        int64 done = 0;
        for (const int64 n : cut) {
            sash::attend(part(done, n), cache, golden::rows(out, c["output"], done, n));
            done += n;
        }
        CHECK(disagreement(out, c["output"], fp32) == "");
    }
}

sash::shape shape_of(const test_case& c) {
    return {.heads = c["output"].extent(1),
            .kv_heads = c["key"].extent(1),
            .key_dim = c["key"].extent(2),
            .value_dim = c["value"].extent(2)};
}

void check_lolcats(const test_case& c) {
    const floats query_weights = c["query_weights"].floats(), key_weights = c["key_weights"].floats(),
                 factors = c["window_factors"].floats(), query = c["query"].floats(), key = c["key"].floats(),
                 value = c["value"].floats();
    const sash::hedgehog map{
        .features = c.integer("features"), .query_weights = query_weights, .key_weights = key_weights};
    const sash::shared_denominator combine{.window_factors = factors, .affine = c.text("linear_factor") == "affine"};
    const auto check = [&](const auto& policy) {
        using tokens = sash::tokens_of<std::remove_cvref_t<decltype(policy)>>;
        check_golden(
            c, policy, shape_of(c), {},
            [&](int64 first, int64 count) {
                return tokens{.query = golden::rows(query, c["query"], first, count),
                              .key = golden::rows(key, c["key"], first, count),
                              .value = golden::rows(value, c["value"], first, count)};
            },
            2e-5);
    };
    const int64 window = c.integer("window"), sinks = c.integer("sinks");
    if (c.text("window_kind") == "terraced")
        check(systems::lolcats_terraced{{.window = window, .sinks = sinks}, {.map = map}, combine});
    else
        check(systems::lolcats{{.window = window, .sinks = sinks}, {.map = map}, combine});
}

void check_liger(const test_case& c) {
    const floats query = c["query"].floats(), key = c["key"].floats(), value = c["value"].floats(),
                 decay = c["decay"].floats();
    const std::vector<double> frequencies = c["frequencies"].values;
    const sash::score score{.rotary = {.frequencies = frequencies, .by = sash::rotates::library}};
    check_golden(
        c, systems::liger_gla{.window = {.window = c.integer("window")}}, shape_of(c), score,
        [&](int64 first, int64 count) {
            return sash::tokens_of<systems::liger_gla>{.query = golden::rows(query, c["query"], first, count),
                                                       .key = golden::rows(key, c["key"], first, count),
                                                       .value = golden::rows(value, c["value"], first, count),
                                                       .decay = golden::rows(decay, c["decay"], first, count)};
        },
        1e-5);
}

}  // namespace

TEST_CASE("R22 R24 R26 golden: LoLCATs and Liger") {
    int checked = 0;
    for (const auto& c : golden::read_beside(__FILE__, "hybrids")) {
        c.text("system") == "lolcats" ? check_lolcats(c) : check_liger(c);
        ++checked;
    }
    CHECK(checked == 19);
}

// ---------------------------------------------------------------------------------------------------------------------
// Against the formula in double, at random

namespace {

using test::numbers;
using test::tensor;

using exact_lolcats = sash::hybrid<sash::sliding_window, sash::linear<>, sash::shared_denominator>;
using merged = sash::hybrid<sash::sliding_window, sash::linear<>, sash::log_sum_exp>;
using merged_terraces = sash::hybrid<sash::terraced_window, sash::linear<sash::favor>, sash::log_sum_exp>;
using delta_beside = sash::hybrid<sash::terraced_window, systems::gated_deltanet, sash::convex>;

// One case drawn at random: the same policy and tokens for the library and the reference.
template <class P, class E>
struct random_hybrid {
    numbers random;
    sash::shape shape;
    int64 tokens = random.between(1, random.one_in(4) ? 330 : 90);
    floats factors, query_weights, key_weights, projections;
    std::vector<double> frequencies;
    std::vector<float> slopes;
    sash::score score;
    sash::storage storage;
    tensor query, key, value, decay, beta;

    explicit random_hybrid(std::uint64_t seed) : random(seed) {
        const int64 kv = random.pick({1, 1, 2, 3}), group = random.pick({1, 2, 4});
        shape = {.heads = kv * group,
                 .kv_heads = kv,
                 .key_dim = random.between(1, 12),
                 .value_dim = random.between(1, 19),
                 .value_heads = random.one_in(4) ? kv * group : kv,
                 .gate_heads = random.one_in(2) ? kv * group : kv};
        query = drawn(shape.heads, shape.key_dim);
        key = drawn(kv, shape.key_dim);
        value = drawn(shape.value_heads, shape.value_dim);
        decay = drawn(shape.gate_heads, 1);
        decay.for_each([&](int64 t, int64 h, int64) { decay.set(t, h, 0, -0.05f * std::abs(decay.get(t, h, 0))); });
        beta = drawn(shape.gate_heads, 1);
        beta.for_each([&](int64 t, int64 h, int64) { beta.set(t, h, 0, std::abs(beta.get(t, h, 0))); });
        if (random.one_in(2)) {
            for (int64 pair = 0; pair < shape.key_dim / 2; ++pair) frequencies.push_back(std::pow(0.3, pair));
            score.rotary = {
                .frequencies = frequencies,
                .layout = random.one_in(2) ? sash::rotary_layout::half_split : sash::rotary_layout::interleaved,
                .by = random.one_in(3) ? sash::rotates::caller : sash::rotates::library};
        }
        if (random.one_in(4)) score.soft_cap = 3;
        if (random.one_in(4)) slopes = random.several(shape.heads, 0.05f), score.alibi = slopes;
        storage.piece = random.pick({1, 7, 64, 256});
        storage.rollback_slack = random.pick({0, 0, 5, 70});
    }
    tensor drawn(int64 heads, int64 dim) {
        const auto type = static_cast<sash::scalar>(random.pick({int(sash::scalar::f32), int(sash::scalar::f16)}));
        tensor t(tokens, heads, dim, type, static_cast<test::arrangement>(random.below(6)));
        t.fill(random);
        return t;
    }

    P policy() {
        P p;
        p.window.window = random.pick({1, 2, 5, 16, 63, 64, 65, 100});
        p.window.sinks = random.pick({0, 0, 1, 4, 70});
        if constexpr (requires { p.window.frame; })
            if (!frequencies.empty() && random.one_in(3)) p.window.frame = sash::frame::compact;
        if constexpr (requires { p.combine.window_factors; }) {
            factors = random.several(random.one_in(3) ? 1 : shape.heads);
            p.combine = {factors, random.one_in(2)};
        } else if constexpr (requires { p.combine.linear; }) {
            p.combine = {random.number(), random.number()};
        }
        if constexpr (requires { p.linear.map.query_weights; }) {
            const int64 features = random.between(1, 5), maps = random.one_in(2) ? shape.heads : shape.kv_heads;
            query_weights = random.several(maps * shape.key_dim * features, 0.5f);
            key_weights = random.several(maps * shape.key_dim * features, 0.5f);
            p.linear.map = {.features = features, .query_weights = query_weights, .key_weights = key_weights};
        }
        if constexpr (requires { p.linear.map.weights; }) {
            projections = random.several(6 * shape.key_dim, 0.5f);
            p.linear.map = {.features = 6, .weights = projections};
        }
        return p;
    }
    sash::tokens_of<P> part(int64 first, int64 count) const {
        if constexpr (P::needs_beta)
            return {query.in(first, count), key.in(first, count), value.in(first, count), decay.in(first, count),
                    beta.in(first, count)};
        else
            return {query.in(first, count), key.in(first, count), value.in(first, count)};
    }

    void run() {
        const P p = policy();
        CAPTURE(tokens, p.window.window, p.window.sinks, shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim,
                storage.piece, storage.rollback_slack, score.rotary.frequencies.size());
        const auto expected =
            sash::reference::attend(p, shape, part(0, tokens), score, -1, sash::detail::storage_name<E>);
        sash::kv_cache<P, E> cache(p, shape, score, storage);
        tensor out(tokens, shape.heads, shape.value_dim);
        std::vector<float> lse(P::has_lse ? size_t(tokens * shape.heads) : 0);
        const int64 largest = random.pick({1, 3, 40, 400});
        for (int64 done = 0; done < tokens;) {
            const int64 n = std::min(random.between(1, largest), tokens - done);
            sash::options how;
            if (random.one_in(2)) how.run = sash::serial{};
            if (P::has_lse) how.lse = std::span(lse).subspan(size_t(done * shape.heads), size_t(n * shape.heads));
            sash::attend(part(done, n), cache, out.out(done, n), how);
            done += n;
        }
        // keys that are turned, then rounded to a narrow type, may fall to the other side of a border
        const bool rounds = !std::is_same_v<E, float>,
                   turns = score.rotary.by == sash::rotates::library && !frequencies.empty();
        const test::tolerance within = rounds && turns ? test::tolerance{2e-2, 2e-2} : test::tolerance{6e-6, 4e-5};
        CHECK(test::differs(out, expected.out, within) == "");
        if (P::has_lse) CHECK(test::differs(lse, expected.lse, within) == "");
        CHECK(cache.length() == tokens);
    }
};

template <class P, class E>
void check_random(std::uint64_t seed, int cases) {
    for (int i = 0; i < cases; ++i) {
        CAPTURE(seed + std::uint64_t(i));
        random_hybrid<P, E>(seed + std::uint64_t(i)).run();
    }
}

}  // namespace

TEST_CASE("R08 R22 hybrid: any cut, any shape, against the formula in double") {
    check_random<exact_lolcats, float>(1000, 150);
    check_random<systems::lolcats, sash::float16>(2000, 80);
    check_random<systems::lolcats_terraced, float>(3000, 80);
    check_random<merged, sash::bfloat16>(4000, 80);
    check_random<merged_terraces, float>(5000, 80);
    check_random<delta_beside, float>(6000, 80);
    check_random<exact_lolcats, sash::int8_rows>(7000, 80);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a cache can do

namespace {

constexpr sash::shape small{.heads = 4, .kv_heads = 2, .key_dim = 6, .value_dim = 5};

// Tokens for shape `small`, and their rows.
struct layer_of_tokens {
    test::stream tokens;
    explicit layer_of_tokens(int64 count, std::uint64_t seed = 1) : tokens(count, seed, small) {}

    template <class P>
    sash::tokens_of<P> part(int64 first, int64 count) const {
        return {tokens.query.in(first, count), tokens.key.in(first, count), tokens.value.in(first, count)};
    }
    template <class Cache>
    tensor rows(Cache& cache, int64 first, int64 count, const sash::options& how = {}) const {
        tensor out(count, small.heads, small.value_dim);
        sash::attend(part<typename Cache::policy_type>(first, count), cache, out.out(), how);
        return out;
    }
};

// A combination of somebody else's: the window counts half as much as it would.
struct halved {
    static constexpr bool divides_tokens = true, has_lse = false;
    constexpr sash::mixture operator()(int64, const sash::row_masses& of) const {
        const float window = of.window_mass / 2, linear = sash::rescale(of.linear_lse, 0), mass = window + linear;
        return {window / mass, linear / mass};
    }
};

const floats even{0.f};  // a window factor of one half

exact_lolcats lolcats_of(int64 window, int64 sinks) { return {{.window = window, .sinks = sinks}, {}, {even}}; }

template <class F>
std::string refused(F&& f) {
    try {
        f();
    } catch (const sash::error& e) { return e.what(); }
    return "";
}

}  // namespace

TEMPLATE_TEST_CASE("R08 hybrid: append, read, attend and a call without a cache give the same rows", "", exact_lolcats,
                   merged_terraces, merged) {
    const layer_of_tokens layer(140);
    const floats weights = numbers(3).several(4 * small.key_dim, 0.5f);
    for (const int64 window : {1, 8, 30})
        for (const int64 sinks : {0, 3}) {
            CAPTURE(window, sinks);
            TestType policy;
            policy.window = {.window = window, .sinks = sinks};
            if constexpr (requires { policy.linear.map.weights; })
                policy.linear.map = {.features = 4, .weights = weights};
            const auto all = sash::reference::attend(policy, small, layer.part<TestType>(0, 100), {});
            tensor stateless(100, small.heads, small.value_dim);
            sash::attend(policy, layer.part<TestType>(0, 100), stateless.out());
            CHECK(test::differs(stateless, all.out, {4e-6, 4e-5}) == "");

            sash::kv_cache<TestType> cache(policy, small, {}, {.piece = 32});
            sash::append(layer.part<TestType>(0, 57), cache);
            sash::append(layer.part<TestType>(57, 43), cache);
            const auto before = cache.save();
            for (const int64 first : {100, 117}) {  // several queries, further and further from the tokens
                const sash::input query = layer.tokens.query.in(100, 40);
                tensor out(40, small.heads, small.value_dim);
                sash::read(query, cache, out.out(), {.first_query = first});
                auto in = layer.part<TestType>(0, 100);
                in.query = query;
                CHECK(test::differs(out, sash::reference::attend(policy, small, in, {}, first).out, {4e-6, 4e-5}) ==
                      "");
            }
            CHECK(cache.save() == before);
            const tensor next = layer.rows(cache, 100, 40);
            const auto expected = sash::reference::attend(policy, small, layer.part<TestType>(0, 140), {});
            CHECK(test::differs(next, {expected.out.begin() + 100 * 20, expected.out.end()}, {4e-6, 4e-5}) == "");
        }
}

TEST_CASE("R23 R34 hybrid: no thread, no neighbour and no later token changes a bit") {
    const layer_of_tokens layer(200), other(200, 2);
    const auto policy = lolcats_of(16, 2);
    sash::kv_cache alone(policy, small), threads(policy, small), first(policy, small), second(policy, small),
        later(policy, small);
    const tensor expected = layer.rows(alone, 0, 200, {.run = sash::serial{}});
    CHECK(layer.rows(threads, 0, 200, {.run = sash::openmp{3}}) == expected);

    tensor out(200, small.heads, small.value_dim), beside(70, small.heads, small.value_dim);
    sash::request<sash::kv_cache<exact_lolcats>> batch[] = {
        {layer.part<exact_lolcats>(0, 200), &first, out.out(), {}},
        {other.part<exact_lolcats>(0, 70), &second, beside.out(), {}}};
    sash::attend(batch);
    CHECK(out == expected);

    layer_of_tokens changed = layer;
    for (tensor* t : {&changed.tokens.query, &changed.tokens.key, &changed.tokens.value})
        t->for_each([&](int64 token, int64 h, int64 d) {
            if (token >= 90) t->set(token, h, d, token == 90 ? NAN : 3);
        });
    const tensor prefix = changed.rows(later, 0, 200);
    for (int64 t = 0; t < 90; ++t)
        for (int64 h = 0; h < small.heads; ++h)
            for (int64 d = 0; d < small.value_dim; ++d) REQUIRE(prefix.get(t, h, d) == expected.get(t, h, d));
}

TEST_CASE("R12 hybrid: back over the border of a step, for every number of drafts") {
    using stepped = sash::hybrid<sash::terraced_window, sash::linear<>, sash::log_sum_exp>;
    const layer_of_tokens layer(120), drafts(40, 2);
    for (const int64 window : {1, 7, 11})
        for (const int64 length : {1, 20, 33, 44, 70})
            for (int64 count = 0; count <= 13; ++count) {
                CAPTURE(window, length, count);
                sash::kv_cache cache(stepped{.window = {.window = window, .sinks = 2}}, small, {},
                                     {.rollback_slack = 12});
                sash::append(layer.part<stepped>(0, length), cache);
                sash::kv_cache undisturbed = cache;
                sash::append(drafts.part<stepped>(0, count), cache);
                if (count <= 12) REQUIRE(cache.can_rollback(count));
                if (!cache.can_rollback(count)) continue;
                cache.rollback(count);
                REQUIRE(layer.rows(cache, length, 50) == layer.rows(undisturbed, length, 50));
            }
}

TEST_CASE("R13 R14 hybrid: forks, files and what was moved from") {
    const layer_of_tokens layer(150);
    const auto policy = lolcats_of(16, 2);
    sash::kv_cache cache(policy, small);
    layer.rows(cache, 0, 100);
    sash::kv_cache fork = cache, loaded(policy, small);
    const auto file = cache.save();
    CHECK(loaded.load(file) == file.size());
    const tensor expected = layer.rows(cache, 100, 50);
    CHECK(layer.rows(fork, 100, 50) == expected);
    CHECK(layer.rows(loaded, 100, 50) == expected);

    sash::kv_cache taken = std::move(fork);
    CHECK(fork.length() == 0);
    sash::kv_cache fresh(policy, small);
    CHECK(fork.save() == fresh.save());
    CHECK(layer.rows(fork, 0, 50) == layer.rows(fresh, 0, 50));
    taken.reset();
    fresh.reset();
    CHECK(layer.rows(taken, 0, 50) == layer.rows(fresh, 0, 50));

    // A file of other parts is refused: another window, other factors, another combination.
    const floats other_factor{1.f};
    sash::kv_cache wider(lolcats_of(17, 2), small), weighed(exact_lolcats{policy.window, {}, {other_factor}}, small);
    CHECK_THROWS_AS(wider.load(file), sash::error);
    CHECK_THROWS_AS(weighed.load(file), sash::error);
    sash::kv_cache merging(merged{.window = policy.window}, small);
    CHECK_THROWS_AS(merging.load(file), sash::error);
}

TEST_CASE("R09 hybrid: memory is bounded, and steady decoding allocates nothing") {
    test::poisoned_memory memory;
    const layer_of_tokens layer(1);
    sash::kv_cache cache(lolcats_of(40, 4), small, {}, {.memory = memory.source()});
    for (int i = 0; i < 200; ++i) layer.rows(cache, 0, 1, {.run = sash::serial{}});
    const int64 calls = memory.calls(), bytes = cache.bytes();
    for (int i = 0; i < 500; ++i) layer.rows(cache, 0, 1, {.run = sash::serial{}});
    CHECK(memory.calls() == calls);
    CHECK(cache.bytes() == bytes);
    CHECK(cache.stored() == 44);
    CHECK(cache.length() == 700);
}

TEST_CASE("hybrid: what cannot be is refused, and nothing has changed") {
    const layer_of_tokens layer(60);
    const floats two(2), logits(4);
    const auto contains = [](const std::string& text, const char* part) {
        return text.find(part) != std::string::npos;
    };
    const auto make = [](const exact_lolcats& p, const sash::score& s = {}) { sash::kv_cache cache(p, small, s); };
    CHECK(contains(refused([&] { make({{.window = 0}, {}, {}}); }), "window is 0"));
    CHECK(contains(refused([&] { make({{.window = 4}, {}, {two}}); }), "window_factors has 2"));
    CHECK(contains(refused([&] { make({{.window = 4}, {}, {{}, true}}); }), "affine"));
    CHECK(contains(refused([&] { make({{.window = 4}, {.normaliser = {.epsilon = 1e-6f}}, {}}); }), "epsilon"));
    CHECK(contains(refused([&] { make({{.window = 4}, {}, {}}, {.sink_logits = logits}); }), "sink_logits"));
    CHECK(contains(refused([&] {
                       sash::kv_cache cache(delta_beside{{.window = 4}, {}, {INFINITY, 0}}, small);
                   }),
                   "finite"));

    sash::kv_cache cache(lolcats_of(8, 1), small);
    layer.rows(cache, 0, 30);
    const auto before = cache.save();
    tensor out(10, small.heads, small.value_dim);
    floats lse(40);
    CHECK(contains(refused([&] { layer.rows(cache, 30, 10, {.lse = lse}); }), "no lse"));
    CHECK(contains(refused([&] { sash::read(layer.tokens.query.in(0, 10), cache, out.out(), {.first_query = 29}); }),
                   "first_query is 29"));
    CHECK(contains(refused([&] {
                       auto in = layer.part<exact_lolcats>(30, 10);
                       in.value = in.value.tokens_from(0, 9);
                       sash::attend(in, cache, out.out());
                   }),
                   "value has 9 tokens"));
    sash::kv_cache other(lolcats_of(8, 1), small);
    sash::request<sash::kv_cache<exact_lolcats>> batch[] = {{layer.part<exact_lolcats>(30, 10), &cache, out.out(), {}},
                                                            {layer.part<exact_lolcats>(0, 9), &other, out.out(), {}}};
    CHECK(contains(refused([&] { sash::attend(batch); }), "out has 10 tokens"));
    CHECK(cache.save() == before);
    CHECK(other.empty());
}

TEST_CASE("hybrid: a combination of the user's") {
    const layer_of_tokens layer(90);
    const sash::sliding_window window{.window = 12, .sinks = 2};
    sash::kv_cache mine(sash::hybrid<sash::sliding_window, sash::linear<>, halved>{window, {}, {}}, small);
    sash::kv_cache theirs(exact_lolcats{window, {}, {even}}, small);  // sigmoid(0) = 1/2
    CHECK(layer.rows(mine, 0, 90) == layer.rows(theirs, 0, 90));
}

TEST_CASE("R01 R02 terraced window: as a policy by itself, exact to the token") {
    const layer_of_tokens layer(230);
    for (const int64 window : {1, 3, 16, 64, 100})
        for (const int64 sinks : {0, 2, 70}) {
            const sash::terraced_window policy{.window = window, .sinks = sinks};
            CAPTURE(window, sinks);
            for (int64 i = 0; i < 230; ++i)
                for (int64 j = 0; j < 230; ++j)
                    REQUIRE(policy.sees(i, j) == (j <= i && (i / window - j / window <= 1 || j < sinks)));
            sash::kv_cache cache(policy, small, {}, {.piece = 50});
            const tensor prefill = layer.rows(cache, 0, 200);
            tensor decoded(30, small.heads, small.value_dim);
            for (int64 t = 0; t < 30; ++t)
                sash::attend(layer.part<sash::terraced_window>(200 + t, 1), cache, decoded.out(t, 1));
            const auto all = sash::reference::attend(policy, small, layer.tokens.query.in(), layer.tokens.key.in(),
                                                     layer.tokens.value.in());
            CHECK(test::differs(prefill, {all.out.begin(), all.out.begin() + 200 * 20}) == "");
            CHECK(test::differs(decoded, {all.out.begin() + 200 * 20, all.out.end()}) == "");
            CHECK(cache.stored() <= sinks + 2 * window);
        }
}
