# SPDX-License-Identifier: Apache-2.0
# NCCL, for examples/10_ring.cpp alone: the library does not use it.
#
# Result: FLASH3_WITH_NCCL, and with it flash3::nccl.
#
# It is looked for where FLASH3_NCCL_ROOT points, then in the wheels nvidia-nccl-cu13 and -cu12 of the
# Python packages (the tests' own, the one on PATH), then in the system.
set(FLASH3_NCCL_ROOT "" CACHE PATH "NCCL to use (its include/ holds nccl.h, its lib/ libnccl.so.2)")

set(nccl_roots ${FLASH3_NCCL_ROOT})
find_program(nccl_python python3 NO_CACHE)
foreach(python IN ITEMS ${FLASH3_PYTHON_EXECUTABLE} ${nccl_python})
  if(EXISTS ${python})
    execute_process(COMMAND ${python} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
                    OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(APPEND nccl_roots ${packages}/nvidia/nccl)
  endif()
endforeach()
find_path(FLASH3_NCCL_INCLUDE_DIR nccl.h HINTS ${nccl_roots} PATH_SUFFIXES include)
find_library(FLASH3_NCCL_LIBRARY NAMES libnccl.so.2 nccl HINTS ${nccl_roots} PATH_SUFFIXES lib)
mark_as_advanced(FLASH3_NCCL_INCLUDE_DIR FLASH3_NCCL_LIBRARY)

set(FLASH3_WITH_NCCL OFF)
if(FLASH3_NCCL_INCLUDE_DIR AND FLASH3_NCCL_LIBRARY)
  set(FLASH3_WITH_NCCL ON)
  add_library(flash3::nccl SHARED IMPORTED)
  set_target_properties(flash3::nccl PROPERTIES
                        IMPORTED_LOCATION ${FLASH3_NCCL_LIBRARY}
                        INTERFACE_INCLUDE_DIRECTORIES $<$<COMPILE_LANGUAGE:CXX>:${FLASH3_NCCL_INCLUDE_DIR}>)
  message(STATUS "flash3: the ring example with NCCL (${FLASH3_NCCL_LIBRARY})")
else()
  message(STATUS "flash3: without the ring example: no NCCL found (set FLASH3_NCCL_ROOT)")
endif()
