// Queries in bfloat16 that meet keys and values stored in bfloat16: where the machine multiplies pairs of them, weights are
// rounded to bfloat16, and nothing else is. So each number of a row is within 2^-8 of the weighted mean of the values'
// magnitudes. Elsewhere the same tests hold with room to spare.
#include "support/catch.hpp"

#include <sash/sash.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace {

using sash::bfloat16;
using sash::int64;

struct sizes {
    int64 tokens, group, kv_heads, key_dim, value_dim, window, sinks;
};

struct layer {
    sizes size;
    float scale = 0, soft_cap = 0;            // 0: 1 / √key_dim, none
    std::vector<bfloat16> query, key, value;  // what a tensor holds is what is stored

    layer(const sizes& s, unsigned seed) : size(s) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        const auto fill = [&](std::vector<bfloat16>& v, int64 n) {
            for (int64 i = 0; i < n; ++i) v.push_back(bfloat16(normal(random)));
        };
        fill(query, s.tokens * heads() * s.key_dim);
        fill(key, s.tokens * s.kv_heads * s.key_dim);
        fill(value, s.tokens * s.kv_heads * s.value_dim);
    }
    int64 heads() const { return size.group * size.kv_heads; }
    sash::sliding_window policy() const { return {.window = size.window, .sinks = size.sinks}; }
    sash::shape shape() const {
        return {.heads = heads(), .kv_heads = size.kv_heads, .key_dim = size.key_dim, .value_dim = size.value_dim};
    }
    bool sees(int64 i, int64 j) const { return j <= i && (i - j < size.window || j < size.sinks); }

    // Runs the tokens through a cache, `cut` at a time.
    template <class Query>
    std::vector<float> run(const std::vector<Query>& q, int64 cut, const sash::storage& storage = {},
                           std::span<float> lse = {}) const {
        sash::kv_cache<sash::sliding_window, bfloat16> cache(policy(), shape(), {.scale = scale, .soft_cap = soft_cap},
                                                             storage);
        std::vector<float> out(static_cast<std::size_t>(size.tokens * heads() * size.value_dim));
        const sash::input all_q{q, size.tokens, heads(), size.key_dim},
            all_k{key, size.tokens, size.kv_heads, size.key_dim},
            all_v{value, size.tokens, size.kv_heads, size.value_dim};
        const sash::output all_out{out, size.tokens, heads(), size.value_dim};
        for (int64 at = 0; at < size.tokens; at += cut) {
            const int64 n = std::min(cut, size.tokens - at);
            sash::attend(all_q.tokens_from(at, n), all_k.tokens_from(at, n), all_v.tokens_from(at, n), cache,
                         all_out.tokens_from(at, n), {.lse = lse});
        }
        return out;
    }

    // The textbook: out and Σ w |v| / Σ w, in double, over the whole history.
    struct rows {
        std::vector<double> out, magnitude, lse;
    };
    rows expected() const {
        rows r;
        for (int64 i = 0; i < size.tokens; ++i)
            for (int64 h = 0; h < heads(); ++h) {
                std::vector<double> sum(static_cast<std::size_t>(size.value_dim)), magnitude(sum);
                double mass = 0;
                for (int64 j = 0; j < size.tokens; ++j) {
                    if (!sees(i, j)) continue;
                    double dot = 0;
                    for (int64 d = 0; d < size.key_dim; ++d)
                        dot += double(query[std::size_t((i * heads() + h) * size.key_dim + d)]) *
                               double(key[std::size_t((j * size.kv_heads + h / size.group) * size.key_dim + d)]);
                    dot *= scale != 0 ? double(scale) : 1 / std::sqrt(double(size.key_dim));
                    const double w = std::exp(soft_cap > 0 ? soft_cap * std::tanh(dot / soft_cap) : dot);
                    mass += w;
                    for (int64 c = 0; c < size.value_dim; ++c) {
                        const double v = value[std::size_t((j * size.kv_heads + h / size.group) * size.value_dim + c)];
                        sum[std::size_t(c)] += w * v;
                        magnitude[std::size_t(c)] += w * std::abs(v);
                    }
                }
                r.lse.push_back(std::log(mass));
                for (double x : sum) r.out.push_back(x / mass);
                for (double x : magnitude) r.magnitude.push_back(x / mass);
            }
        return r;
    }
};

int64 count_wrong(const std::vector<float>& got, const layer::rows& want, double relative) {
    int64 wrong = 0;
    for (std::size_t i = 0; i < got.size(); ++i)
        wrong += !(std::abs(double(got[i]) - want.out[i]) <= relative * want.magnitude[i] + 1e-6);
    return wrong;
}

const sizes every_kind[] = {
    {130, 4, 2, 64, 64, 1000, 0},  // every lane from 0 on; an odd end
    {97, 1, 1, 33, 17, 20, 3},     // odd everywhere
    {201, 3, 2, 128, 96, 64, 4},   // the window begins in the middle of a pair
    {75, 8, 1, 80, 1, 7, 1},      {70, 2, 2, 1, 5, 33, 0}, {15, 48, 1, 2, 16, 4, 5},
};

}  // namespace

TEST_CASE("bfloat16 queries and cache: within the rounding of the weights") {
    unsigned seed = 1;
    for (const sizes& s : every_kind) {
        const layer x(s, seed++);
        const auto want = x.expected();
        CAPTURE(s.tokens, s.group, s.key_dim, s.value_dim, s.window, s.sinks);
        for (const int64 cut : {s.tokens, int64{13}, int64{64}, int64{1}})
            CHECK(count_wrong(x.run(x.query, cut), want, 0x1p-8) == 0);
        // Another type of query is computed in fp32.
        const std::vector<float> wide(x.query.begin(), x.query.end());
        CHECK(count_wrong(x.run(wide, s.tokens), want, 1e-5) == 0);
    }
}

