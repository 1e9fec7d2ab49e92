# sash::openmp: sash with OpenMP switched on; sash::openmp{} is then the default runner.
set(sash_openmp_WANTED "OpenMP for C++ (with clang on Debian, Ubuntu: apt install libomp-dev)")

if(NOT TARGET sash::openmp)
    find_package(OpenMP QUIET COMPONENTS CXX)
    if(TARGET OpenMP::OpenMP_CXX)
        add_library(sash::openmp INTERFACE IMPORTED)
        target_link_libraries(sash::openmp INTERFACE sash::sash OpenMP::OpenMP_CXX)
    endif()
endif()
