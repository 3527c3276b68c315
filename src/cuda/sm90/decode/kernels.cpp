// SPDX-License-Identifier: Apache-2.0
// The list of the decode kernels.
#include "core/message.hpp"
#include "cuda/host/element_type.hpp"
#include "cuda/sm90/decode/plan.hpp"
#include "cuda/sm90/host/kernel_list.hpp"

namespace flash3::cuda::sm90 {
namespace {

std::string id_of(Element element, const DecodeConfig& c) {
  const std::string dims =
      message("d", c.head_dim, c.head_dim_v == c.head_dim ? "" : message("x", c.head_dim_v),
              c.score == ScoreKind::kSoftcap ? "_softcap" : "");
  return message("decode_", short_name(element), "_", c.latent ? "latent" : dims, "_", c.rows, "x",
                 c.tile_n);
}

}  // namespace

std::span<const DecodeKernel> decode_kernels() {
  static const auto list = list_kernels<kDecodeConfigs>([](Element element, const DecodeConfig& c,
                                                           const void* function) {
    return DecodeKernel{id_of(element, c), element, c.score == ScoreKind::kSoftcap, c, function};
  });
  return list;
}

}  // namespace flash3::cuda::sm90
