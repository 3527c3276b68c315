// SPDX-License-Identifier: Apache-2.0
// Text of others, as it may go to a terminal, and the words and numbers that ids are made of.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace flash3::cases {

// Bytes of the character in UTF-8 at the beginning of text, which is not empty; 0: there is none.
inline size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  const size_t length = first < 0x80             ? 1
                        : (first & 0xE0) == 0xC0 ? 2
                        : (first & 0xF0) == 0xE0 ? 3
                        : (first & 0xF8) == 0xF0 ? 4
                                                 : 0;
  if (length < 2) return length;
  if (text.size() < length) return 0;
  uint32_t code = first & (0x7FU >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3F);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};  // a longer form than needed is none
  const bool surrogate = code >= 0xD800 && code < 0xE000;
  return code < kLeast[length] || code > 0x10FFFF || surrogate ? 0 : length;
}

// Control characters (C0 but for those in `kept`, DEL and C1) and bytes that are not UTF-8 are
// written as \x1b, and so reach no terminal.
inline std::string printable(std::string_view text, std::string_view kept = "") {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string safe;
  safe.reserve(text.size());
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    const size_t length = utf8_length(text);
    const bool c0 = (first < 0x20 && kept.find(text[0]) == kept.npos) || first == 0x7F;
    const bool c1 = length == 2 && first == 0xC2 && static_cast<unsigned char>(text[1]) < 0xA0;
    const size_t taken = length == 0 ? 1 : length;
    if (length == 0 || c0 || c1)
      for (const char c : text.substr(0, taken)) {
        const auto value = static_cast<unsigned char>(c);
        safe += {'\\', 'x', kDigits[value >> 4], kDigits[value & 15]};
      }
    else
      safe += text.substr(0, taken);
    text.remove_prefix(taken);
  }
  return safe;
}

// The same in quotes, the first `most` bytes of it.
inline std::string in_quotes(std::string_view text, size_t most = 60) {
  const bool whole = text.size() <= most;
  if (!whole)
    while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  std::string quoted = "'";
  quoted.append(printable(text.substr(0, most))).append(whole ? "'" : "…'");
  return quoted;
}

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
