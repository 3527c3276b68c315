// SPDX-License-Identifier: Apache-2.0
// What a file in instances/ includes: the parts of the library's kernel, for a row that its tile
// table need not have.
#pragma once

#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/load.cuh"
#include "cuda/sm90/forward/load_fp8.cuh"
#include "cuda/sm90/forward/operands_16bit.cuh"
#include "cuda/sm90/forward/operands_fp8.cuh"
#include "cuda/sm90/forward/store.cuh"
#include "cuda/sm90/forward/store_fp8.cuh"
#include "device/ablation/variants.hpp"

namespace flash3::device {

using namespace cuda;
using namespace cuda::sm90;

template <Element kElement_, Variant kVariant>
struct AblationRow {
  static constexpr Element kElement = kElement_;
  static constexpr ForwardConfig kConfig = ablation_config(kElement, kVariant);
};

template <Variant kVariant>
using Fp16Traits = ForwardTraits<AblationRow<Element::kFloat16, kVariant>>;
template <Variant kVariant>
using E4m3Traits = Fp8Traits<AblationRow<Element::kE4m3, kVariant>>;

// The library's own consumers.
template <class Traits>
using Consumer16Bit = Consumer<Traits, Operands16Bit<Traits>, StoreInPlaceOfQ<Traits>>;
template <class Traits>
using ConsumerFp8 = Consumer<Traits, OperandsFp8<Traits>, StoreFp8<Traits>>;

}  // namespace flash3::device

// TRAITS, which what follows calls Traits, and that are the template arguments of forward_kernel.
#define FLASH3_ABLATION_INSTANCE(ELEMENT, VARIANT, TRAITS, ...)                     \
  template <>                                                                       \
  const void* flash3::device::ablation_kernel<flash3::cuda::Element::ELEMENT,       \
                                              flash3::device::Variant::VARIANT>() { \
    using namespace flash3::device;                                                 \
    using Traits = TRAITS;                                                          \
    return reinterpret_cast<const void*>(&forward_kernel<Traits, __VA_ARGS__>);     \
  }
