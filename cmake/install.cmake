# SPDX-License-Identifier: Apache-2.0
# Headers, both libraries, the CMake package and the pkg-config file. All paths in them are relative
# to the files themselves, so the installed tree can be moved. The components are Debian's packages (cmake/deb.cmake).
include(CMakePackageConfigHelpers)

install(DIRECTORY include/flash3 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT devel)
flash3_write_sbom(${PROJECT_BINARY_DIR}/package/flash3.cdx.json library program tvm_ffi)
install(FILES LICENSE NOTICE ${PROJECT_BINARY_DIR}/package/flash3.cdx.json DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT documents)

set(flash3_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flash3)
install(TARGETS flash3_static EXPORT flash3_static_targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT devel)
install(EXPORT flash3_static_targets NAMESPACE flash3:: DESTINATION ${flash3_package_dir} COMPONENT devel)
if(FLASH3_SHARED)
  set_target_properties(flash3_shared PROPERTIES EXPORT_NAME flash3)
  install(TARGETS flash3_shared EXPORT flash3_shared_targets
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT devel)
  install(EXPORT flash3_shared_targets NAMESPACE flash3:: DESTINATION ${flash3_package_dir} COMPONENT devel)
endif()

# Who links libflash3.a needs the CUDA runtime it was built against, which may be on no other
# machine: it travels along, under a name of its own (NVIDIA lists it as redistributable).
set(flash3_pc_private "-lstdc++ -lm -lpthread -ldl -lrt")
set(flash3_cudart_file "")
if(FLASH3_WITH_HOPPER)
  set(flash3_cudart_file libflash3_cudart.a)
  install(FILES ${FLASH3_CUDART_STATIC} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME ${flash3_cudart_file} COMPONENT devel)
  set(flash3_pc_private "-lflash3_cudart ${flash3_pc_private}")
endif()

configure_package_config_file(cmake/flash3Config.cmake.in ${PROJECT_BINARY_DIR}/package/flash3Config.cmake
                              INSTALL_DESTINATION ${flash3_package_dir} PATH_VARS CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/flash3ConfigVersion.cmake
                                 COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/flash3Config.cmake
              ${PROJECT_BINARY_DIR}/package/flash3ConfigVersion.cmake
        DESTINATION ${flash3_package_dir} COMPONENT devel)

file(RELATIVE_PATH flash3_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/flash3.pc.in ${PROJECT_BINARY_DIR}/package/flash3.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/package/flash3.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT devel)

include(cmake/deb.cmake)
