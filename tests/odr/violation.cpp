// Two builds of this file share the name of a function and not its code: check.py must say so.
namespace sash {
[[gnu::noinline]] inline void twice(float* x, int n) {
    for (int i = 0; i < n; ++i) x[i] = x[i] + x[i];
}
}  // namespace sash

namespace odr::UNIT {
extern void (*const functions)(float*, int);
void (*const functions)(float*, int) = sash::twice;
}  // namespace odr::UNIT
