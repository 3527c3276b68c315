// SPDX-License-Identifier: Apache-2.0
// What FP8 kernels are put together from. load_fp8_pages.cuh adds the paged ones, softcap_fp8.cuh
// those with a softcap.
#pragma once

#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/load_fp8.cuh"
#include "cuda/sm90/forward/operands_fp8.cuh"
#include "cuda/sm90/forward/store_fp8.cuh"

namespace flash3::cuda::sm90 {

template <ForwardConfig kRow, Element kElement>
  requires(kRow.operands == Operands::kE4m3)
struct PoliciesOf<kRow, kElement> {
  using Traits = Fp8Traits<kRow, kElement>;
  using Producer = Fp8Producer<Traits>;
  using Operands = OperandsFp8<Traits>;
  using Store = StoreFp8<Traits>;
  using Consumer = sm90::Consumer<Traits, Operands, Store>;

  static const void* kernel() { return reinterpret_cast<const void*>(&forward_kernel<PoliciesOf>); }
};

}  // namespace flash3::cuda::sm90
