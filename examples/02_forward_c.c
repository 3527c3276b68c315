/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on host memory in C11: a sliding window, the log-sum-exp, a workspace, and an error.
 * docs/cpp.md shows the part between the two marks. */
#include <flash3/flash3.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* README: begin */
/* A query sees itself and the 99 keys before it. q, k, v and out are float32 [1, 300, 2, 32], lse
 * is [1, 2, 300]. Where the status is not FLASH3_OK, flash3_last_error() says why. */
flash3_status attend(float* q, float* k, float* v, float* out, float* lse) {
  const flash3_tensor any = {NULL, FLASH3_FLOAT32, 4, {1, 300, 2, 32}, {300 * 64, 64, 32, 1}};
  flash3_forward_params call = {.struct_size = sizeof call};
  call.q = call.k = call.v = call.out = any;
  call.q.data = q, call.k.data = k, call.v.data = v, call.out.data = out;
  call.lse = (flash3_tensor){lse, FLASH3_FLOAT32, 3, {1, 2, 300}, {2 * 300, 300, 1}};
  call.causal = call.window = 1, call.window_left = 99;

  size_t bytes = 0;
  flash3_status status = flash3_forward_workspace(&call, &bytes);
  if (status != FLASH3_OK) return status;
  call.workspace_size = (bytes / FLASH3_WORKSPACE_ALIGNMENT + 1) * FLASH3_WORKSPACE_ALIGNMENT;
  call.workspace = aligned_alloc(FLASH3_WORKSPACE_ALIGNMENT, call.workspace_size);
  status = flash3_forward(&call);
  free(call.workspace);
  return status;
}
/* README: end */

enum { SEQ = 300, HEADS = 2, WINDOW = 100, COUNT = SEQ * HEADS * 32 };

static float q[COUNT], k[COUNT], v[COUNT], out[COUNT], lse[HEADS * SEQ];

int main(void) {
  /* With Q = 0 all scores are equal: out is the mean of the values that a query sees, and lse the
   * logarithm of their number. */
  for (int i = 0; i < COUNT; ++i) {
    k[i] = (float)(i % 7);
    v[i] = 1.5f;
  }
  const flash3_status status = attend(q, k, v, out, lse);
  if (status != FLASH3_OK) {
    fprintf(stderr, "flash3: %s: %s\n", flash3_status_name(status), flash3_last_error());
    return 1;
  }
  printf("out[0] = %.4f, lse[0] = %.4f, lse[%d] = %.4f (ln %d = %.4f)\n", out[0], lse[0], SEQ - 1,
         lse[SEQ - 1], WINDOW, log(WINDOW));
  if (fabs(out[0] - 1.5) > 1e-5 || fabsf(lse[0]) > 1e-5f || fabs(lse[SEQ - 1] - log(WINDOW)) > 1e-5)
    return 1;

  /* A mistake is a status and a sentence; nothing has been computed. */
  if (attend(q, NULL, v, out, lse) != FLASH3_INVALID_ARGUMENT) return 1;
  printf("as expected: %s\n", flash3_last_error());
  return 0;
}
