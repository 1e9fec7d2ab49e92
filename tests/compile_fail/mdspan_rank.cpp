// expected-error {{sash: an mdspan of rank 3 is [tokens, heads, dim]; of rank 2 it needs the number of heads}}
// expected-error {{sash: the number of heads goes with an mdspan of rank 2: [tokens, heads * dim]}}
#include <sash/interop/mdspan.hpp>

template <int Rank>
struct span_of {
    const float* data;
    static constexpr int rank() { return Rank; }
    constexpr const float* data_handle() const { return data; }
    constexpr int extent(int) const { return 1; }
    constexpr int stride(int) const { return 1; }
};

int main() {
    const float x = 1;
#ifdef CORRECTED
    return sash::view(span_of<3>{&x}).empty() || sash::view(span_of<2>{&x}, 1).empty();
#else
    return sash::view(span_of<2>{&x}).empty() || sash::view(span_of<3>{&x}, 1).empty();
#endif
}
