/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * Plans that the caller keeps, for a call that is repeated: a step of decoding, a layer
 * of training. The kernel is chosen once; a run only takes the new addresses. And calls that ask
 * for their workspace, for a caller with an allocator. */
#ifndef FLASH3_PLAN_H_
#define FLASH3_PLAN_H_

#include "flash3/flash3.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The plan of a forward, backward, quantize or merge call.
 *
 * From run to run every data pointer, stream, workspace, workspace_size and schedule may change,
 * and so may what the memory holds, lengths too. A pointer may be NULL when the plan is made: it
 * then counts as a multiple of 16. If the plan's pointer was a multiple of 16, a run's must be one
 * too. Everything else must be unchanged: a field that differs is an error that names it, and
 * nothing runs.
 *
 * A plan is immutable, so many threads may run it concurrently, each with its own workspace.
 * It holds host memory alone. It belongs to the device that was current when it was made; on a CPU
 * to the number of cores that the process then had. Runs can be captured in a CUDA graph. */
typedef struct flash3_plan flash3_plan;

/** @{ @name Making a plan */
/** Sets *plan. Where the call itself would fail, this fails in the same way and sets it to NULL. */
FLASH3_API flash3_status flash3_forward_plan(const flash3_forward_params* params,
                                             flash3_plan** plan);
FLASH3_API flash3_status flash3_backward_plan(const flash3_backward_params* params,
                                              flash3_plan** plan);
FLASH3_API flash3_status flash3_quantize_plan(const flash3_quantize_params* params,
                                              flash3_plan** plan);
FLASH3_API flash3_status flash3_merge_plan(const flash3_merge_params* params, flash3_plan** plan);
/** @} */

/** @{ @name Running a plan */
/** Does what the call does. FLASH3_INVALID_ARGUMENT if params differ from the plan's in more than
 * they may, or if the plan is of another kind of call. */
FLASH3_API flash3_status flash3_forward_run(const flash3_plan* plan,
                                            const flash3_forward_params* params);
FLASH3_API flash3_status flash3_backward_run(const flash3_plan* plan,
                                             const flash3_backward_params* params);
FLASH3_API flash3_status flash3_quantize_run(const flash3_plan* plan,
                                             const flash3_quantize_params* params);
FLASH3_API flash3_status flash3_merge_run(const flash3_plan* plan,
                                          const flash3_merge_params* params);
/** @} */

/** @{ @name Any plan */
/** Bytes of workspace that each run needs. */
FLASH3_API flash3_status flash3_plan_workspace(const flash3_plan* plan, size_t* bytes);

/** The text of the call's _explain, with the same rule for the buffer. */
FLASH3_API flash3_status flash3_plan_explain(const flash3_plan* plan, char* buffer, size_t* size);

/** Frees a plan; NULL: nothing. No run of it may be under way on the host; what it has launched on
 * a device may still run. */
FLASH3_API void flash3_plan_destroy(flash3_plan* plan);
/** @} */

/** @{ @name A call that asks for its workspace */
/** Gives a workspace of so many bytes, at a multiple of FLASH3_WORKSPACE_ALIGNMENT; NULL: there is
 * none. context: what the call was given with the function. */
typedef void* (*flash3_workspace_function)(size_t bytes, void* context);

/** Does what the call does, in a workspace that the function gives. The call is checked and planned
 * once; asking for its workspace first would do that twice. params' workspace and workspace_size
 * are ignored. The function is called at most once, only where
 * the call needs a workspace, by the calling thread, before anything is written; it must return. On
 * a GPU the workspace must live until what is on the stream has run. FLASH3_OUT_OF_MEMORY if it
 * gives NULL. */
FLASH3_API flash3_status flash3_forward_allocating(const flash3_forward_params* params,
                                                   flash3_workspace_function allocate,
                                                   void* context);
FLASH3_API flash3_status flash3_backward_allocating(const flash3_backward_params* params,
                                                    flash3_workspace_function allocate,
                                                    void* context);
FLASH3_API flash3_status flash3_quantize_allocating(const flash3_quantize_params* params,
                                                    flash3_workspace_function allocate,
                                                    void* context);
FLASH3_API flash3_status flash3_merge_allocating(const flash3_merge_params* params,
                                                 flash3_workspace_function allocate, void* context);
/** @} */

#ifdef __cplusplus
}
#endif

#endif /* FLASH3_PLAN_H_ */
