# sash::eigen: sash with Eigen, for <sash/interop/eigen.hpp> and <sash/reference.hpp>.
set(sash_eigen_WANTED "Eigen 3.4 or newer (Debian, Ubuntu: apt install libeigen3-dev; elsewhere set Eigen3_DIR)")

if(NOT TARGET sash::eigen)
    if(NOT TARGET Eigen3::Eigen)
        find_package(Eigen3 CONFIG QUIET)
    endif()
    if(TARGET Eigen3::Eigen AND NOT (Eigen3_FOUND AND Eigen3_VERSION VERSION_LESS 3.4))
        add_library(sash::eigen INTERFACE IMPORTED)
        target_link_libraries(sash::eigen INTERFACE sash::sash Eigen3::Eigen)
    endif()
endif()
