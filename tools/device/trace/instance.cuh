// SPDX-License-Identifier: Apache-2.0
// What a file in instances/ includes: a kernel of the library, with stamps.
#pragma once

#include "device/trace/consume.cuh"
#include "device/trace/kernels.hpp"
#include "device/trace/produce.cuh"
#include "hopper/forward/kernel.cuh"
#include "hopper/forward/operands_16bit.cuh"
#include "hopper/forward/store.cuh"

namespace flash3::device {

template <Element kElement_, int kHeadDim, bool kBand, int kTileM, int kTileN>
struct TracedRow {
  static constexpr Element kElement = kElement_;
  static constexpr ForwardConfig kConfig =
      forward_config(kElement, kHeadDim, kHeadDim, kBand, ScoreKind::kPlain, kTileM, kTileN);
};

template <class Traits>
using TracedConsumer16Bit =
    TracedConsumer<Consumer<Traits, Operands16Bit<Traits>, StoreInPlaceOfQ<Traits>>,
                   StoreInPlaceOfQ<Traits>>;

}  // namespace flash3::device

// element, head dim, band, tile_m, tile_n: a row of the library's tile table.
#define FLASH3_TRACED_INSTANCE(ELEMENT, ...)                                                       \
  template <>                                                                                      \
  flash3::device::TracedKernel                                                                     \
  flash3::device::traced_kernel<flash3::hopper::Element::ELEMENT, __VA_ARGS__>() {                 \
    using Traits = hopper::ForwardTraits<TracedRow<hopper::Element::ELEMENT, __VA_ARGS__>>;        \
    return {                                                                                       \
        reinterpret_cast<const void*>(                                                             \
            &hopper::forward_kernel<Traits, TracedProducer<Traits>, TracedConsumer16Bit<Traits>>), \
        &trace_target};                                                                            \
  }
