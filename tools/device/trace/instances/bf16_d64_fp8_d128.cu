// SPDX-License-Identifier: Apache-2.0
#include "device/trace/instance.cuh"

FLASH3_TRACED_INSTANCE(kBFloat16, 64, false, 192, 128)
FLASH3_TRACED_INSTANCE(kBFloat16, 64, true, 192, 128)
FLASH3_TRACED_INSTANCE(kE4m3, 128, false, 128, 128)
FLASH3_TRACED_INSTANCE(kE4m3, 128, true, 128, 128)
