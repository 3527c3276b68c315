// SPDX-License-Identifier: Apache-2.0
// The keys that tell whether an object in the caller's memory is one for a call.
#pragma once

#include <concepts>
#include <cstdint>

namespace flash3 {

// FNV-1a (Fowler, Noll, Vo) over words of 64 bits.
class Hash {
 public:
  template <std::convertible_to<uint64_t>... Words>
  void add(Words... words) {
    ((hash_ = (hash_ ^ static_cast<uint64_t>(words)) * 0x100000001B3ull), ...);
  }
  // Never 0, which stands for no key; bindings have it in signed integers.
  uint64_t key() const { return (hash_ & INT64_MAX) | 1; }

 private:
  uint64_t hash_ = 0xCBF29CE484222325ull;
};

}  // namespace flash3
