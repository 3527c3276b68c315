# SPDX-License-Identifier: Apache-2.0
# The register lists of wgmma's inline asm.
#
#   flash3_wgmma_shapes()
#
# writes device/ptx/wgmma_shapes.inc into the build folder, which src/cuda/device/ptx/wgmma.cuh includes: a row for every N
# that the hardware has, the multiples of 8 up to 256, so that a row of a tile table needs nothing else. A row here is
#
#   FLASH3_WGMMA_N(N, the eight numbers after the accumulators', "%0, %1, …", "+f"(d[0]), "+f"(d[1]), …)
function(flash3_wgmma_shapes)
  set(registers "")
  set(outputs "")
  set(rows "")
  foreach(n RANGE 8 256 8)
    math(EXPR count "${n} / 2") # of accumulators: four more than in the row before
    math(EXPR first "${count} - 4")
    math(EXPR last "${count} - 1")
    foreach(i RANGE ${first} ${last})
      list(APPEND registers %${i})
      list(APPEND outputs "\"+f\"(d[${i}])")
    endforeach()
    set(others "")
    foreach(i RANGE 7)
      math(EXPR number "${count} + ${i}")
      list(APPEND others ${number})
    endforeach()
    foreach(items IN ITEMS registers outputs others)
      list(JOIN ${items} ", " ${items}_text)
    endforeach()
    string(APPEND rows "FLASH3_WGMMA_N(${n}, ${others_text}, \"${registers_text}\", ${outputs_text})\n")
  endforeach()
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/device/ptx/wgmma_shapes.inc @ONLY
       CONTENT "// Written by cmake/wgmma_shapes.cmake.\n${rows}")
endfunction()
