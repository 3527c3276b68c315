# SPDX-License-Identifier: Apache-2.0
# libflash3_tvm_ffi.so: flash3's calls for TVM-FFI (bindings/tvm_ffi/), where the package apache-tvm-ffi of
# FLASH3_PYTHON_EXECUTABLE gives its C headers. Its own library is linked by name alone: a process that loads this one has it.
set(FLASH3_TVM_FFI AUTO CACHE STRING "Build the library for TVM-FFI: AUTO (if its package is found), ON or OFF")
set_property(CACHE FLASH3_TVM_FFI PROPERTY STRINGS AUTO ON OFF)
if(FLASH3_TVM_FFI STREQUAL "OFF" OR SKBUILD OR NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()
set(tvm_ffi_dir "")
if(EXISTS "${FLASH3_PYTHON_EXECUTABLE}")
  execute_process(
    COMMAND ${FLASH3_PYTHON_EXECUTABLE} -c
            "import importlib.util as u; print(u.find_spec('tvm_ffi').submodule_search_locations[0])"
    OUTPUT_VARIABLE tvm_ffi_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT EXISTS "${tvm_ffi_dir}/include/tvm/ffi/c_api.h")
  if(FLASH3_TVM_FFI STREQUAL "ON")
    message(FATAL_ERROR "FLASH3_TVM_FFI=ON, but ${FLASH3_PYTHON_EXECUTABLE} has no apache-tvm-ffi")
  endif()
  message(STATUS "flash3: without the library for TVM-FFI (${FLASH3_PYTHON_EXECUTABLE} has no apache-tvm-ffi)")
  return()
endif()

add_library(flash3_tvm_ffi MODULE bindings/tvm_ffi/functions.cpp)
target_include_directories(flash3_tvm_ffi PRIVATE ${PROJECT_SOURCE_DIR}/src)
target_include_directories(flash3_tvm_ffi SYSTEM PRIVATE ${tvm_ffi_dir}/include)
target_link_libraries(flash3_tvm_ffi PRIVATE flash3::flash3 flash3_warnings ${tvm_ffi_dir}/lib/libtvm_ffi.so)
flash3_exports(flash3_tvm_ffi __tvm_ffi_*)
target_link_options(flash3_tvm_ffi PRIVATE LINKER:--no-undefined)
set_target_properties(flash3_tvm_ffi PROPERTIES INSTALL_RPATH "$ORIGIN")
if(FLASH3_INSTALL)
  install(TARGETS flash3_tvm_ffi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT tvm_ffi)
endif()

set(version_macros TVM_FFI_VERSION_MAJOR TVM_FFI_VERSION_MINOR TVM_FFI_VERSION_PATCH)
flash3_header_version(version ${tvm_ffi_dir}/include/tvm/ffi/c_api.h ${version_macros})
flash3_contains(tvm_ffi "Apache TVM FFI" "${version}" Apache-2.0
                "headers, compiled into libflash3_tvm_ffi.so; its library is not shipped" pkg:pypi/apache-tvm-ffi)
flash3_header_version(version ${tvm_ffi_dir}/include/dlpack/dlpack.h DLPACK_MAJOR_VERSION DLPACK_MINOR_VERSION)
flash3_contains(tvm_ffi DLPack "${version}" Apache-2.0 "header, compiled into libflash3_tvm_ffi.so" pkg:github/dmlc/dlpack)
