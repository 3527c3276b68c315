// SPDX-License-Identifier: Apache-2.0
// Tensors of calls for programs that run kernels directly.
#pragma once

#include <memory>
#include <vector>

#include "cases/case.hpp"
#include "cases/memory.hpp"
#include "flash3/flash3.h"

namespace flash3::cases {

// A call on N(0, 1) tensors: the case's tensors and lengths, laid out as it says, in this memory;
// out and lse hold values too, to be overwritten. params has no workspace. They live as long as
// this object.
class NormalTensors {
 public:
  NormalTensors(const Case& c, Memory& memory);

  flash3_forward_params params;

 private:
  std::vector<std::shared_ptr<void>> buffers_;
};

// The q, k and v of a call brought to FP8 by a call of flash3_quantize before it.
class Fp8Input {
 public:
  // params: a call on 16-bit tensors (CPU: float32 too) in `memory`, whose sequences, backend,
  // threads, stream and rotation_seed count here too.
  Fp8Input(Memory& memory, const flash3_forward_params& params, Scales scales, bool rotate);

  // Enqueues the work on the stream; any number of times.
  flash3_status quantize() const;

  // Puts the FP8 tensors in the place of the others.
  void apply(flash3_forward_params* params) const;

 private:
  flash3_status status_ = FLASH3_OK;  // of finding out what the call needs
  flash3_quantize_params call_{};
  std::vector<std::shared_ptr<void>> buffers_;
};

}  // namespace flash3::cases
