/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * Which weights the dropout of a call keeps. */
#ifndef FLASH3_DROPOUT_H_
#define FLASH3_DROPOUT_H_

#include "flash3/flash3.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A question which weights dropout keeps. Zero-initialise it, then set struct_size =
 * sizeof(flash3_dropout_mask_params). */
typedef struct flash3_dropout_mask_params {
  size_t struct_size; /**< sizeof of this struct: which fields the caller knows */

  /** [batch, heads_q, seq_q, seq_k] uint8, written: 1 where the weight of a query and a key is
   * kept, 0 where it is dropped, whatever else a mask hides. Queries and keys are counted from the
   * first of their sequence, so that a ragged batch takes the longest lengths. */
  flash3_tensor kept;

  /** @{ @name Which weights */
  float dropout_p; /**< as in flash3_forward_params, to dropout_state */
  uint64_t dropout_seed;
  uint64_t dropout_offset;
  flash3_tensor dropout_state;
  /** @} */

  /** @{ @name Where it runs */
  int32_t backend;     /**< flash3_backend */
  int32_t num_threads; /**< CPU: threads to use; 0: one per core this process may run on */
  void* stream;        /**< CUDA stream, NULL: the default one; not used on a CPU */
  /** @} */
} flash3_dropout_mask_params;

/** Writes which weights a call with this dropout keeps. */
FLASH3_API flash3_status flash3_dropout_mask(const flash3_dropout_mask_params* params);

#ifdef __cplusplus
}
#endif

#endif /* FLASH3_DROPOUT_H_ */
