// SPDX-License-Identifier: Apache-2.0
// The command line: its arguments, and which command they ask for.
#pragma once

#include <functional>
#include <iosfwd>
#include <string>

#include "cli/commands.hpp"

namespace flash3::cli {

// What the subcommands do; each returns the exit code. The program offers those that are there.
struct Commands {
  std::function<int(const InfoOptions&)> info;
  std::function<int(const RunOptions&)> run;
  std::function<int(const BenchOptions&)> bench;
  std::function<int(const CompareOptions&)> compare;
  std::function<int(const VerifyOptions&)> verify;
  std::function<int(const ExplainOptions&)> explain;
  std::function<int(const TraceOptions&)> trace;
};

// Runs the command that the arguments name, and returns the exit code. Help goes to `out`, and what
// is wrong with the arguments to `err`. Throws what the command throws.
int parse_and_run(int argc, const char* const* argv, const std::string& version,
                  const Commands& commands, std::ostream& out, std::ostream& err);

}  // namespace flash3::cli
