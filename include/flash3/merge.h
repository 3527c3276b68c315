/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * Attention over parts of the keys, merged. A part of flash3.h, which includes it. */
#ifndef FLASH3_MERGE_H_
#define FLASH3_MERGE_H_

#include "flash3/flash3.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Merges attention over parts of the keys into attention over all of them: with the out and lse of
 * each part,
 *
 *     lse = log(exp(sink) + Σ exp(lse_s))      out = Σ exp(lse_s − lse) · out_s
 *
 * in float32, rounded once. A part whose lse is −∞ saw no key, and its out is ignored.
 * A row that no part saw gets out = 0 and lse = −∞, or the sink. Rows may be those of a batch or of
 * packed sequences. Zero-initialise it, then set struct_size = sizeof(flash3_merge_params). */
typedef struct flash3_merge_params {
  size_t struct_size; /**< sizeof of this struct: which fields the caller knows */

  /** @{ @name Tensors */
  flash3_tensor out_parts; /**< [parts, rows, heads, head_dim_v] float32, head_dim_v ≤ 512 */
  flash3_tensor lse_parts; /**< [parts, heads, rows] float32, natural log */
  flash3_tensor out;       /**< [rows, heads, head_dim_v] float16, bfloat16 or float32 */
  flash3_tensor lse;       /**< [heads, rows] float32; all zero: not wanted */
  flash3_tensor sink;      /**< [heads] float32, or the dtype of out; all zero: none */
  /** @} */

  /** @{ @name Where it runs */
  int32_t backend; /**< as in flash3_forward_params, to the end */
  int32_t num_threads;
  void* stream;
  void* workspace;
  size_t workspace_size;
  /** @} */
} flash3_merge_params;

/** @{ @name Merge calls */
/** As their forward counterparts. */
FLASH3_API flash3_status flash3_merge_supported(const flash3_merge_params* params);
FLASH3_API flash3_status flash3_merge_workspace(const flash3_merge_params* params, size_t* bytes);
FLASH3_API flash3_status flash3_merge(const flash3_merge_params* params);
FLASH3_API flash3_status flash3_merge_explain(const flash3_merge_params* params, char* buffer,
                                              size_t* size);
/** @} */

#ifdef __cplusplus
}
#endif

#endif /* FLASH3_MERGE_H_ */
