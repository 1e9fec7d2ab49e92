// Every system by its name, through the verb: against the reference in both its forms, in every cut, rolled back.
#include "support/catch.hpp"
#include "support/linear_text.hpp"

#include <sash/reference.hpp>

namespace {

using namespace linear_text;
using namespace sash;

// Weights that the learned and random maps look at.
struct weights {
    floats query, key, gamma, beta, random_rows;
    weights(std::mt19937& random, const shape& s, int64 f) {
        std::normal_distribution<float> normal(0, .4f);
        for (floats* x : {&query, &key}) {
            x->resize(at(s.heads * s.key_dim * f));
            for (float& e : *x) e = normal(random);
        }
        for (floats* x : {&gamma, &beta}) {
            x->resize(at(s.key_dim));
            for (float& e : *x) e = 1 + normal(random);
        }
        std::normal_distribution<float> unit;
        random_rows.resize(at(s.key_dim * f));
        for (float& e : random_rows) e = unit(random);
    }
};

// Calls f(name, policy) for every system of systems.hpp that is a type of its own.
template <class F>
void for_each_system(const text& x, const weights& w, int64 f, F&& call) {
    const std::span<const float> one_key(w.key.data(), at(x.dims.key_dim * f));
    call("katharopoulos", systems::katharopoulos{.normaliser = {.epsilon = 1e-6f}});
    call("t2r", systems::t2r{{.features = f, .query_weights = w.query, .key_weights = one_key}});
    call("performer", systems::performer{{.features = f, .weights = w.random_rows}});
    call("cosformer", systems::cosformer{.map = {.most_positions = 64}, .normaliser = {.least = 1e-6f}});
    call("based", systems::based{.normaliser = {.epsilon = 1e-6f}});
    call("rebased",
         systems::rebased{.map = {.query_gamma = w.gamma, .key_beta = w.beta}, .normaliser = {.epsilon = 1e-5f}});
    for (const hedgehog_form form : {hedgehog_form::h1, hedgehog_form::h2, hedgehog_form::h3, hedgehog_form::h4})
        call("hedgehog",
             systems::hedgehog{{.form = form, .features = f, .query_weights = w.query, .key_weights = w.key}});
    call("supra", systems::supra{.decay = alibi_decays(x.dims.gate_heads)});
    call("retnet", systems::retnet{.decay = retnet_decays(x.dims.gate_heads)});
    call("lightning", systems::lightning{.decay = lightning_decays(x.dims.gate_heads, 2, 9)});
    call("gla", systems::gla{});
    call("simple_gla", systems::simple_gla{});
    call("liger_linear", systems::liger_linear{});
    call("mamba2", systems::mamba2{});
    call("rwkv6", systems::rwkv6{.update = {x.u}});
    call("rwkv7", systems::rwkv7{});
    call("deltanet", systems::deltanet{});
    call("gated_deltanet", systems::gated_deltanet{});
    call("kda", systems::kda{});
    call("performer that forgets", linear<favor, per_channel_and_token>{{.features = f, .weights = w.random_rows}});
    call("performer that forgets by head",
         linear<favor, per_head_and_token>{{.features = f, .weights = w.random_rows}});
}

// The gates of a channel decay are as many as the features; those of `text` are as many as the key dim.
template <class P>
tokens_of<P> tokens_for(const P& policy, const text& x, const floats& wide, int64 first, int64 n) {
    tokens_of<P> in = x.slice<P>(first, n);
    if constexpr (P::needs_decay)
        if (ask::per_channel<decltype(P::decay)>)
            in.decay = x.view(wide, x.dims.gate_heads, policy.features(x.dims.key_dim), first, n);
    return in;
}

const shape grouped{.heads = 6, .kv_heads = 2, .key_dim = 9, .value_dim = 21};

}  // namespace

TEST_CASE("R22: every system is its quadratic form and its recurrence, in short calls to the bit, and rolls back") {
    const unsigned seed = GENERATE(601u, 602u);
    std::mt19937 random(seed);
    const int64 f = 7;
    const text x(random, grouped, 45);
    const weights w(random, x.dims, f);
    floats wide(at(x.tokens * x.dims.gate_heads * 64));
    for (float& g : wide) g = random() % 4 ? -float(random() % 1024) / 700 : 0.0f;
    for_each_system(x, w, f, [&]<class P>(const char* name, const P& policy) {
        CAPTURE(seed, name);
        const auto in = [&](int64 first, int64 n) { return tokens_for(policy, x, wide, first, n); };
        const reference::result expected = reference::attend(policy, x.dims, in(0, x.tokens));
        CHECK(far_apart(reference::recur(policy, x.dims, in(0, x.tokens)).out, expected.out, 1e-11) == "");

        floats whole = unwritten(x), lse(at(x.tokens * x.dims.heads));
        kv_cache<P> one(policy, x.dims, {}, {.rollback_slack = 20});
        options how;
        if (P::has_normaliser) how.lse = lse;
        attend(in(0, x.tokens), one, x.rows(whole, 0, x.tokens), how);
        CHECK(far_apart(whole, expected.out, 2e-5) == "");
        if (P::has_normaliser) CHECK(far_apart(lse, expected.lse, 2e-5) == "");

        // What a cache gave for its last tokens it gives again, to the bit, when they have been taken back.
        const auto check_rollback = [&](const kv_cache<P>& cache, const floats& given) {
            for (const int64 n : {1, 7, 20}) {
                kv_cache<P> back = cache;
                back.rollback(n);
                floats again = given;
                attend(in(x.tokens - n, n), back, x.rows(again, x.tokens - n, n));
                CHECK(same_bits(again, given));
            }
        };
        check_rollback(one, whole);

        floats singly;
        for (const positions& cut : {positions(at(x.tokens), 1), random_cut(random, x.tokens)}) {
            kv_cache<P> parts(policy, x.dims, {}, {.rollback_slack = 20});
            floats out = unwritten(x);
            int64 first = 0;
            for (const int64 n : cut) attend(in(first, n), parts, x.rows(out, first, n)), first += n;
            CHECK(far_apart(out, expected.out, 2e-5) == "");
            if (singly.empty()) singly = out;
            CHECK(same_bits(out, singly));
            check_rollback(parts, out);
        }
        kv_cache<P> plain(policy, x.dims);  // without slack: tokens may wait beside the states
        floats waited = unwritten(x);
        int64 next = 0;
        for (const int64 n : random_cut(random, x.tokens))
            attend(in(next, n), plain, x.rows(waited, next, n)), next += n;
        CHECK(far_apart(waited, expected.out, 2e-5) == "");
        floats stateless = waited;  // the last twenty, by a call without a cache
        tokens_of<P> last = in(0, x.tokens);
        last.query = last.query.tokens_from(x.tokens - 20, 20);
        attend(policy, last, x.rows(stateless, x.tokens - 20, 20));
        CHECK(same_bits(stateless, waited));
    });
}

