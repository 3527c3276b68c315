/* flash3.h as a C11 program sees it. The layout is the ABI: what these lines state never changes.
 */
#include "c11_user.h"

#include <stddef.h>

_Static_assert(sizeof(flash3_status) == 4 && sizeof(flash3_dtype) == 4 &&
                   sizeof(flash3_backend) == 4,
               "enums are 32 bits wide");
_Static_assert(sizeof(flash3_tensor) == 80, "flash3_tensor");
_Static_assert(offsetof(flash3_tensor, dtype) == 8 && offsetof(flash3_tensor, ndim) == 12 &&
                   offsetof(flash3_tensor, shape) == 16 && offsetof(flash3_tensor, stride) == 48,
               "flash3_tensor");
_Static_assert(offsetof(flash3_forward_params, q) == 8 &&
                   offsetof(flash3_forward_params, k) == 88 &&
                   offsetof(flash3_forward_params, v) == 168 &&
                   offsetof(flash3_forward_params, out) == 248 &&
                   offsetof(flash3_forward_params, lse) == 328,
               "tensors of flash3_forward_params");
_Static_assert(offsetof(flash3_forward_params, softmax_scale) == 408 &&
                   offsetof(flash3_forward_params, causal) == 412 &&
                   offsetof(flash3_forward_params, window) == 416 &&
                   offsetof(flash3_forward_params, window_left) == 424 &&
                   offsetof(flash3_forward_params, window_right) == 432 &&
                   offsetof(flash3_forward_params, backend) == 440 &&
                   offsetof(flash3_forward_params, num_threads) == 444 &&
                   offsetof(flash3_forward_params, stream) == 448 &&
                   offsetof(flash3_forward_params, workspace) == 456 &&
                   offsetof(flash3_forward_params, workspace_size) == 464,
               "options of flash3_forward_params");

flash3_status c11_average(float a, float b, float* out, float* lse) {
  float q[1] = {1.0f}, k[2] = {3.0f, 3.0f}, v[2] = {a, b};
  const flash3_forward_params params = {
      .struct_size = sizeof(flash3_forward_params),
      .q = {q, FLASH3_FLOAT32, 4, {1, 1, 1, 1}, {1, 1, 1, 1}},
      .k = {k, FLASH3_FLOAT32, 4, {1, 2, 1, 1}, {2, 1, 1, 1}},
      .v = {v, FLASH3_FLOAT32, 4, {1, 2, 1, 1}, {2, 1, 1, 1}},
      .out = {out, FLASH3_FLOAT32, 4, {1, 1, 1, 1}, {1, 1, 1, 1}},
      .lse = {lse, FLASH3_FLOAT32, 3, {1, 1, 1}, {1, 1, 1}},
      .softmax_scale = 0.5f,
      .backend = FLASH3_BACKEND_CPU,
  };
  return flash3_forward(&params);
}
