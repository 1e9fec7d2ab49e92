// Rules 22 to 25: the state of linear attention.
#include "support/catch.hpp"
#include "support/probes.hpp"

using namespace probes;
using sash::bfloat16;
using sash::float16;
using sash::kv_cache;
using sash::linear;

namespace {

constexpr float endless = std::numeric_limits<float>::infinity();

using gated = linear<sash::elu_plus_one, sash::per_head_and_token>;
using gated_sum = linear<sash::identity, sash::per_head_and_token, sash::additive, sash::no_normaliser>;

// K = Q = 0 (phi = 1), V[j] = j: row i is i / 2.
floats halves(int64 tokens) {
    floats h;
    for (int64 i = 0; i < tokens; ++i) h.push_back(static_cast<float>(i) / 2);
    return h;
}

const sash::shape some{.heads = 4, .kv_heads = 2, .key_dim = 5, .value_dim = 19};

std::vector<positions> cuts_and_more(int64 tokens) {
    std::vector<positions> cuts = cuts_of(tokens);
    cuts.push_back({tokens - 1, 1});
    cuts.push_back({});
    for (int64 left = tokens; left > 0; left -= cuts.back().back()) cuts.back().push_back(std::min<int64>(5, left));
    return cuts;
}

// A history with a decay for each token and KV head, and its rows by the sum over keys:
//     out_i = sum_j a_ij v_j / sum_j a_ij,        a_ij = phi(q_i)·phi(k_j) exp(g_{j+1} + … + g_i)
//     out_i = scale · sum_j a_ij v_j              without a normaliser, and with phi(x) = x
struct gated_history : history {
    floats decay;  // [tokens, kv_heads]
    gated_history(int64 n, sash::shape s) : history(contents(n, s)), decay(index(n * s.kv_heads)) {}
    sash::input decays(int64 first, int64 count) const {
        return {decay.data() + first * shape.kv_heads, count, shape.kv_heads, 1};
    }

