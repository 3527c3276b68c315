// SPDX-License-Identifier: Apache-2.0
/** @file
 * flash3 for C++20: which weights the dropout of a call keeps, a header-only layer over dropout.h.
 */
#pragma once

#include <array>
#include <cstdint>

#include "flash3/dropout.h"
#include "flash3/flash3.hpp"

namespace flash3 {

/// A seed and an offset: dropout_state.
inline Tensor dropout_state_tensor(const int64_t* state) {
  return Tensor{const_cast<int64_t*>(state), FLASH3_INT64, 1, {2, 0, 0, 0}, {1, 0, 0, 0}};
}
/// A byte for each pair, [batch, heads_q, seq_q, seq_k]: kept.
inline Tensor kept_tensor(uint8_t* kept, std::array<int64_t, 4> shape) {
  return tensor(kept, FLASH3_UINT8, shape);
}

/// What a mask of dropout is made of; the fields of flash3_dropout_mask_params.
struct DropoutMask {
  /// @{ @name Fields

  /// The field of this name in flash3_dropout_mask_params.
  Tensor kept = {};
  float dropout_p = 0.f;
  uint64_t dropout_seed = 0;
  uint64_t dropout_offset = 0;
  Tensor dropout_state = {};
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;
  void* stream = nullptr;
  /// @}

  /// The C struct of this call.
  flash3_dropout_mask_params params() const {
    return {sizeof(flash3_dropout_mask_params),
            kept,
            dropout_p,
            dropout_seed,
            dropout_offset,
            dropout_state,
            backend,
            num_threads,
            stream};
  }
};

/// Writes which weights a call with this dropout keeps; the Result says how it went.
inline Result try_dropout_mask(const DropoutMask& args) {
  const flash3_dropout_mask_params p = args.params();
  return Result(flash3_dropout_mask(&p));
}

#if FLASH3_EXCEPTIONS
/// The same; throws an Error if it fails.
inline void dropout_mask(const DropoutMask& args) { try_dropout_mask(args).or_throw(); }
#endif

}  // namespace flash3
