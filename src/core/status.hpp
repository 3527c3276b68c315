// SPDX-License-Identifier: Apache-2.0
// What a step returns: a code of the C interface, and a sentence for the user when it is not OK.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "flash3/flash3.h"

namespace flash3 {

// A pointer that is null for OK: a call makes dozens, nearly all of them OK.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(flash3_status code, std::string message)
      : failure_(std::make_unique<const Failure>(Failure{code, std::move(message)})) {}

  bool ok() const { return !failure_; }
  flash3_status code() const { return failure_ ? failure_->code : FLASH3_OK; }
  const std::string& message() const {
    static const std::string none;
    return failure_ ? failure_->message : none;
  }

 private:
  struct Failure {
    flash3_status code;
    std::string message;
  };
  std::unique_ptr<const Failure> failure_;
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
