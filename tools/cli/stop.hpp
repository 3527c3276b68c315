// SPDX-License-Identifier: Apache-2.0
// What ends a run early: SIGINT, SIGTERM, or a stdout that takes nothing more. Work goes on to its
// next step, and what is there by then is printed and written.
#pragma once

#include <exception>

namespace flash3::cli {

// From now on the first SIGINT or SIGTERM is noted; the second ends the program. Writing to a pipe
// without a reader, or more than a limit of the file's size allows, is an error of that write.
// Standard descriptors that are closed are taken, so that no file gets their numbers.
void prepare_to_stop();

bool stop_requested();

// Thrown where a step cannot be left half done; main() answers it by the exit code alone.
class Stopped : public std::exception {
 public:
  const char* what() const noexcept override { return "stopped"; }
};
void throw_if_stopped();

// The number of the signal that came; 0: none.
int stop_signal();

}  // namespace flash3::cli
