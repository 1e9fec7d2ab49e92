// expected-error {{sash: a score function must be trivially copyable (hold views, not containers)}}
#include <sash/sash.hpp>

#include <vector>

struct per_token_bias {
#ifdef CORRECTED
    const float* bias = nullptr;
#else
    std::vector<float> bias;
#endif
    template <class N, class Site>
    constexpr N operator()(N s, const Site&) const {
        return s;
    }
};

int main() {
    sash::kv_cache cache(sash::full{}, {.heads = 2, .kv_heads = 1, .head_dim = 8}, {.custom = per_token_bias{}});
}
