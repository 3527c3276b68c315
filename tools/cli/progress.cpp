// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.hpp"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "cases/printable.hpp"
#include "cli/format.hpp"

namespace flash3::cli {

using Clock = std::chrono::steady_clock;

Progress::Progress(std::string label, size_t total)
    : label_(std::move(label)),
      total_(total),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(Clock::now()),
      drawn_(start_) {}

Progress::~Progress() { clear(); }

void Progress::step() {
  ++done_;
  if (Clock::now() - drawn_ > std::chrono::milliseconds(100)) draw();
}

void Progress::announce(const std::string& what) {
  what_ = cases::printable(what);
  draw();
}

void Progress::print(const std::string& line) {
  clear();
  cli::print("{}\n", line);
  flush_output();  // a run that is cut short keeps its lines
}

void Progress::draw() {
  drawn_ = Clock::now();
  if (!terminal_ || total_ == 0) return;
  constexpr size_t kWidth = 32;
  const size_t filled = done_ * kWidth / total_;
  const double seconds = std::chrono::duration<double>(drawn_ - start_).count();
  std::string bar(filled, '#');
  bar.append(kWidth - filled, '.');
  std::fprintf(stderr, "\r\033[K%s [%s] %zu/%zu  %.0f s  %s", label_.c_str(), bar.c_str(), done_,
               total_, seconds, what_.c_str());
  std::fflush(stderr);
  visible_ = true;
}

void Progress::clear() {
  if (!visible_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  visible_ = false;
}

}  // namespace flash3::cli
