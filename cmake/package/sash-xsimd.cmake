# sash::xsimd, an include directory and nothing more: the xsimd target of Debian 12 asks the linker for xtl, which is a
# header-only library, so linking to that target fails.
set(sash_xsimd_WANTED "xsimd 8.1 or newer (Debian, Ubuntu: apt install libxsimd-dev; elsewhere set xsimd_DIR)")

if(NOT TARGET sash::xsimd)
    if(NOT TARGET xsimd AND NOT TARGET xsimd::xsimd)
        find_package(xsimd CONFIG QUIET)
    endif()

    set(_sash_directories)
    if(TARGET xsimd)
        get_target_property(_sash_directories xsimd INTERFACE_INCLUDE_DIRECTORIES)
    elseif(TARGET xsimd::xsimd)
        get_target_property(_sash_directories xsimd::xsimd INTERFACE_INCLUDE_DIRECTORIES)
    else()
        find_path(SASH_XSIMD_INCLUDE_DIRECTORY xsimd/xsimd.hpp)
        mark_as_advanced(SASH_XSIMD_INCLUDE_DIRECTORY)
        if(SASH_XSIMD_INCLUDE_DIRECTORY)
            set(_sash_directories ${SASH_XSIMD_INCLUDE_DIRECTORY})
        endif()
    endif()

    if(_sash_directories AND NOT (xsimd_FOUND AND xsimd_VERSION VERSION_LESS 8.1))
        add_library(sash::xsimd INTERFACE IMPORTED)
        target_include_directories(sash::xsimd INTERFACE ${_sash_directories})
    endif()
endif()
