// SPDX-License-Identifier: Apache-2.0
#define FMT_HEADER_ONLY
#include "cli/format.hpp"

namespace flash3::cli {

std::string format_arguments(fmt::string_view text, fmt::format_args values) {
  return fmt::vformat(text, values);
}

void print_arguments(std::FILE* file, fmt::string_view text, fmt::format_args values) {
  fmt::vprint(file, text, values);
}

}  // namespace flash3::cli
