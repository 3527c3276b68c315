// SPDX-License-Identifier: Apache-2.0
// The words and numbers that ids are made of.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

namespace flash3::cases {

template <class Table, class Value>
const char* name_in(const Table& table, Value value) {
  for (const auto& [name, entry] : table)
    if (entry == value) return name;
  return "unknown";
}

template <class Value, size_t N>
std::optional<Value> value_in(const std::pair<const char*, Value> (&table)[N],
                              std::string_view name) {
  for (const auto& [entry, value] : table)
    if (entry == name) return value;
  return std::nullopt;
}

// Strips prefix from *text if it is there.
inline bool eat(std::string_view prefix, std::string_view* text) {
  if (!text->starts_with(prefix)) return false;
  text->remove_prefix(prefix.size());
  return true;
}

// All of text as a non-negative number, and a finite one.
template <class Number>
bool number(std::string_view text, Number* out) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), *out);
  if (std::is_floating_point_v<Number> && !std::isfinite(static_cast<double>(*out))) return false;
  return !text.empty() && text[0] != '-' && code == std::errc() && end == text.data() + text.size();
}

}  // namespace flash3::cases
