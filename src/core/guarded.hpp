// SPDX-License-Identifier: Apache-2.0
// What surrounds the body of every C function: nothing thrown gets past it, and every failure
// leaves its message (flash3_last_error).
#pragma once

#include <exception>
#include <new>
#include <string>

#include "core/message.hpp"
#include "core/status.hpp"

namespace flash3 {

// The sentence is `text`, or the literal that `fixed` points to where no memory was left for a
// string.
struct LastError {
  std::string text;
  const char* fixed = nullptr;
};

// The last error of this thread.
LastError& last_error();

flash3_status fail(flash3_status code, std::string text) noexcept;
flash3_status fail_literal(flash3_status code, const char* text) noexcept;

// Runs the body of a C function and turns what it returns or throws into a status.
template <class Body>
flash3_status guarded(const Body& body) noexcept {
  try {
    Status status = body();
    return status.ok() ? FLASH3_OK : fail(status.code(), status.message());
  } catch (const std::bad_alloc&) {
    return fail_literal(FLASH3_OUT_OF_MEMORY, "host memory ran out");
  } catch (const std::exception& e) {
    try {
      return fail(FLASH3_INTERNAL_ERROR, message("unexpected exception: ", e.what()));
    } catch (...) {
      return fail_literal(FLASH3_INTERNAL_ERROR, "unexpected exception");
    }
  } catch (...) {
    return fail_literal(FLASH3_INTERNAL_ERROR, "unexpected exception of unknown type");
  }
}

template <class T>
Status check_result(const T* pointer, const char* name) {
  if (pointer) return {};
  return invalid_argument(message(name, " is null; it must point to where the result goes"));
}

}  // namespace flash3
