// expected-error {{sash: a large runner must be an lvalue that outlives the call}}
#include <sash/sash.hpp>

struct pool {
    int threads[8] = {};
    void operator()(sash::int64 tasks, sash::task f) const {
        for (sash::int64 i = 0; i < tasks; ++i) f(i);
    }
};

int main() {
#ifdef CORRECTED
    pool named;
    sash::runner run = named;
#else
    sash::runner run = pool{};
#endif
    return run ? 0 : 1;
}
