// expected-error {{sash: .beta is no input of this policy}}
// expected-error {{sash: .removal is no input of this policy}}
// expected-error {{sash: .replacement is no input of this policy}}
#include <sash/sash.hpp>

#include <vector>

int main() {
    sash::kv_cache cache(sash::systems::gla{}, {.head_dim = 8});
    std::vector<float> x(8), out(8);
    const sash::input row(x, 1, 1, 8), beta(x, 1, 1);
#ifdef CORRECTED
    sash::append({.key = row, .value = row, .decay = row}, cache);
#else
    sash::append({.key = row, .value = row, .decay = row, .beta = beta}, cache);
    sash::append({.key = row, .value = row, .decay = row, .removal = row}, cache);
    sash::append({.key = row, .value = row, .decay = row, .replacement = row}, cache);
#endif
}
