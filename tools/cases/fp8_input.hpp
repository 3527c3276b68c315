// SPDX-License-Identifier: Apache-2.0
// The q, k and v of a call brought to FP8 by a call of flash3_quantize before it.
#pragma once

#include <memory>
#include <vector>

#include "cases/case.hpp"
#include "cases/memory.hpp"

namespace flash3::cases {

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
