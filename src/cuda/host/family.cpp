// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/family.hpp"

#include <string>

#include "core/message.hpp"

namespace flash3::cuda {

Status find_family(std::span<const Family* const> families, const Device& device,
                   const Family** family) {
  std::string needs;
  for (const Family* each : families) {
    *family = each;
    if (each->takes(device.capability)) return {};
    append(needs, message(needs.empty() ? "" : " or ", each->needs));
  }
  const auto [major, minor] = device.capability;
  return unsupported(message("CUDA device ", device.index, " has compute capability ", major, ".",
                             minor, " but the hopper backend needs ", needs));
}

}  // namespace flash3::cuda
