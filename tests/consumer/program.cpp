#include <sash/sash.hpp>
#include <vector>

int main() {
    sash::kv_cache cache(sash::sliding_window{.window = 1024, .sinks = 4},        // 1024 keys counting the query's own, plus 4 sinks
                         {.heads = 32, .kv_heads = 8, .head_dim = 128});
    std::vector<float> q(32 * 128, 0.1f), k(8 * 128, 0.2f), v(8 * 128, 0.3f), out(32 * 128);
    for (int token = 0; token < 10000; ++token)                                    // for ever, in constant memory
        sash::attend({q, 1, 32, 128}, {k, 1, 8, 128}, {v, 1, 8, 128}, cache, {out, 1, 32, 128});   // [tokens, heads, dim]
}
