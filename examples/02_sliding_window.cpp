// Lesson 2: a sliding window, and what sinks change. Query i sees the `window` last keys, its own included, and the
// first `sinks`:
//
//     V(i) = { j <= i :  i - j < window  or  j < sinks }
//
// so memory is constant for ever. Models trained with full attention put much of their weight on the first tokens,
// whatever these say (Xiao et al. 2024): the rest of the softmax is small only as long as that weight has a place to
// go. Here such a model is imitated: every query leans in one direction, in which only the first key lies, and the
// first value is 0.
#include "lesson.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

namespace {

using sash::int64;
constexpr int64 tokens = 600, heads = 4, kv_heads = 1, dim = 64;
const sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim};

struct sequence {
    std::vector<float> q = lesson::numbers(tokens * heads * dim, 1);
    std::vector<float> k = lesson::numbers(tokens * kv_heads * dim, 2);
    std::vector<float> v = lesson::numbers(tokens * kv_heads * dim, 3);
    sash::input query{q, tokens, heads, dim}, key{k, tokens, kv_heads, dim}, value{v, tokens, kv_heads, dim};

    sequence() {
        for (std::size_t row = 0; row < tokens * heads; ++row) q[row * dim] = 8;
        for (std::size_t t = 0; t < tokens; ++t) k[t * dim] = t == 0 ? 8 : 0;  // 8 · 8 / sqrt(64): a score of 8 more
        for (std::size_t d = 0; d < dim; ++d) v[d] = 0;
    }
};

template <class Policy>
std::vector<float> stream(const sequence& s, const Policy& policy, const sash::score& score = {}) {
    std::vector<float> rows(s.q.size());
    const sash::output out(rows, tokens, heads, dim);
    sash::kv_cache cache(policy, shape, score);
    for (int64 t = 0; t < tokens; ++t)
        sash::attend(s.query.tokens_from(t, 1), s.key.tokens_from(t, 1), s.value.tokens_from(t, 1), cache,
                     out.tokens_from(t, 1));
    return rows;
}

// Root mean square of the difference, over the later half: there the window has left the beginning behind.
double apart(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (std::size_t i = a.size() / 2; i < a.size(); ++i) sum += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    return std::sqrt(sum / double(a.size() / 2));
}

}  // namespace

int main() {
    const sequence s;

    // ---- What is kept: the sinks and the newest keys. `length` goes on counting.
    sash::kv_cache cache(sash::sliding_window{.window = 6, .sinks = 2}, shape);
    sash::append(s.key, s.value, cache);
    std::cout << "window 6, 2 sinks, after " << cache.length() << " tokens, holds positions";
    for (const int64 position : cache.positions()) std::cout << ' ' << position;
    std::cout << '\n';
    const int64 held = cache.bytes();
    for (int i = 0; i < 20; ++i) sash::append(s.key, s.value, cache);
    lesson::expect(cache.length() == 21 * tokens && cache.stored() == 8 && cache.bytes() == held,
                   "20 times as many tokens, the same memory");

    // ---- What sinks change: how far the rows are from those of full attention.
    const std::vector<float> full = stream(s, sash::full{});
    const std::vector<float> alone = stream(s, sash::sliding_window{.window = 36});
    const std::vector<float> with_sinks = stream(s, sash::sliding_window{.window = 32, .sinks = 4});
    lesson::say("distance from full attention: window 36 ", apart(alone, full), ", window 32 + 4 sinks ",
                apart(with_sinks, full));
    lesson::expect(apart(with_sinks, full) < apart(alone, full) / 5,
                   "the same number of keys, five times nearer with sinks");

    const sash::sliding_window policy{.window = 32, .sinks = 4};
    const auto expected = sash::reference::attend(policy, shape, s.query, s.key, s.value);
    lesson::expect_near(lesson::largest_difference(with_sinks, expected.out), 1e-5,
                        "window 32 + 4 sinks, against the textbook");

    // ---- Two frames for rotary positions. In the original frame a query reads the sinks at their true distance, which
    // grows without bound; in the compact frame (StreamingLLM) at the distance that they have inside the cache. Window
    // keys are the same in both.
    const sash::sliding_window compact{.window = 32, .sinks = 4, .frame = sash::frame::compact};
    constexpr int64 late = 100000;
    lesson::say("query ", late, " reads key 0 at distance ", policy.distance(late, 0), " in the original frame, ",
                compact.distance(late, 0), " in the compact frame");
    lesson::expect(policy.distance(late, 0) == late && compact.distance(late, 0) == 32 + 4 - 1,
                   "far away, and never further than the cache is long");
    lesson::expect(policy.distance(late, late - 31) == 31 && compact.distance(late, late - 31) == 31,
                   "the window is read as it was");

    const sash::rope_table frequencies = sash::rope_frequencies(dim);
    const sash::score turned{
        .rotary = {.frequencies = frequencies, .by = sash::rotates::library}};  // q and k arrive unturned
    for (const sash::sliding_window& p : {policy, compact}) {
        const auto textbook = sash::reference::attend(p, shape, s.query, s.key, s.value, turned);
        lesson::expect_near(lesson::largest_difference(stream(s, p, turned), textbook.out), 1e-5,
                            p.frame == sash::frame::compact ? "rotary, compact frame, against the textbook"
                                                            : "rotary, original frame, against the textbook");
    }
    return lesson::exit_code();
}
