// SPDX-License-Identifier: Apache-2.0
// The list of the backward kernels.
#include <utility>
#include <vector>

#include "cuda/sm90/backward/plan.hpp"
#include "cuda/sm90/backward/tile_table.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"

namespace flash3::cuda::sm90 {
namespace {

template <Element kElement, int kRow>
BackwardKernel kernel_of_row() {
  constexpr BackwardConfig c = kBackwardConfigs[kRow];
  return {kernel_id("bwd", kElement, c, c.tile_m), kElement, c,
          backward_kernel_function<kElement, c.head_dim, c.head_dim_v, c.band, c.score, c.tile_m,
                                   c.tile_n>()};
}

template <Element kElement, int... kRows>
void add_kernels(std::vector<BackwardKernel>& list, std::integer_sequence<int, kRows...>) {
  (list.push_back(kernel_of_row<kElement, kRows>()), ...);
}

}  // namespace

std::span<const BackwardKernel> backward_kernels() {
  static const std::vector<BackwardKernel> list = [] {
    std::vector<BackwardKernel> kernels;
    constexpr auto rows = std::make_integer_sequence<int, int(std::size(kBackwardConfigs))>();
    add_kernels<Element::kFloat16>(kernels, rows);
    add_kernels<Element::kBFloat16>(kernels, rows);
    return kernels;
  }();
  return list;
}

}  // namespace flash3::cuda::sm90
