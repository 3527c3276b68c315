# SPDX-License-Identifier: Apache-2.0
# Writes OUTPUT with `git describe` of SOURCE, at build time; touches it only when it changes.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --tags
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
#pragma once
namespace flash3::cli {
inline constexpr char kBuildCommit[] = "@commit@";
}
]] @ONLY)