    std::vector<double> rows(bool normalised) const {
        const auto phi = [&](double x) { return !normalised ? x : x > 0 ? x + 1 : std::exp(x); };
        std::vector<double> out;
        for (int64 i = 0; i < tokens; ++i)
            for (int64 head = 0; head < shape.heads; ++head) {
                const int64 kv = head / (shape.heads / shape.kv_heads);
                double mass = 0, since = 0;
                std::vector<double> sum(index(shape.value_dim));
                for (int64 j = i; j >= 0; --j) {
                    double weight = 0;
                    for (int64 c = 0; c < shape.key_dim; ++c)
                        weight += phi(query[index((i * shape.heads + head) * shape.key_dim + c)]) *
                                  phi(key[index((j * shape.kv_heads + kv) * shape.key_dim + c)]);
                    weight *= std::exp(since);
                    since += decay[index(j * shape.kv_heads + kv)];
                    mass += weight;
                    for (int64 c = 0; c < shape.value_dim; ++c)
                        sum[index(c)] += weight * value[index((j * shape.kv_heads + kv) * shape.value_dim + c)];
                }
                for (const double x : sum) out.push_back(normalised ? x / mass : x / std::sqrt(double(shape.key_dim)));
            }
        return out;
    }
};

template <class Cache>
floats fed_with_decay(Cache& cache, const gated_history& h, const positions& cut, const sash::runner& run = {}) {
    floats out(index(h.tokens * h.row_floats()), not_a_number);
    int64 first = 0;
    for (const int64 n : cut) {
        sash::attend({.query = h.queries(first, n),
                      .key = h.keys(first, n),
                      .value = h.values(first, n),
                      .decay = h.decays(first, n)},
                     cache, h.history::rows(out, first, n), {.run = run});
        first += n;
    }
    return out;
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------------- R22

TEMPLATE_TEST_CASE("R22: A10 every append goes on with the state", "", float, float16, bfloat16) {
    const history h = uniform(17);
    for (const positions& cut : {positions{17}, positions(17, 1), positions{5, 5, 5, 2}, positions{16, 1}}) {
        kv_cache<linear<>, TestType> cache({}, h.shape);
        const floats out = fed(cache, h, cut).out;
        CHECK(difference(out, halves(17)) == "");
        CHECK((std::abs(out[5] - 2.5f) < 1e-5 && std::abs(out[9] - 4.5f) < 1e-5));  // a dropped state gives 5 and 7
    }
    for (const way& w : every_way<TestType>(17)) {
        CAPTURE(w.name);
        CHECK(difference(rows_by<TestType>(w, linear{}, h).out, halves(17)) == "");
    }
}

TEMPLATE_TEST_CASE("R22: in every form, cut and runner the rows are those of the sum over keys, and the state is one",
                   "", float, bfloat16) {
    for (const int64 tokens : {40, 150}) {
        const history h = contents(tokens, some);
        const exact_rows expected = linear_rows(h);
        for (const way& w : every_way<TestType>(tokens)) {
            CAPTURE(tokens, w.name);
            CHECK(difference(rows_by<TestType>(w, linear{}, h), expected, 3) == "");
        }
        floats after;
        for (const positions& cut : cuts_and_more(tokens)) {  // the state, by what it answers
            kv_cache<linear<>, TestType> cache({}, some);
            fed(cache, h, cut);
            rows r = unwritten(h);
            sash::read(h.queries(0, tokens), std::as_const(cache), h.rows(r.out, 0, tokens));
            if (after.empty()) after = r.out;
            CAPTURE(tokens, cut.size());
            CHECK(difference(r.out, after) == "");
        }
    }
}

TEST_CASE("R22: the token itself is in its row") {
    const history h = contents(1, some);
    kv_cache cache(linear{}, some);
    floats out = fed(cache, h, {1}).out;
    for (int64 head = 0; head < 4; ++head)  // alone, it weighs one
        CHECK(difference(floats(out.begin() + head * 19, out.begin() + (head + 1) * 19),
                         floats(h.value.begin() + head / 2 * 19, h.value.begin() + (head / 2 + 1) * 19)) == "");
    history with_zero(1, {.key_dim = 2, .value_dim = 3});
    with_zero.query = with_zero.key = {1, 2};
    with_zero.value = {3, 4, 5};
    kv_cache products(linear<sash::identity, sash::no_decay, sash::additive, sash::no_normaliser>{}, with_zero.shape,
                      {.scale = .5f});
    CHECK(difference(fed(products, with_zero, {1}).out, floats{7.5f, 10, 12.5f}) == "");  // (1 + 4) / 2 · v
}

TEST_CASE("R22: with a decay too, normalised or not") {
    gated_history h(120, some);
    for (int64 n = 0; n < 240; ++n) h.decay[index(n)] = -.3f * (content(n) + 1);
    for (const positions& cut : cuts_and_more(120))
        for (const named_runner& by : runners()) {
            CAPTURE(cut.size(), by.name);
            kv_cache<gated> weighted({}, some);
            CHECK(difference(fed_with_decay(weighted, h, cut, by.run), h.rows(true), 3) == "");
            kv_cache<gated_sum> summed({}, some);
            CHECK(difference(fed_with_decay(summed, h, cut, by.run), h.rows(false), 10) == "");
        }
}

TEST_CASE("R22: an append without rows, then one with, and reads in between, are one sequence") {
    const history h = contents(60, some);
    const exact_rows expected = linear_rows(h);
    kv_cache cache(linear{}, some);
    sash::append(h.keys(0, 33), h.values(0, 33), cache);
    rows r = unwritten(h), again = r;
    sash::read(h.queries(32, 1), std::as_const(cache), h.rows(r.out, 32, 1));
    sash::read(h.queries(32, 1), std::as_const(cache), h.rows(again.out, 32, 1));  // a read changes nothing
    CHECK(difference_in_bits(r, again) == "");
    sash::attend(h.queries(33, 27), h.keys(33, 27), h.values(33, 27), cache, h.rows(r.out, 33, 27));
    CHECK(difference(floats(r.out.begin() + 32 * 76, r.out.end()),
                     std::vector<double>(expected.out.begin() + 32 * 76, expected.out.end()), 3) == "");
    CHECK_THROWS_AS(sash::read(h.queries(0, 1), std::as_const(cache), h.rows(r.out, 0, 1), {.first_query = 3}),
                    sash::error);
}

// ----------------------------------------------------------------------------------------------------------------- R23

TEST_CASE("R23: what follows changes no bit of what came before") {
    const history h = contents(200, some);
    kv_cache whole(linear{}, some);
    const rows all = fed(whole, h, {200});
    for (const int64 tokens : {1, 2, 15, 16, 17, 63, 64, 65, 128, 199})
        for (const float behind : {0.f, not_a_number, endless}) {
            history other = h;
            std::fill(other.key.begin() + tokens * 10, other.key.end(), behind);
            std::fill(other.value.begin() + tokens * 38, other.value.end(), behind);
            std::fill(other.query.begin() + tokens * 20, other.query.end(), behind);
            kv_cache cache(linear{}, some);
            const rows r = fed(cache, other, {200});
            CAPTURE(tokens, behind);
            CHECK(difference_in_bits(floats(r.out.begin(), r.out.begin() + tokens * 76),
                                     floats(all.out.begin(), all.out.begin() + tokens * 76)) == "");
            kv_cache alone(linear{}, some);
            CHECK(difference(fed(alone, h, {tokens, 200 - tokens}), linear_rows(h), 3) == "");
        }
}

TEST_CASE("R23: short calls: what follows, in the same call or the next, changes no bit of what came before") {
    const history h = contents(31, some);
    kv_cache whole(linear{}, some);
    const rows all = fed(whole, h, {31});
    for (int64 tokens = 1; tokens < 31; ++tokens) {
        kv_cache alone(linear{}, some);
        CAPTURE(tokens);
        CHECK(difference_in_bits(fed(alone, h, {tokens, 31 - tokens}), all) == "");
    }
}

TEST_CASE("R23: the same of softmax policies: later tokens change no bit of earlier rows") {
    const history h = contents(300, {.heads = 4, .kv_heads = 2, .head_dim = 5});
    const auto first_rows = [&](const history& of, int64 tokens, const auto& policy, int64 key_piece) {
        kv_cache cache(policy, of.shape);
        const rows r = fed(cache, of, {300}, {.run = sash::serial{}, .key_piece = key_piece});
        return floats(r.out.begin(), r.out.begin() + tokens * 20);
    };
    for (const int64 tokens : {1, 17, 64, 100, 299})
        for (const float behind : {0.f, not_a_number, endless, 1e30f})
            for (const int64 piece : {0, 10}) {
                history other = h;
                std::fill(other.key.begin() + tokens * 10, other.key.end(), behind);
                std::fill(other.value.begin() + tokens * 10, other.value.end(), behind);
                std::fill(other.query.begin() + tokens * 20, other.query.end(), behind);
                CAPTURE(tokens, behind, piece);
                CHECK(difference_in_bits(first_rows(other, tokens, sash::full{}, piece),
                                         first_rows(h, tokens, sash::full{}, piece)) == "");
                CHECK(difference_in_bits(
                          first_rows(other, tokens, sash::sliding_window{.window = 70, .sinks = 2}, piece),
                          first_rows(h, tokens, sash::sliding_window{.window = 70, .sinks = 2}, piece)) == "");
            }
}

TEST_CASE("R23: no tokens add and decay nothing") {
    gated_history h(30, some);
    std::fill(h.decay.begin(), h.decay.end(), -.5f);
    kv_cache<gated> cache({}, some, {}, {.rollback_slack = 3});
    fed_with_decay(cache, h, {20});
    const auto before = cache.save();
    sash::append({.query = {}, .key = h.keys(0, 0), .value = h.values(0, 0), .decay = h.decays(0, 0)}, cache);
    sash::attend({.query = h.queries(0, 0), .key = h.keys(0, 0), .value = h.values(0, 0), .decay = h.decays(0, 0)},
                 cache, {static_cast<float*>(nullptr), 0, 4, 19});
    CHECK((cache.save() == before));
}

TEST_CASE("R23: features and columns that only pad add nothing, whatever memory held") {
    for (const int64 key_dim : {1, 3, 15, 16, 17, 33})
        for (const int64 value_dim : {1, 2, 16, 31, 70}) {
            const history h = contents(50, {.heads = 2, .kv_heads = 1, .key_dim = key_dim, .value_dim = value_dim});
            const auto over = [&](int pattern) {
                poisoned_memory memory(pattern);
                sash::workspace scratch(0, memory.source());
                kv_cache cache(linear{}, h.shape, {}, {.rollback_slack = 2, .memory = memory.source()});
                return fed(cache, h, {20, 1, 29}, {.workspace = &scratch});
            };
            CAPTURE(key_dim, value_dim);
            const rows r = over(0xff);
            CHECK(difference(r, linear_rows(h), 3) == "");
            CHECK(difference_in_bits(over(0), r) == "");
        }
}

// ----------------------------------------------------------------------------------------------------------------- R24

TEMPLATE_TEST_CASE("R24: the state is fp32, whatever the element and the inputs are", "", float, float16, bfloat16) {
    const int64 tokens = 100'000;
    const TestType zero(0.f), one(1.f);
    kv_cache<linear<>, TestType> cache({}, {.head_dim = 1});
    std::vector<TestType> values;
    for (int64 j = 0; j < tokens; ++j) values.push_back(TestType(j % 2 ? 1.f : 0.f));
    sash::append({&zero, tokens, 1, 1, 0, 0}, {values, tokens, 1, 1}, cache);
    floats out(1, not_a_number), lse(1, not_a_number);
    sash::read({&one, 1, 1, 1}, cache, {out, 1, 1, 1}, {.lse = lse});
    CHECK(difference(out, floats{.5f}) == "");
    CHECK(difference(lse, std::vector<double>{std::log(2.0 * double(tokens))}) == "");  // phi(1) = 2
}

TEST_CASE("R24: a row is divided by the sum of all keys, decayed, not by the last") {
    gated_history h(40, {.heads = 1, .kv_heads = 1, .key_dim = 3, .value_dim = 2});
    for (int64 j = 0; j < 40; ++j) h.decay[index(j)] = -.1f * static_cast<float>(j % 5);
    std::fill(h.value.begin(), h.value.end(), 1.f);  // a mean of ones is one
    kv_cache<gated> cache({}, h.shape);
    CHECK(difference(fed_with_decay(cache, h, {40}), floats(80, 1.f)) == "");
    kv_cache<linear<>> plain({}, h.shape);
    CHECK(difference(fed(plain, h, {13, 27}).out, floats(80, 1.f)) == "");
}

TEST_CASE("R24: decays of any strength: no factor above one is ever formed") {
    for (const float g : {-0.f, -1e-6f, -1.f, -20.f, -88.f, -104.f, -1000.f, -1e30f, -endless})
        for (const positions& cut : cuts_and_more(130)) {
            gated_history h(130, some);
            std::fill(h.decay.begin(), h.decay.end(), g);
            CAPTURE(g, cut.size());
            kv_cache<gated> weighted({}, some);
            CHECK(difference(fed_with_decay(weighted, h, cut), h.rows(true), 3) == "");
            kv_cache<gated_sum> summed({}, some);
            CHECK(difference(fed_with_decay(summed, h, cut), h.rows(false), 10) == "");
        }
}

TEST_CASE("R24: one token that forgets all between tokens that forget nothing") {
    gated_history h(100, some);
    for (const int64 at : {0, 1, 50, 63, 64, 99}) {
        std::fill(h.decay.begin(), h.decay.end(), 0.f);
        h.decay[index(2 * at)] = -endless;  // in the first gate head only
        kv_cache<gated> cache({}, some);
        CAPTURE(at);
        CHECK(difference(fed_with_decay(cache, h, {100}), h.rows(true), 3) == "");
    }
}

TEST_CASE("R24: a factor above one, or NaN, is refused before anything is written") {
    gated_history h(10, some);
    kv_cache<gated> cache({}, some);
    fed_with_decay(cache, h, {5});
    const auto before = cache.save();
    floats out(index(10 * h.row_floats()), 7.f);
    for (const float bad : {1e-6f, .9f, endless, not_a_number, -not_a_number})
        for (const int64 at : {10, 13, 19}) {
            gated_history wrong = h;
            wrong.decay[index(at)] = bad;
            CHECK(refusal([&] {
                      sash::attend({.query = wrong.queries(5, 5),
                                    .key = wrong.keys(5, 5),
                                    .value = wrong.values(5, 5),
                                    .decay = wrong.decays(5, 5)},
                                   cache, {out, 5, 4, 19});
                  }).find("decay") != std::string::npos);
            CHECK_THROWS_AS(
                sash::append(
                    {.query = {}, .key = wrong.keys(5, 5), .value = wrong.values(5, 5), .decay = wrong.decays(5, 5)},
                    cache),
                sash::error);
            CHECK_THROWS_AS(sash::attend(gated{},
                                         {.query = wrong.queries(0, 10),
                                          .key = wrong.keys(0, 10),
                                          .value = wrong.values(0, 10),
                                          .decay = wrong.decays(0, 10)},
                                         {out, 10, 4, 19}),
                            sash::error);
        }
    CHECK(out == floats(out.size(), 7.f));
    CHECK((cache.save() == before));
}

TEST_CASE("R24: a row whose features are all zero is 0, and its lse -inf") {
    history h(5, {.key_dim = 2, .value_dim = 3});
    for (int64 j = 0; j < 5; ++j) {
        std::fill_n(h.query.begin() + 2 * j, 2, j == 3 ? -1.f : 1.f);
        std::fill_n(h.key_row(j), 2, j < 2 ? -1.f : 1.f);  // nothing is written before token 2
        std::fill_n(h.value_row(j), 3, 4.f);
    }
    for (const positions& cut : cuts_of(5)) {
        kv_cache cache(linear<sash::relu>{}, h.shape);
        const rows r = fed(cache, h, cut);
        for (int64 i = 0; i < 5; ++i) {
            const bool sees = i >= 2 && i != 3;
            CHECK(r.out[index(3 * i)] == (sees ? 4.f : 0.f));
            CHECK((r.lse[index(i)] == -endless) != sees);
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------- R25

TEST_CASE("R25: a state is rolled back by replay, to the bit, as far as its slack; without slack not at all") {
    gated_history h(80, some);
    for (int64 n = 0; n < 160; ++n) h.decay[index(n)] = -.2f * (content(n) + 1);
    for (const int64 slack : {0, 1, 5, 16, 17, 40})
        for (const int64 length : {1, 3, 20, 50}) {
            kv_cache<gated> cache({}, some, {}, {.rollback_slack = slack});
            fed_with_decay(cache, h, {length});
            for (const int64 drafts : {1, 5, 16, 17, 30})
                for (int64 back = 1; back <= drafts; back += drafts > 5 ? 5 : 1) {
                    CAPTURE(slack, length, drafts, back);
                    kv_cache<gated> fork = cache;
                    sash::append({.query = {},
                                  .key = h.keys(50, drafts),
                                  .value = h.values(50, drafts),
                                  .decay = h.decays(50, drafts)},
                                 fork);
                    const auto before = fork.save();
                    CHECK(fork.can_rollback(back) == (back <= slack));
                    if (back > slack) {
                        CHECK_THROWS_AS(fork.rollback(back), sash::error);
                        CHECK((fork.save() == before));
                        continue;
                    }
                    fork.rollback(back);
                    kv_cache<gated> never = cache;
                    const int64 stay = drafts - back;
                    sash::append({.query = {},
                                  .key = h.keys(50, stay),
                                  .value = h.values(50, stay),
                                  .decay = h.decays(50, stay)},
                                 never);
                    floats a(index(80 * h.row_floats())), b = a;
                    sash::read(h.queries(0, 80), std::as_const(fork), h.history::rows(a, 0, 80));
                    sash::read(h.queries(0, 80), std::as_const(never), h.history::rows(b, 0, 80));
                    REQUIRE(difference_in_bits(a, b) == "");
                    REQUIRE(difference_in_bits(fed_with_decay(fork, h, {3, 1}), fed_with_decay(never, h, {3, 1})) ==
                            "");
                }
        }
}

TEST_CASE("R25: a fork, a checkpoint, a saved and loaded state can be rolled back as the original can") {
    const history h = contents(60, some);
    kv_cache cache(linear{}, some, {}, {.rollback_slack = 6});
    fed(cache, h, {40});
    kv_cache fork = cache, loaded = cache.empty_copy();
    loaded.load(cache.save());
    const kv_cache then = cache.checkpoint();
    fed(cache, h, {9});
    cache.restore(then);
    for (kv_cache<linear<>>* c : {&cache, &fork, &loaded}) {
        c->rollback(6);
        floats out(index(26 * h.row_floats()), not_a_number);
        sash::attend(h.queries(34, 26), h.keys(34, 26), h.values(34, 26), *c, {out, 26, 4, 19});
        const exact_rows expected = linear_rows(h);
        CHECK(difference(out, std::vector<double>(expected.out.begin() + 34 * 76, expected.out.end()), 3) == "");
    }
}

TEST_CASE("R25: states do not alias: a batch with one cache twice is refused, assignment to itself is safe") {
    const history h = contents(10, some);
    kv_cache cache(linear{}, some);
    fed(cache, h, {5});
    const auto before = cache.save();
    floats out(index(2 * h.row_floats()), 7.f);
    using request = sash::request<kv_cache<linear<>>>;
    request requests[2];
    for (int n = 0; n < 2; ++n)
        requests[n] = {.tokens = {.query = h.queries(5, 1), .key = h.keys(5, 1), .value = h.values(5, 1)},
                       .cache = &cache,
                       .out = {out.data() + n * 76, 1, 4, 19},
                       .lse = {}};
    CHECK_THROWS_AS(sash::attend(requests), sash::error);
    CHECK(out == floats(out.size(), 7.f));
    kv_cache<linear<>>& itself = cache;
    cache = itself;
    cache.restore(itself);
    cache.load(cache.save());
    CHECK((cache.save() == before));
}
