# SPDX-License-Identifier: Apache-2.0
# flash3_warnings: link it to get the project's warnings. An INTERFACE target, so that code which
# takes flash3 in by add_subdirectory keeps its own. -Wconversion is about values that may change:
# sizes are signed here and those of containers are not, so where Clang counts signs too, it must not.
add_library(flash3_warnings INTERFACE)
target_compile_options(
  flash3_warnings
  INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wno-sign-conversion>
            # libstdc++ 12 itself calls what it deprecates, and clang tells of it where a template is used.
            $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-deprecated-declarations>
            $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow,-Wno-unused-parameter>)
if(FLASH3_WERROR)
  target_compile_options(
    flash3_warnings
    INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Werror>
              $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Werror>
              "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings>")
endif()

# All of a fuzz build is instrumented: AddressSanitizer and UBSan, every report fatal, and the coverage that libFuzzer steers by. An
# engine of the caller's own brings its flags along (CXXFLAGS).
if(FLASH3_FUZZ AND NOT FLASH3_FUZZING_ENGINE)
  set(flash3_sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all)
  add_compile_options(${flash3_sanitizers} -fno-omit-frame-pointer -fsanitize=fuzzer-no-link)
  add_link_options(${flash3_sanitizers})
endif()

# Tests of host code once more, under sanitizers: what ships is compiled again, and linked with the objects that the tests have
# anyway. Oracles and cases are not instrumented: they compile once, and run at full speed. The Hopper backend is left out, since
# CUDA's memory mappings collide with the sanitizers' shadows.
option(FLASH3_SANITIZED_TESTS "Run the tests of host code also under AddressSanitizer and UBSan, and threads under ThreadSanitizer" OFF)

set(flash3_address_options -fsanitize=address,undefined -fno-sanitize-recover=all)
set(flash3_thread_options -fsanitize=thread)
set(flash3_sanitized_options -O1 -g1 -UNDEBUG -fno-omit-frame-pointer)

if(FLASH3_SANITIZED_TESTS)
  add_custom_target(flash3_sanitized_tests)
endif()

# flash3_library_sources(target source…): sources of what ships, as the library compiles them.
function(flash3_library_sources target)
  target_sources(${target} PRIVATE ${ARGN})
  target_compile_definitions(${target} PRIVATE FLASH3_BUILDING_SHARED)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tools)
  target_include_directories(${target} SYSTEM PRIVATE ${FLASH3_HIGHWAY_INCLUDE_DIR})
  target_link_libraries(${target} PRIVATE flash3_warnings)
endfunction()

# flash3_sanitized_library(target option…): the core and the CPU backend. Kernels that this machine cannot run are left to the library
# itself: to instrument them takes a minute.
function(flash3_sanitized_library target)
  get_target_property(sources flash3_objects SOURCES)
  list(FILTER sources INCLUDE REGEX "src/(core|cpu)/.*[.]cpp$")
  list(REMOVE_ITEM sources ${flash3_kernels_of_other_machines})
  add_library(${target} OBJECT)
  target_compile_options(${target} PRIVATE ${flash3_sanitized_options} ${ARGN})
  flash3_library_sources(${target} ${sources})
endfunction()

# flash3_sanitized_executable(target <kind> [source…]): a program of sources compiled here and of the sanitized library, which come
# first, so that inline functions are theirs. <kind> is ADDRESS or THREAD.
function(flash3_sanitized_executable target kind)
  string(TOLOWER ${kind} kind)
  add_executable(${target} ${ARGN} $<TARGET_OBJECTS:flash3_${kind}_sanitized>)
  target_compile_options(${target} PRIVATE ${flash3_sanitized_options} ${flash3_${kind}_options})
  target_link_options(${target} PRIVATE ${flash3_${kind}_options})
  target_link_libraries(${target} PRIVATE flash3_static)  # for the kernels of other machines
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
  add_dependencies(flash3_sanitized_tests ${target})
endfunction()

# flash3_add_sanitized_test(name <kind> [source…]): the test `name` once more, of these sources and, under AddressSanitizer, of its
# own objects. What a call touches there depends on shapes: tests that compare the bits of many calls on one shape, and those of
# sizes that only repeat tiles, are left out. Under ThreadSanitizer the sources are the test's own: they make the threads.
function(flash3_add_sanitized_test name kind)
  if(NOT FLASH3_SANITIZED_TESTS)
    return()
  endif()
  set(target ${name}_sanitized)
  flash3_sanitized_executable(${target} ${kind})
  flash3_library_sources(${target} ${ARGN})
  get_target_property(libraries ${name} LINK_LIBRARIES)
  target_link_libraries(${target} PRIVATE ${libraries})
  if(kind STREQUAL ADDRESS)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${name}>)
    set(options --gtest_filter=-*Bits*:*.Many*:*.OneGiant*:*.EachSequenceIsAsAlone:*.RaggedTable)
  else()
    # The runtime of older compilers finds no place for its shadow where the kernel moves mappings by 32 bits.
    execute_process(COMMAND setarch -R true RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(NOT failed)
      set_target_properties(${target} PROPERTIES CROSSCOMPILING_EMULATOR "setarch;-R")
    endif()
  endif()
  add_test(NAME ${target} COMMAND ${target} ${options})
  set_tests_properties(${target} PROPERTIES LABELS "sanitizers;check" ENVIRONMENT TSAN_OPTIONS=halt_on_error=1)
endfunction()
