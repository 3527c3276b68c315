// SPDX-License-Identifier: Apache-2.0
// Masks that the caller keeps (flash3/mask.h): the making, and who may take one.
#pragma once

#include "core/backend.hpp"
#include "core/mask_checks.hpp"

namespace flash3 {

// Whether the mask that the problem was given, if any, is one that this backend made for the device
// that it runs on, and is all there.
Status check_mask(const Problem& problem, const Backend& backend);

Status make_mask(const flash3_mask_params* params, flash3_mask* mask);
Status count_mask(const flash3_mask& mask, void* stream, MaskCounts* counts);

}  // namespace flash3
