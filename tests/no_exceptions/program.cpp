// Compiled with -fno-exceptions -fno-rtti. With an argument it makes a mistake, of which on_error must be told.
#include <sash/sash.hpp>

#include <cstdio>
#include <cstdlib>
#include <vector>

#ifndef FORGETS_ON_ERROR
namespace sash {
void on_error(std::string_view message) {
    std::printf("on_error: %.*s\n", static_cast<int>(message.size()), message.data());
    std::exit(0);
}
}  // namespace sash
#endif

int main(int argc, char**) {
    sash::kv_cache cache(sash::sliding_window{.window = 4, .sinks = 1}, {.heads = 2, .kv_heads = 1, .head_dim = 8});
    std::vector<float> q(2 * 8, 0.1f), k(8, 0.2f), v(8, 0.3f), out(2 * 8);
    for (int token = 0; token < 20; ++token)
        sash::attend({q, 1, 2, 8}, {k, 1, 1, 8}, {v, 1, 1, 8}, cache, {out, 1, 2, 8});
    for (const float x : out) {
        // Equal values: any average of them is that value, up to rounding.
        if (!(x > 0.2999f && x < 0.3001f)) return 1;
    }
    std::printf("20 tokens attended\n");
    if (argc > 1) {
        sash::attend({q, 1, 4, 4}, {k, 1, 1, 8}, {v, 1, 1, 8}, cache, {out, 1, 2, 8});
        return 2;  // not reached: the query has 4 heads, the cache 2
    }
}