TEST_CASE("bfloat16 queries and cache: a negative scale, a cap, and queries that do not lie side by side") {
    for (const float cap : {0.0f, 2.0f})
        for (const sizes& s : every_kind) {
            layer x(s, 21);
            x.scale = -0.25f;
            x.soft_cap = cap;
            CAPTURE(cap, s.tokens, s.group, s.key_dim, s.value_dim, s.window, s.sinks);
            std::vector<float> lse(static_cast<std::size_t>(s.tokens * x.heads()));
            const auto got = x.run(x.query, s.tokens, {}, lse);
            const auto want = x.expected();
            CHECK(count_wrong(got, want, 0x1p-8) == 0);
            int64 wrong = 0;
            for (std::size_t i = 0; i < lse.size(); ++i) wrong += !(std::abs(double(lse[i]) - want.lse[i]) <= 1e-5);
            CHECK(wrong == 0);

            // The same numbers two apart, with NaN between.
            std::vector<bfloat16> apart(2 * x.query.size(), bfloat16(std::numeric_limits<float>::quiet_NaN()));
            for (std::size_t i = 0; i < x.query.size(); ++i) apart[2 * i] = x.query[i];
            sash::input query{apart, s.tokens, 2 * x.heads(), s.key_dim};
            query.heads = x.heads();
            query.token_stride = 2 * x.heads() * s.key_dim;
            query.head_stride = 2 * s.key_dim;
            query.dim_stride = 2;
            sash::kv_cache<sash::sliding_window, bfloat16> cache(x.policy(), x.shape(),
                                                                 {.scale = x.scale, .soft_cap = cap});
            std::vector<float> out(got.size());
            sash::attend(query, {x.key, s.tokens, s.kv_heads, s.key_dim}, {x.value, s.tokens, s.kv_heads, s.value_dim},
                         cache, {out, s.tokens, x.heads(), s.value_dim});
            CHECK(out == got);
        }
}

TEST_CASE("bfloat16 queries and cache: log-sum-exps are those of fp32") {
    const layer x({150, 4, 1, 64, 32, 50, 2}, 7);
    std::vector<float> lse(150 * 4);
    x.run(x.query, 150, {}, lse);
    const auto want = x.expected();
    for (std::size_t i = 0; i < lse.size(); ++i) REQUIRE(std::abs(double(lse[i]) - want.lse[i]) <= 1e-5);
}

TEST_CASE("R19: bfloat16 queries and cache: what a row does not see changes no bit, though it shares a word") {
    const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
    for (const int64 window : {4, 5, 64, 65}) {
        const sizes s{140, 4, 1, 32, 32, window, 1};
        layer x(s, 11);
        const auto spoil = [&](int64 token, float with) {
            for (int64 c = 0; c < 32; ++c) {
                x.key[std::size_t(token * 32 + c)] = bfloat16(with);
                x.value[std::size_t(token * 32 + c)] = bfloat16(with);
            }
        };
        CAPTURE(window);
        for (const int64 token : {21, 22, 63, 64}) {
            const auto before = x;
            spoil(token, 0);
            const auto zero = x.run(x.query, 140);
            for (const float with : {nan, infinity, -infinity}) {
                spoil(token, with);
                const auto got = x.run(x.query, 140);
                int64 changed = 0, kept = 0;
                for (int64 i = 0; i < 140; ++i)
                    for (int64 c = 0; c < 4 * 32; ++c) {
                        const auto at = std::size_t(i * 4 * 32 + c);
                        const bool same =
                            std::bit_cast<std::uint32_t>(got[at]) == std::bit_cast<std::uint32_t>(zero[at]);
                        changed += !x.sees(i, token) && !same;
                        kept += x.sees(i, token) && std::isnan(with) && !std::isnan(got[at]);
                    }
                CHECK(changed == 0);
                CHECK(kept == 0);
            }
            x = before;
        }
    }
}

TEST_CASE("R19: bfloat16 queries and cache: a lane that was never stored may share a word with one that was") {
    // Memory full of bfloat16 NaN, of which many bits are 0.
    const auto allocate = [](void*, std::size_t bytes, std::size_t alignment) {
        auto* memory = static_cast<std::uint16_t*>(std::aligned_alloc(alignment, bytes));
        std::fill_n(memory, bytes / 2, std::uint16_t{0x7fc0});
        return static_cast<void*>(memory);
    };
    const auto release = [](void*, void* memory, std::size_t, std::size_t) { std::free(memory); };
    for (const int64 tokens : {33, 35, 37, 47, 65, 67, 69}) {
        const layer x({tokens, 4, 2, 16, 16, 1000, 0}, 3);
        CAPTURE(tokens);
        CHECK(x.run(x.query, tokens) == x.run(x.query, tokens, {.memory = {allocate, release, nullptr}}));
    }
}

TEST_CASE("R34: bfloat16 queries and cache: a token's bits do not depend on its neighbours in the call") {
    const layer x({100, 4, 1, 64, 64, 1000, 0}, 5);
    const auto whole = x.run(x.query, 100);
    layer other = x;
    for (std::size_t i = std::size_t(60 * 4 * 64); i < other.query.size(); ++i) other.query[i] = bfloat16(3.0f);
    const auto changed = other.run(other.query, 100);
    for (std::size_t i = 0; i < std::size_t(60 * 4 * 64); ++i)
        REQUIRE(std::bit_cast<std::uint32_t>(whole[i]) == std::bit_cast<std::uint32_t>(changed[i]));
}
