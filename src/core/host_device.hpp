// SPDX-License-Identifier: Apache-2.0
// Marks what host and device share.
#pragma once

#if defined(__CUDACC__)
#define FLASH3_HOST_DEVICE __host__ __device__
#else
#define FLASH3_HOST_DEVICE
#endif
