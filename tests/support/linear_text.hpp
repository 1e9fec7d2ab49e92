#pragma once
// Random tokens for any linear policy, with every gate it may ask for; feeding them to a cache; comparing rows.
#include <sash/sash.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace linear_text {

using sash::int64;
using floats = std::vector<float>;
using doubles = std::vector<double>;

inline std::size_t at(int64 i) { return static_cast<std::size_t>(i); }

// ------------------------------------------------------------------------------------------------------------- tokens

// Which gates a text has, and how strong its decays are.
enum class gates { mild, strong, zero };

// T random tokens of a layer: everything that any policy may ask for. Decays are between 0 and -2, or 0 and -60 (every
// fourth is exactly 0, and head 0 forgets at most 0.02 a step, so that what came first still counts), or all 0. The
// vectors of the low-rank rule are a = -n and d = eta n with |n| = 1, 0 <= eta <= 1.
struct text {
    sash::shape dims;
    int64 tokens, features;
    floats q, k, v, g, channel_g, beta, a, d, u, constant;

    text(std::mt19937& random, const sash::shape& s, int64 n, gates strength = gates::mild)
        : dims(sash::detail::resolve<sash::build::here>(s)), tokens(n), features(dims.key_dim) {
        std::normal_distribution<float> normal;
        std::uniform_real_distribution<float> unit(0, 1);
        const auto fill = [&](floats& x, int64 row, auto&& number) {
            x.resize(at(n * row));
            for (float& e : x) e = number();
        };
        for (const auto& [x, row] :
             {std::pair{&q, dims.query_heads * features}, std::pair{&k, dims.key_heads * features},
              std::pair{&v, dims.value_heads * dims.value_dim}})
            fill(*x, row, [&] { return normal(random); });
        fill(beta, dims.gate_heads, [&] { return 2 * unit(random); });
        const float strongest = strength == gates::strong ? -60 : strength == gates::mild ? -2 : 0;
        const auto decays = [&](floats& x, int64 width) {
            fill(x, dims.gate_heads * width, [&] { return random() % 4 ? strongest * unit(random) : 0.0f; });
            for (int64 t = 0; t < n; ++t)
                for (int64 c = 0; c < width; ++c)
                    x[at(t * dims.gate_heads * width + c)] = strongest / 3000 * unit(random);
        };
        decays(g, 1);
        decays(channel_g, features);
        u.resize(at(dims.heads * features));
        for (float& e : u) e = normal(random);
        for (int64 h = 0; h < dims.gate_heads; ++h) constant.push_back(h == 0 ? -.01f : strongest * unit(random));
        fill(a, dims.gate_heads * features, [&] { return normal(random); });
        d = a;
        for (std::size_t row = 0; row < a.size(); row += at(features)) {
            float square = 1e-12f;
            for (int64 c = 0; c < features; ++c) square += a[row + at(c)] * a[row + at(c)];
            const float eta = unit(random);
            for (int64 c = 0; c < features; ++c) {
                a[row + at(c)] /= -std::sqrt(square);
                d[row + at(c)] = -eta * a[row + at(c)];
            }
        }
    }

    sash::input view(const floats& x, int64 heads, int64 dim, int64 first, int64 n) const {
        return sash::input(x.data(), tokens, heads, dim).tokens_from(first, n);
    }
    template <class P>
    sash::tokens_of<P> slice(int64 first, int64 n) const {
        sash::tokens_of<P> in = sash::detail::query_alone<P>(view(q, dims.query_heads, features, first, n));
        in.key = view(k, dims.key_heads, features, first, n);
        in.value = view(v, dims.value_heads, dims.value_dim, first, n);
        if constexpr (P::needs_decay) {
            if constexpr (sash::ask::per_channel<decltype(P::decay)>)
                in.decay = view(channel_g, dims.gate_heads, features, first, n);
            else
                in.decay = view(g, dims.gate_heads, 1, first, n);
        }
        if constexpr (P::needs_beta) in.beta = view(beta, dims.gate_heads, 1, first, n);
        if constexpr (P::needs_vectors) {
            in.removal = view(a, dims.gate_heads, features, first, n);
            in.replacement = view(d, dims.gate_heads, features, first, n);
        }
        return in;
    }
    sash::output rows(floats& out, int64 first, int64 n) const {
        return sash::output(out.data(), tokens, dims.heads, dims.value_dim).tokens_from(first, n);
    }
    std::size_t row() const { return at(dims.heads * dims.value_dim); }
};

// Empty where |got - expected| <= most · max |expected| everywhere, else a sentence.
template <class Numbers>
std::string far_apart(const Numbers& got, const doubles& expected, double most) {
    double largest = 1e-30;
    for (const double e : expected)
        if (std::isfinite(e)) largest = std::max(largest, std::abs(e));
    for (std::size_t i = 0; i < expected.size(); ++i)
        if (double(got[i]) != expected[i] && !(std::abs(double(got[i]) - expected[i]) <= most * largest))
            return "number " + std::to_string(i) + " is " + std::to_string(got[i]) + " instead of " +
                   std::to_string(expected[i]) + ", the largest is " + std::to_string(largest);
    return "";
}
inline bool same_bits(const floats& a, const floats& b, std::size_t from = 0) {
    return a.size() == b.size() &&
           std::memcmp(a.data() + from, b.data() + from, (a.size() - from) * sizeof(float)) == 0;
}

using positions = std::vector<int64>;
inline positions random_cut(std::mt19937& random, int64 n) {
    positions cut;
    for (int64 done = 0; done < n; done += cut.back()) cut.push_back(std::min<int64>(n - done, 1 + random() % 11));
    return cut;
}

template <class P>
void feed(sash::kv_cache<P>& cache, const text& x, int64 first, const positions& cut, floats& out,
          const sash::runner& run = {}) {
    for (const int64 n : cut) {
        sash::attend(x.slice<P>(first, n), cache, x.rows(out, first, n), {.run = run});
        first += n;
    }
}
template <class P>
void feed(sash::kv_cache<P>& cache, const text& x, int64 first, int64 n, floats& out) {
    feed(cache, x, first, positions{n}, out);
}
inline floats unwritten(const text& x) {
    return floats(at(x.tokens) * x.row(), std::numeric_limits<float>::quiet_NaN());
}

}  // namespace linear_text
