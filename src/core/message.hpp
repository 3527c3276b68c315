// SPDX-License-Identifier: Apache-2.0
// Sentences from parts, independent of the process's locale.
#pragma once

#include <array>
#include <charconv>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace flash3 {

inline void append(std::string& text, std::string_view part) { text += part; }

template <std::integral Int>
void append(std::string& text, Int value) {
  text += std::to_string(value);
}

// The shortest decimal that reads back as the same float.
inline void append(std::string& text, float value) {
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  text.append(digits.data(), end);
}

// An address as a part of a message.
inline std::string hex(const void* address) {
  std::array<char, 20> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(),
                                 reinterpret_cast<uintptr_t>(address), 16)
                       .ptr;
  return "0x" + std::string(digits.data(), end);
}

template <class... Parts>
std::string message(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

}  // namespace flash3
