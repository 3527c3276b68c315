// SPDX-License-Identifier: Apache-2.0
// {fmt} for the command line. Its formatting code takes seconds to compile, so format.cpp alone
// holds it; every other file sees {fmt}'s small header.
#pragma once

#include <fmt/core.h>

#include <cstdio>
#include <string>
#include <string_view>

namespace flash3::cli {

std::string format_arguments(fmt::string_view text, fmt::format_args values);
// Control characters but for the newline are escaped: text of files and arguments reaches no
// terminal as it is.
void print_arguments(std::FILE* file, fmt::string_view text, fmt::format_args values);

void flush_output();
// errno of the first write to stdout that failed; 0: none has.
int output_error();

template <class... Values>
std::string format(fmt::format_string<Values...> text, Values&&... values) {
  return format_arguments(text, fmt::make_format_args(values...));
}

template <class... Values>
void print(std::FILE* file, fmt::format_string<Values...> text, Values&&... values) {
  print_arguments(file, text, fmt::make_format_args(values...));
}

template <class... Values>
void print(fmt::format_string<Values...> text, Values&&... values) {
  print_arguments(stdout, text, fmt::make_format_args(values...));
}

template <class Words>
std::string join(const Words& words, std::string_view separator) {
  std::string text;
  for (bool first = true; const auto& word : words) {
    if (!first) text += separator;
    text += format("{}", word);
    first = false;
  }
  return text;
}

}  // namespace flash3::cli
