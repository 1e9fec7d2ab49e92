# find_package(sash [version] [COMPONENTS openmp eigen])
#   sash::sash     the library: include path, C++20, xsimd's include path
#   sash::openmp   the same with OpenMP switched on
#   sash::eigen    the same with Eigen, for <sash/interop/eigen.hpp> and <sash/reference.hpp>

include(${CMAKE_CURRENT_LIST_DIR}/sash-xsimd.cmake)
if(NOT TARGET sash::xsimd)
    set(sash_FOUND FALSE)
    set(sash_NOT_FOUND_MESSAGE "sash needs ${sash_xsimd_WANTED}")
    return()
endif()
include(${CMAKE_CURRENT_LIST_DIR}/sash-targets.cmake)

foreach(_sash_component IN LISTS sash_FIND_COMPONENTS)
    if(_sash_component MATCHES "^(openmp|eigen)$")
        include(${CMAKE_CURRENT_LIST_DIR}/sash-${_sash_component}.cmake)
        set(_sash_problem "component '${_sash_component}' needs ${sash_${_sash_component}_WANTED}")
    elseif(_sash_component STREQUAL "cuda")
        set(_sash_problem "this sash was installed without its component 'cuda'")
    else()
        set(_sash_problem "sash has no component '${_sash_component}'; there are: openmp, eigen, cuda")
    endif()

    if(TARGET sash::${_sash_component})
        set(sash_${_sash_component}_FOUND TRUE)
    else()
        set(sash_${_sash_component}_FOUND FALSE)
        if(sash_FIND_REQUIRED_${_sash_component})
            set(sash_FOUND FALSE)
            set(sash_NOT_FOUND_MESSAGE "${_sash_problem}")
        endif()
    endif()
endforeach()
