// SPDX-License-Identifier: Apache-2.0
#include "hopper/forward_fp8/instance.cuh"

FLASH3_FP8_FORWARD_INSTANCE(192, 128, false, 128, kPlain)
