// The parts of `flash3 verify --record`: what a kernel must pass on a GPU before a release.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/commands.hpp"

namespace flash3::cli {

struct RecordPart {
  std::string name;
  bool judges;  // by what the oracle says of the results; others look at something else
  // Runs it, printing as `flash3 verify` does. What the record keeps: "command", and the counts.
  // Throws PartFailed.
  nlohmann::ordered_json (*run)(const VerifyOptions& options);
};

class PartFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

const std::vector<RecordPart>& record_parts();

}  // namespace flash3::cli
