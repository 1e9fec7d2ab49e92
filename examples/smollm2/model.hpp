#pragma once
/// \file
/// A Llama-style language model: RMSNorm, grouped-query attention with rotary positions, SwiGLU, tied embeddings.
///
/// The weights know nothing of attention policies, and the model touches attention in one place, attention.cpp: a cache
/// per layer and one call of sash. `transformer` is a template on the cache for the sake of that line alone.
#include "dense.hpp"

#include <chrono>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace smollm2 {

/// Shapes and constants, as config.json gives them.
struct model_config {
    std::string name;
    index layers = 0, hidden = 0, inner = 0;
    index heads = 0, kv_heads = 0, head_dim = 0;
    index vocabulary = 0, trained_positions = 0;
    double rope_base = 10000;
    float norm_epsilon = 1e-5f;

    sash::shape attention() const { return {.heads = heads, .kv_heads = kv_heads, .head_dim = head_dim}; }
    index qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
};

/// The weights of one layer; rows are outputs. Matrices that multiply the same input are stacked into one.
struct layer_weights {
    matrix attention_norm;  ///< [1, hidden]
    matrix qkv;             ///< [(heads + 2 kv_heads) head_dim, hidden]: queries, keys, values
    matrix output;          ///< [hidden, heads head_dim]
    matrix inner_norm;      ///< [1, hidden]
    matrix gate, up;        ///< [inner, hidden]
    matrix down;            ///< [hidden, inner]
};

struct weights {
    model_config config;
    matrix embedding = {};  ///< [vocabulary, hidden]; also the last layer
    std::vector<layer_weights> layers = {};
    matrix final_norm = {};  ///< [1, hidden]
};

/// Reads config.json and model.safetensors of a folder. About 0.5 GB for SmolLM2-135M.
weights load_weights(const std::filesystem::path& folder);

/// A small model with random weights from a fixed seed: everything works, nothing it says means anything.
weights random_weights();

/// -log p(next[i]) of each token, given the final hidden rows [tokens, hidden]. The logits are made a few hundred words
/// of the vocabulary at a time and summed while they are in the processor's cache.
std::vector<float> losses(const weights& model, const matrix& hidden, std::span<const int> next, const crew& run);

/// All logits, [tokens, vocabulary].
matrix logits(const weights& model, const matrix& hidden, const crew& run);

// The parts of a layer that have nothing to do with attention.

/// Rows of the embedding, [tokens, hidden].
void embed(const weights& model, std::span<const int> tokens, matrix& to);
/// to = x / sqrt(mean(x²) + epsilon) · scale, row by row. Source: Zhang and Sennrich 2019.
void rms_norm(const matrix& x, const matrix& scale, float epsilon, matrix& to, const crew& run);
/// x += (silu(n gateᵀ) ⊙ n upᵀ) downᵀ with n the normalised x. Source: Shazeer 2020, SwiGLU.
void inner_layer(const layer_weights& layer, float epsilon, matrix& x, matrix& normed, matrix& inner, const crew& run);

/// A sequence in the making: the weights, and one cache per layer, which hold everything remembered of the tokens so
/// far. The caches are public: copy them to fork the sequence, roll them back, save them.
template <class Cache>
class transformer {
public:
    std::vector<Cache> caches;

    transformer(const weights& model, const typename Cache::policy_type& policy, const crew& run)
        : model_(model), run_(run) {
        const model_config& c = model.config;
        const sash::rope_table frequencies = sash::rope_frequencies(c.head_dim, c.rope_base);
        const sash::score rotated{.rotary = {.frequencies = frequencies, .by = sash::rotates::library}};
        caches.assign(model.layers.size(), Cache(policy, c.attention(), rotated));
    }

    /// Appends tokens to the sequence and returns their final hidden rows, [tokens, hidden], valid until the next call.
    const matrix& forward(std::span<const int> tokens) {
        const float epsilon = model_.config.norm_epsilon;
        embed(model_, tokens, x_);
        for (std::size_t i = 0; i < model_.layers.size(); ++i) {
            const layer_weights& layer = model_.layers[i];
            rms_norm(x_, layer.attention_norm, epsilon, normed_, run_);
            multiply(normed_, layer.qkv, qkv_, run_);
            attend(caches[i]);
            multiply_add(attended_, layer.output, x_, run_);
            inner_layer(layer, epsilon, x_, normed_, inner_, run_);
        }
        rms_norm(x_, model_.final_norm, epsilon, normed_, run_);
        return normed_;
    }

    /// Appends a prompt of any length and returns the last token's final row, [1, hidden]: in chunks, since nobody
    /// needs all rows at once. An empty prompt gives an empty matrix.
    matrix feed(std::span<const int> tokens) {
        constexpr std::size_t chunk = 256;
        matrix last;
        for (std::size_t at = 0; at < tokens.size(); at += chunk)
            last = forward(tokens.subspan(at, std::min(chunk, tokens.size() - at))).bottomRows(1);
        return last;
    }

    /// Tokens the sequence holds.
    index length() const { return caches.front().length(); }
    /// Memory of all layers' caches.
    index cache_bytes() const {
        index sum = 0;
        for (const Cache& layer : caches) sum += static_cast<index>(layer.bytes());
        return sum;
    }
    /// Seconds spent in attention since the beginning.
    double attention_seconds() const { return attention_seconds_; }

private:
    /// attended_ = attention over everything the layer's cache holds, the tokens of qkv_ included: see attention.cpp.
    void attend(Cache& layer);

    const weights& model_;
    crew run_;
    matrix x_, normed_, qkv_, attended_, inner_;
    double attention_seconds_ = 0;
};

}  // namespace smollm2
