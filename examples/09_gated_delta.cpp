// Lesson 9: a layer of the delta rule, as Qwen3-Next has it three times for each layer of full attention. The state is a
// memory that is corrected, not only added to: with the key k_t at unit length and 0 <= beta <= 1,
//
//     S' = exp(g_t) S            S = S' + beta_t k_t (v_t - S'^T k_t)^T            out_t = S^T q_t / sqrt(key_dim)
//
// (Yang et al. 2024, "Gated delta networks"). Around that core the layer has a convolution over the last four tokens
// before it, and a norm and a gate behind it. The core is a cache's policy; the rest are functions of rows, and what they
// remember travels with the cache.
#include "lesson.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <cstring>

using sash::int64;
namespace layer = sash::layer;
using policy = sash::systems::gated_deltanet;

namespace {

// 16 heads of query and key, 32 of value: each query and key serves two values, and each value head has its own state.
constexpr int64 key_heads = 16, heads = 32, key_dim = 16, value_dim = 8, taps = 4;
constexpr int64 keys = key_heads * key_dim, values = heads * value_dim;
const sash::shape shape{.heads = heads,
                        .kv_heads = heads,
                        .key_dim = key_dim,
                        .value_dim = value_dim,
                        .query_heads = key_heads,
                        .key_heads = key_heads};

// What a training would have found.
const std::vector<float> query_taps = lesson::numbers(keys * taps, 1), key_taps = lesson::numbers(keys * taps, 2),
                         value_taps = lesson::numbers(values * taps, 3), A_log = lesson::numbers(heads, 4),
                         dt_bias = lesson::numbers(heads, 5), norm_weight = lesson::numbers(value_dim, 6);

// What the projections of some tokens would give.
struct projected {
    int64 tokens;
    std::vector<float> query, key, value, gate, decay, beta;

    explicit projected(int64 n, unsigned seed = 10)
        : tokens(n),
          query(lesson::numbers(n * keys, seed)),
          key(lesson::numbers(n * keys, seed + 1)),
          value(lesson::numbers(n * values, seed + 2)),
          gate(lesson::numbers(n * values, seed + 3)),
          decay(lesson::numbers(n * heads, seed + 4)),
          beta(lesson::numbers(n * heads, seed + 5)) {}

    projected part(int64 first, int64 count) const {
        projected p(0);
        p.tokens = count;
        const auto cut = [&](const std::vector<float>& x, int64 width) {
            return std::vector<float>(x.begin() + first * width, x.begin() + (first + count) * width);
        };
        p.query = cut(query, keys), p.key = cut(key, keys), p.value = cut(value, values), p.gate = cut(gate, values);
        p.decay = cut(decay, heads), p.beta = cut(beta, heads);
        return p;
    }
    sash::tokens_of<policy> tokens_of() const {
        return {.query = {query, tokens, key_heads, key_dim},
                .key = {key, tokens, key_heads, key_dim},
                .value = {value, tokens, heads, value_dim},
                .decay = {decay, tokens, heads, 1},
                .beta = {beta, tokens, heads, 1}};
    }
};

constexpr int64 tail = layer::filter_state(2 * keys + values, taps);  // floats that the convolution remembers

// Before the core: query, key and value through the convolution and SiLU, raw gates to a decay and a beta.
void prepare(projected& x, std::span<float> remembered) {
    const auto convolve = [&](std::vector<float>& rows, int64 width, const std::vector<float>& weights) {
        const auto floats = static_cast<std::size_t>(layer::filter_state(width, taps));
        layer::convolve({rows, x.tokens, 1, width}, {.weights = weights, .activation = layer::activation::silu},
                        remembered.first(floats));
        remembered = remembered.subspan(floats);
    };
    convolve(x.query, keys, query_taps);
    convolve(x.key, keys, key_taps);
    convolve(x.value, values, value_taps);
    for (std::size_t i = 0; i < x.decay.size(); ++i) {
        const std::size_t head = i % heads;
        x.decay[i] = sash::gate::gated_delta(x.decay[i], A_log[head], dt_bias[head]);
        x.beta[i] = sash::gate::sigmoid(x.beta[i]);
    }
}

// Behind it: each head normed, then gated.
void finish(std::vector<float>& rows, const projected& x) {
    const sash::output out(rows, x.tokens, heads, value_dim);
    layer::rms_norm(out, {.epsilon = 1e-6f, .weight = norm_weight});
    layer::multiply_by_silu(out, {x.gate, x.tokens, heads, value_dim});
}

using cache = sash::kv_cache<policy>;

std::vector<float> run(cache& c, projected x) {
    std::vector<float> rows(static_cast<std::size_t>(x.tokens * values));
    prepare(x, c.auxiliary());
    sash::attend(x.tokens_of(), c, {rows, x.tokens, heads, value_dim});
    finish(rows, x);
    return rows;
}

}  // namespace

int main() {
    const projected tokens(40);
    const cache empty({}, shape, {}, {.auxiliary = tail});
    lesson::say(heads, " states of ", key_dim, " x ", value_dim, " floats, ", tail,
                " floats of convolution: ", empty.bytes() / 1024, " KiB, for ever");

    // ---- A prompt at once, against the recurrence in double.
    cache prompt = empty;
    const std::vector<float> rows = run(prompt, tokens);
    projected prepared = tokens;
    std::vector<float> forgotten(tail);
    prepare(prepared, forgotten);
    const std::vector<double> core = sash::reference::recur(policy{}, shape, prepared.tokens_of()).out;
    std::vector<float> expected(core.begin(), core.end());
    finish(expected, prepared);
    lesson::expect_near(lesson::largest_difference(rows, expected), 1e-4, "the whole prompt, against the recurrence");

    // ---- Token by token, and a fork on the way: the convolution's past went along.
    cache decoding = empty;
    std::vector<float> decoded;
    bool same = true;
    for (int64 t = 0; t < tokens.tokens; ++t) {
        cache fork = decoding;
        const std::vector<float> row = run(decoding, tokens.part(t, 1)), again = run(fork, tokens.part(t, 1));
        same = same && row == again;
        decoded.insert(decoded.end(), row.begin(), row.end());
    }
    lesson::expect_near(lesson::largest_difference(decoded, expected), 1e-4, "token by token");
    lesson::expect(same, "a fork at each token goes on as the cache does");

    // ---- What the delta rule is for: what was stored under a key is replaced, not blurred. Twice the same key, with
    // beta = 1 and no decay: the second value is read back, where adding would give the sum.
    sash::kv_cache memory(sash::systems::deltanet{}, {.key_dim = 2, .value_dim = 1}, {.scale = 1});
    const std::vector<float> key{1, 0, 1, 0}, value{5, 7}, one{1, 1};
    std::vector<float> read(2);
    sash::attend({.query = {key, 2, 1, 2}, .key = {key, 2, 1, 2}, .value = {value, 2, 1, 1}, .beta = {one, 2, 1, 1}},
                 memory, {read, 2, 1, 1});
    lesson::expect_near(lesson::largest_difference(read, value), 1e-4, "a key written twice gives its last value");
    return lesson::exit_code();
}
