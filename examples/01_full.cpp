// Lesson 1: full attention. A token sees itself and every token before it:
//
//     out_i = sum_{j <= i} p_ij v_j        p_ij = exp(q_i · k_j / sqrt(dim) - lse_i)        sum_{j <= i} p_ij = 1
//
// Keys and values live in a cache. One verb appends new tokens and gives back their rows.
#include "lesson.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

int main() {
    using sash::int64;
    constexpr int64 tokens = 100, prompt = 90;
    constexpr int64 heads = 8, kv_heads = 2, dim = 64;  // four query heads share a KV head: grouped-query attention
    const sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim};

    const std::vector<float> q = lesson::numbers(tokens * heads * dim, 1);
    const std::vector<float> k = lesson::numbers(tokens * kv_heads * dim, 2);
    const std::vector<float> v = lesson::numbers(tokens * kv_heads * dim, 3);
    const sash::input query(q, tokens, heads, dim), key(k, tokens, kv_heads, dim), value(v, tokens, kv_heads, dim);

    std::vector<float> rows(q.size()), lse(tokens * heads);
    const sash::output out(rows, tokens, heads, dim);

    // ---- The prompt in one call (prefill), then one token a call (decoding).
    sash::kv_cache cache(sash::full{}, shape);
    cache.reserve(tokens);
    sash::attend(query.tokens_from(0, prompt), key.tokens_from(0, prompt), value.tokens_from(0, prompt), cache,
                 out.tokens_from(0, prompt), {.lse = std::span(lse).first(prompt * heads)});
    for (int64 t = prompt; t < tokens; ++t)
        sash::attend(query.tokens_from(t, 1), key.tokens_from(t, 1), value.tokens_from(t, 1), cache,
                     out.tokens_from(t, 1),
                     {.lse = std::span(lse).subspan(static_cast<std::size_t>(t * heads), heads)});

    lesson::say("full attention: ", cache.length(), " tokens seen, ", cache.stored(), " stored, ", cache.bytes() / 1024,
                " KiB held");

    // The textbook, in double, over the whole history.
    const sash::reference::result expected = sash::reference::attend(sash::full{}, shape, query, key, value);
    lesson::expect_near(lesson::largest_difference(rows, expected.out), 1e-5,
                        "prefill and decoding, against the textbook");
    lesson::expect_near(lesson::largest_difference(lse, expected.lse), 1e-5, "log-sum-exp, against the textbook");

    // ---- However the tokens are cut into calls, the rows are the same: 7 at a time, and one by one.
    for (const int64 step : {int64{7}, int64{1}}) {
        std::vector<float> again(q.size());
        sash::kv_cache other(sash::full{}, shape);
        for (int64 t = 0; t < tokens; t += step) {
            const int64 n = std::min(step, tokens - t);
            sash::attend(query.tokens_from(t, n), key.tokens_from(t, n), value.tokens_from(t, n), other,
                         sash::output(again, tokens, heads, dim).tokens_from(t, n));
        }
        lesson::expect_near(lesson::largest_difference(again, rows), 2e-6,
                            step == 1 ? "one token a call" : "seven tokens a call");
    }

    // ---- The same without a cache, for keys and values that you keep yourself, in any layout. Here keys and values of
    // a head lie together, [kv_heads, tokens, dim]: two strides say so, and nothing is copied by the caller.
    std::vector<float> by_head_k(k.size()), by_head_v(v.size()), without_cache(q.size());
    for (std::size_t t = 0; t < tokens; ++t)
        for (std::size_t h = 0; h < kv_heads; ++h)
            for (std::size_t d = 0; d < dim; ++d) {
                by_head_k[(h * tokens + t) * dim + d] = k[(t * kv_heads + h) * dim + d];
                by_head_v[(h * tokens + t) * dim + d] = v[(t * kv_heads + h) * dim + d];
            }
    sash::attend(sash::full{}, query, {by_head_k, tokens, kv_heads, dim, dim, tokens * dim},
                 {by_head_v, tokens, kv_heads, dim, dim, tokens * dim}, {without_cache, tokens, heads, dim});
    lesson::expect_near(lesson::largest_difference(without_cache, expected.out), 1e-5,
                        "without a cache, head-major memory");

    // ---- An encoder's tokens see the later ones, too.
    sash::attend(sash::full{.causal = false}, query, key, value, out);
    const sash::reference::result both = sash::reference::attend(sash::full{.causal = false}, shape, query, key, value);
    lesson::expect_near(lesson::largest_difference(rows, both.out), 1e-5, "bidirectional, against the textbook");
    return lesson::exit_code();
}
