# SPDX-License-Identifier: Apache-2.0
# The CUDA side: which compiler, its flags, the runtime to link.
#
# Result: FLASH3_WITH_HOPPER, and with it
#   flash3_cuda_flags(target), flash3_kernel_flags(target)   per-file flags; compile log and timing
#   flash3::cudart         the static CUDA runtime
#   FLASH3_CUDA_ROOT_DIR   the toolkit's root
#
# Nothing here needs a GPU or its driver: the library takes driver calls from
# cudaGetDriverEntryPointByVersion at run time.
#
# The compiler is the first of
#   1. the one pointed to: -DFLASH3_CUDA_ROOT=…, -DCMAKE_CUDA_COMPILER=…, or FLASH3_CUDA_ROOT or
#      CUDACXX in the environment. It must be there and ≥ 12.8: anything else is an error.
#   2. the pinned wheels that scripts/setup.sh puts into build/toolchain
#   3. an nvcc ≥ 12.8 on PATH or in /usr/local/cuda
# The wheels come before whatever else is installed, so that two builds of one commit are alike.

set(FLASH3_MIN_CUDA 12.8)
set(FLASH3_CUDA_ROOT "" CACHE PATH "CUDA toolkit to use (its bin/ holds nvcc)")

# nvcc's version; empty if it cannot be run.
function(flash3_nvcc_version nvcc result)
  set(${result} "" PARENT_SCOPE)
  if(EXISTS "${nvcc}")
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed AND text MATCHES "V([0-9]+\\.[0-9]+\\.[0-9]+)")
      set(${result} ${CMAKE_MATCH_1} PARENT_SCOPE)
    endif()
  endif()
endfunction()

# Sets `compiler` to the nvcc to use, or `reason` to why there is none.
macro(flash3_find_nvcc)
  set(compiler "")
  set(reason "")
  set(pointed_to "")
  if(FLASH3_CUDA_ROOT)
    set(pointed_to ${FLASH3_CUDA_ROOT}/bin/nvcc)
  elseif(NOT "$ENV{FLASH3_CUDA_ROOT}" STREQUAL "")
    set(pointed_to $ENV{FLASH3_CUDA_ROOT}/bin/nvcc)
  elseif(NOT CMAKE_CUDA_COMPILER AND NOT "$ENV{CUDACXX}" STREQUAL "")
    find_program(cudacxx NAMES $ENV{CUDACXX} NO_CACHE)
    set(pointed_to ${cudacxx})
    if(NOT cudacxx)
      set(pointed_to $ENV{CUDACXX})
    endif()
  endif()
  if(CMAKE_CUDA_COMPILER) # given, or this folder's second configure
    if(pointed_to AND NOT pointed_to STREQUAL CMAKE_CUDA_COMPILER)
      message(FATAL_ERROR "this build folder uses ${CMAKE_CUDA_COMPILER}; for ${pointed_to} take a new one (make clean)")
    endif()
    set(pointed_to ${CMAKE_CUDA_COMPILER})
  endif()

  if(pointed_to)
    flash3_nvcc_version("${pointed_to}" version)
    if(version STREQUAL "")
      message(FATAL_ERROR "${pointed_to}: not an nvcc that runs")
    elseif(version VERSION_LESS FLASH3_MIN_CUDA)
      message(FATAL_ERROR "${pointed_to} is CUDA ${version}; flash3 needs ${FLASH3_MIN_CUDA} or newer")
    endif()
    set(compiler ${pointed_to})
  else()
    find_program(nvcc_on_path nvcc NO_CACHE)
    foreach(candidate IN ITEMS ${PROJECT_SOURCE_DIR}/build/toolchain/cuda/bin/nvcc ${nvcc_on_path}
                               /usr/local/cuda/bin/nvcc)
      flash3_nvcc_version("${candidate}" version)
      if(NOT compiler AND version AND version VERSION_GREATER_EQUAL FLASH3_MIN_CUDA)
        set(compiler ${candidate})
      elseif(NOT compiler AND version)
        set(reason "${candidate} is CUDA ${version}, older than ${FLASH3_MIN_CUDA}")
      endif()
    endforeach()
    if(NOT compiler AND NOT reason)
      set(reason "no CUDA compiler found (scripts/setup.sh brings one; or set FLASH3_CUDA_ROOT)")
    endif()
  endif()
endmacro()

set(FLASH3_WITH_HOPPER OFF)
if(NOT EXISTS ${PROJECT_SOURCE_DIR}/src/cuda/CMakeLists.txt)
  message(STATUS "flash3: CPU backend alone: src/cuda is not there")
  return()
elseif(FLASH3_HOPPER STREQUAL "AUTO" OR FLASH3_HOPPER)
  flash3_find_nvcc()
  if(NOT compiler AND FLASH3_HOPPER STREQUAL "AUTO")
    message(STATUS "flash3: CPU backend alone: ${reason}")
    return()
  elseif(NOT compiler)
    message(FATAL_ERROR "FLASH3_HOPPER=ON: ${reason}")
  endif()
