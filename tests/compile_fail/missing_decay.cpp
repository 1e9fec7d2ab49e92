// expected-error {{sash: this policy needs .decay}}
#include <sash/sash.hpp>

#include <vector>

int main() {
    sash::kv_cache cache(sash::linear<sash::elu_plus_one, sash::per_head_and_token>{}, {.head_dim = 8});
    std::vector<float> x(8), decay(1), out(8);
#ifdef CORRECTED
    sash::attend({.query = {x, 1, 1, 8}, .key = {x, 1, 1, 8}, .value = {x, 1, 1, 8}, .decay = {decay, 1, 1}}, cache,
                 {out, 1, 1, 8});
#else
    sash::attend({.query = {x, 1, 1, 8}, .key = {x, 1, 1, 8}, .value = {x, 1, 1, 8}}, cache, {out, 1, 1, 8});
#endif
}
