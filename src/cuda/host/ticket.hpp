// SPDX-License-Identifier: Apache-2.0
// What tells a launch's counters in uninitialised memory from anything else that lies there.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

namespace flash3::cuda {

// A number that no other launch has, and that memory does not hold by chance; never 0. A replayed
// graph repeats it.
inline unsigned long long new_ticket() {
  static std::atomic<uint64_t> count = std::random_device{}();
  uint64_t x = count.fetch_add(0x9E3779B97F4A7C15);  // splitmix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return (x ^ (x >> 31)) | 1;
}

}  // namespace flash3::cuda
