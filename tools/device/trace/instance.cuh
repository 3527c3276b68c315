// SPDX-License-Identifier: Apache-2.0
// What a file in instances/ includes: a kernel of the library, with stamps.
#pragma once

#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/operands_16bit.cuh"
#include "cuda/sm90/forward/operands_fp8.cuh"
#include "cuda/sm90/forward/store.cuh"
#include "cuda/sm90/forward/store_fp8.cuh"
#include "device/trace/consume.cuh"
#include "device/trace/kernels.hpp"
#include "device/trace/produce.cuh"
#include "device/trace/produce_fp8.cuh"

namespace flash3::device {

template <Element kElement_, int kHeadDim, bool kBand, int kTileM, int kTileN>
struct TracedRow {
  static constexpr Element kElement = kElement_;
  static constexpr ForwardConfig kConfig =
      forward_config(kElement, kHeadDim, kHeadDim, kBand, ScoreKind::kPlain, kTileM, kTileN);
};

// What forward_kernel is put together from.
template <class Row>
struct TracedPolicies {
  using Traits = ForwardTraits<Row>;
  using Producer = TracedProducer<Traits>;
  using Store = StoreInPlaceOfQ<Traits>;
  using Consumer =
      TracedConsumer<cuda::sm90::Consumer<Traits, Operands16Bit<Traits>, Store>, Store>;
};
template <class Row>
  requires(Row::kElement == Element::kE4m3)
struct TracedPolicies<Row> {
  using Traits = Fp8Traits<Row>;
  using Producer = TracedFp8Producer<Traits>;
  using Store = StoreFp8<Traits>;
  using Consumer = TracedConsumer<cuda::sm90::Consumer<Traits, OperandsFp8<Traits>, Store>, Store>;
};

}  // namespace flash3::device

// element, head dim, band, tile_m, tile_n: a row of the library's tile table.
#define FLASH3_TRACED_INSTANCE(ELEMENT, ...)                                       \
  template <>                                                                      \
  flash3::device::TracedKernel                                                     \
  flash3::device::traced_kernel<flash3::cuda::Element::ELEMENT, __VA_ARGS__>() {   \
    using P = TracedPolicies<TracedRow<cuda::Element::ELEMENT, __VA_ARGS__>>;      \
    return {reinterpret_cast<const void*>(                                         \
                &cuda::sm90::forward_kernel<P::Traits, P::Producer, P::Consumer>), \
            &trace_target};                                                        \
  }
