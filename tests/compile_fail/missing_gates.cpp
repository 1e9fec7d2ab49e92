// expected-error {{sash: this policy needs .beta}}
// expected-error {{sash: this policy needs .removal}}
// expected-error {{sash: this policy needs .replacement}}
#include <sash/sash.hpp>

#include <vector>

int main() {
    sash::kv_cache corrected(sash::systems::deltanet{}, {.head_dim = 8});
    sash::kv_cache removing(sash::systems::rwkv7{}, {.head_dim = 8});
    std::vector<float> x(8), out(8);
    const sash::input row(x, 1, 1, 8), beta(x, 1, 1);
#ifdef CORRECTED
    sash::append({.key = row, .value = row, .beta = beta}, corrected);
    sash::append({.key = row, .value = row, .decay = row, .removal = row, .replacement = row}, removing);
#else
    sash::append({.key = row, .value = row}, corrected);
    sash::append({.key = row, .value = row, .decay = row}, removing);
#endif
}
