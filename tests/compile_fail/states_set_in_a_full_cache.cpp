// expected-error {{sash: this policy keeps no state: only linear and hybrid policies do}}
#include <sash/sash.hpp>

int main() {
#ifdef CORRECTED
    sash::kv_cache cache(sash::linear{}, {.head_dim = 8});
#else
    sash::kv_cache cache(sash::full{}, {.head_dim = 8});
#endif
    cache.state(sash::recurrent_state{});
}
