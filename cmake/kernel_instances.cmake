# SPDX-License-Identifier: Apache-2.0
# One source file for every row of a family's tile table, so that kernels compile in parallel and in seconds: the row's element types
# share the time that the headers take, about half of a kernel's.
#
#   flash3_kernel_instances(<list> <family> <prefix>)
#
# reads the tile table in <family>/tile_table.hpp, writes <family>/instances/<row id>.cu into the build folder for every row, and
# appends the files to <list>. A changed table configures again.
#
# A row of the table begins with {.head_dim = and names its fields: head_dim, head_dim_v, band, tile_n, and tile_m or warpgroups
# (of 64 rows each); score is kPlain without one, and operands are 16 bits. A file holds lines of macros that
# <family>/instance.cuh defines, or instance_fp8.cuh for rows with .operands = Operands::kE4m3, or instance_wide.cuh for rows with
# .wide = true. Rows with .paged = true include <family>/load_pages.cuh as well, and those with .score = ScoreKind::kSoftcap
# <family>/softcap.cuh or softcap_fp8.cuh:
#
#   FLASH3_KERNEL_ROW(the fields of the row)
#   FLASH3_KERNEL_INSTANCE(element)                 for each element type that the row holds
#
# which define specialisations of the function template that <family>/plan.cpp calls for every row, so that a row that is not
# read here does not link.
#
#   flash3_decode_instances(<list>)
#
# does the same for decode/config.hpp, whose rows name head_dim, head_dim_v, rows and tile_n: each makes four kernels, of two
# element types with and without a softcap; or, with .e4m3 = true, one; or, with .latent = true, two, of latent/instance.cuh.

# Sets <result> to a field of a row; to <default>, or to an error, if the row does not name it.
function(flash3_row_field result row field)
  if(row MATCHES "\\.${field} = ([A-Za-z0-9_:]+)")
    string(REGEX REPLACE ".*::" "" value ${CMAKE_MATCH_1})
  elseif(ARGC GREATER 3)
    set(value ${ARGV3})
  else()
    message(FATAL_ERROR "a row of a tile table has no .${field}: ${row}")
  endif()
  set(${result} ${value} PARENT_SCOPE)
endfunction()

# Sets <result> to the rows of a table.
function(flash3_table_rows result table)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})
  file(READ ${table} text)
  string(REGEX MATCHALL "{\\.head_dim = [^{}]*}" rows "${text}")
  if(NOT rows)
    message(FATAL_ERROR "${table} has no row that begins with {.head_dim =")
  endif()
  set(${result} ${rows} PARENT_SCOPE)
endfunction()

# Sets <result> to the part of a row id that names head dims, and the element type unless both of 16 bits are meant.
function(flash3_row_name result e4m3 head_dim head_dim_v)
  set(name d${head_dim})
  if(e4m3)
    set(name e4m3_${name})
  endif()
  if(NOT head_dim_v EQUAL head_dim)
    string(APPEND name x${head_dim_v})
  endif()
  set(${result} ${name} PARENT_SCOPE)
endfunction()

