// Lesson 10: a hybrid. What is near is seen exactly, in a window; what has left the window goes into a state, blurred,
// instead of away. LoLCATs (Zhang et al. 2025) puts both under one denominator: with s_j = q·k_j / sqrt(dim), m their
// maximum in the window, and a learned factor wf,
//
//            wf sum_{j in window} exp(s_j - m) v_j  +  sum_{j before} phi(q)·phi(k_j) v_j
//     out =  ----------------------------------------------------------------------------
//            wf sum_{j in window} exp(s_j - m)      +  sum_{j before} phi(q)·phi(k_j)
//
// Sinks stay in the window and out of the state: the first tokens draw much of the attention of a softmax model, and a
// state cannot hold such a peak.
#include "lesson.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

using sash::int64;

int main() {
    constexpr int64 tokens = 300, heads = 4, kv_heads = 2, dim = 32, features = 16;
    const sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim};
    const sash::sliding_window window{.window = 64, .sinks = 4};

    // Learned matrices [heads, dim, features], one for each query head, and the factors before their sigmoid; -2.2 is
    // where training begins. These have not been trained. They are views: they stay yours and must outlive the cache.
    std::vector<float> to_query = lesson::numbers(heads * dim * features, 1),
                       to_key = lesson::numbers(heads * dim * features, 2);
    for (auto* matrix : {&to_query, &to_key})
        for (float& x : *matrix) x /= 8;
    const std::vector<float> factors(heads, -2.2f);
    const sash::systems::lolcats policy{
        .window = window,
        .linear = {.map = {.features = features, .query_weights = to_query, .key_weights = to_key}},
        .combine = {.window_factors = factors}};

    const std::vector<float> q = lesson::numbers(tokens * heads * dim, 3),
                             k = lesson::numbers(tokens * kv_heads * dim, 4),
                             v = lesson::numbers(tokens * kv_heads * dim, 5);
    const sash::input query(q, tokens, heads, dim), key(k, tokens, kv_heads, dim), value(v, tokens, kv_heads, dim);
    const sash::rope_table frequencies = sash::rope_frequencies(dim, 10000);
    const sash::score turned{.rotary = {.frequencies = frequencies, .by = sash::rotates::library}};

    // ---- Prefill, then decode, against the formula in double over the whole history.
    std::vector<float> rows(q.size());
    const sash::output out(rows, tokens, heads, dim);
    sash::kv_cache cache(policy, shape, turned);
    sash::attend(query.tokens_from(0, 250), key.tokens_from(0, 250), value.tokens_from(0, 250), cache,
                 out.tokens_from(0, 250));
    const int64 held = cache.bytes();
    for (int64 t = 250; t < tokens; ++t)
        sash::attend(query.tokens_from(t, 1), key.tokens_from(t, 1), value.tokens_from(t, 1), cache,
                     out.tokens_from(t, 1));
    const std::vector<double> expected = sash::reference::attend(policy, shape, query, key, value, turned).out;
    lesson::say(cache.length(), " tokens seen: ", cache.stored(), " in the window, the others in ", heads, " states; ",
                held / 1024, " KiB held");
    lesson::expect_near(lesson::largest_difference(rows, expected), 1e-5, "a prompt of 250, then token by token");
    lesson::expect(cache.bytes() == held, "the memory stays what it was");

    // ---- Until the window is full the state is empty, and the hybrid is the window: whatever wf, it cancels.
    std::vector<float> windowed(q.size());
    sash::kv_cache plain(window, shape, turned);
    sash::attend(query, key, value, plain, {windowed, tokens, heads, dim});
    const auto differ_in = [&](int64 first, int64 last) {
        const auto row = static_cast<std::size_t>(heads * dim);
        const auto from = static_cast<std::size_t>(first) * row, count = static_cast<std::size_t>(last - first) * row;
        return lesson::largest_difference(std::span(rows).subspan(from, count),
                                          std::span(windowed).subspan(from, count));
    };
    lesson::expect_near(differ_in(0, 68), 1e-5, "window and hybrid agree while nothing has left");
    lesson::say("  from there on they differ, by up to ", differ_in(68, tokens), ": the hybrid remembers");
    lesson::expect(differ_in(68, 69) > 1e-4, "the first token outside of the window makes a difference");

    // ---- The sinks never enter the state. Let their values be huge: the hybrid's rows then move only by what the
    // window gives the sinks, so the reference, which has no state at all, must still agree.
    std::vector<float> loud = v;
    for (std::size_t i = 0; i < 4 * kv_heads * dim; ++i) loud[i] *= 1000;
    const sash::input louder(loud, tokens, kv_heads, dim);
    sash::kv_cache again(policy, shape, turned);
    sash::attend(query, key, louder, again, out);
    const std::vector<double> moved = sash::reference::attend(policy, shape, query, key, louder, turned).out;
    lesson::expect_near(lesson::largest_difference(rows, moved), 1e-2, "values of 1000 in the sinks: relative 1e-5");

    // ---- A hybrid's cache is a value like any other: fork, take back, save.
    sash::kv_cache drafting(policy, shape, turned, {.rollback_slack = 4});
    sash::append(key, value, drafting);
    sash::kv_cache fork = drafting;
    sash::append(key.tokens_from(0, 3), value.tokens_from(0, 3), drafting);
    drafting.rollback(3);
    std::vector<float> next(heads * dim), after(heads * dim);
    sash::attend(query.tokens_from(0, 1), key.tokens_from(0, 1), value.tokens_from(0, 1), fork, {next, 1, heads, dim});
    sash::attend(query.tokens_from(0, 1), key.tokens_from(0, 1), value.tokens_from(0, 1), drafting,
                 {after, 1, heads, dim});
    lesson::expect(next == after, "three drafts taken back: bit for bit as if they had never been");
    return lesson::exit_code();
}
