// expected-error {{sash: Policy must model sash::attention_policy}}
#include <sash/sash.hpp>

// It says who sees whom, but not where the keys of a tile of queries lie.
struct every_other {
    constexpr bool sees(sash::int64 query, sash::int64 key) const { return key <= query && (query - key) % 2 == 0; }
#ifdef CORRECTED
    constexpr sash::key_intervals<1> visible(sash::int64, sash::int64 last_query) const {
        sash::key_intervals<1> keys;
        keys.add(0, last_query);
        return keys;
    }
#endif
};

int main() { sash::kv_cache cache(every_other{}, {.heads = 2, .head_dim = 8}); }
