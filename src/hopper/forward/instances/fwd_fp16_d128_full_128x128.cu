// SPDX-License-Identifier: Apache-2.0
#include "hopper/forward/instance.cuh"

FLASH3_FORWARD_INSTANCE(kFloat16, 128, 128, false, 128)
