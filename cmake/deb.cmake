# SPDX-License-Identifier: Apache-2.0
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
