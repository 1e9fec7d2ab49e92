// expected-error {{sash: .decay is no input of this policy}}
#include <sash/sash.hpp>

void step(sash::input q, sash::input k, sash::input v, sash::input g, sash::kv_cache<sash::sliding_window>& cache,
          sash::output out) {
#ifdef CORRECTED
    static_cast<void>(g);
    sash::attend({.query = q, .key = k, .value = v}, cache, out);
#else
    sash::attend({.query = q, .key = k, .value = v, .decay = g}, cache, out);
#endif
}
