// The whole of attention: one call. The file is compiled for every type of cache that policies.hpp offers, and no other
// file compiles a kernel.
#include "model.hpp"

namespace smollm2 {

template <class Cache>
void transformer<Cache>::attend(Cache& layer) {
    const auto start = std::chrono::steady_clock::now();
    const model_config& c = model_.config;
    const index tokens = qkv_.rows(), width = qkv_.cols(), d = c.head_dim;
    attended_.resize(tokens, c.heads * d);

    // The rows of qkv_ are [queries | keys | values], and are read where they lie: [tokens, heads, dim], then the strides
    // from token to token and from head to head.
    const float* const q = qkv_.data();
    const float* const k = q + c.heads * d;
    const float* const v = k + c.kv_heads * d;
    sash::attend({q, tokens, c.heads, d, width, d}, {k, tokens, c.kv_heads, d, width, d},
                 {v, tokens, c.kv_heads, d, width, d}, layer, {attended_.data(), tokens, c.heads, d}, {.run = run_});

    attention_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <class Policy, class Element>
using cache = sash::kv_cache<Policy, Element>;

template void transformer<cache<sash::full, float>>::attend(cache<sash::full, float>&);
template void transformer<cache<sash::full, sash::float16>>::attend(cache<sash::full, sash::float16>&);
template void transformer<cache<sash::full, sash::bfloat16>>::attend(cache<sash::full, sash::bfloat16>&);

using window = sash::sliding_window;
template void transformer<cache<window, float>>::attend(cache<window, float>&);
template void transformer<cache<window, sash::float16>>::attend(cache<window, sash::float16>&);
template void transformer<cache<window, sash::bfloat16>>::attend(cache<window, sash::bfloat16>&);

template void transformer<cache<sash::linear<>, float>>::attend(cache<sash::linear<>, float>&);

}  // namespace smollm2
