# SPDX-License-Identifier: Apache-2.0
# Source files of few rows of a family's tile table, so that kernels compile in parallel and in seconds. Rows that include the same
# share a file of up to four kernels, as nvcc takes longer for CUDA's own headers than for a kernel's instructions.
#
#   flash3_kernel_instances(<list> <family> <prefix>)
#
# reads the tile table in <family>/tile_table.hpp, writes <family>/instances/<id of the first row>.cu into the build folder, and
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

# Adds a row to the family's file that includes the same and has room for its kernels, else to a new one, named after it. A row's
# weight is the number of its kernels, of those with a softcap twice that: they take longer to compile.
set(flash3_weight_of_file 4)
function(flash3_add_instance family id weight includes lines)
  if(id IN_LIST ids)
    message(FATAL_ERROR "${family}: two rows are ${id}")
  endif()
  string(MD5 open "${includes}")
  if(NOT DEFINED room_${open} OR room_${open} LESS weight)
    set(file_${open} ${id} PARENT_SCOPE)
    set(room_${open} ${flash3_weight_of_file})
    set(file_${open} ${id})
    set(text_${id} "${includes}")
    set(files ${files} ${id} PARENT_SCOPE)
  endif()
  set(file ${file_${open}})
  math(EXPR room "${room_${open}} - ${weight}")
  set(room_${open} ${room} PARENT_SCOPE)
  set(text_${file} "${text_${file}}\n${lines}" PARENT_SCOPE)
  set(ids ${ids} ${id} PARENT_SCOPE)
endfunction()

# Writes the family's files, appends them to <list>, and removes those that its table no longer makes.
macro(flash3_write_instances list table family)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/${family}/instances)
  file(GLOB stale ${folder}/*.cu)
  file(RELATIVE_PATH source ${PROJECT_SOURCE_DIR}/src ${table})
  foreach(file IN LISTS files)
    file(CONFIGURE OUTPUT ${folder}/${file}.cu @ONLY CONTENT
"// Written by cmake/kernel_instances.cmake from the tile table in ${source}.
${text_${file}}")
    list(REMOVE_ITEM stale ${folder}/${file}.cu)
    list(APPEND ${list} ${folder}/${file}.cu)
  endforeach()
  if(stale)
    file(REMOVE ${stale})
  endif()
  set(${list} ${${list}} PARENT_SCOPE)
endmacro()

function(flash3_kernel_instances list family prefix)
  set(table ${CMAKE_CURRENT_SOURCE_DIR}/${family}/tile_table.hpp)
  flash3_table_rows(rows ${table})
  set(files "")
  set(ids "")
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
    list(LENGTH elements weight)
    if(score STREQUAL kSoftcap)
      math(EXPR weight "2 * ${weight}")
    endif()
    list(TRANSFORM elements REPLACE "(.+)" "FLASH3_KERNEL_INSTANCE(\\1)" OUTPUT_VARIABLE lines)
    list(JOIN lines "\n" lines)
    flash3_row_name(name "${e4m3}" ${head_dim} ${head_dim_v})
    set(id ${prefix}_${name}_${kind}_${tile_m}x${tile_n})
    # The macros call each file's row kRow.
    flash3_add_instance(${family} ${id} ${weight} "#include \"hopper/${family}/${header}\"\n${more_headers}"
"#define kRow kRow_${id}
FLASH3_KERNEL_ROW(${fields})
${lines}
#undef kRow
")
  endforeach()
  flash3_write_instances(${list} ${table} ${family})
endfunction()

function(flash3_decode_instances list)
  set(table ${CMAKE_CURRENT_SOURCE_DIR}/decode/config.hpp)
  flash3_table_rows(table_rows ${table})
  set(files "")
  set(ids "")
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
    set(lines "")
    if(latent STREQUAL true)
      foreach(element IN LISTS elements)
        string(APPEND lines "FLASH3_LATENT_INSTANCE(${element})\n")
      endforeach()
      flash3_add_instance(decode decode_latent_${rows}x${tile_n} 2 "#include \"hopper/decode/latent/instance.cuh\"\n" "${lines}")
      continue()
    endif()
    foreach(element IN LISTS elements)
      foreach(capped IN LISTS softcaps)
        string(APPEND lines "FLASH3_DECODE_INSTANCE(${element}, ${head_dim}, ${head_dim_v}, ${rows}, ${capped})\n")
      endforeach()
    endforeach()
    flash3_row_name(name ${e4m3} ${head_dim} ${head_dim_v})
    set(weight 4)
    if(e4m3 STREQUAL true)
      set(weight 1)
    endif()
    flash3_add_instance(decode decode_${name}_${rows}x${tile_n} ${weight} "#include \"hopper/decode/instance.cuh\"\n" "${lines}")
  endforeach()
  flash3_write_instances(${list} ${table} decode)
endfunction()
