// SPDX-License-Identifier: Apache-2.0
// A call on N(0, 1) tensors, for programs that run kernels directly.
#pragma once

#include <memory>
#include <vector>

#include "cases/case.hpp"
#include "cases/memory.hpp"
#include "flash3/flash3.h"

namespace flash3::cases {

// The case's tensors and lengths, laid out as it says, in this memory; out and lse hold values too,
// to be overwritten. params has no workspace. They live as long as this object.
class NormalTensors {
 public:
  NormalTensors(const Case& c, Memory& memory);

  flash3_forward_params params;

 private:
  std::vector<std::shared_ptr<void>> buffers_;
};

}  // namespace flash3::cases
