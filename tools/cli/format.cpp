// SPDX-License-Identifier: Apache-2.0
#define FMT_HEADER_ONLY
#include "cli/format.hpp"

#include <atomic>
#include <cerrno>

#include "cases/text.hpp"

namespace flash3::cli {
namespace {

std::atomic<int> first_error{0};

void note_error() {
  int none = 0;
  first_error.compare_exchange_strong(none, errno != 0 ? errno : EIO);
}

}  // namespace

std::string format_arguments(fmt::string_view text, fmt::format_args values) {
  return fmt::vformat(text, values);
}

void print_arguments(std::FILE* file, fmt::string_view text, fmt::format_args values) {
  const std::string safe = cases::printable(fmt::vformat(text, values), "\n");
  errno = 0;
  if (std::fwrite(safe.data(), 1, safe.size(), file) < safe.size() && file == stdout) note_error();
}

void flush_output() {
  errno = 0;
  if (std::fflush(stdout) != 0) note_error();
}

int output_error() { return first_error; }

}  // namespace flash3::cli
