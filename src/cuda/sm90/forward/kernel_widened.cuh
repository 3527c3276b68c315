// SPDX-License-Identifier: Apache-2.0
// What kernels are put together from that widen K and V.
#pragma once

#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/load_widened.cuh"
#include "cuda/sm90/forward/operands_widened.cuh"
#include "cuda/sm90/forward/store.cuh"

namespace flash3::cuda::sm90 {

template <ForwardConfig kRow, Element kElement>
  requires(kRow.operands == Operands::kWidened)
struct PoliciesOf<kRow, kElement> {
  using Traits = WidenedTraits<kRow, kElement>;
  using Producer = WidenedProducer<Traits>;
  using Operands = OperandsWidened<Traits>;
  using Store = StoreInPlaceOfQ<Traits>;
  using Consumer = sm90::Consumer<Traits, Operands, Store>;

  static const void* kernel() { return reinterpret_cast<const void*>(&forward_kernel<PoliciesOf>); }
};

}  // namespace flash3::cuda::sm90
