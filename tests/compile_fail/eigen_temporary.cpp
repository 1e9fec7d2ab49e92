// expected-error {{sash: this Eigen matrix is a temporary and would be gone before it is read; give it a name}}
#include <sash/interop/eigen.hpp>

int main() {
    const Eigen::MatrixXf x = Eigen::MatrixXf::Random(3, 8);
#ifdef CORRECTED
    return sash::view(x.transpose(), 1).empty();
#else
    return sash::view((2 * x).eval(), 2).empty();
#endif
}
