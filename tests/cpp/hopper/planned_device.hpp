// SPDX-License-Identifier: Apache-2.0
// The device that plans without a GPU are made for.
#pragma once

#include "cuda/host/device_info.hpp"

namespace flash3::cuda::sm90 {

inline constexpr Device kDevice{0, 132, {9, 0}};  // an H100 or H200

}  // namespace flash3::cuda::sm90
