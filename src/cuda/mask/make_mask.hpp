// SPDX-License-Identifier: Apache-2.0
// Makes masks as data (core/mask_lists.hpp) on the device.
#pragma once

#include "core/mask_problem.hpp"
#include "core/status.hpp"

namespace flash3::cuda {

// Enqueues the making on the problem's stream. The host reads nothing, and nothing is allocated.
Status launch_make_mask(const MaskProblem& problem);

// Waits for the stream, and reads what the mask in this memory takes.
Status read_mask_counts(const MaskShape& shape, const void* data, void* stream, MaskCounts* counts);

}  // namespace flash3::cuda
