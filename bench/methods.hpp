#pragma once
// One layer of 32 query and 8 KV heads of 128 numbers, and the ways it may remember: keys and values in bfloat16, states
// in fp32. Each method says, by arithmetic, what a sequence of it holds and what a token moves.
#include "gated.hpp"

#include <memory>

namespace bench {

inline constexpr int64 sinks = 4;

/// A method's policy, heads and bytes; `part` makes it that part of the layer, with all heads fewer.
///
///     name, element, states        states of the whole layer
///     shape(), policy()
///     held()                       bytes of a sequence
///     moved()                      bytes that a token reads and writes of them
///     shared()                     bytes of weights that all sequences of the layer read
namespace method {

/// Bytes of one token's keys and values: 4,096 for the whole layer.
inline double bytes_of_key(int64 part) {
    return 8.0 * (128 + 128) * sizeof(sash::bfloat16) / static_cast<double>(part);
}

inline sash::shape grouped(int64 part) { return {.heads = 32 / part, .kv_heads = 8 / part, .head_dim = 128}; }

struct full {
    int64 keys = 4096;
    int64 part = 1;

    static constexpr const char* name = "full";
    static constexpr int64 states = 0;
    using element = sash::bfloat16;
    sash::shape shape() const { return grouped(part); }
    sash::full policy() const { return {}; }
    double held() const { return bytes_of_key(part) * static_cast<double>(keys); }
    double moved() const { return held(); }
    double shared() const { return 0; }
};

struct window {
    int64 keys = 64;  ///< that a query sees, the sinks among them
    int64 part = 1;

    static constexpr const char* name = "window";
    static constexpr int64 states = 0;
    using element = sash::bfloat16;
    sash::shape shape() const { return grouped(part); }
    sash::sliding_window policy() const { return {.window = keys - sinks, .sinks = sinks}; }
    double held() const { return bytes_of_key(part) * static_cast<double>(keys); }
    double moved() const { return held(); }
    double shared() const { return 0; }
};

/// A state that is read and written, and nothing else.
template <class Policy>
struct state_alone {
    int64 part = 1;

    using element = float;
    Policy policy() const { return {}; }
    double shared() const { return 0; }

protected:
    double bytes(const sash::shape& s) const { return bytes_of_states(policy(), s); }
};

/// Gates and states for KV heads.
struct gla : state_alone<sash::systems::gla> {
    static constexpr const char* name = "GLA";
    static constexpr int64 states = 8;
    sash::shape shape() const { return grouped(part); }
    double held() const { return bytes(shape()); }
    double moved() const { return 2 * held(); }
};

/// x has the heads of the output; B and C are shared by four of them.
struct mamba2 : state_alone<sash::systems::mamba2> {
    static constexpr const char* name = "Mamba-2";
    static constexpr int64 states = 32;
    sash::shape shape() const {
        const int64 heads = 32 / part, groups = 8 / part;
        return {.heads = heads, .kv_heads = heads, .head_dim = 128, .query_heads = groups, .key_heads = groups};
    }
    double held() const { return bytes(shape()); }
    double moved() const { return 2 * held(); }
};

/// 16 query and key heads, 32 value heads, as in Qwen3-Next.
struct gated_deltanet : state_alone<sash::systems::gated_deltanet> {
    static constexpr const char* name = "gated delta";
    static constexpr int64 states = 32;
    sash::shape shape() const {
        const int64 heads = 32 / part, keys = 16 / part;
        return {.heads = heads, .kv_heads = heads, .head_dim = 128, .query_heads = keys, .key_heads = keys};
    }
    double held() const { return bytes(shape()); }
    double moved() const { return 2 * held(); }
};

/// The learned map of Hedgehog for each query head: 128 × 64 numbers twice, so 128 features.
class hedgehog_map {
public:
    explicit hedgehog_map(int64 heads)
        : weights_(std::make_shared<const std::vector<float>>(small(noise(2 * heads * 128 * 64, 7)))) {}
    sash::hedgehog map() const {
        const std::span<const float> both(*weights_);
        return {
            .features = 64, .query_weights = both.first(both.size() / 2), .key_weights = both.last(both.size() / 2)};
    }
    double bytes() const { return static_cast<double>(weights_->size()) * sizeof(float); }

private:
    static std::vector<float> small(std::vector<float> x) {
        for (float& w : x) w *= 0.1f;
        return x;
    }
    std::shared_ptr<const std::vector<float>> weights_;
};

struct hedgehog {
    int64 part = 1;
    hedgehog_map weights = hedgehog_map(32 / part);

    static constexpr const char* name = "Hedgehog";
    static constexpr int64 states = 32;
    using element = float;
    sash::shape shape() const { return grouped(part); }
    sash::systems::hedgehog policy() const { return {.map = weights.map()}; }
    double held() const { return bytes_of_states(policy(), shape()); }
    double moved() const { return 2 * held(); }
    double shared() const { return weights.bytes(); }
};

/// A window of 64 keys, and Hedgehog behind it.
struct lolcats {
    int64 part = 1;
    hedgehog_map weights = hedgehog_map(32 / part);

