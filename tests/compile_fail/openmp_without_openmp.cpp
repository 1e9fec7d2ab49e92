// expected-error {{sash: sash::openmp needs this file to be compiled with OpenMP (-fopenmp)}}
#include <sash/sash.hpp>

#include <vector>

int main() {
    sash::kv_cache cache(sash::full{}, {.head_dim = 8});
    std::vector<float> x(8), out(8);
#ifdef CORRECTED
    const auto run = sash::serial{};
#else
    const auto run = sash::openmp{.threads = 2};
#endif
    sash::attend({x, 1, 1, 8}, {x, 1, 1, 8}, {x, 1, 1, 8}, cache, {out, 1, 1, 8}, {.run = run});
}
