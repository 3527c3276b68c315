# SPDX-License-Identifier: Apache-2.0
# Headers, both libraries, the CMake package and the pkg-config file. All paths in them are relative
# to the files themselves, so the installed tree can be moved. The components are Debian's packages, below.
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
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/package/flash3.pc @ONLY CONTENT "prefix=\${pcfiledir}/${flash3_pc_prefix}
libdir=\${prefix}/${CMAKE_INSTALL_LIBDIR}
includedir=\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}
# To link the shared library from where the loader does not look: pkg-config --variable=rpath flash3
rpath=-Wl,-rpath,\${libdir}

Name: flash3
Description: ${PROJECT_DESCRIPTION}
Version: ${PROJECT_VERSION}
Cflags: -I\${includedir}
Libs: -L\${libdir} -lflash3
Libs.private: ${flash3_pc_private}
")
install(FILES ${PROJECT_BINARY_DIR}/package/flash3.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT devel)

# Debian packages, by cpack (make deb): libflash3-0, libflash3-dev and flash3, the program. Install to /usr: only then are the library's
# folders Debian's.
option(FLASH3_DEB "Make cpack's Debian packages" OFF)
set(FLASH3_DEB_MAINTAINER "the flash3 authors <flash3@localhost.localdomain>" CACHE STRING "Who is the Debian packages' maintainer")
if(NOT FLASH3_DEB)
  return()
endif()
if(NOT CMAKE_INSTALL_PREFIX STREQUAL "/usr" OR NOT FLASH3_SHARED OR NOT FLASH3_CLI)
  message(FATAL_ERROR "FLASH3_DEB=ON: CMAKE_INSTALL_PREFIX = ${CMAKE_INSTALL_PREFIX}, FLASH3_SHARED = ${FLASH3_SHARED}, "
                      "FLASH3_CLI = ${FLASH3_CLI}; they must be /usr, ON, ON")
endif()

set(deb ${PROJECT_BINARY_DIR}/deb)
file(READ ${PROJECT_SOURCE_DIR}/NOTICE deb_notice)
file(WRITE ${deb}/copyright "${deb_notice}
----------------------------------------------------------------------------------------------------
On Debian systems the Apache License, Version 2.0, is /usr/share/common-licenses/Apache-2.0 and the GNU General Public License, version 3,
/usr/share/common-licenses/GPL-3.
")
string(TIMESTAMP deb_date "%a, %d %b %Y %H:%M:%S +0000" UTC) # SOURCE_DATE_EPOCH's if that is set
file(WRITE ${deb}/changelog.Debian "flash3 (${PROJECT_VERSION}-1) unstable; urgency=medium

  * Version ${PROJECT_VERSION}, as its changelog tells.

 -- ${FLASH3_DEB_MAINTAINER}  ${deb_date}
")
file(COPY_FILE ${PROJECT_SOURCE_DIR}/CHANGELOG.md ${deb}/changelog)
foreach(name IN ITEMS changelog changelog.Debian)
  execute_process(COMMAND gzip -9nf ${deb}/${name} COMMAND_ERROR_IS_FATAL ANY)
endforeach()

# flash3_deb(COMPONENT NAME SECTION DEPENDS SUMMARY DESCRIPTION)
function(flash3_deb component name section depends summary description)
  string(TOUPPER ${component} upper)
  install(FILES ${deb}/copyright ${deb}/changelog.gz ${deb}/changelog.Debian.gz ${PROJECT_BINARY_DIR}/package/flash3.cdx.json
          DESTINATION share/doc/${name} COMPONENT ${component} EXCLUDE_FROM_ALL)
  foreach(field IN ITEMS NAME SECTION DEPENDS)
    string(TOLOWER ${field} variable)
    set(CPACK_DEBIAN_${upper}_PACKAGE_${field} "${${variable}}" PARENT_SCOPE)
  endforeach()
  set(CPACK_COMPONENT_${upper}_DESCRIPTION "${summary}\n${description}" PARENT_SCOPE)
endfunction()
set(what "Exact attention, softmax(scale * Q * K^T + mask) * V, tile by tile and without\nthe matrix of scores.")
flash3_deb(runtime libflash3-0 libs "" "exact attention for Hopper GPUs and CPUs - library" "${what}")
flash3_deb(devel libflash3-dev libdevel "libflash3-0 (= ${PROJECT_VERSION}-1)"
           "exact attention for Hopper GPUs and CPUs - headers and static library"
           "${what}\nHeaders in C and C++20, CMake's package and pkg-config's file.")
flash3_deb(program flash3 science "" "exact attention for Hopper GPUs and CPUs - program"
           "${what}\nThe program runs attention on files, compares it with a float64 oracle and\nmeasures it.")

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME flash3)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "") # each package has its own
set(CPACK_PACKAGE_VENDOR "the flash3 authors")
set(CPACK_PACKAGE_CONTACT "${FLASH3_DEB_MAINTAINER}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_COMPONENTS_ALL runtime devel program)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_MULTIARCH same)
set(CPACK_DEBIAN_DEVEL_PACKAGE_MULTIARCH same)
include(CPack)
