// SPDX-License-Identifier: Apache-2.0
// How far a long run is, and what ends it early.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <string>

namespace flash3::cli {

// A bar on stderr, while that is a terminal. Output to stdout goes through print(), which keeps the
// two apart.
class Progress {
 public:
  Progress(std::string label, size_t total);
  ~Progress();  // clears the bar
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step();                             // one more is done
  void announce(const std::string& what);  // what is under way
  void print(const std::string& line);     // a line on stdout

 private:
  void draw();
  void clear();

  std::string label_, what_;
  size_t done_ = 0, total_;
  bool terminal_, visible_ = false;
  std::chrono::steady_clock::time_point start_, drawn_;
};

// What ends a run early: SIGINT, SIGTERM, or a stdout that takes nothing more. Work goes on to its
// next step, and what is there by then is printed and written.

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
