# Headers, the CMake package and the pkg-config file. Nothing depends on the architecture, so all of it goes under share.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(_package_dir ${CMAKE_INSTALL_DATADIR}/cmake/sash)
install(TARGETS sash EXPORT sash-targets FILE_SET HEADERS FILE_SET eigen_headers)
install(EXPORT sash-targets NAMESPACE sash:: DESTINATION ${_package_dir})

# Within 0.x a minor version may break things.
write_basic_package_version_file(sash-config-version.cmake COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES
    ${PROJECT_SOURCE_DIR}/cmake/package/sash-config.cmake
    ${PROJECT_SOURCE_DIR}/cmake/package/sash-xsimd.cmake
    ${PROJECT_SOURCE_DIR}/cmake/package/sash-openmp.cmake
    ${PROJECT_SOURCE_DIR}/cmake/package/sash-eigen.cmake
    ${CMAKE_CURRENT_BINARY_DIR}/sash-config-version.cmake
    DESTINATION ${_package_dir})

# pkg-config wants the way from its own file to the prefix, so that the tree can be moved.
set(_pkgconfig_dir ${CMAKE_INSTALL_DATADIR}/pkgconfig)
file(RELATIVE_PATH _prefix_from_pkgconfig
    "${CMAKE_INSTALL_FULL_DATADIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/package/sash.pc.in sash.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/sash.pc DESTINATION ${_pkgconfig_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
