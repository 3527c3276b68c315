// SPDX-License-Identifier: Apache-2.0
// What a file of kernels instantiates (cmake/kernel_instances.cmake), after the policies of their
// family.
#pragma once

#include "cuda/sm90/device/kernel_table.hpp"

namespace flash3::cuda::sm90 {

template <const auto& kTable, int kRow>
const void* kernel_function(Element element) {
  constexpr auto kCompiled = kTable[kRow].compiled();
  const void* function = nullptr;
  const auto add = [&]<Element kElement>() {
    if constexpr (kTable[kRow].holds(kElement))
      if (element == kElement) function = PoliciesOf<kCompiled, kElement>::kernel();
  };
  add.template operator()<Element::kFloat16>();
  add.template operator()<Element::kBFloat16>();
  add.template operator()<Element::kE4m3>();
  return function;
}

}  // namespace flash3::cuda::sm90
