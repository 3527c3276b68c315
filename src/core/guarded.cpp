// SPDX-License-Identifier: Apache-2.0
#include "core/guarded.hpp"

#include <utility>

namespace flash3 {

LastError& last_error() {
  thread_local LastError error;
  return error;
}

flash3_status fail(flash3_status code, std::string text) noexcept {
  LastError& error = last_error();
  error.text = std::move(text);
  error.fixed = nullptr;
  return code;
}

flash3_status fail_literal(flash3_status code, const char* text) noexcept {
  last_error().fixed = text;
  return code;
}

}  // namespace flash3
