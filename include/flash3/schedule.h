/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * Schedules of forward calls that the caller keeps: the layers of a model whose sequences have the
 * same lengths share one. */
#ifndef FLASH3_SCHEDULE_H_
#define FLASH3_SCHEDULE_H_

#include "flash3/flash3.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Which block of a GPU computes what in a call whose lengths are in device memory. Without a
 * schedule, a call first lists that in its workspace.
 *
 * What a schedule is made from: the sizes of the params, which fields of them are given, the mask,
 * sm_margin, the backend and its device, and what cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
 * leftpad_k and cu_seqlens_k_new hold when it is made. A call that differs in anything but what
 * those tensors hold is refused, by the key. If they hold something else by then, what the call
 * writes is undefined, but stays inside out and lse. Pages, addresses and strides do not count.
 *
 * Calls may share one while it is not changed, on any streams that wait for the one that made it.
 */
struct flash3_schedule {
  void* data;   /**< the caller's, in the tensors' kind of memory, a multiple of 256; may be NULL
                   where no bytes are needed */
  size_t size;  /**< bytes of it */
  uint64_t key; /**< 0 until flash3_forward_schedule has set it; then from 1 to INT64_MAX */
};

/** @{ @name Making a schedule */
/** Bytes that the schedule of this call takes; 0 where the call needs none, as on a CPU. */
FLASH3_API flash3_status flash3_forward_schedule_size(const flash3_forward_params* params,
                                                      size_t* bytes);

/** Enqueues the listing on params.stream, into schedule->data, and sets schedule->key. A schedule
 * that has a key is made again, for other lengths. A call that needs another key is refused, so
 * that a graph which reads the schedule never gets another call's. Only the addresses of tensors
 * that tell lengths are needed in the params. It can be captured in a CUDA graph. */
FLASH3_API flash3_status flash3_forward_schedule(const flash3_forward_params* params,
                                                 flash3_schedule* schedule);
/** @} */

#ifdef __cplusplus
}
#endif

#endif /* FLASH3_SCHEDULE_H_ */
