// Lesson 4: a decode loop, and what changes when another policy is put into it: one type.
//
// The model is a toy: 64 words, one attention layer, random weights; the next word is the one whose embedding is
// nearest to the row that attention gives. What it writes means nothing. What it costs to remember does.
#include "lesson.hpp"

#include <sash/reference.hpp>
#include <sash/sash.hpp>

#include <type_traits>

namespace {

using sash::int64;
constexpr int64 words = 64, heads = 4, kv_heads = 2, dim = 32, width = heads * dim;
const sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim};

// y = x W, [width] -> [columns]
std::vector<float> project(std::span<const float> x, const std::vector<float>& weights) {
    std::vector<float> y(weights.size() / x.size());
    for (std::size_t i = 0; i < x.size(); ++i)
        for (std::size_t j = 0; j < y.size(); ++j)
            y[j] += x[i] * weights[i * y.size() + j] / std::sqrt(float(x.size()));
    return y;
}

struct model {
    std::vector<float> embedding = lesson::numbers(words * width, 1);  // [words, width]
    std::vector<float> to_query = lesson::numbers(width * heads * dim, 2);
    std::vector<float> to_key = lesson::numbers(width * kv_heads * dim, 3);
    std::vector<float> to_value = lesson::numbers(width * kv_heads * dim, 4);

    std::span<const float> embed(int64 word) const {
        return std::span(embedding).subspan(static_cast<std::size_t>(word * width), width);
    }

    int64 nearest(const std::vector<float>& row, int64 word) const {
        int64 best = 0;
        float highest = -std::numeric_limits<float>::infinity();
        for (int64 w = 0; w < words; ++w) {
            float dot = 0;
            for (std::size_t i = 0; i < width; ++i) dot += embed(w)[i] * row[i];
            if (w != word && dot > highest) highest = dot, best = w;
        }
        return best;
    }
};

// Positions are rotary, and turned by the library: queries and keys are handed over as the projections give them.
const sash::rope_table frequencies = sash::rope_frequencies(dim);
const sash::score rotary{.rotary = {.frequencies = frequencies, .by = sash::rotates::library}};

void keep(std::vector<float>& history, const std::vector<float>& more) {
    history.insert(history.end(), more.begin(), more.end());
}

template <class Cache>
std::vector<int64> generate(const char* name, const model& m, Cache cache, int64 count) {
    std::vector<float> keys, values, q, row(width);  // the whole history, for the check alone
    std::vector<int64> text{7};
    while (static_cast<int64>(text.size()) < count) {
        const auto x = m.embed(text.back());
        q = project(x, m.to_query);
        const auto k = project(x, m.to_key), v = project(x, m.to_value);
        sash::attend({q, 1, heads, dim}, {k, 1, kv_heads, dim}, {v, 1, kv_heads, dim}, cache, {row, 1, heads, dim});
        text.push_back(m.nearest(row, text.back()));
        keep(keys, k), keep(values, v);
    }

    std::cout << name << "\n  writes";
    for (std::size_t i = text.size() - 8; i < text.size(); ++i) std::cout << ' ' << text[i];
    lesson::say("; after ", cache.length(), " tokens it holds ", cache.stored(), " of them in ", cache.bytes() / 1024,
                " KiB");

    const double most =
        std::is_same_v<typename Cache::element_type, float> ? 1e-5 : 2e-2;  // bfloat16 keeps 8 bits of a key
    const sash::input key(keys, count - 1, kv_heads, dim), value(values, count - 1, kv_heads, dim);
    const auto expected = sash::reference::attend(cache.policy(), shape, {q, 1, heads, dim}, key, value, rotary);
    lesson::expect_near(lesson::largest_difference(row, expected.out), most,
                        "the last row, against the textbook over the whole history");
    return text;
}

}  // namespace

int main() {
    const model m;
    constexpr int64 count = 2000;
    const sash::sliding_window near{.window = 60, .sinks = 4},
        streaming{.window = 60, .sinks = 4, .frame = sash::frame::compact};

    const auto full = generate("full", m, sash::kv_cache(sash::full{}, shape, rotary), count);
    const auto wide = generate("window 5000 (longer than the text)", m,
                               sash::kv_cache(sash::sliding_window{.window = 5000}, shape, rotary), count);
    lesson::expect(full == wide, "a window longer than the text is full attention");

    generate("window 60 + 4 sinks, original frame", m, sash::kv_cache(near, shape, rotary), count);
    generate("window 60 + 4 sinks, compact frame", m, sash::kv_cache(streaming, shape, rotary), count);
    generate("window 60 + 4 sinks, compact frame, bfloat16", m,
             sash::kv_cache<sash::sliding_window, sash::bfloat16>(streaming, shape, rotary), count);
    generate("linear, elu(x) + 1", m, sash::kv_cache(sash::linear{}, shape, rotary), count);
    return lesson::exit_code();
}
