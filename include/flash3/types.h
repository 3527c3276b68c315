/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * What every call is described with: statuses, dtypes, backends, tensors. A part of flash3.h, which
 * includes it. */
#ifndef FLASH3_TYPES_H_
#define FLASH3_TYPES_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* C++ and C23 can say that the enums are 32 bits wide; other C makes them so anyway. */
#if defined(__cplusplus) || (defined(__STDC_VERSION__) && __STDC_VERSION__ >= 202311L)
#define FLASH3_ENUM_INT32 : int32_t
#else
#define FLASH3_ENUM_INT32
#endif

/** What a call returns. */
typedef enum flash3_status FLASH3_ENUM_INT32 {
  FLASH3_OK = 0,               /**< the call has done, or enqueued, its work */
  FLASH3_INVALID_ARGUMENT = 1, /**< the call breaks a rule of this header */
  FLASH3_UNSUPPORTED = 2,      /**< valid, but no backend here, or not the one asked for, runs it */
  FLASH3_CUDA_ERROR = 3,     /**< the CUDA runtime or driver refused; the message holds its words */
  FLASH3_OUT_OF_MEMORY = 4,  /**< host memory ran out */
  FLASH3_INTERNAL_ERROR = 5, /**< a bug in flash3 */
  FLASH3_CANCELLED = 6 /**< flash3_set_interrupt()'s function ended it: results are undefined */
} flash3_status;

/** What a tensor's elements are. */
typedef enum flash3_dtype FLASH3_ENUM_INT32 {
  FLASH3_DTYPE_NONE = 0,  /**< a zero-initialised tensor: not given */
  FLASH3_FLOAT16 = 1,     /**< IEEE 754 binary16 */
  FLASH3_BFLOAT16 = 2,    /**< 8 bits of exponent, 7 of fraction */
  FLASH3_FLOAT32 = 3,     /**< IEEE 754 binary32 */
  FLASH3_INT32 = 4,       /**< index tensors alone: cu_seqlens_q, seqused_k … */
  FLASH3_FLOAT8_E4M3 = 5, /**< of a forward's q, k and v, or k and v alone: OCP e4m3fn */
  FLASH3_INT64 = 6,       /**< tree_mask alone */
  FLASH3_UINT8 = 7        /**< dense and bits of a mask alone: mask.h */
} flash3_dtype;

/** Tokens that share a scale where a scale tensor holds blocks. */
#define FLASH3_FP8_BLOCK 128

/** Bytes that the address of a workspace is a multiple of. */
#define FLASH3_WORKSPACE_ALIGNMENT 256

/** What a call runs on. */
typedef enum flash3_backend FLASH3_ENUM_INT32 {
  FLASH3_BACKEND_AUTO = 0,   /**< by the memory; without pointers: Hopper if there is one */
  FLASH3_BACKEND_HOPPER = 1, /**< compute capability 9.0; float16, bfloat16, float8_e4m3 */
  FLASH3_BACKEND_CPU = 2     /**< float16, bfloat16, float32, float8_e4m3 */
} flash3_backend;

/** A strided view of memory that the caller owns. Strides count elements; the last dimension's must
 * be 1 (a bias's need not), none may be negative, and that of a dimension of size 0 or 1 may be
 * anything. Elements of an input may share memory (stride 0 broadcasts); those of an output must
 * not: each dimension's stride must reach past the dimensions with smaller strides. data must be
 * aligned to the element, and may be NULL if there are no elements. Where only a question is asked
 * (_supported, _workspace, _explain), data may be NULL. What a call writes, its workspace too,
 * shares no memory with its other tensors or its schedule; interleaved views, such as dq, dk and dv
 * in one tensor, share none. */
typedef struct flash3_tensor {
  void* data;         /**< the first element */
  flash3_dtype dtype; /**< of every element */
  int32_t ndim;       /**< dimensions that count, 1 to 4 */
  int64_t shape[4];   /**< elements along each dimension */
  int64_t stride[4];  /**< elements from one index of a dimension to the next */
} flash3_tensor;

/** What a forward call computes in (flash3_forward_params.compute). */
typedef enum flash3_compute FLASH3_ENUM_INT32 {
  FLASH3_COMPUTE_AS_GIVEN = 0, /**< the dtype of q, k and v */
  FLASH3_COMPUTE_FP8 = 1       /**< FLASH3_FLOAT8_E4M3, from 16-bit (CPU: float32 too) q, k and v */
} flash3_compute;

/** How Hopper sums up FP8 products of weights and v (flash3_forward_params.fp8_sums). */
typedef enum flash3_fp8_sums FLASH3_ENUM_INT32 {
  FLASH3_FP8_SUMS_AUTO = 0,      /**< two levels where a query may see more than 2048 keys */
  FLASH3_FP8_SUMS_ONE_LEVEL = 1, /**< in the tensor cores only, whose long sums shrink */
  FLASH3_FP8_SUMS_TWO_LEVELS = 2 /**< added to float32 sums every few tiles */
} flash3_fp8_sums;

/** The diagonal of a mask (flash3_forward_params.mask_alignment). */
typedef enum flash3_mask_alignment FLASH3_ENUM_INT32 {
  FLASH3_ALIGN_BOTTOM_RIGHT = 0, /**< i' = i + seq_k − seq_q: the last query is at the last key */
  FLASH3_ALIGN_TOP_LEFT = 1      /**< i' = i: the first query is at the first key */
} flash3_mask_alignment;

#ifdef __cplusplus
}
#endif

#endif /* FLASH3_TYPES_H_ */
