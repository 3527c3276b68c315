// SPDX-License-Identifier: Apache-2.0
// The parts of `flash3 verify --record`: what a kernel must pass on a GPU before a release.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/commands.hpp"

namespace flash3::cli {

struct RecordPart {
  std::string name;
  bool checks_results;  // against the oracle; other parts look at something else
  // Runs it, printing as `flash3 verify` does. What the record keeps: "command", and the counts.
  // before: what it has of this part, {} if nothing; random problems add up. Throws PartFailed.
  nlohmann::ordered_json (*run)(const VerifyOptions& options, const nlohmann::ordered_json& before);
  // What the record lacks where it has this of the part; "" if nothing. None: a part is whole.
  std::string (*missing)(const nlohmann::ordered_json& noted) = nullptr;
};

class PartFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

const std::vector<RecordPart>& record_parts();

}  // namespace flash3::cli
