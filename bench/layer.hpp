#pragma once
// The layers that are measured: prompts of random tokens, and caches in such number that each is cold when its turn
// comes.
#include "machine.hpp"

#include <sash/sash.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

namespace bench {

using sash::int64;

/// Numbers with mean 0 and variance 1, the same in every run: sums of four bytes of a linear congruential generator.
inline std::vector<float> noise(int64 count, std::uint64_t seed) {
    std::vector<float> x(static_cast<std::size_t>(count));
    std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (float& v : x) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const std::uint64_t bytes = state >> 32;
        const auto total = static_cast<int>((bytes & 255) + (bytes >> 8 & 255) + (bytes >> 16 & 255) + (bytes >> 24));
        v = (static_cast<float>(total) - 510.0f) * (1.0f / 147.8f);
    }
    return x;
}

/// A layer of a model like Llama 3 8B, and a quarter of it: the same work a head, in a shorter time.
inline constexpr sash::shape whole_layer(int64 dim = 128) { return {.heads = 32, .kv_heads = 8, .head_dim = dim}; }
inline constexpr sash::shape quarter_layer(int64 dim = 128) { return {.heads = 8, .kv_heads = 2, .head_dim = dim}; }

/// Random query, key and value of n tokens, and room for their rows; all of one type of numbers.
template <class Number>
struct prompt_of {
    sash::shape shape;
    int64 tokens;
    std::vector<Number> q, k, v, out;

    prompt_of(sash::shape s, int64 n)
        : shape(s),
          tokens(n),
          q(random(n * s.heads * s.head_dim, 1)),
          k(random(n * s.kv_heads * s.head_dim, 2)),
          v(random(n * s.kv_heads * s.head_dim, 3)),
          out(q.size()) {}

    /// The first n tokens of it.
    sash::input query(int64 n) const { return {q.data(), n, shape.heads, shape.head_dim}; }
    sash::input key(int64 n) const { return {k.data(), n, shape.kv_heads, shape.head_dim}; }
    sash::input value(int64 n) const { return {v.data(), n, shape.kv_heads, shape.head_dim}; }
    sash::output rows(int64 n) { return {out.data(), n, shape.heads, shape.head_dim}; }

private:
    static std::vector<Number> random(int64 count, std::uint64_t seed) {
        std::vector<Number> x;
        x.reserve(static_cast<std::size_t>(count));
        for (const float v : noise(count, seed)) x.push_back(Number(v));
        return x;
    }
};
using prompt = prompt_of<float>;

/// Pairs (query, key) of one head that a prompt of n tokens makes visible, when a query sees `most` keys at most.
inline double visible_pairs(int64 n, int64 most) {
    const double filling = static_cast<double>(std::min(n, most));
    return filling * (filling + 1) / 2 + static_cast<double>(std::max<int64>(n - most, 0)) * static_cast<double>(most);
}

/// A multiplication and an addition for each number of a key, and of a value.
inline double flops(const sash::shape& s, double pairs) {
    return 4.0 * static_cast<double>(s.head_dim * s.heads) * pairs;
}

/// Bytes of `keys` keys and values as they are stored, without scales and padding.
template <class Element>
double bytes_of_keys(const sash::shape& s, int64 keys) {
    constexpr int64 element = std::is_same_v<Element, sash::int8_rows> ? 1 : int64{sizeof(Element)};
    return static_cast<double>(2 * element * keys * s.kv_heads * s.head_dim);
}

/// Attends a whole prompt, again and again, into one cache.
template <class Element, class Policy, class Number = float>
class prefill {
public:
    prefill(prompt_of<Number>& tokens, const Policy& policy) : tokens_(&tokens), cache_(policy, tokens.shape) {}

    void operator()(sash::runner run = sash::serial{}) {
        cache_.reset();
        auto& p = *tokens_;
        sash::attend(p.query(p.tokens), p.key(p.tokens), p.value(p.tokens), cache_, p.rows(p.tokens), {.run = run});
    }
    /// Thread CPU time of one prompt.
    double seconds() {
        return machine::seconds_of([this] { (*this)(); });
    }

private:
    prompt_of<Number>* tokens_;
    sash::kv_cache<Policy, Element> cache_;
};

