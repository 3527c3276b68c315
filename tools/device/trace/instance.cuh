// SPDX-License-Identifier: Apache-2.0
// What a file in instances/ includes: a kernel of the library, with stamps.
#pragma once

#include "cuda/sm90/forward/kernel_16bit.cuh"
#include "cuda/sm90/forward/kernel_fp8.cuh"
#include "cuda/sm90/forward/kernel_params.h"
#include "device/trace/consume.cuh"
#include "device/trace/kernels.hpp"
#include "device/trace/produce.cuh"

namespace flash3::device {

// A row of the library's tile table.
template <Element kElement, int kHeadDim, bool kBand, int kTileM, int kTileN>
inline constexpr ForwardConfig kTracedRow =
    forward_config(kElement, kHeadDim, kHeadDim, kBand, ScoreKind::kPlain, kTileM, kTileN)
        .compiled();

// The library's policies with stamps in the producer and in the consumer.
template <class Policies, template <class> class Producer_>
struct TracedPolicies {
  using Traits = typename Policies::Traits;
  using Producer = Producer_<Traits>;
  using Consumer = TracedConsumer<typename Policies::Consumer, typename Policies::Store>;
};
template <ForwardConfig kRow, Element kElement>
struct TracedKernelOf : TracedPolicies<PoliciesOf<kRow, kElement>, TracedProducer> {};
template <ForwardConfig kRow>
struct TracedKernelOf<kRow, Element::kE4m3>
    : TracedPolicies<PoliciesOf<kRow, Element::kE4m3>, TracedFp8Producer> {};

}  // namespace flash3::device

// element, head dim, band, tile_m, tile_n: a row of the library's tile table.
#define FLASH3_TRACED_INSTANCE(ELEMENT, ...)                                                      \
  template <>                                                                                     \
  flash3::device::TracedKernel                                                                    \
  flash3::device::traced_kernel<flash3::cuda::Element::ELEMENT, __VA_ARGS__>() {                  \
    using Policies = TracedKernelOf<kTracedRow<Element::ELEMENT, __VA_ARGS__>, Element::ELEMENT>; \
    return {reinterpret_cast<const void*>(&forward_kernel<Policies>), &trace_target};             \
  }
