// SPDX-License-Identifier: Apache-2.0
// Which kernels this program launches. The command line is linked so that every launch passes here
// (--wrap, tools/cli/CMakeLists.txt): a list of kernels that cases ought to run could be wrong.
#pragma once

#include <set>
#include <string>

namespace flash3::device {

void start_launch_log();

// Functions launched since then, as the compiler spells their names. Throws std::runtime_error if
// the runtime does not know one.
std::set<std::string> stop_launch_log();

}  // namespace flash3::device
