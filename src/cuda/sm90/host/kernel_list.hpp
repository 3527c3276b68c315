// SPDX-License-Identifier: Apache-2.0
// The kernels of a family: each row of its tile table with each element type that it holds.
#pragma once

#include <utility>
#include <vector>

#include "cuda/sm90/device/kernel_table.hpp"

namespace flash3::cuda::sm90 {

// make(element, row, address), in the order of the table: all of an element type before the next.
template <const auto& kTable, class Make>
auto list_kernels(const Make& make) {
  std::vector<decltype(make(Element{}, kTable[0], nullptr))> list;
  for (const Element element : {Element::kFloat16, Element::kBFloat16, Element::kE4m3}) {
    const auto add = [&]<int kRow>() {
      if (kTable[kRow].holds(element))
        list.push_back(make(element, kTable[kRow], kernel_function<kTable, kRow>(element)));
    };
    [&]<int... kRows>(std::integer_sequence<int, kRows...>) {
      (add.template operator()<kRows>(), ...);
    }(std::make_integer_sequence<int, kRowsOf<kTable>>());
  }
  return list;
}

}  // namespace flash3::cuda::sm90
