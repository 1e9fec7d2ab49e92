// expected-error {{sash: this policy keeps no state: only linear and hybrid policies do}}
#include <sash/sash.hpp>

int main() {
#ifdef CORRECTED
    sash::kv_cache cache(sash::linear{}, {.head_dim = 8});
#else
    sash::kv_cache cache(sash::sliding_window{.window = 8}, {.head_dim = 8});
#endif
    return cache.state().length == 0 ? 0 : 1;
}
