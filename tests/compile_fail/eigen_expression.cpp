// expected-error {{sash: this Eigen expression has no memory of its own; evaluate it into a matrix first}}
#include <sash/interop/eigen.hpp>

int main() {
    const Eigen::MatrixXf x = Eigen::MatrixXf::Random(3, 8), weights = Eigen::MatrixXf::Random(8, 8);
#ifdef CORRECTED
    const Eigen::MatrixXf product = x * weights;
    return sash::view(product, 2).empty();
#else
    return sash::view(x * weights, 2).empty();
#endif
}
