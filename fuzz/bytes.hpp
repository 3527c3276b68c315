// SPDX-License-Identifier: Apache-2.0
// The fuzzer's bytes as choices. Past their end all are zero, so that a short input is a plain one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>

namespace flash3::fuzz {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  size_t left() const { return static_cast<size_t>(end_ - at_); }

  template <class T>
  T raw() {
    T value{};
    const size_t n = std::min(sizeof value, left());
    std::memcpy(&value, at_, n);
    at_ += n;
    return value;
  }

  uint8_t byte() { return raw<uint8_t>(); }
  bool flag() { return byte() & 1; }
  bool rarely() { return byte() % 16 == 15; }

  // In [least, most].
  int64_t between(int64_t least, int64_t most) {
    const int64_t n = most - least + 1;
    return least + (n <= 256 ? byte() : raw<uint16_t>()) % n;
  }

  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[byte() % values.size()];
  }

  // Numbers at which arithmetic goes wrong, and any other.
  int64_t odd() {
    constexpr int64_t kMin = std::numeric_limits<int64_t>::min(),
                      kMax = std::numeric_limits<int64_t>::max();
    constexpr int64_t kNumbers[] = {0,
                                    1,
                                    -1,
                                    2,
                                    127,
                                    128,
                                    255,
                                    256,
                                    257,
                                    kMin,
                                    kMax,
                                    kMax - 1,
                                    1 << 20,
                                    1 << 30,
                                    1 << 16,
                                    (1 << 16) - 1,
                                    INT32_MAX,
                                    INT32_MIN,
                                    int64_t{1} << 31,
                                    int64_t{1} << 32,
                                    int64_t{1} << 40,
                                    int64_t{1} << 62,
                                    int64_t{1} << 33};
    const uint8_t which = byte();
    return which < std::size(kNumbers) ? kNumbers[which] : raw<int64_t>();
  }

  // The next so many, or all that are left.
  std::string text(size_t size) {
    std::string taken(reinterpret_cast<const char*>(at_), std::min(size, left()));
    at_ += taken.size();
    return taken;
  }

 private:
  const uint8_t *at_, *end_;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::abort();
}

}  // namespace flash3::fuzz

// A finding: stops the target, with the condition that does not hold.
#define FUZZ_CHECK(condition, what) \
  ((condition) ? void()             \
               : flash3::fuzz::fail(__FILE__, __LINE__, std::string(#condition ": ") + (what)))
