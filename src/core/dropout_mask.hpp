// SPDX-License-Identifier: Apache-2.0
// A validated, normalised call of flash3_dropout_mask.
#pragma once

#include "core/problem.hpp"
#include "flash3/dropout.h"

namespace flash3 {

struct DropoutMaskProblem {
  Dropout dropout;
  StateView state;
  uint8_t* kept = nullptr;  // [batch, head, query, key], the last stride is 1
  int64_t batch = 0, heads = 0, seq_q = 0, seq_k = 0;
  int64_t stride_batch = 0, stride_head = 0, stride_query = 0;
  flash3_backend backend = FLASH3_BACKEND_AUTO;
  int num_threads = 0;  // 0: all
  void* stream = nullptr;

  bool is_empty() const { return batch == 0 || heads == 0 || seq_q == 0 || seq_k == 0; }
};

// The rule for dropout_p.
Status check_dropout_p(float p);

}  // namespace flash3
