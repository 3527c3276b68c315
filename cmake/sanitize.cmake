# SPDX-License-Identifier: Apache-2.0
# FLASH3_SANITIZE, every report fatal:
#   ON       AddressSanitizer and UBSan
#   THREAD   ThreadSanitizer, which cannot be had together with those
# For host code: the Hopper backend is left out, as CUDA's own memory mappings collide with the
# sanitizers' shadows.
set(FLASH3_SANITIZE OFF CACHE STRING "Sanitizers on all host code: ON (address, undefined behaviour), THREAD or OFF")
set_property(CACHE FLASH3_SANITIZE PROPERTY STRINGS OFF ON THREAD)
if(FLASH3_SANITIZE)
  if(FLASH3_HOPPER STREQUAL "ON")
    message(FATAL_ERROR "FLASH3_SANITIZE=${FLASH3_SANITIZE} and FLASH3_HOPPER=ON: the sanitizers are for host code; "
                        "set FLASH3_HOPPER=OFF")
  endif()
  set(FLASH3_HOPPER OFF)
  if(FLASH3_SANITIZE STREQUAL "THREAD")
    set(flash3_sanitizers -fsanitize=thread)
    # The runtime of older compilers finds no place for its shadow where the kernel moves mappings by 32 bits.
    execute_process(COMMAND setarch -R true RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(NOT failed)
      set(CMAKE_CROSSCOMPILING_EMULATOR setarch -R) # what add_test runs a target with
    endif()
  else()
    set(flash3_sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all)
  endif()
  add_compile_options(${flash3_sanitizers} -fno-omit-frame-pointer)
  add_link_options(${flash3_sanitizers})
endif()

# Coverage that libFuzzer steers by. An engine of the caller's own brings its flags along (CXXFLAGS).
if(FLASH3_FUZZ AND NOT FLASH3_FUZZING_ENGINE)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
