// One token under full attention sees itself alone: its output is its value.
#include <sash/sash.hpp>

#include <cstdio>
#include <vector>

int main() {
    sash::kv_cache cache(sash::full{}, {.heads = 2, .kv_heads = 1, .head_dim = 8});
    std::vector<float> q(2 * 8, 0.1f), k(8, 0.2f), v(8, 0.75f), out(2 * 8);
    sash::attend({q, 1, 2, 8}, {k, 1, 1, 8}, {v, 1, 1, 8}, cache, {out, 1, 2, 8});
    for (const float x : out) {
        if (x != 0.75f) {
            std::printf("expected 0.75, got %g\n", static_cast<double>(x));
            return 1;
        }
    }
}
