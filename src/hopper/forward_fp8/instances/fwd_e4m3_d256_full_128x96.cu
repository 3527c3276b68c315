// SPDX-License-Identifier: Apache-2.0
#include "hopper/forward_fp8/instance.cuh"

FLASH3_FP8_FORWARD_INSTANCE(256, 256, false, 96, kPlain)
