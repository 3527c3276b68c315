# SPDX-License-Identifier: Apache-2.0
# Source files of a few rows of a family's tile table each, so that kernels compile side by side and in seconds.
#
#   flash3_kernel_instances(<list> <family> <table> <header> <rows>)
#
# counts the rows of the <table> in src/cuda/sm90/<family>/<header>, which are the lines that begin with {.head_dim =, writes a file for
# each <rows> of them into <family>/instances/ of the build folder, and appends the files to <list>. A changed table configures again.
#
# A file includes <family>/kernels.cuh and instantiates kernel_function<table, row> (kernel_table.hpp), which has the kernels of each
# element type that the row holds. The family's list of kernels calls it for every row, so that a row without an instance does not link.
# One row too many is out of the table's bounds and does not compile.
function(flash3_kernel_instances list family table header rows)
  set(path ${CMAKE_CURRENT_SOURCE_DIR}/sm90/${family}/${header})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
  file(STRINGS ${path} lines REGEX "^ *{\\.head_dim = ")
  list(LENGTH lines count)
  if(count EQUAL 0)
    message(FATAL_ERROR "${path} has no row that begins with {.head_dim =")
  endif()
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/sm90/${family}/instances)
  file(GLOB stale ${folder}/*.cu)
  math(EXPR last_row "${count} - 1")
  foreach(first RANGE 0 ${last_row} ${rows})
    math(EXPR last "${first} + ${rows} - 1")
    if(last GREATER last_row)
      set(last ${last_row})
    endif()
    set(text "")
    foreach(row RANGE ${first} ${last})
      string(APPEND text "template const void* kernel_function<${table}, ${row}>(Element);\n")
    endforeach()
    set(file ${folder}/${family}_rows_${first}_to_${last}.cu)
    file(CONFIGURE OUTPUT ${file} @ONLY CONTENT
"// Written by cmake/kernel_instances.cmake: rows of the tile table in cuda/sm90/${family}/${header}.
#include \"cuda/sm90/${family}/kernels.cuh\"

namespace flash3::cuda::sm90 {

${text}
}  // namespace flash3::cuda::sm90
")
    list(REMOVE_ITEM stale ${file})
    list(APPEND ${list} ${file})
  endforeach()
  if(stale)
    file(REMOVE ${stale})
  endif()
  set(${list} ${${list}} PARENT_SCOPE)
endfunction()
