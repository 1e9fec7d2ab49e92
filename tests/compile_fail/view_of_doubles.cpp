// expected-error {{sash: views are of float, sash::float16 or sash::bfloat16}}
#include <sash/sash.hpp>

#include <vector>

#ifdef CORRECTED
using number = float;
#else
using number = double;
#endif

int main() {
    const std::vector<number> x(8);
    const sash::input view(x, 1, 1, 8);
    return view.empty() ? 1 : 0;
}
