// expected-error {{sash: this policy needs .decay}}
#include <sash/sash.hpp>

#include <vector>

int main() {
#ifdef CORRECTED
    sash::kv_cache cache(sash::linear{}, {.head_dim = 8});
#else
    sash::kv_cache cache(sash::linear<sash::elu_plus_one, sash::per_head_and_token>{}, {.head_dim = 8});
#endif
    std::vector<float> x(8), out(8);
    sash::attend({x, 1, 1, 8}, {x, 1, 1, 8}, {x, 1, 1, 8}, cache, {out, 1, 1, 8});
}
