// SPDX-License-Identifier: Apache-2.0
// The attention kernels of one GPU architecture, as the backend sees them.
#pragma once

#include <span>
#include <string>

#include "core/message.hpp"
#include "core/plan.hpp"
#include "cuda/host/device_info.hpp"

namespace flash3::cuda {

struct Family {
  const char* needs;  // compute capabilities, in words: "9.0"
  bool (*takes)(const Capability& capability);

  // What runs a problem on a device that it takes, as Backend::plan() gives it.
  Status (*forward)(const ForwardProblem&, const Device&, PlanPointer<ForwardProblem>*);
  Status (*backward)(const BackwardProblem&, const Device&, PlanPointer<BackwardProblem>*);
};

// The first that takes the device; UNSUPPORTED where none does.
inline Status find_family(std::span<const Family* const> families, const Device& device,
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
