# SPDX-License-Identifier: Apache-2.0
# The Python package: the library under the name that the package loads, and torch's operators.
#
#   flash3_python   libflash3.so, all of the library in one file without version links (a wheel has no
#                   symbolic links)
#   flash3_torch    libflash3_torch.so, bindings/torch/ on torch's stable ABI
#   flash3_eager    _eager.abi3.so, the short way from Python around torch's dispatcher, on Python's stable
#                   ABI; only with Python's headers, and the package does without it
#   flash3_jax      libflash3_jax.so, bindings/jax/ on XLA's FFI; only with jaxlib's headers, for flash3.jax alone
#
# With FLASH3_MANYLINUX they run on systems older than this one, as PyPI's wheels must (cmake/manylinux/stubs.py).
#
# pip builds it (pyproject.toml, packaging/backend). In this tree FLASH3_PYTHON_EXECUTABLE names the interpreter whose
# torch gives the headers; scripts/setup.sh makes one in build/toolchain/python. FLASH3_TORCH_DIR names a torch's folder itself, as
# pip's builds do, whose Python does not see what is installed. Both libraries and the
# package's sources then lie in python/flash3 of the build folder, so that PYTHONPATH=…/python is the
# package.
set(FLASH3_PYTHON AUTO CACHE STRING "Build the Python package: AUTO (if there is a torch to build with), ON or OFF")
set_property(CACHE FLASH3_PYTHON PROPERTY STRINGS AUTO ON OFF)
set(default_python ${PROJECT_SOURCE_DIR}/build/toolchain/python/bin/python)
if(SKBUILD)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  set(default_python ${Python3_EXECUTABLE})
endif()
set(FLASH3_PYTHON_EXECUTABLE ${default_python} CACHE FILEPATH "Interpreter whose torch the Python package is built with")
set(FLASH3_TORCH_DIR "" CACHE PATH "Folder of the torch whose headers are taken (default: that of FLASH3_PYTHON_EXECUTABLE)")

option(FLASH3_MANYLINUX "Link the Python package for manylinux_2_28: glibc 2.28 or newer (x86-64, GCC)" OFF)

set(FLASH3_WITH_PYTHON FALSE)
if(NOT FLASH3_PYTHON STREQUAL "OFF" AND PROJECT_IS_TOP_LEVEL)
  set(torch_dir "${FLASH3_TORCH_DIR}")
  if(NOT torch_dir AND EXISTS ${FLASH3_PYTHON_EXECUTABLE})
    execute_process(
      COMMAND ${FLASH3_PYTHON_EXECUTABLE} -c
              "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(torch_version "none")
  if(EXISTS "${torch_dir}/include/torch/csrc/stable/library.h")
    file(STRINGS ${torch_dir}/version.py torch_version REGEX "^__version__")
    string(REGEX MATCH "[0-9]+[.][0-9]+[.][0-9]+" torch_version "${torch_version}")
  endif()
  if(torch_version VERSION_GREATER_EQUAL 2.10)
    set(FLASH3_WITH_PYTHON TRUE)
  else()
    set(reason "needs headers of torch >= 2.10, and in ${FLASH3_PYTHON_EXECUTABLE} there is ${torch_version}")
    if(FLASH3_TORCH_DIR)
      set(reason "needs headers of torch >= 2.10, and in FLASH3_TORCH_DIR=${FLASH3_TORCH_DIR} there is ${torch_version}")
    endif()
    if(FLASH3_PYTHON STREQUAL "ON")
      message(FATAL_ERROR "FLASH3_PYTHON=ON ${reason}")
    endif()
    message(STATUS "flash3: without the Python package, which ${reason}")
  endif()
endif()
if(NOT FLASH3_WITH_PYTHON)
  return()
endif()

set(package ${PROJECT_SOURCE_DIR}/bindings/python/flash3)
set(FLASH3_PYTHONPATH ${PROJECT_BINARY_DIR}/python)
set(staged ${FLASH3_PYTHONPATH}/flash3)

# What every library of the package links, before anything else that brings a libstdc++: newer symbols than the stubs have come out of
# GCC's archives.
add_library(flash3_manylinux INTERFACE)
if(FLASH3_MANYLINUX)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR NOT CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    message(FATAL_ERROR "FLASH3_MANYLINUX=ON: the compiler is ${CMAKE_CXX_COMPILER_ID} for ${CMAKE_SYSTEM_PROCESSOR}; it must be GNU for x86_64")
  endif()
  set(stubs ${PROJECT_BINARY_DIR}/manylinux)
  execute_process(COMMAND ${FLASH3_PYTHON_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/manylinux/stubs.py --compiler ${CMAKE_CXX_COMPILER}
                          --readelf ${CMAKE_READELF} ${stubs} COMMAND_ERROR_IS_FATAL ANY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/manylinux/stubs.py)
  # libstdc++'s headers ask glibc, since 2.32, whether the process has one thread. Never sure of it: counts are atomic.
  set(single_threaded ${PROJECT_BINARY_DIR}/single_threaded.c)
  file(CONFIGURE OUTPUT ${single_threaded} CONTENT "char __libc_single_threaded = 0;\n")
  add_library(flash3_single_threaded STATIC ${single_threaded})
  set_target_properties(flash3_single_threaded PROPERTIES POSITION_INDEPENDENT_CODE ON)
  set(libraries "") # the stubs as options: by their names CMake would make a path to load them from
  foreach(name IN ITEMS libstdc++.so.6 libm.so.6 libgcc_s.so.1 libc.so.6 ld-linux-x86-64.so.2)
    list(APPEND libraries -Wl,${stubs}/${name})
  endforeach()
  foreach(name IN ITEMS libstdc++.a libgcc.a libc_nonshared.a)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name} OUTPUT_VARIABLE file OUTPUT_STRIP_TRAILING_WHITESPACE)
    list(APPEND libraries ${file})
  endforeach()
  # Threads, dlopen and shm_open are libc's own only since glibc 2.34.
  target_link_options(flash3_manylinux INTERFACE -nodefaultlibs LINKER:--push-state,--no-as-needed
                      LINKER:-l:libpthread.so.0,-l:libdl.so.2,-l:librt.so.1 LINKER:--pop-state)
  target_link_libraries(flash3_manylinux INTERFACE ${libraries} flash3_single_threaded ${libraries})
  flash3_contains(torch "libstdc++ and libgcc" "${CMAKE_CXX_COMPILER_VERSION}" "GPL-3.0-or-later WITH GCC-exception-3.1"
                  "static libraries, linked in where manylinux_2_28 has older ones" pkg:generic/gcc)
