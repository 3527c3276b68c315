/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on host memory in C11: a sliding window, the log-sum-exp, a workspace, and an error.
 * README.md shows the part between the two marks. */
#include <flash3/flash3.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 1, SEQ = 300, HEADS = 2, DIM = 32, WINDOW = 100, COUNT = BATCH * SEQ * HEADS * DIM };

static float q[COUNT], k[COUNT], v[COUNT], out[COUNT], lse[BATCH * HEADS * SEQ];

static flash3_tensor tensor(float* data) {
  const flash3_tensor t = {
      data, FLASH3_FLOAT32, 4, {BATCH, SEQ, HEADS, DIM}, {SEQ * HEADS * DIM, HEADS * DIM, DIM, 1}};
  return t;
}

int main(void) {
  /* With Q = 0 all scores are equal: out is the mean of the values that a query sees, and lse the
   * logarithm of their number. */
  for (int i = 0; i < COUNT; ++i) {
    k[i] = (float)(i % 7);
    v[i] = 1.5f;
  }

  /* README: begin */
  flash3_forward_params params = {.struct_size = sizeof params};
  params.q = tensor(q);
  params.k = tensor(k);
  params.v = tensor(v);
  params.out = tensor(out);
  params.lse = (flash3_tensor){lse, FLASH3_FLOAT32, 3, {BATCH, HEADS, SEQ}, {HEADS * SEQ, SEQ, 1}};
  params.causal = 1;
  params.window = 1;
  params.window_left = WINDOW - 1; /* a query sees itself and the 99 keys before it */

  size_t bytes = 0;
  if (flash3_forward_workspace(&params, &bytes) != FLASH3_OK) {
    fprintf(stderr, "flash3: %s\n", flash3_last_error());
    return 1;
  }
  const size_t unit = FLASH3_WORKSPACE_ALIGNMENT;
  params.workspace = bytes ? aligned_alloc(unit, (bytes + unit - 1) / unit * unit) : NULL;
  params.workspace_size = bytes;
  const flash3_status status = flash3_forward(&params);
  /* README: end */
  free(params.workspace);
  if (status != FLASH3_OK) {
    fprintf(stderr, "flash3: %s: %s\n", flash3_status_name(status), flash3_last_error());
    return 1;
  }
  printf("out[0] = %.4f, lse[0] = %.4f, lse[%d] = %.4f (ln %d = %.4f)\n", out[0], lse[0], SEQ - 1,
         lse[SEQ - 1], WINDOW, log(WINDOW));
  if (fabs(out[0] - 1.5) > 1e-5 || fabsf(lse[0]) > 1e-5f || fabs(lse[SEQ - 1] - log(WINDOW)) > 1e-5)
    return 1;

  /* A mistake is a status and a sentence; nothing has been computed. */
  params.k.shape[3] = 16;
  if (flash3_forward(&params) != FLASH3_INVALID_ARGUMENT) return 1;
  printf("as expected: %s\n", flash3_last_error());
  return 0;
}
