// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/forward/kernels.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/sm90/forward/tile_table.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"

namespace flash3::cuda::sm90 {
namespace {

template <Element kElement, int kRow>
ForwardKernel kernel_of_row() {
  constexpr ForwardConfig c = kForwardConfigs[kRow];
  return {kernel_id("fwd", kElement, c, c.tile_m()), kElement, c,
          forward_kernel_function<kElement, c.operands, c.head_dim, c.head_dim_v, c.band, c.score,
                                  c.paged, c.split, c.tile_m(), c.tile_n>()};
}

template <Element kElement, int... kRows>
void add_kernels(std::vector<ForwardKernel>& list, std::integer_sequence<int, kRows...>) {
  const auto add = [&]<int kRow>() {
    if constexpr (kForwardConfigs[kRow].holds(kElement))
      list.push_back(kernel_of_row<kElement, kRow>());
  };
  (add.template operator()<kRows>(), ...);
}

}  // namespace

std::span<const ForwardKernel> forward_kernels() {
  static const std::vector<ForwardKernel> list = [] {
    std::vector<ForwardKernel> kernels;
    constexpr auto rows = std::make_integer_sequence<int, int(std::size(kForwardConfigs))>();
    add_kernels<Element::kFloat16>(kernels, rows);
    add_kernels<Element::kBFloat16>(kernels, rows);
    add_kernels<Element::kE4m3>(kernels, rows);
    return kernels;
  }();
  return list;
}

std::span<const ForwardKernel> forward_kernels(Element element) {
  // They lie in the order of elements.
  return std::ranges::equal_range(forward_kernels(), element, {}, &ForwardKernel::element);
}

}  // namespace flash3::cuda::sm90
