// What happens to a score: the order of scale, soft cap, ALiBi and the user's function; and what a function costs.
#include "support/catch.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <vector>

namespace {

std::vector<float> content(std::size_t n, int salt) {
    std::vector<float> x(n);
    for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>((37 * i + static_cast<std::size_t>(11 * salt)) % 101) / 50 - 1;
    return x;
}

struct capped_alibi {  // a soft cap, then ALiBi, as a user writes them
    float cap;
    sash::per_head slope;
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        using std::tanh;
        return N(cap) * tanh(s / N(cap)) - at.of_head(slope) * at.distance();
    }
};

struct halved {
    template <class N, class Site>
    constexpr N operator()(N s, const Site&) const {
        return s * N(0.5f);
    }
};

struct written_out {
    float scale;
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        using std::tanh;
        return N(1) * tanh(s * N(scale) / N(2)) - N(0.05f) * at.distance();
    }
};

struct capped {
    template <class N, class Site>
    constexpr N operator()(N s, const Site&) const {
        using std::tanh;
        return N(30.0f) * tanh(s / N(30.0f));
    }
};

struct layer {
    sash::int64 tokens = 150, heads = 6, kv_heads = 2, dim = 20;
    std::vector<float> q = content(static_cast<std::size_t>(tokens * heads * dim), 1);
    std::vector<float> k = content(static_cast<std::size_t>(tokens * kv_heads * dim), 2);
    std::vector<float> v = content(static_cast<std::size_t>(tokens * kv_heads * dim), 3);
    sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim};

    template <class Policy>
    std::vector<float> run(Policy policy, const sash::score& score, sash::int64 cut) const {
        std::vector<float> out(q.size(), std::nanf(""));
        sash::kv_cache<Policy> cache(policy, shape, score);
        for (sash::int64 at = 0; at < tokens; at += cut) {
            const sash::int64 n = std::min(cut, tokens - at);
            sash::attend({q.data() + at * heads * dim, n, heads, dim}, {k.data() + at * kv_heads * dim, n, kv_heads, dim},
                         {v.data() + at * kv_heads * dim, n, kv_heads, dim}, cache, {out.data() + at * heads * dim, n, heads, dim});
        }
        return out;
    }
    template <class Policy>
    std::vector<double> expected(Policy policy, const sash::score& score) const {
        return sash::reference::attend(policy, shape, {q, tokens, heads, dim}, {k, tokens, kv_heads, dim}, {v, tokens, kv_heads, dim}, score).out;
    }
};

void require_close(const std::vector<float>& got, const std::vector<double>& expected) {
    REQUIRE(got.size() == expected.size());
    double worst = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        const double error = std::abs(got[i] - expected[i]) / (1e-6 + 1e-5 * std::abs(expected[i]));
        worst = error <= worst ? worst : error;  // a NaN stays
    }
    REQUIRE(worst <= 1);
}

double thread_seconds() {
    std::timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

TEST_CASE("a user's cap and ALiBi equal the built-in ones and the reference", "[score]") {
    const layer l;
    const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.015625f};
    const sash::score own{.scale = 0.9f, .custom = capped_alibi{3, {slopes.data()}}};
    const sash::score built_in{.scale = 0.9f, .soft_cap = 3, .alibi = slopes};
    const sash::sliding_window window{.window = 33, .sinks = 4};
    for (const sash::int64 cut : {sash::int64{1}, sash::int64{7}, sash::int64{150}}) {
        CAPTURE(cut);
        require_close(l.run(window, own, cut), l.expected(window, built_in));
        require_close(l.run(window, built_in, cut), l.expected(window, own));
        require_close(l.run(sash::full{}, own, cut), l.expected(sash::full{}, built_in));
    }
}

TEST_CASE("a user's function follows soft cap and ALiBi", "[score]") {
    const layer l;
    const std::vector<float> slopes(6, 0.1f);
    const sash::score all{.soft_cap = 2, .alibi = slopes, .custom = halved{}};
    // cap · tanh(s / cap) - slope · distance, halved, is cap / 2 · tanh(s / cap) - slope / 2 · distance: written out with float sites
    const sash::score expected{.scale = 1, .custom = written_out{static_cast<float>(1 / std::sqrt(20.0))}};
    require_close(l.run(sash::full{}, all, 150), l.expected(sash::full{}, expected));
    require_close(l.run(sash::full{}, all, 1), l.expected(sash::full{}, expected));
}

TEST_CASE("a function with tanh costs at most a tenth of a prefill", "[score][time]") {
    constexpr sash::int64 n = 1024, heads = 4, kv_heads = 1, dim = 128;
    const auto q = content(n * heads * dim, 1), k = content(n * kv_heads * dim, 2), v = content(n * kv_heads * dim, 3);
    std::vector<float> out(q.size());
    const sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim};
    const auto seconds = [&](sash::kv_cache<sash::full>& cache) {
        cache.reset();
        const double start = thread_seconds();
        sash::attend({q, n, heads, dim}, {k, n, kv_heads, dim}, {v, n, kv_heads, dim}, cache, {out, n, heads, dim}, {.run = sash::serial{}});
        return thread_seconds() - start;
    };
    sash::kv_cache plain(sash::full{}, shape);
    sash::kv_cache with_function(sash::full{}, shape, {.custom = capped{}});
    std::vector<double> ratio;
    for (int round = 0; round < 31; ++round) {  // interleaved: the machine's other work meets both
        const double base = seconds(plain);
        ratio.push_back(seconds(with_function) / base);
    }
    std::nth_element(ratio.begin(), ratio.begin() + 15, ratio.end());
    CAPTURE(ratio[15]);
    WARN("prefill with tanh over plain prefill: " << ratio[15]);
    REQUIRE(ratio[15] <= 1.10);
}
