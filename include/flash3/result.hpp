// SPDX-License-Identifier: Apache-2.0
/** @file
 * flash3 for C++20: how calls say that they failed, with exceptions and without.
 */
#pragma once

#include <stdexcept>
#include <string>

#include "flash3/flash3.h"

/// 1 if the compiler has exceptions, and functions that throw are there; otherwise 0.
#if defined(__cpp_exceptions)
#define FLASH3_EXCEPTIONS 1
#else
#define FLASH3_EXCEPTIONS 0
#endif

namespace flash3 {

/// What went wrong: a code and a sentence.
class Error : public std::runtime_error {
 public:
  /// From what a C function returned and flash3_last_error() says of it.
  Error(flash3_status code, const std::string& message)
      : std::runtime_error(message), code_(code) {}
  /// Anything but FLASH3_OK.
  flash3_status code() const noexcept { return code_; }

 private:
  flash3_status code_;
};

/// The outcome of a try_ call; true if it went well.
class [[nodiscard]] Result {
 public:
  /// A call that went well.
  Result() = default;
  /// What a C function returned, with flash3_last_error() if it failed.
  explicit Result(flash3_status code)
      : code_(code), message_(code == FLASH3_OK ? "" : flash3_last_error()) {}
  /// True if the call went well.
  explicit operator bool() const noexcept { return code_ == FLASH3_OK; }
  /// FLASH3_OK, or the kind of error.
  flash3_status code() const noexcept { return code_; }
  /// The sentence that goes with an error; otherwise empty.
  const std::string& message() const noexcept { return message_; }
  /// Throws an Error if the call failed. Not there without exceptions.
  void or_throw() const;

 private:
  flash3_status code_ = FLASH3_OK;
  std::string message_;
};

#if FLASH3_EXCEPTIONS
inline void Result::or_throw() const {
  if (code_ != FLASH3_OK) throw Error(code_, message_);
}

namespace detail {

// What a function of this form finds: ask(&found) returns a Result.
template <class Found, class Ask>
Found or_throw(const Ask& ask) {
  Found found{};
  ask(&found).or_throw();
  return found;
}

}  // namespace detail
#endif  // FLASH3_EXCEPTIONS

}  // namespace flash3
