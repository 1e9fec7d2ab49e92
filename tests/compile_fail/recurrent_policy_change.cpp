// expected-error {{sash: the policy of a recurrent cache cannot change: its state was made with it}}
#include <sash/sash.hpp>

int main() {
#ifdef CORRECTED
    sash::kv_cache cache(sash::sliding_window{.window = 8}, {.head_dim = 8});
    cache.policy({.window = 4});
#else
    sash::kv_cache cache(sash::linear{}, {.head_dim = 8});
    cache.policy(sash::linear{});
#endif
}