endif()

# Each exports what its users call and no more: another library that has loaded a flash3 must not notice.
function(flash3_python_library target) # and flash3_exports' pattern
  set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${staged} INSTALL_RPATH "$ORIGIN"
                                             BUILD_RPATH "$ORIGIN" BUILD_RPATH_USE_ORIGIN ON)
  flash3_exports(${target} ${ARGN})
  install(TARGETS ${target} LIBRARY DESTINATION flash3 COMPONENT python EXCLUDE_FROM_ALL) # for the wheel alone
endfunction()

add_library(flash3_python SHARED ${flash3_library_objects})
target_link_libraries(flash3_python PRIVATE $<$<BOOL:${FLASH3_WITH_HOPPER}>:flash3::cudart> flash3_manylinux)
flash3_library(flash3_python)
flash3_python_library(flash3_python flash3_*)
target_link_options(flash3_python PRIVATE LINKER:--no-undefined)

# What the operators are made of, but for their names in torch.ops (ops.cpp).
function(flash3_torch_settings target)
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_include_directories(${target} SYSTEM PRIVATE ${torch_dir}/include)
  target_link_libraries(${target} PRIVATE flash3_warnings)
endfunction()
add_library(flash3_torch_objects OBJECT ${PROJECT_SOURCE_DIR}/bindings/torch/call.cpp
            ${PROJECT_SOURCE_DIR}/bindings/torch/kv_cache.cpp ${PROJECT_SOURCE_DIR}/bindings/torch/mask.cpp
            ${PROJECT_SOURCE_DIR}/bindings/torch/quantize.cpp)
flash3_torch_settings(flash3_torch_objects)
set_target_properties(flash3_torch_objects PROPERTIES POSITION_INDEPENDENT_CODE ON)

function(flash3_torch_library target library)
  add_library(${target} SHARED ${PROJECT_SOURCE_DIR}/bindings/torch/ops.cpp $<TARGET_OBJECTS:flash3_torch_objects>)
  flash3_torch_settings(${target})
  target_link_libraries(${target} PRIVATE flash3_manylinux ${library} ${CMAKE_DL_LIBS} ${torch_dir}/lib/libtorch_cpu.so)
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON) # not torch's folder: it is loaded by then
  target_link_options(${target} PRIVATE LINKER:--no-undefined)
endfunction()
flash3_torch_library(flash3_torch flash3_python)
flash3_python_library(flash3_torch)

