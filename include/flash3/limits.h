/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * What calls may ask for on a backend, known before there is a call. */
#ifndef FLASH3_LIMITS_H_
#define FLASH3_LIMITS_H_

#include "flash3/flash3.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Calls whose head dims have a limit of their own. */
typedef enum flash3_head_dims_of FLASH3_ENUM_INT32 {
  FLASH3_HEAD_DIMS_OF_FORWARD = 0, /**< forward calls without FP8 */
  FLASH3_HEAD_DIMS_OF_FORWARD_FP8 =
      1,                           /**< forward calls with FP8 tensors, or of FLASH3_COMPUTE_FP8 */
  FLASH3_HEAD_DIMS_OF_BACKWARD = 2 /**< backward calls */
} flash3_head_dims_of;

/** The most that head_dim and head_dim_v may be: the backend takes each pair from 1 to these. It
 * must be built in, but need not be able to run here. Latent attention goes beyond it on a GPU,
 * with qv or with a v that is a part of k: flash3_forward_supported() answers for such a call. */
FLASH3_API flash3_status flash3_backend_head_dims(flash3_backend backend, flash3_head_dims_of calls,
                                                  int32_t* head_dim, int32_t* head_dim_v);

#ifdef __cplusplus
}
#endif

#endif /* FLASH3_LIMITS_H_ */