# Writes a family's instance and appends it to <list>.
function(flash3_write_instance list table family id text)
  set(file ${CMAKE_CURRENT_BINARY_DIR}/${family}/instances/${id}.cu)
  if(file IN_LIST ${list})
    message(FATAL_ERROR "${table}: two rows are ${file}")
  endif()
  file(RELATIVE_PATH source ${PROJECT_SOURCE_DIR}/src ${table})
  file(CONFIGURE OUTPUT ${file} @ONLY CONTENT
"// Written by cmake/kernel_instances.cmake from the tile table in ${source}.
${text}
")
  set(${list} ${${list}} ${file} PARENT_SCOPE)
endfunction()

# Removes the files of rows that a family's table no longer has.
function(flash3_remove_stale_instances files family)
  file(GLOB stale ${CMAKE_CURRENT_BINARY_DIR}/${family}/instances/*.cu)
  list(REMOVE_ITEM stale ${files})
  if(stale)
    file(REMOVE ${stale})
  endif()
endfunction()

function(flash3_kernel_instances list family prefix)
  set(table ${CMAKE_CURRENT_SOURCE_DIR}/${family}/tile_table.hpp)
  flash3_table_rows(rows ${table})
  set(files ${${list}})
  foreach(row IN LISTS rows)
    foreach(field IN ITEMS head_dim head_dim_v band tile_n)
      flash3_row_field(${field} "${row}" ${field})
    endforeach()
    flash3_row_field(score "${row}" score kPlain)
    flash3_row_field(operands "${row}" operands k16Bit)
    flash3_row_field(warpgroups "${row}" warpgroups 0)
    math(EXPR rows_of_warpgroups "64 * ${warpgroups}")
    flash3_row_field(tile_m "${row}" tile_m ${rows_of_warpgroups})
    string(REGEX REPLACE "[{}]" "" fields "${row}")
    string(REGEX REPLACE "[ \n]+" " " fields "${fields}")
    if(score STREQUAL kSoftcap)
      set(kind softcap)
    elseif(band)
      set(kind band)
    else()
      set(kind full)
    endif()
    flash3_row_field(paged "${row}" paged false)
    if(paged STREQUAL true)
      string(REPLACE paged_band paged kind paged_${kind})
    endif()
    flash3_row_field(split "${row}" split false)
    if(split STREQUAL true)
      string(REPLACE paged split kind ${kind})
    endif()
    set(elements kFloat16 kBFloat16)
    set(header instance.cuh)
    set(e4m3 FALSE)
    if(operands STREQUAL kE4m3)
      set(e4m3 TRUE)
      set(elements kE4m3)
      set(header instance_fp8.cuh)
    endif()
    flash3_row_field(wide "${row}" wide false)
    if(wide STREQUAL true)
      set(header instance_wide.cuh)
    endif()
    set(more_headers "")
    if(paged STREQUAL true)
      string(APPEND more_headers "#include \"hopper/${family}/load_pages.cuh\"\n")
    endif()
    if(score STREQUAL kSoftcap)
      set(softcap_header softcap.cuh)
      if(operands STREQUAL kE4m3)
        set(softcap_header softcap_fp8.cuh)
      endif()
      string(APPEND more_headers "#include \"hopper/${family}/${softcap_header}\"\n")
    endif()
    list(TRANSFORM elements REPLACE "(.+)" "FLASH3_KERNEL_INSTANCE(\\1)" OUTPUT_VARIABLE instances)
    list(JOIN instances "\n" instances)
    flash3_row_name(name "${e4m3}" ${head_dim} ${head_dim_v})
    flash3_write_instance(files ${table} ${family} ${prefix}_${name}_${kind}_${tile_m}x${tile_n}
"#include \"hopper/${family}/${header}\"
${more_headers}
FLASH3_KERNEL_ROW(${fields})
${instances}")
  endforeach()
  flash3_remove_stale_instances("${files}" ${family})
  set(${list} ${files} PARENT_SCOPE)
endfunction()

function(flash3_decode_instances list)
  set(table ${CMAKE_CURRENT_SOURCE_DIR}/decode/config.hpp)
  flash3_table_rows(table_rows ${table})
  set(files ${${list}})
  foreach(row IN LISTS table_rows)
    foreach(field IN ITEMS head_dim head_dim_v rows tile_n)
      flash3_row_field(${field} "${row}" ${field})
    endforeach()
    flash3_row_field(e4m3 "${row}" e4m3 false)
    set(elements kFloat16 kBFloat16)
    set(softcaps false true)
    if(e4m3 STREQUAL true)
      set(elements kE4m3)
      set(softcaps false)
    endif()
    flash3_row_field(latent "${row}" latent false)
    set(instances "")
    if(latent STREQUAL true)
      foreach(element IN LISTS elements)
        string(APPEND instances "\nFLASH3_LATENT_INSTANCE(${element})")
      endforeach()
      flash3_write_instance(files ${table} decode decode_latent_${rows}x${tile_n} "#include \"hopper/decode/latent/instance.cuh\"
${instances}")
      continue()
    endif()
    foreach(element IN LISTS elements)
      foreach(capped IN LISTS softcaps)
        string(APPEND instances "\nFLASH3_DECODE_INSTANCE(${element}, ${head_dim}, ${head_dim_v}, ${rows}, ${capped})")
      endforeach()
    endforeach()
    flash3_row_name(name ${e4m3} ${head_dim} ${head_dim_v})
    flash3_write_instance(files ${table} decode decode_${name}_${rows}x${tile_n} "#include \"hopper/decode/instance.cuh\"
${instances}")
  endforeach()
  flash3_remove_stale_instances("${files}" decode)
  set(${list} ${files} PARENT_SCOPE)
endfunction()