    static constexpr const char* name = "LoLCATs";
    static constexpr int64 states = 32;
    using element = sash::bfloat16;
    sash::shape shape() const { return grouped(part); }
    sash::systems::lolcats policy() const { return {.window = {.window = 64}, .linear = {.map = weights.map()}}; }
    double held() const { return 64 * bytes_of_key(part) + bytes_of_states(policy().linear, shape()); }
    double moved() const { return 64 * bytes_of_key(part) + 2 * bytes_of_states(policy().linear, shape()); }
    double shared() const { return weights.bytes(); }
};

/// A window of 64 keys, and a gated state of every KV head beside it.
struct liger {
    int64 part = 1;

    static constexpr const char* name = "Liger";
    static constexpr int64 states = 8;
    using element = sash::bfloat16;
    sash::shape shape() const { return grouped(part); }
    sash::systems::liger_gla policy() const { return {.window = {.window = 64}}; }
    double held() const { return 64 * bytes_of_key(part) + bytes_of_states(policy().linear, shape()); }
    double moved() const { return 64 * bytes_of_key(part) + 2 * bytes_of_states(policy().linear, shape()); }
    double shared() const { return 0; }
};

}  // namespace method

template <class Method>
using cache_of = sash::kv_cache<decltype(std::declval<Method>().policy()), typename Method::element>;

/// Brings a cache to `length` tokens with the tokens of a prompt, again and again.
template <class Policy, class Element>
void append_until(int64 length, const gated_prompt<Policy>& tokens, sash::kv_cache<Policy, Element>& cache,
                  sash::workspace& scratch) {
    cache.reserve(length);
    while (cache.length() < length) {
        const int64 n = std::min(length - cache.length(), tokens.tokens);
        sash::append(tokens.slice(0, n), cache, {.run = sash::serial{}, .workspace = &scratch});
    }
}

/// Layers of a batch of sequences that come from memory: a step takes one token for each sequence of the next layer.
/// (Small sequences count as a megabyte: a cache has room for more tokens than it shows, and all of it must fit.)
/// Each layer has weights of its own, which its sequences share.
template <class Method>
class cold_sequences {
public:
    using cache = cache_of<Method>;
    using policy = typename cache::policy_type;

    cold_sequences(const Method& m, int64 batch)
        : tokens_(m.policy(), m.shape(), std::max<int64>(batch, 256)),
          layers_(static_cast<double>(batch) * std::max(m.held(), 1e6) + m.shared(),
                  [&] { return layer(*this, m, batch); }) {
        in_all_phases(layers_, [this](layer& l) { step(l); });
    }

    void step() { step(layers_.next()); }
    /// Bytes that one sequence holds.
    double bytes() { return static_cast<double>(layers_.next().caches.front().bytes()); }

private:
    struct layer {
        Method method;
        std::vector<cache> caches;
        std::vector<sash::request<cache>> requests;

        layer(cold_sequences& all, const Method& m, int64 batch) : method(m) {
            if constexpr (requires { method.weights; }) method.weights = method::hedgehog_map(32 / m.part);
            caches.reserve(static_cast<std::size_t>(batch));
            for (int64 i = 0; i < batch; ++i) caches.push_back(all.next_cache(method, caches));
            for (int64 i = 0; i < batch; ++i)
                requests.push_back({.tokens = all.tokens_.slice(i, 1),
                                    .cache = &caches[static_cast<std::size_t>(i)],
                                    .out = all.tokens_.rows(i, 1)});
        }
    };

    void step(layer& l) { sash::attend(l.requests, {.run = sash::serial{}, .workspace = &scratch_}); }

    /// A copy of one that is full, where that has memory of its own and the weights of the same layer.
    cache next_cache(const Method& m, const std::vector<cache>& before) {
        if constexpr (!std::is_same_v<Method, method::full>) {
            if (!before.empty()) return before.front();
            if constexpr (!requires { m.weights; })
                if (filled_) return *filled_;
        }
        cache fresh(m.policy(), m.shape(), sash::score{}, {.memory = reused_memory()});
        append_until(full_length(m), tokens_, fresh, scratch_);
        if constexpr (!std::is_same_v<Method, method::full>) filled_ = std::make_unique<cache>(fresh);
        return fresh;
    }
    /// Where the stream is long enough that every later token costs the same.
    static int64 full_length(const Method& m) {
        if constexpr (std::is_same_v<Method, method::full>)
            return m.keys;
        else if constexpr (std::is_same_v<Method, method::window>)
            return m.keys + 77;
        else
            return 77;
    }

    gated_prompt<policy> tokens_;
    sash::workspace scratch_;
    std::unique_ptr<cache> filled_;
    cold_layers<layer> layers_;
};

}  // namespace bench
