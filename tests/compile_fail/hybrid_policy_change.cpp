// expected-error {{sash: the policy of a recurrent cache cannot change: its state was made with it}}
#include <sash/sash.hpp>

using policy = sash::hybrid<sash::sliding_window, sash::linear<>, sash::log_sum_exp>;

int main() {
    sash::kv_cache cache(policy{.window = {.window = 8}}, {.head_dim = 4});
#ifndef CORRECTED
    cache.policy(policy{.window = {.window = 9}});
#endif
    return cache.policy().window.window == 8 ? 0 : 1;
}
