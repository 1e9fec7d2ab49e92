// The shared library that peers.py loads: prompts and cold layers of sash behind a C interface, on one thread, and what
// the machine can do. Tensors are [tokens, heads, dim], contiguous, of the element that the cache stores.
#include "machine.hpp"

#include <sash/sash.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace {

using sash::int64;

/// Some layers of one kind; each call takes the next.
class layers {
public:
    virtual ~layers() = default;
    virtual void reset() = 0;
    virtual void append(int64 tokens, const void* key, const void* value) = 0;  ///< to every layer
    virtual void attend(int64 tokens, const void* query, const void* key, const void* value, const float* decay,
                        const float* beta, void* out) = 0;
    virtual void read(const void* query, void* out) = 0;  ///< one token that sees every key
};

template <class Policy, class Element>
class layers_of final : public layers {
public:
    layers_of(int64 count, const Policy& policy, const sash::shape& shape) {
        while (static_cast<int64>(caches_.size()) < count) caches_.emplace_back(policy, shape);
    }
    void reset() override {
        for (auto& cache : caches_) cache.reset();
    }
    void append(int64 n, const void* key, const void* value) override {
        if constexpr (!sash::detail::takes_decay<Policy>)
            for (auto& cache : caches_) sash::append(keys(n, key), keys(n, value), cache, {.run = sash::serial{}});
    }
    void attend(int64 n, const void* query, const void* key, const void* value, [[maybe_unused]] const float* decay,
                [[maybe_unused]] const float* beta, void* out) override {
        auto tokens = sash::detail::query_alone<Policy>(queries(n, query));
        tokens.key = keys(n, key);
        tokens.value = keys(n, value);
        if constexpr (sash::detail::takes_decay<Policy>) tokens.decay = {decay, n, dims().kv_heads, 1};
        if constexpr (sash::detail::takes_beta<Policy>) tokens.beta = {beta, n, dims().kv_heads, 1};
        sash::attend(tokens, next(), rows(n, out), {.run = sash::serial{}, .workspace = &scratch_});
    }
    void read(const void* query, void* out) override {
        auto& cache = next();
        sash::read(queries(1, query), cache, rows(1, out),
                   {.first_query = cache.length() - 1, .run = sash::serial{}, .workspace = &scratch_});
    }

private:
    const sash::shape& dims() const { return caches_.front().shape(); }
    sash::input queries(int64 n, const void* data) const {
        return {static_cast<const Element*>(data), n, dims().heads, dims().head_dim};
    }
    sash::input keys(int64 n, const void* data) const {
        return {static_cast<const Element*>(data), n, dims().kv_heads, dims().head_dim};
    }
    sash::output rows(int64 n, void* data) const {
        return {static_cast<Element*>(data), n, dims().heads, dims().head_dim};
    }
    auto& next() {
        auto& cache = caches_[next_];
        next_ = (next_ + 1) % caches_.size();
        return cache;
    }

    std::vector<sash::kv_cache<Policy, Element>> caches_;
    std::size_t next_ = 0;
    sash::workspace scratch_;
};

template <class Element>
std::unique_ptr<layers> make(int64 count, int64 window, int64 sinks, const sash::shape& shape) {
    if (window > 0)
        return std::make_unique<layers_of<sash::sliding_window, Element>>(
            count, sash::sliding_window{.window = window, .sinks = sinks}, shape);
    return std::make_unique<layers_of<sash::full, Element>>(count, sash::full{}, shape);
}

template <class FeatureMap, class Update>
layers* linear_layers(int64 count, int64 heads, int64 dim) {
    using gated = sash::linear<FeatureMap, sash::per_head_and_token, Update, sash::no_normaliser>;
    const sash::shape shape{.heads = heads, .kv_heads = heads, .head_dim = dim};
    return std::make_unique<layers_of<gated, float>>(count, gated{}, shape).release();
}

}  // namespace

extern "C" {

double sash_peak_flops() { return machine::peak_flops(); }
double sash_peak_bfloat16_flops() { return machine::peak_bfloat16_flops(); }
double sash_read_bandwidth() { return machine::read_bandwidth(); }

/// `count` layers; window 0 is full attention.
layers* sash_layers(int is_bfloat16, int64 count, int64 window, int64 sinks, int64 heads, int64 kv_heads, int64 dim) {
    const sash::shape shape{.heads = heads, .kv_heads = kv_heads, .head_dim = dim};
    auto made =
        is_bfloat16 ? make<sash::bfloat16>(count, window, sinks, shape) : make<float>(count, window, sinks, shape);
    return made.release();
}
/// `count` layers of gated linear attention: S = exp(decay) S + k vᵀ, row = scale · Sᵀ q.
layers* sash_linear_layers(int64 count, int64 heads, int64 dim) {
    return linear_layers<sash::identity, sash::additive>(count, heads, dim);
}
/// … of the gated delta rule, for keys of length 1.
layers* sash_delta_layers(int64 count, int64 heads, int64 dim) {
    return linear_layers<sash::normalised_by_caller, sash::delta>(count, heads, dim);
}
void sash_free(layers* l) { delete l; }
void sash_reset(layers* l) { l->reset(); }
void sash_append(layers* l, int64 tokens, const void* key, const void* value) { l->append(tokens, key, value); }
void sash_attend(layers* l, int64 tokens, const void* query, const void* key, const void* value, const float* decay,
                 const float* beta, void* out) {
    l->attend(tokens, query, key, value, decay, beta, out);
}
void sash_read(layers* l, const void* query, void* out) { l->read(query, out); }

}  // extern "C"
