// SPDX-License-Identifier: Apache-2.0
// What 16-bit kernels are put together from. load_pages.cuh adds the paged ones,
// device/softcap_score.cuh those with a softcap.
#pragma once

#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/load.cuh"
#include "cuda/sm90/forward/operands_16bit.cuh"
#include "cuda/sm90/forward/store.cuh"

namespace flash3::cuda::sm90 {

template <ForwardConfig kRow, Element kElement>
  requires(kRow.operands == Operands::k16Bit)
struct PoliciesOf<kRow, kElement> {
  using Traits = ForwardTraits<kRow, kElement>;
  using Producer = TmaProducer<Traits>;
  using Operands = Operands16Bit<Traits>;
  using Store = StoreInPlaceOfQ<Traits>;
  using Consumer = sm90::Consumer<Traits, Operands, Store>;

  static const void* kernel() { return reinterpret_cast<const void*>(&forward_kernel<PoliciesOf>); }
};

}  // namespace flash3::cuda::sm90