TEST_CASE("R13: a performer's largest key goes along with forks and files") {
    std::mt19937 random(603);
    const text x(random, {.heads = 2, .head_dim = 6}, 30);
    const weights w(random, x.dims, 9);
    using P = systems::performer;
    const P policy{{.features = 9, .weights = w.random_rows}};
    kv_cache<P> cache(policy, x.dims, {}, {.rollback_slack = 4}), loaded = cache.empty_copy();
    floats out = unwritten(x), other = unwritten(x);
    feed(cache, x, 0, 20, out);
    kv_cache<P> fork = cache;
    loaded.load(cache.save());
    feed(cache, x, 20, 10, out);
    for (kv_cache<P>* each : {&fork, &loaded}) {
        each->rollback(3);
        feed(*each, x, 17, 13, other);
        CHECK(std::memcmp(other.data() + 20 * x.row(), out.data() + 20 * x.row(), 10 * x.row() * sizeof(float)) == 0);
    }
    cache.reset();
    feed(cache, x, 0, 20, other);
    CHECK(std::memcmp(other.data(), out.data(), 20 * x.row() * sizeof(float)) == 0);
}

TEST_CASE("R16: cosFormer and rotary positions count on over cuts and after a rollback") {
    std::mt19937 random(604);
    const text x(random, {.heads = 4, .kv_heads = 2, .head_dim = 8}, 30);
    const rope_table table = rope_frequencies(8);
    const score turned{.rotary = {.frequencies = {table.data(), table.size()}, .by = rotates::library}};
    using P = systems::retnet;
    const P policy{.decay = retnet_decays(2)};
    const auto expected = reference::attend(policy, x.dims, x.slice<P>(0, 30), turned);
    kv_cache<P> cache(policy, x.dims, turned, storage{.rollback_slack = 5});
    floats out = unwritten(x);
    feed(cache, x, 0, {9, 1, 12}, out);
    cache.rollback(4);
    feed(cache, x, 18, 12, out);
    CHECK(far_apart(out, expected.out, 1e-5) == "");
}

TEST_CASE("systems: the scale is 1 / sqrt(key_dim), or 1, unless the scores say") {
    const floats one(4, 1.0f), none(1, 0.0f);
    const auto first_row = [&](const auto& policy, const score& s) {
        using P = std::remove_cvref_t<decltype(policy)>;
        kv_cache<P> cache(policy, {.key_dim = 4, .value_dim = 1}, s);
        floats out(1);
        tokens_of<P> in = detail::query_alone<P>({one, 1, 1, 4});
        in.key = {one, 1, 1, 4};
        in.value = input(one.data(), 1, 1, 1);
        if constexpr (P::needs_decay) in.decay = {none, 1, 1, 1};
        attend(in, cache, {out, 1, 1, 1});
        return out[0];
    };
    CHECK(first_row(systems::simple_gla{}, {}) == 2);
    CHECK(first_row(systems::mamba2{}, {}) == 4);
    CHECK(first_row(systems::mamba2{}, {.scale = .25f}) == 1);
    CHECK(first_row(systems::katharopoulos{}, {}) == 1);
    CHECK(first_row(systems::katharopoulos{}, {.scale = 1}) == 1);
}

TEST_CASE("R4: a scale is refused where rows are divided by their sum, in which it cancels") {
    for (const float scale : {.5f, -1.0f, 2.0f})
        CHECK_THROWS_WITH(kv_cache(systems::katharopoulos{}, {.head_dim = 4}, {.scale = scale}),
                          Catch::Matchers::Contains("scale is ") && Catch::Matchers::Contains("cancels"));
    CHECK_THROWS_AS((kv_cache<linear<elu_plus_one, per_head_and_token>>({}, {.head_dim = 4}, {.scale = .5f})), error);
    CHECK_NOTHROW(
        kv_cache(systems::lolcats{.window = {.window = 8}}, {.head_dim = 4}, {.scale = .5f}));  // the window's
}
