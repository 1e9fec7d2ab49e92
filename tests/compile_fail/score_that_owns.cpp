// expected-error {{sash: a score function must be trivially copyable (hold views, not containers)}}
#include <sash/sash.hpp>

#include <vector>

struct slopes {
#ifdef CORRECTED
    std::span<const float> table;
#else
    std::vector<float> table;
#endif
    template <class N, class Site>
    constexpr N operator()(N s, const Site& at) const {
        return s - N(table[0]) * at.distance();
    }
};

int main() { sash::kv_cache cache(sash::full{}, {.head_dim = 8}, {.custom = slopes{}}); }