else()
  message(STATUS "flash3: CPU backend alone: FLASH3_HOPPER=OFF")
  return()
endif()

set(CMAKE_CUDA_COMPILER ${compiler} CACHE FILEPATH "")
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND "$ENV{CUDAHOSTCXX}" STREQUAL "")
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER} CACHE FILEPATH "")
endif()
set(CMAKE_CUDA_ARCHITECTURES 90a-real) # wgmma and setmaxnreg are sm_90a's alone: no PTX to carry forward
set(CMAKE_CUDA_RUNTIME_LIBRARY None) # flash3::cudart instead, so that the installed package can name it
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake 3.25.1 does not know it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
if(NOT FLASH3_LINEINFO)  # with -lineinfo nvcc does it: kernels name their source file, by which `flash3 verify` knows ours
  string(APPEND CMAKE_CUDA_COMPILE_OBJECT " -Xfatbin --ident=<SOURCE>")
endif()

set(FLASH3_WITH_HOPPER ON)
set(FLASH3_CUDA_ROOT_DIR ${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT})
message(STATUS "flash3: Hopper and CPU backends, CUDA ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER})")

find_library(FLASH3_CUDART_STATIC libcudart_static.a REQUIRED NO_DEFAULT_PATH
             HINTS ${FLASH3_CUDA_ROOT_DIR} ${CMAKE_CUDA_COMPILER_LIBRARY_ROOT}
             PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib targets/sbsa-linux/lib)
find_path(FLASH3_CUDA_INCLUDE_DIR cuda_runtime.h REQUIRED NO_DEFAULT_PATH
          HINTS ${FLASH3_CUDA_ROOT_DIR} ${CMAKE_CUDA_COMPILER_LIBRARY_ROOT}
          PATH_SUFFIXES include targets/x86_64-linux/include targets/sbsa-linux/include)
add_library(flash3::cudart STATIC IMPORTED)
set_target_properties(flash3::cudart PROPERTIES
                      IMPORTED_LOCATION ${FLASH3_CUDART_STATIC}
                      INTERFACE_INCLUDE_DIRECTORIES $<$<COMPILE_LANGUAGE:CXX>:${FLASH3_CUDA_INCLUDE_DIR}>
                      INTERFACE_LINK_LIBRARIES "dl;rt;pthread")

flash3_header_version(version ${FLASH3_CUDA_INCLUDE_DIR}/cuda_runtime_api.h CUDART_VERSION)
math(EXPR major "${version} / 1000")
math(EXPR minor "${version} % 1000 / 10")
set(nvidia_eula "NVIDIA CUDA Toolkit End User License Agreement|https://docs.nvidia.com/cuda/eula/")
flash3_contains(library "NVIDIA CUDA runtime" ${major}.${minor} "${nvidia_eula}" "static library, linked in, and headers"
                pkg:generic/nvidia-cuda-runtime)
find_file(FLASH3_CCCL_VERSION_H cuda/std/__cccl/version.h REQUIRED NO_DEFAULT_PATH
          HINTS ${FLASH3_CUDA_INCLUDE_DIR} ${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT}/include PATH_SUFFIXES cccl)
mark_as_advanced(FLASH3_CCCL_VERSION_H)
flash3_header_version(version ${FLASH3_CCCL_VERSION_H} CCCL_VERSION)
math(EXPR major "${version} / 1000000")
math(EXPR minor "${version} / 1000 % 1000")
math(EXPR patch "${version} % 1000")
flash3_contains(library "CUDA C++ Core Libraries (CUB)" ${major}.${minor}.${patch} "BSD-3-Clause AND Apache-2.0 WITH LLVM-exception"
                "headers, compiled in" pkg:github/nvidia/cccl)

# Any target with CUDA in it, tests included. In the build folder lies what CMake writes for device headers.
function(flash3_cuda_flags target)
  if(FLASH3_LINEINFO)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>)
  endif()
  target_include_directories(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${PROJECT_BINARY_DIR}/src>)
  target_include_directories(${target} SYSTEM PRIVATE
                             $<$<COMPILE_LANGUAGE:CXX>:${FLASH3_CUDA_INCLUDE_DIR}>)
endfunction()

# The library's kernels: no spill, and a log of each file's ptxas report and compile time beside its
# object, for the gates in tests/gates.
function(flash3_kernel_flags target)
  flash3_cuda_flags(${target})
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xptxas -v>")
  if(FLASH3_DEBUG_BARRIERS) # printing a name takes a stack frame
    target_compile_definitions(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:FLASH3_DEBUG_BARRIERS>)
  else()
    target_compile_options(
      ${target}
      PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xptxas --warn-on-spills,--warn-on-local-memory-usage>")
  endif()
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER
                        ${PROJECT_SOURCE_DIR}/cmake/nvcc_logged.sh)
endfunction()
