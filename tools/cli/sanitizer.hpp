// SPDX-License-Identifier: Apache-2.0
// Cases under NVIDIA's compute-sanitizer.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/commands.hpp"

namespace flash3::cli {

// Each list in a process of its own, `flash3 verify --case …`, under memcheck, racecheck, synccheck
// and initcheck; several at a time. The program is the one on PATH, or in $CUDA_HOME/bin. Throws
// PartFailed with what a tool said.
nlohmann::ordered_json run_sanitizer_tools(const VerifyOptions& options,
                                           const std::vector<std::vector<std::string>>& lists);

}  // namespace flash3::cli
