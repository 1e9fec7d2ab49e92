// Lesson 5: a policy and a score of your own. A policy is a small struct that says who sees whom. It gets the same
// cache, the same kernels and the same verb as those of the library, and a bounded cache if it says what later queries
// may still see.
#include "lesson.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

using sash::int64;

// A dilated window: the query's own key, the one `step` before it, the one 2 · step before it, `count` in all.
// (Longformer, Beltagy et al. 2020, section 3.1.)
struct dilated_window {
    int64 count = 1, step = 1;

    constexpr bool sees(int64 query, int64 key) const {
        return key <= query && query - key < count * step && (query - key) % step == 0;
    }

    // Where the keys of queries [first, last) lie: one interval, half-open. `sees` sorts out the rest.
    constexpr sash::key_intervals<1> visible(int64 first_query, int64 last_query) const {
        sash::key_intervals<1> keys;
        keys.add(first_query - (count - 1) * step, last_query);
        return keys;
    }

    // What query next - 1 saw and later ones may see. Without this the cache would keep everything.
    constexpr sash::key_intervals<1> retained(int64 next) const {
        sash::key_intervals<1> keys;
        keys.add(next - 1 - (count - 1) * step, next);
        return keys;
    }

    // Refusals come before anything is stored, with these words.
    template <class Refuse>
    constexpr void validate(Refuse&& refuse) const {
        if (count < 1) refuse("count is ", count, ", must be at least 1");
        if (step < 1) refuse("step is ", step, ", must be at least 1");
    }
};
static_assert(sash::softmax_policy<dilated_window>);
static_assert(dilated_window{.count = 3, .step = 4}.sees(100, 92) &&
              !dilated_window{.count = 3, .step = 4}.sees(100, 91));

// A score of one's own: it falls with the logarithm of the distance, at a pace that each head has (KERPLE, Chi et al.
// 2022). N is float in the textbook and on a GPU, and a register of floats on the CPU; the call of `log` finds the
// right function.
struct logarithmic_decay {
    sash::per_head pace;

    template <class N, class Site>
    constexpr N operator()(N score, const Site& at) const {
        using std::log;
        return score - at.of_head(pace) * log(N(1) + at.distance());
    }
};

namespace {

constexpr int64 tokens = 400, heads = 4, kv_heads = 2, dim = 40;

// The same once more in the plainest words, without the library: row `i` of head `h`.
std::vector<double> by_hand(const dilated_window& p, const std::vector<float>& pace, const std::vector<float>& q,
                            const std::vector<float>& k, const std::vector<float>& v, int64 i, int64 h) {
    const int64 kv = h / (heads / kv_heads);
    std::vector<double> sum(dim);
    double mass = 0;
    for (int64 n = 0; n < p.count && i - n * p.step >= 0; ++n) {
        const int64 j = i - n * p.step;
        double dot = 0;
        for (int64 c = 0; c < dim; ++c)
            dot += double(q[std::size_t((i * heads + h) * dim + c)]) *
                   double(k[std::size_t((j * kv_heads + kv) * dim + c)]);
        const double weight =
            std::exp(dot / std::sqrt(double(dim)) - double(pace[std::size_t(h)]) * std::log(1.0 + double(n * p.step)));
        mass += weight;
        for (int64 c = 0; c < dim; ++c)
            sum[std::size_t(c)] += weight * double(v[std::size_t((j * kv_heads + kv) * dim + c)]);
    }
    for (double& x : sum) x /= mass;
    return sum;
}

}  // namespace

int main() {
    const std::vector<float> q = lesson::numbers(tokens * heads * dim, 1);
    const std::vector<float> k = lesson::numbers(tokens * kv_heads * dim, 2);
    const std::vector<float> v = lesson::numbers(tokens * kv_heads * dim, 3);
    const sash::input query(q, tokens, heads, dim), key(k, tokens, kv_heads, dim), value(v, tokens, kv_heads, dim);

    const dilated_window policy{.count = 8, .step = 5};
    const std::vector<float> pace{0.1f, 0.3f, 1, 3};
    const sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim};
    const sash::score score{.custom = logarithmic_decay{{pace.data()}}};

    sash::kv_cache cache(policy, shape, score);
    std::vector<float> rows(q.size());
    const sash::output out(rows, tokens, heads, dim);
    constexpr int64 prompt = 300;
    sash::attend(query.tokens_from(0, prompt), key.tokens_from(0, prompt), value.tokens_from(0, prompt), cache,
                 out.tokens_from(0, prompt));
    const int64 held = cache.bytes();
    for (int64 t = prompt; t < tokens; ++t)
        sash::attend(query.tokens_from(t, 1), key.tokens_from(t, 1), value.tokens_from(t, 1), cache,
                     out.tokens_from(t, 1));

    lesson::say("8 keys, 5 apart: after ", cache.length(), " tokens the cache holds ", cache.stored(), ", in ",
                cache.bytes() / 1024, " KiB");
    lesson::expect(cache.stored() == 7 * 5 + 1 && cache.bytes() == held,
                   "as far back as the window reaches, and no more");

    double largest = 0;
    for (int64 i = 0; i < tokens; ++i)
        for (int64 h = 0; h < heads; ++h) {
            const auto row = std::span(rows).subspan(std::size_t((i * heads + h) * dim), dim);
            largest = std::max(largest, lesson::largest_difference(row, by_hand(policy, pace, q, k, v, i, h)));
        }
    lesson::expect_near(largest, 1e-5, "every row, against a loop that knows nothing of the library");

    const auto expected = sash::reference::attend(policy, shape, query, key, value, score);
    lesson::expect_near(lesson::largest_difference(rows, expected.out), 1e-5,
                        "every row, against the textbook under the same policy");

    try {
        sash::kv_cache refused(dilated_window{.count = 8, .step = 0}, shape);
        lesson::expect(false, "a step of 0 is refused");
    } catch (const sash::error& e) { lesson::expect(true, e.what()); }
    return lesson::exit_code();
}
