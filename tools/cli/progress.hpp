// SPDX-License-Identifier: Apache-2.0
// A bar on stderr, while that is a terminal. Output to stdout goes through print(), which keeps the
// two apart.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace flash3::cli {

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

}  // namespace flash3::cli