execute_process(COMMAND ${FLASH3_PYTHON_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('include'))"
                OUTPUT_VARIABLE python_include OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(EXISTS "${python_include}/Python.h")
  # A module, whose Python symbols are those of the interpreter that loads it.
  function(flash3_eager_module target library)
    add_library(${target} MODULE ${PROJECT_SOURCE_DIR}/bindings/torch/eager.cpp ${PROJECT_SOURCE_DIR}/bindings/torch/signals.cpp)
    set_target_properties(${target} PROPERTIES PREFIX "" OUTPUT_NAME _eager SUFFIX .abi3.so)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
    target_include_directories(${target} SYSTEM PRIVATE ${python_include} ${torch_dir}/include)
    target_link_libraries(${target} PRIVATE flash3_manylinux ${library} flash3_warnings)
  endfunction()
  flash3_eager_module(flash3_eager flash3_python)
  flash3_python_library(flash3_eager PyInit__eager)
  add_dependencies(flash3_torch flash3_eager) # a build of the operators alone, as pip makes it, builds this as well
  flash3_header_version(version ${torch_dir}/include/ATen/dlpack.h DLPACK_MAJOR_VERSION DLPACK_MINOR_VERSION)
  flash3_contains(torch DLPack "${version}" Apache-2.0 "header, compiled into _eager.abi3.so" pkg:github/dmlc/dlpack)
  flash3_header_version(version ${python_include}/patchlevel.h PY_MAJOR_VERSION PY_MINOR_VERSION PY_MICRO_VERSION)
  flash3_contains(torch CPython "${version}" PSF-2.0 "headers, compiled into _eager.abi3.so; Python is not shipped"
                  pkg:generic/python)
else()
  message(STATUS "flash3: without the short way from Python (${FLASH3_PYTHON_EXECUTABLE} has no Python.h: apt install python3-dev)")
endif()

set(FLASH3_JAX AUTO CACHE STRING "Build the library of flash3.jax: AUTO (if jaxlib is there for its headers), ON or OFF")
set_property(CACHE FLASH3_JAX PROPERTY STRINGS AUTO ON OFF)
set(jaxlib_dir "")
if(NOT FLASH3_JAX STREQUAL "OFF")
  execute_process(
    COMMAND ${FLASH3_PYTHON_EXECUTABLE} -c
            "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0])"
    OUTPUT_VARIABLE jaxlib_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(EXISTS "${jaxlib_dir}/include/xla/ffi/api/ffi.h")
  add_library(flash3_jax SHARED ${PROJECT_SOURCE_DIR}/bindings/jax/handlers.cpp)
  target_include_directories(flash3_jax PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_include_directories(flash3_jax SYSTEM PRIVATE ${jaxlib_dir}/include)
  target_link_libraries(flash3_jax PRIVATE flash3_manylinux flash3_python flash3_warnings)
  set_target_properties(flash3_jax PROPERTIES CXX_VISIBILITY_PRESET default) # XLA's macro leaves that open; flash3_exports decides
  flash3_python_library(flash3_jax flash3_jax_*)
  target_link_options(flash3_jax PRIVATE LINKER:--no-undefined)
  add_dependencies(flash3_torch flash3_jax) # as _eager
  file(STRINGS ${jaxlib_dir}/version.py version REGEX "^_version")
  string(REGEX MATCH "[0-9]+[.][0-9]+[.][0-9]+" version "${version}")
  flash3_contains(jax XLA "${version}" Apache-2.0 "headers of jaxlib, compiled into libflash3_jax.so; jaxlib is not shipped"
                  pkg:pypi/jaxlib)
elseif(FLASH3_JAX STREQUAL "ON")
  message(FATAL_ERROR "FLASH3_JAX=ON, but ${FLASH3_PYTHON_EXECUTABLE} has no jaxlib >= 0.7, whose headers flash3.jax is built with")
elseif(NOT FLASH3_JAX STREQUAL "OFF")
  message(STATUS "flash3: without flash3.jax (${FLASH3_PYTHON_EXECUTABLE} has no jaxlib)")
endif()

flash3_contains(torch PyTorch "${torch_version}" BSD-3-Clause "headers, compiled into libflash3_torch.so; the libraries are not shipped"
                pkg:pypi/torch)
if(SKBUILD)
  flash3_write_sbom(${PROJECT_BINARY_DIR}/wheel/flash3.cdx.json library torch jax)
  install(FILES ${PROJECT_BINARY_DIR}/wheel/flash3.cdx.json DESTINATION ${SKBUILD_METADATA_DIR}/sboms
          COMPONENT python EXCLUDE_FROM_ALL)
endif()

add_custom_target(flash3_python_sources ALL
                  COMMAND ${CMAKE_COMMAND} -E copy_directory ${package} ${staged}
                  COMMENT "Copying the Python package's sources" VERBATIM)
