// SPDX-License-Identifier: Apache-2.0
#include "device/trace/instance.cuh"

FLASH3_TRACED_INSTANCE(kBFloat16, 128, false, 128, 128)
FLASH3_TRACED_INSTANCE(kBFloat16, 128, false, 192, 80)
FLASH3_TRACED_INSTANCE(kBFloat16, 128, true, 128, 128)
FLASH3_TRACED_INSTANCE(kBFloat16, 128, true, 192, 80)
