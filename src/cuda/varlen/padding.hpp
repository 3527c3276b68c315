// SPDX-License-Identifier: Apache-2.0
// The kernel after those of a ragged batch: it fills the rows that belong to no token, which only
// the lengths on the device tell.
#pragma once

#include "core/padding.hpp"
#include "core/status.hpp"

namespace flash3::cuda {

Status launch_fill_padding(const Padding& padding, void* stream);

}  // namespace flash3::cuda
