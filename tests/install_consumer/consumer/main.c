/* SPDX-License-Identifier: Apache-2.0 */
/* A C program that uses the installed library: one key, so the output must be its value. */
#include <flash3/flash3.h>
#include <stdio.h>

enum { kSeqQ = 3, kDim = 4 };

static flash3_tensor tensor(float* data, int64_t seq) {
  flash3_tensor t = {data, FLASH3_FLOAT32, 4, {1, seq, 1, kDim}, {seq * kDim, kDim, kDim, 1}};
  return t;
}

int main(void) {
  float q[kSeqQ * kDim] = {0}, k[kDim] = {1, 2, 3, 4}, v[kDim] = {5, 6, 7, 8}, out[kSeqQ * kDim];
  flash3_forward_params params = {0};
  params.struct_size = sizeof params;
  params.q = tensor(q, kSeqQ);
  params.k = tensor(k, 1);
  params.v = tensor(v, 1);
  params.out = tensor(out, kSeqQ);
  params.backend = FLASH3_BACKEND_CPU;
  if (flash3_forward(&params) != FLASH3_OK) {
    fprintf(stderr, "flash3_forward: %s\n", flash3_last_error());
    return 1;
  }
  for (int i = 0; i < kSeqQ * kDim; ++i) {
    if (out[i] != v[i % kDim]) {
      fprintf(stderr, "out[%d] = %g, not %g\n", i, out[i], v[i % kDim]);
      return 1;
    }
  }
  printf("C, flash3 %s\n", flash3_version());
  return 0;
}
