// expected-error {{sash: Element must be float, sash::float16, sash::bfloat16 or sash::int8_rows}}
#include <sash/sash.hpp>

#ifdef CORRECTED
using element = float;
#else
using element = int;
#endif

int main() {
    sash::kv_cache<sash::full, element> cache({}, {.heads = 2, .kv_heads = 1, .head_dim = 8});
}
