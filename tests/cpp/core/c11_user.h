/* SPDX-License-Identifier: Apache-2.0 */
/* What the C11 translation unit offers to the tests. */
#ifndef FLASH3_TESTS_C11_USER_H_
#define FLASH3_TESTS_C11_USER_H_

#include "flash3/flash3.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One query, two equal keys, head_dim 1: out is the mean of two values, lse is score + ln 2. */
flash3_status c11_average(float a, float b, float* out, float* lse);

#ifdef __cplusplus
}
#endif

#endif /* FLASH3_TESTS_C11_USER_H_ */
