// SPDX-License-Identifier: Apache-2.0
// What a step returns: a code of the C interface, and a sentence for the user when it is not OK.
#pragma once

#include <string>
#include <utility>

#include "flash3/flash3.h"

namespace flash3 {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(flash3_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == FLASH3_OK; }
  flash3_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  flash3_status code_ = FLASH3_OK;
  std::string message_;
};

inline Status invalid_argument(std::string message) {
  return {FLASH3_INVALID_ARGUMENT, std::move(message)};
}
inline Status unsupported(std::string message) { return {FLASH3_UNSUPPORTED, std::move(message)}; }

// Leaves the enclosing function with the status of `expression` unless that is OK.
#define FLASH3_CHECK(expression)                                                \
  do {                                                                          \
    if (::flash3::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

}  // namespace flash3
