# Instruction sets, and how the tests that call a compiler themselves call it.

if(SASH_CLANGXX)
    execute_process(COMMAND ${SASH_CLANGXX} -dumpversion OUTPUT_VARIABLE _version OUTPUT_STRIP_TRAILING_WHITESPACE)
    sash_warnings(SASH_CLANG_WARNINGS Clang ${_version})
endif()

set(SASH_ARCH_native -march=native)
set(SASH_ARCH_avx2 -mavx2 -mfma -mf16c)
set(SASH_ARCH_sse4.2 -msse4.2)
set(SASH_ARCH_baseline -march=x86-64)

# Where sash is (not as system headers: their warnings would be lost), and where its dependencies are.
set(SASH_COMPILE_DEPENDENCIES)
foreach(_target IN ITEMS sash::xsimd Eigen3::Eigen Catch2::Catch2)
    get_target_property(_directories ${_target} INTERFACE_INCLUDE_DIRECTORIES)
    foreach(_directory IN LISTS _directories)
        if(NOT _directory IN_LIST CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES)
            list(APPEND SASH_COMPILE_DEPENDENCIES -isystem${_directory})
        endif()
    endforeach()
endforeach()
list(REMOVE_DUPLICATES SASH_COMPILE_DEPENDENCIES)
set(SASH_COMPILE -std=c++20 -I${PROJECT_SOURCE_DIR}/include ${SASH_COMPILE_DEPENDENCIES})

check_cxx_source_runs("
    int main() { return __builtin_cpu_supports(\"avx2\") && __builtin_cpu_supports(\"fma\") ? 0 : 1; }"
    SASH_CAN_RUN_AVX2)
