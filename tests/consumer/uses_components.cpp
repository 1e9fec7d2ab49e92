// Compiled by projects that ask for the components openmp and eigen.
#include <sash/interop/eigen.hpp>
#include <sash/reference.hpp>
#include <sash/sash.hpp>

#ifndef _OPENMP
#error "the component openmp did not switch OpenMP on"
#endif

int main() {}
