// SPDX-License-Identifier: Apache-2.0
#include "hopper/forward_fp8/instance.cuh"

FLASH3_FP8_FORWARD_INSTANCE(64, 64, false, 64, kPlain)
