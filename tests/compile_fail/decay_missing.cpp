// expected-error {{sash: this policy needs .decay}}
#include <sash/sash.hpp>

using gated = sash::linear<sash::elu_plus_one, sash::per_head_and_token>;

void step(sash::input q, sash::input k, sash::input v, sash::input g, sash::kv_cache<gated>& cache, sash::output out) {
#ifdef CORRECTED
    sash::attend({.query = q, .key = k, .value = v, .decay = g}, cache, out);
#else
    static_cast<void>(g);
    sash::attend({.query = q, .key = k, .value = v}, cache, out);
#endif
}
