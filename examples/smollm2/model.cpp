#include "model.hpp"

#include "safetensors.hpp"

#include <cmath>
#include <random>

namespace smollm2 {

namespace {

constexpr index tokens_per_task = 32;
constexpr index words_per_task = 512;  // a tile of logits [256 tokens, 512 words] stays in a core's second-level cache

model_config read_config(const std::filesystem::path& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot open " + path.string());
    const nlohmann::json json = nlohmann::json::parse(file);
    if (json.at("model_type") != "llama" || json.at("tie_word_embeddings") != true)
        throw std::runtime_error(path.string() + ": expected a Llama model with tied embeddings");
    return {.name = json.value("name", "Llama"),
            .layers = json.at("num_hidden_layers"),
            .hidden = json.at("hidden_size"),
            .inner = json.at("intermediate_size"),
            .heads = json.at("num_attention_heads"),
            .kv_heads = json.at("num_key_value_heads"),
            .head_dim = json.at("head_dim"),
            .vocabulary = json.at("vocab_size"),
            .trained_positions = json.at("max_position_embeddings"),
            .rope_base = json.at("rope_theta"),
            .norm_epsilon = json.at("rms_norm_eps")};
}

/// Makes every matrix of the model in its shape; `fill(name, matrix, first row, rows)` gives it numbers.
template <class Fill>
weights make_weights(const model_config& c, const Fill& fill) {
    weights model{.config = c};
    const auto make = [&](matrix& m, index rows, index columns, const std::string& name) {
        m.resize(rows, columns);
        fill(name + ".weight", m, index{0}, rows);
    };
    const index query_rows = c.heads * c.head_dim, key_rows = c.kv_heads * c.head_dim;
    make(model.embedding, c.vocabulary, c.hidden, "model.embed_tokens");
    make(model.final_norm, 1, c.hidden, "model.norm");
    for (index i = 0; i < c.layers; ++i) {
        const std::string name = "model.layers." + std::to_string(i) + ".";
        layer_weights& layer = model.layers.emplace_back();
        make(layer.attention_norm, 1, c.hidden, name + "input_layernorm");
        layer.qkv.resize(c.qkv_width(), c.hidden);
        fill(name + "self_attn.q_proj.weight", layer.qkv, index{0}, query_rows);
        fill(name + "self_attn.k_proj.weight", layer.qkv, query_rows, key_rows);
        fill(name + "self_attn.v_proj.weight", layer.qkv, query_rows + key_rows, key_rows);
        make(layer.output, c.hidden, query_rows, name + "self_attn.o_proj");
        make(layer.inner_norm, 1, c.hidden, name + "post_attention_layernorm");
        make(layer.gate, c.inner, c.hidden, name + "mlp.gate_proj");
        make(layer.up, c.inner, c.hidden, name + "mlp.up_proj");
        make(layer.down, c.hidden, c.inner, name + "mlp.down_proj");
    }
    return model;
}

}  // namespace

weights load_weights(const std::filesystem::path& folder) {
    safetensors file(folder / "model.safetensors");
    const auto read = [&](const std::string& name, matrix& m, index first, index rows) {
        file.read_rows(name, m, first, rows);
    };
    return make_weights(read_config(folder / "config.json"), read);
}

weights random_weights() {
    const model_config c{.name = "built-in model with random weights",
                         .layers = 4,
                         .hidden = 96,
                         .inner = 256,
                         .heads = 6,
                         .kv_heads = 2,
                         .head_dim = 16,
                         .vocabulary = 256,
                         .trained_positions = 8192,
                         .rope_base = 100000};
    std::mt19937 random(1);  // the same numbers everywhere: golden.py draws them, too
    const auto draw = [&](const std::string& name, matrix& m, index first, index rows) {
        const bool is_norm = name.find("norm") != std::string::npos;
        const float most = 2.0f / std::sqrt(static_cast<float>(m.cols()));
        for (index i = first; i < first + rows; ++i)
            for (float& number : m.row(i))
                number = is_norm ? 1.0f : most * (static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f);
    };
    return make_weights(c, draw);
}

void embed(const weights& model, std::span<const int> tokens, matrix& to) {
    to.resize(static_cast<index>(tokens.size()), model.config.hidden);
    for (index i = 0; i < to.rows(); ++i) to.row(i) = model.embedding.row(tokens[static_cast<std::size_t>(i)]);
}

void rms_norm(const matrix& x, const matrix& scale, float epsilon, matrix& to, const crew& run) {
    to.resize(x.rows(), x.cols());
    in_parts(run, x.rows(), tokens_per_task, [&](index first, index count) {
        for (index i = first; i < first + count; ++i) {
            const float mean_square = x.row(i).squaredNorm() / static_cast<float>(x.cols());
            to.row(i) = (x.row(i) / std::sqrt(mean_square + epsilon)).cwiseProduct(scale.row(0));
        }
    });
}

void inner_layer(const layer_weights& layer, float epsilon, matrix& x, matrix& normed, matrix& inner, const crew& run) {
    rms_norm(x, layer.inner_norm, epsilon, normed, run);
    inner.resize(x.rows(), layer.gate.rows());
    in_parts(run, layer.gate.rows(), columns_per_task(layer.gate.rows()), [&](index first, index count) {
        thread_local matrix gate, up;
        gate.resize(x.rows(), count);
        up.resize(x.rows(), count);
        multiply_columns(normed, layer.gate, first, count, gate);
        multiply_columns(normed, layer.up, first, count, up);
        inner.middleCols(first, count).array() = gate.array() / (1.0f + (-gate.array()).exp()) * up.array();
    });
    multiply_add(inner, layer.down, x, run);
}

matrix logits(const weights& model, const matrix& hidden, const crew& run) {
    matrix result;
    multiply(hidden, model.embedding, result, run);
    return result;
}

std::vector<float> losses(const weights& model, const matrix& hidden, std::span<const int> next, const crew& run) {
    const index tokens = static_cast<index>(next.size()), words = model.embedding.rows();
    const index parts = (words + words_per_task - 1) / words_per_task;
    matrix maximum(parts, tokens), sum(parts, tokens);  // of exp(logit - maximum), over the words of one part
    vector of_next(tokens);
    in_parts(run, words, words_per_task, [&](index first, index count) {
        thread_local matrix tile;
        tile.resize(tokens, count);
        multiply_columns(hidden, model.embedding, first, count, tile);
        for (index i = 0; i < tokens; ++i) {
            const auto row = tile.row(i).array();
            const float most = row.maxCoeff();
            maximum(first / words_per_task, i) = most;
            sum(first / words_per_task, i) = (row - most).exp().sum();
            const index word = next[static_cast<std::size_t>(i)];
            if (word >= first && word < first + count) of_next[i] = tile(i, word - first);
        }
    });
    std::vector<float> result(next.size());
    for (index i = 0; i < tokens; ++i) {
        const float most = maximum.col(i).maxCoeff();
        const float total = ((maximum.col(i).array() - most).exp() * sum.col(i).array()).sum();
        result[static_cast<std::size_t>(i)] = most + std::log(total) - of_next[i];
    }
    return result;
}

}  // namespace smollm2
