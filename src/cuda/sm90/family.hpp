// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/host/family.hpp"

namespace flash3::cuda::sm90 {

// The kernels for Hopper GPUs.
const Family& family();

}  // namespace flash3::cuda::sm90
