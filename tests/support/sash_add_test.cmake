# sash_add_test(<name> [ARCHS native avx2 baseline] [VARIANTS clang asan tsan tsan_threads] [OPTIONS <flag>…])
#
# Builds tests/<name>.cpp as test_<name> and registers it with ctest as <name>. Each further member of ARCHS makes one
# more executable, <name>.<arch>. OPTIONS go to the compiler of each. VARIANTS are built where SASH_TEST_VARIANTS is on,
# and leave out the cases tagged [slow]:
#   clang         with clang++ and its OpenMP runtime
#   asan          with AddressSanitizer and UndefinedBehaviorSanitizer, by the compiler of the build
#   tsan          with ThreadSanitizer and OpenMP, by clang++: gcc's OpenMP runtime is not instrumented
#   tsan_threads  with ThreadSanitizer without OpenMP, by the compiler of the build: the test brings its own threads
# A name without a file is passed over, so that a list may be shared.

set(SASH_TEST_LIBRARIES sash::openmp sash::eigen Catch2::Catch2WithMain)
set(SASH_TEST_TIMEOUT 600)

function(sash_add_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "ARCHS;VARIANTS;OPTIONS")
    if(NOT EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${name}.cpp)
        return()
    endif()
    if(NOT arg_ARCHS)
        set(arg_ARCHS native)
    endif()

    foreach(arch IN LISTS arg_ARCHS)
        if(NOT arch STREQUAL "native" AND NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
            continue()  # the others are flags of x86
        endif()
        set(target test_${name})
        set(test ${name})
        if(NOT arch STREQUAL "native")
            set(target test_${name}.${arch})
            set(test ${name}.${arch})
        endif()
        add_executable(${target} ${name}.cpp)
        target_compile_options(${target} PRIVATE ${SASH_WARNINGS_BESIDE_EIGEN} ${SASH_OPTIMISATION} ${SASH_ARCH_${arch}}
            ${arg_OPTIONS})
        target_link_libraries(${target} PRIVATE ${SASH_TEST_LIBRARIES})
        if(arch STREQUAL "avx2" AND NOT SASH_CAN_RUN_AVX2)
            continue()  # built, and not run
        endif()
        add_test(NAME ${test} COMMAND ${target} WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
        set_tests_properties(${test} PROPERTIES
            TIMEOUT ${SASH_TEST_TIMEOUT} ENVIRONMENT "${SASH_TEST_ENVIRONMENT}")
    endforeach()

    if(SASH_TEST_VARIANTS)
        foreach(variant IN LISTS arg_VARIANTS)
            sash_add_variant(${name} ${variant} ${arg_OPTIONS})
        endforeach()
    endif()
endfunction()

# ---------------------------------------------------------------------------------------------------------------------
# Variants call their compiler in one command, since one CMake build has one C++ compiler.

set(SASH_SANITIZE -O1 -g1 -fno-omit-frame-pointer -march=native)

set(SASH_VARIANT_clang_COMPILER ${SASH_CLANGXX})
set(SASH_VARIANT_clang_FLAGS ${SASH_CLANG_WARNINGS} -O2 -march=native -fopenmp)

set(SASH_VARIANT_asan_COMPILER ${CMAKE_CXX_COMPILER})
set(SASH_VARIANT_asan_FLAGS ${SASH_SANITIZE} -fopenmp -fsanitize=address,undefined -fno-sanitize-recover=all)

set(SASH_VARIANT_tsan_COMPILER ${SASH_CLANGXX})
set(SASH_VARIANT_tsan_FLAGS ${SASH_SANITIZE} -fopenmp -fsanitize=thread)

set(SASH_VARIANT_tsan_threads_COMPILER ${CMAKE_CXX_COMPILER})
set(SASH_VARIANT_tsan_threads_FLAGS ${SASH_SANITIZE} -fsanitize=thread)

# ThreadSanitizer learns of the synchronisation inside clang's OpenMP runtime from the tool Archer beside it.
set(SASH_VARIANT_tsan_ENVIRONMENT "TSAN_OPTIONS=ignore_noninstrumented_modules=1")
if(SASH_CLANGXX)
    execute_process(COMMAND ${SASH_CLANGXX} -print-file-name=libarcher.so
        OUTPUT_VARIABLE _archer OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(IS_ABSOLUTE "${_archer}")
        list(APPEND SASH_VARIANT_tsan_ENVIRONMENT "OMP_TOOL_LIBRARIES=${_archer}")
    endif()
endif()

# Sets SASH_VARIANT_<variant>_WORKS, and _LAUNCHER where a sanitizer cannot live with a randomised address space. What a
# machine cannot run is said once, when the build is configured.
function(sash_check_variant variant)
    if(DEFINED CACHE{SASH_VARIANT_${variant}_WORKS})
        return()
    endif()
    set(works FALSE)
    set(launcher)
    if(SASH_VARIANT_${variant}_COMPILER)
        set(probe ${CMAKE_CURRENT_BINARY_DIR}/probe.${variant})
        file(WRITE ${probe}.cpp "
            #include <thread>
            int main(int n, char**) {
                int* p = new int(n);
                std::thread([&] { *p = 0; }).join();
                n = *p;
                delete p;
                return n;
            }")
        execute_process(COMMAND ${SASH_VARIANT_${variant}_COMPILER} -std=c++20 ${SASH_VARIANT_${variant}_FLAGS}
                ${probe}.cpp -o ${probe} -pthread
            RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
        foreach(way IN ITEMS "" "setarch;-R")
            if(NOT failed AND NOT works)
                execute_process(COMMAND ${CMAKE_COMMAND} -E env ${SASH_VARIANT_${variant}_ENVIRONMENT} ${way} ${probe}
                    RESULT_VARIABLE crashed OUTPUT_VARIABLE output ERROR_VARIABLE output)
                if(crashed EQUAL 0)
                    set(works TRUE)
                    set(launcher ${way})
                endif()
            endif()
        endforeach()
    endif()
    if(NOT works)
        message(WARNING "The tests of variant '${variant}' are left out, a first program of that kind does not run here: "
            "${output}")
    endif()
    set(SASH_VARIANT_${variant}_WORKS ${works} CACHE INTERNAL "")
    set(SASH_VARIANT_${variant}_LAUNCHER "${launcher}" CACHE INTERNAL "")
endfunction()

function(sash_add_variant name variant)
    sash_check_variant(${variant})
    if(NOT SASH_VARIANT_${variant}_WORKS)
        return()
    endif()
    set(source ${CMAKE_CURRENT_SOURCE_DIR}/${name}.cpp)
    set(program ${CMAKE_CURRENT_BINARY_DIR}/test_${name}.${variant})
    set(catch $<TARGET_FILE:Catch2::Catch2WithMain>)
    if(Catch2_VERSION VERSION_GREATER_EQUAL 3)
        list(APPEND catch $<TARGET_FILE:Catch2::Catch2>)
    endif()
    add_custom_command(OUTPUT ${program}
        COMMAND ${SASH_VARIANT_${variant}_COMPILER} ${SASH_COMPILE} ${SASH_VARIANT_${variant}_FLAGS} ${ARGN}
            -MD -MF ${program}.d -MT ${program} ${source} -o ${program} ${catch} -pthread
        DEPENDS ${source}
        DEPFILE ${program}.d
        COMMENT "Building test_${name}.${variant}"
        COMMAND_EXPAND_LISTS VERBATIM)
    add_custom_target(build_test_${name}.${variant} ALL DEPENDS ${program})
    add_test(NAME ${name}.${variant} COMMAND ${SASH_VARIANT_${variant}_LAUNCHER} ${program} "~[slow]"
        WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    set_tests_properties(${name}.${variant} PROPERTIES TIMEOUT ${SASH_TEST_TIMEOUT}
        ENVIRONMENT "${SASH_TEST_ENVIRONMENT};${SASH_VARIANT_${variant}_ENVIRONMENT}")
endfunction()