/// A source of memory for caches that come and go row by row: a stack that is empty again when all of them are gone.
inline sash::memory_source reused_memory() {
    struct stack {
        machine::huge_memory memory{std::size_t{2560} << 20};
        std::size_t used = 0, pieces = 0;
    };
    static stack here;
    return {.allocate = [](void* context, std::size_t bytes, std::size_t alignment) -> void* {
                stack& s = *static_cast<stack*>(context);
                const std::size_t first = (s.used + alignment - 1) / alignment * alignment;
                if (first + bytes > s.memory.size()) return nullptr;
                s.used = first + bytes;
                ++s.pieces;
                return s.memory.data() + first;
            },
            .release =
                [](void* context, void*, std::size_t, std::size_t) {
                    stack& s = *static_cast<stack*>(context);
                    if (--s.pieces == 0) s.used = 0;
                },
            .context = &here};
}

/// A cache that holds `length` tokens; its key and value rows repeat those of the prompt.
template <class Element, class Policy>
sash::kv_cache<Policy, Element> filled(const prompt& tokens, const Policy& policy, int64 length,
                                       const sash::score& scores = {}) {
    sash::kv_cache<Policy, Element> cache(policy, tokens.shape, scores, {.memory = reused_memory()});
    cache.reserve(length);
    for (int64 done = 0; done < length;) {
        const int64 n = std::min(length - done, tokens.tokens);
        sash::append(tokens.key(n), tokens.value(n), cache);
        done += n;
    }
    return cache;
}

/// A copy with memory of its own: a copy of a growing cache shares its tokens.
template <class Policy, class Element>
sash::kv_cache<Policy, Element> own_copy(const sash::kv_cache<Policy, Element>& cache, const prompt& tokens) {
    if constexpr (std::is_same_v<Policy, sash::full>)
        return filled<Element>(tokens, cache.policy(), cache.length());
    else
        return cache;
}

/// The layers of a model in turn, as many as it takes that none is in a cache of the machine when its turn comes again.
template <class Cache>
class cold_layers {
public:
    /// `touched` bytes of each are read in a step; make() gives the next one.
    template <class Make>
    cold_layers(double touched, Make&& make) {
        constexpr double in_all = double(std::size_t{540} << 20);
        const auto count = std::max<std::size_t>(2, static_cast<std::size_t>(std::ceil(in_all / touched)));
        layers_.reserve(count);
        while (layers_.size() < count) layers_.push_back(make());
    }

    std::size_t count() const { return layers_.size(); }
    Cache& next() {
        Cache& layer = layers_[next_];
        next_ = (next_ + 1) % layers_.size();
        return layer;
    }

private:
    std::vector<Cache> layers_;
    std::size_t next_ = 0;
};

/// The first token touches new memory; then layer i takes i % 8 more, so that the layers stand everywhere on the way to
/// the eighth token, with which the delta rule writes all that wait.
template <class Cache, class Step>
void in_all_phases(cold_layers<Cache>& layers, Step&& step) {
    for (std::size_t token = 0; token < 8; ++token)
        for (std::size_t i = 0; i < layers.count(); ++i)
            if (Cache& layer = layers.next(); i % 8 >= token) step(layer);
}

template <class Make>
cold_layers(double, Make&&) -> cold_layers<std::invoke_result_t<Make>>;

/// Thread CPU time of a step that touches so many bytes of cold layers, the mean of `steps`. As many as fill a last cache
/// go before, untimed: what they wrote is written back while the others are timed, as it is in a long run.
template <class Step>
double seconds_of_step(int steps, double touched, Step&& step) {
    constexpr double last_cache = 64e6;
    for (double bytes = 0; bytes < last_cache; bytes += touched) step();
    return machine::seconds_of([&] {
               for (int i = 0; i < steps; ++i) step();
           }) /
           steps;
}

}  // namespace bench
