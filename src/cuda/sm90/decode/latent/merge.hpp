// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/device/types.hpp"

namespace flash3::cuda::sm90 {

const void* latent_merge_function(Element element);
inline constexpr int kLatentMergeThreads = 256;

}  // namespace flash3::cuda::sm90
