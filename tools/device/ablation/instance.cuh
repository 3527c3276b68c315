// SPDX-License-Identifier: Apache-2.0
// What a file in instances/ includes: the parts of the library's kernel, for a row that its tile
// table need not have.
#pragma once

#include "cuda/sm90/forward/kernel_16bit.cuh"
#include "cuda/sm90/forward/kernel_fp8.cuh"
#include "cuda/sm90/forward/kernel_params.h"
#include "device/ablation/variants.hpp"

namespace flash3::device {

using namespace cuda;
using namespace cuda::sm90;

template <Variant kVariant>
using Fp16Traits = ForwardTraits<ablation_config(Element::kFloat16, kVariant), Element::kFloat16>;
template <Variant kVariant>
using E4m3Traits = Fp8Traits<ablation_config(Element::kE4m3, kVariant), Element::kE4m3>;

// The library's own consumers.
template <class Traits>
using Consumer16Bit = Consumer<Traits, Operands16Bit<Traits>, StoreInPlaceOfQ<Traits>>;
template <class Traits>
using ConsumerFp8 = Consumer<Traits, OperandsFp8<Traits>, StoreFp8<Traits>>;

// What a variant's kernel is put together from.
template <class Traits_, class Producer_, class Consumer_>
struct AblationPolicies {
  using Traits = Traits_;
  using Producer = Producer_;
  using Consumer = Consumer_;
};

}  // namespace flash3::device

// TRAITS, which what follows calls Traits: the producer and the consumer.
#define FLASH3_ABLATION_INSTANCE(ELEMENT, VARIANT, TRAITS, ...)                     \
  template <>                                                                       \
  const void* flash3::device::ablation_kernel<flash3::cuda::Element::ELEMENT,       \
                                              flash3::device::Variant::VARIANT>() { \
    using namespace flash3::device;                                                 \
    using Traits = TRAITS;                                                          \
    static_assert(is_valid(Traits::kConfig));                                       \
    using Policies = AblationPolicies<Traits, __VA_ARGS__>;                         \
    return reinterpret_cast<const void*>(&forward_kernel<Policies>);                \
  }
