// expected-error {{sash: the features of this map may be negative, so their sum must not divide: use no_normaliser}}
#include <sash/sash.hpp>

#ifdef CORRECTED
using policy = sash::linear<sash::identity, sash::no_decay, sash::additive, sash::no_normaliser>;
#else
using policy = sash::linear<sash::identity>;
#endif

int main() {
    sash::kv_cache<policy> cache({}, {.heads = 2, .kv_heads = 1, .head_dim = 8});
}
