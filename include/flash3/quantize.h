/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * Conversion of tensors to FP8, for flash3_forward. A part of flash3.h, which includes it. */
#ifndef FLASH3_QUANTIZE_H_
#define FLASH3_QUANTIZE_H_

#include "flash3/flash3.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Converts q, k and v to FP8, in this order:
 *   - rotary, if there are cos and sin: a position embedding of q and k;
 *   - rotate = 1: q and k are multiplied by D·H/√n, which leaves q·k as it is and spreads outliers
 *     over the head dim. D: a sign for each dimension, − where bit i % 64 of word i / 64 is 1; word
 *     w is output w of SplitMix64 started at rotation_seed. H: the Hadamard matrix (Sylvester's) of
 *     n = head_dim dimensions; if that is no power of two, one for each power of two that it is the
 *     sum of, the largest first: 96 = 64 + 32;
 *   - scales: the smallest power of two for which no element is above 448 (so that scaling does not
 *     round), 1 for all zeros, NaN where an element is NaN or infinite. Their shapes say what each
 *     is for: see flash3_forward_params.q_scale;
 *   - rounding to e4m3, to nearest even.
 *
 * Computed in float32. Each of q, k and v may be left out: then all of its tensors are zero, and
 * its other fields are ignored.
 *
 * Zero-initialise it, then set struct_size = sizeof(flash3_quantize_params). */
typedef struct flash3_quantize_params {
  size_t struct_size; /**< sizeof of this struct: which fields the caller knows */

  /** @{ @name Tensors */
  flash3_tensor q; /**< [batch, seq_q, heads_q, head_dim] float16 or bfloat16; CPU: float32 too */
  flash3_tensor k; /**< [batch, seq_k, heads_k, head_dim]; q, k and v have one dtype */
  flash3_tensor v; /**< [batch, seq_k, heads_k, head_dim_v] */
  flash3_tensor q_out;   /**< FLASH3_FLOAT8_E4M3, the shape of q */
  flash3_tensor k_out;   /**< the same for k */
  flash3_tensor v_out;   /**< the same for v */
  flash3_tensor q_scale; /**< written; as in flash3_forward_params. That of a block without a token
                            that counts is left as it is */
  flash3_tensor k_scale; /**< the same for k */
  flash3_tensor v_scale; /**< the same for v */
  /** @} */

  /** @name Rotary embedding and rotation
   * Dimensions i and i + rotary_dim / 2 (interleaved: 2i and 2i + 1) of the token at position p
   * are rotated by an angle: (x, y) becomes (x·cos − y·sin, x·sin + y·cos) with row p, column i.
   * Both all zero: none. rotary_offset: the position of each sequence's first token; the tables
   * must reach the last token that a sequence can have. @{ */
  flash3_tensor rotary_cos;   /**< [positions, rotary_dim / 2] float32 or the dtype of q and k */
  flash3_tensor rotary_sin;   /**< the same shape and dtype */
  int32_t rotary_interleaved; /**< 1: dimensions 2i and 2i + 1 */
  int32_t rotate;             /**< 1: q and k are multiplied by D·H/√n */
  int64_t rotary_offset_q;    /**< the position of the first token of each sequence of q */
  int64_t rotary_offset_k;    /**< the same for k */
  uint64_t rotation_seed;     /**< of the signs in D */
  /** @} */

  /** @{ @name Ragged batches */
  flash3_tensor cu_seqlens_q; /**< as in flash3_forward_params, to max_seqlen_k */
  flash3_tensor cu_seqlens_k;
  flash3_tensor seqused_q; /**< tokens after these neither count in a scale nor are written */
  flash3_tensor seqused_k; /**< the same for k and v */
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  /** @} */

  /** @{ @name Where it runs */
  int32_t backend; /**< as in flash3_forward_params, to the end */
  int32_t num_threads;
  void* stream;
  void* workspace;
  size_t workspace_size;
  /** @} */
} flash3_quantize_params;

/** @{ @name Quantize calls */
/** As their forward counterparts. */
FLASH3_API flash3_status flash3_quantize_supported(const flash3_quantize_params* params);
FLASH3_API flash3_status flash3_quantize_workspace(const flash3_quantize_params* params,
                                                   size_t* bytes);
FLASH3_API flash3_status flash3_quantize(const flash3_quantize_params* params);
FLASH3_API flash3_status flash3_quantize_explain(const flash3_quantize_params* params, char* buffer,
                                                 size_t* size);
/** @} */

#ifdef __cplusplus
}
#endif

#endif /* FLASH3_QUANTIZE_H_ */
