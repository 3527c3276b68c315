# SPDX-License-Identifier: Apache-2.0
# Source files of few rows of a family's tile table, so that kernels compile in parallel and in seconds. Rows that include the same
# share a file until it takes a quarter of a minute, as nvcc takes longer for CUDA's own headers than for a small kernel.
#
#   flash3_kernel_instances(<list> <family> <prefix>)
#
# reads the tile table in <family>/tile_table.hpp, writes <family>/instances/<id of the first row>.cu into the build folder, and
# appends the files to <list>. A changed table configures again.
#
# A row of the table begins with {.head_dim = and names its fields: head_dim, head_dim_v, band, tile_n, and tile_m or warpgroups
# (of 64 rows each); score is kPlain without one, and operands are 16 bits. A file holds lines of macros that
# <family>/instance.cuh defines, or instance_fp8.cuh for rows with .operands = Operands::kE4m3, instance_widened.cuh for kWidened,
# or instance_wide.cuh for rows with .wide = true. Other rows with .paged = true include <family>/load_pages.cuh or
# load_fp8_pages.cuh as well, and those with .score = ScoreKind::kSoftcap device/score/softcap.cuh or softcap_fp8.cuh:
#
#   FLASH3_KERNEL_ROW(the fields of the row)
#   FLASH3_KERNEL_INSTANCE(element)                 for each element type that the row holds
#
# which define specialisations of the function template that the family's list of kernels calls for every row, so that a row that
# is not read here does not link.
#
#   flash3_decode_instances(<list>)
#
# does the same for decode/config.hpp, whose rows name head_dim, head_dim_v, rows and tile_n: each makes four kernels, of two
# element types with and without a softcap; or, with .e4m3 = true, one; or, with .latent = true, two, of latent/instance.cuh.
# Files divide these by kernels, not rows: four of the longest row take half a minute.

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

# Adds lines to the first of the family's files that includes the same and has room for their weight, else to a new one, named after
# them. Weights are the seconds of CPU time that kernels take to compile where an empty file takes 1.7 s (bench/compile_time.py);
# gate.kernel_code counts what a file holds in the end.
set(flash3_weight_of_file 16)
function(flash3_add_instance id weight includes lines)
  if(id IN_LIST ids)
    message(FATAL_ERROR "two rows are ${id}")
  endif()
  set(ids ${ids} ${id} PARENT_SCOPE)
  string(MD5 same "${includes}")
  foreach(file IN LISTS files_${same})
    if(NOT room_${file} LESS weight)
      math(EXPR room "${room_${file}} - ${weight}")
      set(room_${file} ${room} PARENT_SCOPE)
      set(text_${file} "${text_${file}}${lines}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  math(EXPR room "${flash3_weight_of_file} - ${weight}")
  set(room_${id} ${room} PARENT_SCOPE)
  set(text_${id} "${includes}\n${lines}" PARENT_SCOPE)
  set(files_${same} ${files_${same}} ${id} PARENT_SCOPE)
  set(files ${files} ${id} PARENT_SCOPE)
endfunction()

# Writes the family's files, appends them to <list>, and removes those that its table no longer makes.
macro(flash3_write_instances list table family)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/sm90/${family}/instances)
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

# Sets <result> to the weight of a kernel of a row.
function(flash3_weight result family head_dim e4m3 score)
  set(weight 2)
  if(head_dim GREATER 128)
    math(EXPR weight "${weight} + 1")
  endif()
  if(e4m3)
    math(EXPR weight "${weight} + 1")
  endif()
  if(score STREQUAL kSoftcap AND family STREQUAL forward)
    if(e4m3)
      math(EXPR weight "${weight} + 1")
    else()
      set(weight 4)
    endif()
  endif()
  set(${result} ${weight} PARENT_SCOPE)
endfunction()

