// Lesson 3: linear attention. In place of keys and values a state of fixed size: with a feature map phi
//
//     S = sum_j phi(k_j) v_j^T        z = sum_j phi(k_j)        out_i = S^T phi(q_i) / (z · phi(q_i))
//
// (Katharopoulos et al. 2020). Nothing is cut off, and everything is blurred: what a token wrote can be read only
// through the state. A decay makes it forget: S = exp(g_t) S + phi(k_t) v_t^T.
#include "lesson.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

using sash::int64;

int main() {
    constexpr int64 tokens = 200, heads = 4, kv_heads = 2, dim = 32;
    const sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim};

    // ---- By hand: with keys and queries of zero every feature is 1, so a row is the mean of all values so far. Values
    // are 0, 1, 2 …
    {
        sash::kv_cache cache(sash::linear{}, {.head_dim = 1});
        const std::vector<float> zero(17);
        std::vector<float> count(17), rows(17), half(17);
        for (std::size_t i = 0; i < 17; ++i) count[i] = float(i), half[i] = float(i) / 2;
        sash::attend({zero, 17, 1, 1}, {zero, 17, 1, 1}, {count, 17, 1, 1}, cache, {rows, 17, 1, 1});
        lesson::expect_near(lesson::largest_difference(rows, half), 1e-5, "the mean of 0 … i is i / 2");
    }

    // ---- With a decay of log(1/2) each step back weighs half: the mean of 0 … i nears i - 1. What a token brings
    // beyond query, key and value is named; to leave out .decay, or to give it to a policy that takes none, does not
    // compile.
    {
        sash::kv_cache cache(sash::linear<sash::elu_plus_one, sash::per_head_and_token>{}, {.head_dim = 1});
        const std::vector<float> zero(17), halve(17, std::log(0.5f));
        std::vector<float> count(17), rows(17), expected(17);
        double weight = 0, sum = 0;
        for (std::size_t i = 0; i < 17; ++i) {
            count[i] = float(i);
            weight = weight / 2 + 1;
            sum = sum / 2 + double(i);
            expected[i] = float(sum / weight);
        }
        sash::attend({.query = {zero, 17, 1, 1},
                      .key = {zero, 17, 1, 1},
                      .value = {count, 17, 1, 1},
                      .decay = {halve, 17, 1, 1}},
                     cache, {rows, 17, 1, 1});
        lesson::say("position 16: the mean of all is 8, with half the weight at each step back it is ", rows[16]);
        lesson::expect_near(lesson::largest_difference(rows, expected), 1e-5, "forgetting by half a step");
    }

    // ---- In earnest, token by token and in one call, against the quadratic form of the formula in double.
    const std::vector<float> q = lesson::numbers(tokens * heads * dim, 1);
    const std::vector<float> k = lesson::numbers(tokens * kv_heads * dim, 2);
    const std::vector<float> v = lesson::numbers(tokens * kv_heads * dim, 3);
    const sash::input query(q, tokens, heads, dim), key(k, tokens, kv_heads, dim), value(v, tokens, kv_heads, dim);
    const auto shows = [&](const char* name, auto policy) {
        std::vector<float> rows(q.size()), by_one(q.size());
        const sash::output out(by_one, tokens, heads, dim);
        sash::kv_cache cache(policy, shape), again(policy, shape);
        sash::attend(query, key, value, cache, {rows, tokens, heads, dim});
        const int64 held = cache.bytes();
        for (int64 t = 0; t < tokens; ++t)
            sash::attend(query.tokens_from(t, 1), key.tokens_from(t, 1), value.tokens_from(t, 1), again,
                         out.tokens_from(t, 1));

        lesson::say(name, ": ", cache.length(), " tokens seen, ", cache.stored(), " stored, ", held / 1024,
                    " KiB held");
        const std::vector<double> expected = sash::reference::attend(policy, shape, query, key, value).out;
        lesson::expect_near(lesson::largest_difference(rows, expected), 1e-5, "one call, against the quadratic form");
        lesson::expect_near(lesson::largest_difference(by_one, expected), 1e-5,
                            "token by token, against the quadratic form");
        for (int more = 0; more < 10; ++more) sash::append(key, value, cache);
        lesson::expect(cache.stored() == 0 && cache.bytes() == held, "ten times as many tokens, the same memory");
    };
    shows("elu(x) + 1", sash::linear{});
    shows("relu", sash::linear<sash::relu>{});

    // ---- A learned map. Its weights are views: they stay yours and must outlive the cache. These have not been
    // trained.
    const std::vector<float> to_query = lesson::numbers(dim * dim, 4), to_key = lesson::numbers(dim * dim, 5);
    shows("Hedgehog", sash::linear<sash::hedgehog>{.map = {.query_weights = to_query, .key_weights = to_key}});
    return lesson::exit_code();
}
