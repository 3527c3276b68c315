// SPDX-License-Identifier: Apache-2.0
// The list of the decode kernels.
#include <utility>
#include <vector>

#include "core/message.hpp"
#include "cuda/host/element_type.hpp"
#include "cuda/sm90/decode/instances.hpp"
#include "cuda/sm90/decode/plan.hpp"

namespace flash3::cuda::sm90 {
namespace {

template <Element kElement, bool kCapped, int kRow>
DecodeKernel kernel_of_row() {
  constexpr DecodeConfig c = kDecodeConfigs[kRow];
  if constexpr (c.latent)
    return {message("decode_", short_name(kElement), "_latent_", c.rows, "x", c.tile_n), kElement,
            false, c, latent_kernel_function<kElement>()};
  else
    return {message("decode_", short_name(kElement), "_d", c.head_dim,
                    c.head_dim_v == c.head_dim ? "" : message("x", c.head_dim_v),
                    kCapped ? "_softcap_" : "_", c.rows, "x", c.tile_n),
            kElement, kCapped, c,
            decode_kernel_function<kElement, c.head_dim, c.head_dim_v, c.rows, kCapped>()};
}

template <Element kElement, bool kCapped, int kRow>
void add_kernel(std::vector<DecodeKernel>& list) {
  constexpr DecodeConfig c = kDecodeConfigs[kRow];
  if constexpr (c.e4m3 == (kElement == Element::kE4m3) && !(c.latent && kCapped))
    list.push_back(kernel_of_row<kElement, kCapped, kRow>());
}

template <Element kElement, bool kCapped, int... kRows>
void add_kernels(std::vector<DecodeKernel>& list, std::integer_sequence<int, kRows...>) {
  (add_kernel<kElement, kCapped, kRows>(list), ...);
}

}  // namespace

std::span<const DecodeKernel> decode_kernels() {
  static const std::vector<DecodeKernel> list = [] {
    std::vector<DecodeKernel> kernels;
    constexpr auto rows = std::make_integer_sequence<int, int(std::size(kDecodeConfigs))>();
    add_kernels<Element::kFloat16, false>(kernels, rows);
    add_kernels<Element::kBFloat16, false>(kernels, rows);
    add_kernels<Element::kFloat16, true>(kernels, rows);
    add_kernels<Element::kBFloat16, true>(kernels, rows);
    add_kernels<Element::kE4m3, false>(kernels, rows);
    return kernels;
  }();
  return list;
}

}  // namespace flash3::cuda::sm90
