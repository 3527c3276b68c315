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
