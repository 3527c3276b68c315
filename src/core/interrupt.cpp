// SPDX-License-Identifier: Apache-2.0
#include "core/interrupt.hpp"

namespace flash3 {

std::atomic<flash3_interrupt_function>& interrupt_function() {
  static std::atomic<flash3_interrupt_function> function{nullptr};
  return function;
}

Status Interrupt::status() const {
  if (!ends_.load(std::memory_order_relaxed)) return {};
  return {FLASH3_CANCELLED, "the function of flash3_set_interrupt ended the call"};
}

}  // namespace flash3
