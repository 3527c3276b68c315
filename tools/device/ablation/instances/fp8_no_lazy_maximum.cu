// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/instance.cuh"

FLASH3_FP8_ABLATION_INSTANCE(kNoLazyMaximum, kAblationTileN)
