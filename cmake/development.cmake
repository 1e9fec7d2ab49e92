# What tests, examples and benchmarks are compiled with; never what a user of the library gets.

# Warnings are errors with the compilers that the code is checked with. A newer one may know a new warning: it prints it.
function(sash_warnings result compiler_id version)
    set(flags -Wall -Wextra -Wpedantic -Wconversion -Wshadow)
    if((compiler_id STREQUAL "GNU" AND version VERSION_LESS 13) OR (compiler_id STREQUAL "Clang" AND version VERSION_LESS 15))
        list(APPEND flags -Werror)
    endif()
    set(${result} ${flags} PARENT_SCOPE)
endfunction()
sash_warnings(SASH_WARNINGS ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION})

# g++ 12 falsely finds uninitialised values in its own AVX-512 header where Eigen uses it; sash looks after itself.
set(SASH_WARNINGS_BESIDE_EIGEN ${SASH_WARNINGS})
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    list(APPEND SASH_WARNINGS_BESIDE_EIGEN -Wno-maybe-uninitialized)
endif()

# -O2, where a debug build does not ask for less: -O3 takes longer to compile and makes these no better.
set(SASH_OPTIMISATION $<$<NOT:$<CONFIG:Debug>>:-O2>)

# OpenMP threads that wait must not take the cores of the tests beside them.
set(SASH_TEST_ENVIRONMENT "OMP_WAIT_POLICY=passive")
