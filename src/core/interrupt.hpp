// SPDX-License-Identifier: Apache-2.0
// The caller's function that may end a CPU call before its end (flash3_set_interrupt), and what
// asks it.
#pragma once

#include <atomic>
#include <chrono>

#include "core/status.hpp"

namespace flash3 {

// The function of the process; null: none.
inline std::atomic<flash3_interrupt_function>& interrupt_function() {
  static std::atomic<flash3_interrupt_function> function{nullptr};
  return function;
}

// Whether one call is to end. Its threads ask this between their tasks; the caller's function is
// asked once in a while, on the thread that made the call.
class Interrupt {
 public:
  // worker: 0 is the thread that made the call.
  bool ends(int worker) {
    if (worker == 0 && function_) ask();
    return ends_.load(std::memory_order_relaxed);
  }
  // The status of the call.
  Status status() const {
    if (!ends_.load(std::memory_order_relaxed)) return {};
    return {FLASH3_CANCELLED, "the function of flash3_set_interrupt ended the call"};
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPause{50};

  void ask() {
    if (const auto now = Clock::now(); now - last_ >= kPause) {
      if (function_() != 0) ends_.store(true, std::memory_order_relaxed);
      last_ = Clock::now();
    }
  }

  flash3_interrupt_function function_ = interrupt_function().load();
  Clock::time_point last_ = Clock::now();
  std::atomic<bool> ends_{false};
};

}  // namespace flash3
