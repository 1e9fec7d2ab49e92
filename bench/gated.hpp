#pragma once
// Prompts and layers of any policy: query, key and value, and beside them whatever gates the policy takes.
#include "layer.hpp"

namespace bench {

/// Random tokens of a policy. Gates are those of a model that remembers some tens of tokens: decays of -0.1, corrections
/// of one half, removal along unit vectors. Heads may differ from operand to operand; every head is shape.head_dim wide.
template <class Policy>
class gated_prompt {
public:
    gated_prompt(const Policy& policy, const sash::shape& s, int64 n)
        : shape(sash::detail::resolve<sash::build::here>(s)),
          tokens(n),
          query_(noise(tokens * shape.query_heads * shape.key_dim, 1)),
          key_(noise(tokens * shape.key_heads * shape.key_dim, 2)),
          value_(noise(tokens * shape.value_heads * shape.value_dim, 3)),
          out_(static_cast<std::size_t>(tokens * shape.heads * shape.value_dim)) {
        const int64 gates = tokens * shape.gate_heads;
        if constexpr (takes_decay<Policy>) decay_.assign(count(gates * policy.decay_width(shape.key_dim)), -0.1f);
        if constexpr (takes_beta<Policy>) beta_.assign(count(gates), 0.5f);
        if constexpr (takes_vectors<Policy>) {
            const int64 features = policy.features(shape.key_dim);
            removal_ = noise(gates * features, 4);
            const float unit = -1 / std::sqrt(static_cast<float>(features));
            for (float& a : removal_) a *= unit;
            replacement_ = removal_;
            for (float& d : replacement_) d *= -0.5f;
        }
    }

    const sash::shape shape;
    const int64 tokens;

    /// Its tokens [first, first + n), and the rows they give.
    sash::tokens_of<Policy> slice(int64 first, int64 n) const {
        const auto part = [&](const std::vector<float>& x, int64 heads) -> sash::input {
            const int64 dim = static_cast<int64>(x.size()) / (tokens * heads);
            return {x.data() + first * heads * dim, n, heads, dim};
        };
        auto t = sash::detail::query_alone<Policy>(part(query_, shape.query_heads));
        t.key = part(key_, shape.key_heads);
        t.value = part(value_, shape.value_heads);
        if constexpr (takes_decay<Policy>) t.decay = part(decay_, shape.gate_heads);
        if constexpr (takes_beta<Policy>) t.beta = part(beta_, shape.gate_heads);
        if constexpr (takes_vectors<Policy>) {
            t.removal = part(removal_, shape.gate_heads);
            t.replacement = part(replacement_, shape.gate_heads);
        }
        return t;
    }
    sash::output rows(int64 first, int64 n) {
        const int64 row = shape.heads * shape.value_dim;
        return {out_.data() + first * row, n, shape.heads, shape.value_dim};
    }

private:
    template <class P>
    static constexpr bool takes_decay = sash::detail::takes_decay<P>;
    template <class P>
    static constexpr bool takes_beta = sash::detail::takes_beta<P>;
    template <class P>
    static constexpr bool takes_vectors = sash::detail::takes_vectors<P>;
    static std::size_t count(int64 n) { return static_cast<std::size_t>(n); }

    std::vector<float> query_, key_, value_, out_, decay_, beta_, removal_, replacement_;
};

/// Bytes of all states of a policy, fp32, the sums of their features included.
template <class Policy>
double bytes_of_states(const Policy& policy, const sash::shape& s) {
    const sash::shape full = sash::detail::resolve<sash::build::here>(s);
    const int64 columns = full.value_dim + (Policy::has_normaliser ? 1 : 0);
    return static_cast<double>(policy.states(full) * policy.features(full.key_dim) * columns) * sizeof(float);
}

/// One token into the next of some layers of states, each of which comes from memory.
template <class Policy>
class cold_states {
public:
    cold_states(const Policy& policy, const sash::shape& s)
        : tokens_(policy, s, 1), bytes_(bytes_of_states(policy, s)), layers_(bytes_, [&] {
              return sash::kv_cache<Policy>(policy, s, sash::score{}, {.memory = reused_memory()});
          }) {
        in_all_phases(layers_, [this](sash::kv_cache<Policy>& layer) { step(layer); });
    }

    /// Bytes that a step reads, and writes.
    double bytes() const { return bytes_; }
    void step() { step(layers_.next()); }
    /// Thread CPU time of a step, the mean over about 100 MB of states.
    double seconds() {
        const int steps = std::max(1, static_cast<int>(100e6 / bytes_));
        return seconds_of_step(steps, bytes_, [&] { step(); });
    }

private:
    void step(sash::kv_cache<Policy>& layer) {
        sash::attend(tokens_.slice(0, 1), layer, tokens_.rows(0, 1), {.run = sash::serial{}, .workspace = &scratch_});
    }

    gated_prompt<Policy> tokens_;
    double bytes_;
    cold_layers<sash::kv_cache<Policy>> layers_;
    sash::workspace scratch_;
};

/// A whole prompt, again and again, into one cache: in one call, or in calls of `most` tokens.
template <class Policy>
class gated_prefill {
public:
    int64 most;

    gated_prefill(const Policy& policy, const sash::shape& s, int64 tokens, const sash::storage& how = {})
        : most(tokens), tokens_(policy, s, tokens), cache_(policy, s, sash::score{}, how) {}

    void operator()() {
        cache_.reset();
        for (int64 first = 0, n = 0; first < tokens_.tokens; first += n) {
            n = std::min(most, tokens_.tokens - first);
            sash::attend(tokens_.slice(first, n), cache_, tokens_.rows(first, n),
                         {.run = sash::serial{}, .workspace = &scratch_});
        }
    }
    /// Thread CPU time of one prompt.
    double seconds() {
        return machine::seconds_of([this] { (*this)(); });
    }

private:
    gated_prompt<Policy> tokens_;
    sash::kv_cache<Policy> cache_;
    sash::workspace scratch_;
};

}  // namespace bench