function(flash3_kernel_instances list family prefix)
  set(table ${CMAKE_CURRENT_SOURCE_DIR}/sm90/${family}/tile_table.hpp)
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
    elseif(operands STREQUAL kWidened)
      set(header instance_widened.cuh)
      string(PREPEND kind kv8_)
      string(REPLACE kv8_paged kv8 kind ${kind})
    endif()
    flash3_row_field(wide "${row}" wide false)
    if(wide STREQUAL true)
      set(header instance_wide.cuh)
    endif()
    set(more_headers "")
    if(paged STREQUAL true AND NOT operands STREQUAL kWidened)
      set(paged_header load_pages.cuh)
      if(e4m3)
        set(paged_header load_fp8_pages.cuh)
      endif()
      string(APPEND more_headers "#include \"cuda/sm90/${family}/${paged_header}\"\n")
    endif()
    if(score STREQUAL kSoftcap)
      set(softcap_header cuda/device/score/softcap.cuh)
      if(operands STREQUAL kE4m3)
        set(softcap_header cuda/sm90/forward/softcap_fp8.cuh)
      endif()
      string(APPEND more_headers "#include \"${softcap_header}\"\n")
    endif()
    flash3_weight(weight ${family} ${head_dim} ${e4m3} ${score})
    list(LENGTH elements count)
    math(EXPR weight "${count} * ${weight}")
    list(TRANSFORM elements REPLACE "(.+)" "FLASH3_KERNEL_INSTANCE(\\1)" OUTPUT_VARIABLE lines)
    list(JOIN lines "\n" lines)
    flash3_row_name(name "${e4m3}" ${head_dim} ${head_dim_v})
    set(id ${prefix}_${name}_${kind}_${tile_m}x${tile_n})
    # The macros call each file's row kRow.
    flash3_add_instance(${id} ${weight} "#include \"cuda/sm90/${family}/${header}\"\n${more_headers}"
"#define kRow kRow_${id}
FLASH3_KERNEL_ROW(${fields})
${lines}
#undef kRow

")
  endforeach()
  flash3_write_instances(${list} ${table} ${family})
endfunction()

# Sets <result> to the weight of a decode kernel of a row.
function(flash3_decode_weight result e4m3 head_dim rows)
  set(weight 4)
  if(rows EQUAL 8)
    set(weight 2)
  elseif(rows EQUAL 16 OR e4m3)
    set(weight 3)
  elseif(head_dim EQUAL 128)
    set(weight 6)
  endif()
  set(${result} ${weight} PARENT_SCOPE)
endfunction()

function(flash3_decode_instances list)
  set(table ${CMAKE_CURRENT_SOURCE_DIR}/sm90/decode/config.hpp)
  flash3_table_rows(table_rows ${table})
  set(suffix_of_kFloat16 _fp16)
  set(suffix_of_kBFloat16 _bf16)
  set(files "")
  set(ids "")
  foreach(row IN LISTS table_rows)
    foreach(field IN ITEMS head_dim head_dim_v rows tile_n)
      flash3_row_field(${field} "${row}" ${field})
    endforeach()
    flash3_row_field(e4m3 "${row}" e4m3 false)
    flash3_row_field(latent "${row}" latent false)
    if(latent STREQUAL true)
      flash3_add_instance(decode_latent_${rows}x${tile_n} 11 "#include \"cuda/sm90/decode/latent/instance.cuh\"\n"
                          "FLASH3_LATENT_INSTANCE(kFloat16)\nFLASH3_LATENT_INSTANCE(kBFloat16)\n")
      continue()
    endif()
    set(elements kFloat16 kBFloat16)
    set(softcaps false true)
    if(e4m3 STREQUAL true)
      set(elements kE4m3)
      set(softcaps false)
    endif()
    flash3_decode_weight(weight ${e4m3} ${head_dim} ${rows})
    flash3_row_name(name ${e4m3} ${head_dim} ${head_dim_v})
    foreach(element IN LISTS elements)
      foreach(capped IN LISTS softcaps)
        set(id decode_${name}_${rows}x${tile_n}${suffix_of_${element}})
        if(capped)
          string(APPEND id _softcap)
        endif()
        flash3_add_instance(${id} ${weight} "#include \"cuda/sm90/decode/instance.cuh\"\n"
                            "FLASH3_DECODE_INSTANCE(${element}, ${head_dim}, ${head_dim_v}, ${rows}, ${capped})\n")
      endforeach()
    endforeach()
  endforeach()
  flash3_write_instances(${list} ${table} decode)
endfunction()
