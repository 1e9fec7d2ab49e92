// expected-error {{sash: a score function holds at most 64 bytes; keep tables outside and hold per_head views}}
#include <sash/sash.hpp>

struct slopes {
#ifdef CORRECTED
    sash::per_head table;
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        return s - at.of_head(table) * at.distance();
    }
#else
    float table[32] = {};
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        return s - N(table[0]) * at.distance();
    }
#endif
};

int main() { sash::kv_cache cache(sash::full{}, {.head_dim = 8}, {.custom = slopes{}}); }
