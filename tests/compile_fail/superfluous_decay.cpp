// expected-error {{sash: .decay is no input of this policy}}
#include <sash/sash.hpp>

#include <vector>

int main() {
    sash::kv_cache cache(sash::full{}, {.head_dim = 8});
    std::vector<float> x(8), out(8);
    const sash::input decay(x, 1, 1);
#ifdef CORRECTED
    sash::attend({.query = {x, 1, 1, 8}, .key = {x, 1, 1, 8}, .value = {x, 1, 1, 8}}, cache, {out, 1, 1, 8});
#else
    sash::attend({.query = {x, 1, 1, 8}, .key = {x, 1, 1, 8}, .value = {x, 1, 1, 8}, .decay = decay}, cache,
                 {out, 1, 1, 8});
#endif
}
