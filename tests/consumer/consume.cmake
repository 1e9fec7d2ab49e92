# One step of a user's way to sash:
#   cmake -DSTEP=<step> -DBUILD=<build tree of sash> -DWORK=<folder> -DCOMPILER=<c++> -P consume.cmake
# Steps: install; find_package, components, refused and pkg_config use what it installed; subdirectory; fetch.

set(prefix ${WORK}/prefix)

function(run)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "EXPECT_FAILURE" "COMMAND")
    execute_process(COMMAND ${arg_COMMAND} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(arg_EXPECT_FAILURE)
        # CMake breaks the lines of its messages where it likes.
        string(REGEX REPLACE "[ \n]+" " " flat "${output}")
        if(result EQUAL 0 OR NOT flat MATCHES "${arg_EXPECT_FAILURE}")
            message(FATAL_ERROR "must fail and say '${arg_EXPECT_FAILURE}': ${arg_COMMAND}\n${output}")
        endif()
        message(STATUS "refused as expected: ${arg_EXPECT_FAILURE}")
    elseif(NOT result EQUAL 0)
        message(FATAL_ERROR "failed: ${arg_COMMAND}\n${output}")
    endif()
    set(output "${output}" PARENT_SCOPE)
endfunction()

# Configures, builds and runs a project of this folder.
function(consume project)
    set(build ${WORK}/${STEP})
    file(REMOVE_RECURSE ${build})
    run(COMMAND ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/${project} -B ${build} -G ${GENERATOR}
        -DCMAKE_CXX_COMPILER=${COMPILER} ${ARGN})
    run(COMMAND ${CMAKE_COMMAND} --build ${build})
    run(COMMAND ${build}/checks_result)
endfunction()

set(sash_source ${CMAKE_CURRENT_LIST_DIR}/../..)

if(STEP STREQUAL "install")
    # Installed in one place and used in another: nothing in it may know where it was.
    file(REMOVE_RECURSE ${prefix} ${prefix}.first)
    run(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix}.first)
    file(RENAME ${prefix}.first ${prefix})
    foreach(file IN ITEMS include/sash/sash.hpp include/sash/reference.hpp include/sash/interop/eigen.hpp
            share/cmake/sash/sash-config.cmake share/pkgconfig/sash.pc share/doc/sash/LICENSE)
        if(NOT EXISTS ${prefix}/${file})
            message(FATAL_ERROR "not installed: ${file}")
        endif()
    endforeach()

elseif(STEP STREQUAL "find_package")
    consume(installed -DCMAKE_PREFIX_PATH=${prefix})

elseif(STEP STREQUAL "components")
    consume(installed -DCMAKE_PREFIX_PATH=${prefix} -DVERSION=${VERSION} -DCOMPONENTS=openmp,eigen)
    run(COMMAND ${WORK}/components/uses_components)

elseif(STEP STREQUAL "refused")
    string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" minor ${VERSION})
    math(EXPR next "${CMAKE_MATCH_2} + 1")
    set(configure ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/installed -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER}
        -DCMAKE_PREFIX_PATH=${prefix})
    foreach(version IN ITEMS ${CMAKE_MATCH_1}.${next} 99.0)
        file(REMOVE_RECURSE ${WORK}/refused)
        run(COMMAND ${configure} -B ${WORK}/refused -DVERSION=${version}
            EXPECT_FAILURE "compatible with requested version \"${version}\"")
    endforeach()
    file(REMOVE_RECURSE ${WORK}/refused)
    run(COMMAND ${configure} -B ${WORK}/refused -DCOMPONENTS=telepathy
        EXPECT_FAILURE "sash has no component 'telepathy'. there are: openmp, eigen, cuda")
    file(REMOVE_RECURSE ${WORK}/refused)
    run(COMMAND ${configure} -B ${WORK}/refused -DCOMPONENTS=cuda
        EXPECT_FAILURE "this sash was installed without its component 'cuda'")

elseif(STEP STREQUAL "pkg_config")
    set(ENV{PKG_CONFIG_PATH} ${prefix}/share/pkgconfig:$ENV{PKG_CONFIG_PATH})
    run(COMMAND pkg-config --exists --print-errors "sash = ${VERSION}")
    run(COMMAND pkg-config --cflags sash)
    separate_arguments(flags UNIX_COMMAND "${output}")
    run(COMMAND ${COMPILER} -std=c++20 ${flags} ${CMAKE_CURRENT_LIST_DIR}/checks_result.cpp -o ${WORK}/checks_result)
    run(COMMAND ${WORK}/checks_result)

elseif(STEP STREQUAL "subdirectory" OR STEP STREQUAL "fetch")
    consume(${STEP} -DSASH_SOURCE=${sash_source})
    run(COMMAND ${WORK}/${STEP}/uses_components)
    file(REMOVE_RECURSE ${WORK}/${STEP}.installed)
    run(COMMAND ${CMAKE_COMMAND} --install ${WORK}/${STEP} --prefix ${WORK}/${STEP}.installed)
    if(EXISTS ${WORK}/${STEP}.installed)
        message(FATAL_ERROR "sash was installed with its parent, which did not ask for that")
    endif()

else()
    message(FATAL_ERROR "no step '${STEP}'")
endif()
