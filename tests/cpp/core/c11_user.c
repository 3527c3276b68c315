/* SPDX-License-Identifier: Apache-2.0 */
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
_Static_assert(offsetof(flash3_forward_params, cu_seqlens_q) == 472 &&
                   offsetof(flash3_forward_params, cu_seqlens_k) == 552 &&
                   offsetof(flash3_forward_params, seqused_q) == 632 &&
                   offsetof(flash3_forward_params, seqused_k) == 712 &&
                   offsetof(flash3_forward_params, max_seqlen_q) == 792 &&
                   offsetof(flash3_forward_params, max_seqlen_k) == 800 &&
                   offsetof(flash3_forward_params, sink) == 808 &&
                   offsetof(flash3_forward_params, softcap) == 888 &&
                   offsetof(flash3_forward_params, chunk) == 896,
               "what flash3_forward_params has after its first version");
_Static_assert(offsetof(flash3_forward_params, q_scale) == 904 &&
                   offsetof(flash3_forward_params, k_scale) == 984 &&
                   offsetof(flash3_forward_params, v_scale) == 1064 &&
                   offsetof(flash3_forward_params, compute) == 1144 &&
                   offsetof(flash3_forward_params, rotation_seed) == 1152,
               "what flash3_forward_params has for FP8");
_Static_assert(offsetof(flash3_forward_params, page_table) == 1160 &&
                   offsetof(flash3_forward_params, cache_batch_idx) == 1240 &&
                   offsetof(flash3_forward_params, leftpad_k) == 1320 &&
                   offsetof(flash3_forward_params, k_new) == 1400 &&
                   offsetof(flash3_forward_params, v_new) == 1480 &&
                   offsetof(flash3_forward_params, cu_seqlens_k_new) == 1560 &&
                   offsetof(flash3_forward_params, rotary_cos) == 1640 &&
                   offsetof(flash3_forward_params, rotary_sin) == 1720 &&
                   offsetof(flash3_forward_params, rotary_offsets) == 1800 &&
                   offsetof(flash3_forward_params, rotary_interleaved) == 1880 &&
                   offsetof(flash3_forward_params, sm_margin) == 1884 &&
                   offsetof(flash3_forward_params, schedule) == 1888 &&
                   offsetof(flash3_forward_params, qv) == 1896 &&
                   offsetof(flash3_forward_params, tree_mask) == 1984,
               "what flash3_forward_params has for a KV cache");
_Static_assert(offsetof(flash3_forward_params, fp8_sums) == 1976 &&
                   offsetof(flash3_forward_params, rotate) == 2064 &&
                   offsetof(flash3_forward_params, fill_padding) == 2068,
               "what flash3_forward_params has for FP8 since");

_Static_assert(offsetof(flash3_merge_params, out_parts) == 8 &&
                   offsetof(flash3_merge_params, lse_parts) == 88 &&
                   offsetof(flash3_merge_params, out) == 168 &&
                   offsetof(flash3_merge_params, lse) == 248 &&
                   offsetof(flash3_merge_params, sink) == 328 &&
                   offsetof(flash3_merge_params, backend) == 408 &&
                   offsetof(flash3_merge_params, workspace_size) == 432,
               "flash3_merge_params");

_Static_assert(offsetof(flash3_quantize_params, q) == 8 &&
                   offsetof(flash3_quantize_params, q_out) == 248 &&
                   offsetof(flash3_quantize_params, q_scale) == 488 &&
                   offsetof(flash3_quantize_params, rotary_cos) == 728 &&
                   offsetof(flash3_quantize_params, rotary_interleaved) == 888 &&
                   offsetof(flash3_quantize_params, rotate) == 892 &&
                   offsetof(flash3_quantize_params, rotary_offset_q) == 896 &&
                   offsetof(flash3_quantize_params, rotation_seed) == 912 &&
                   offsetof(flash3_quantize_params, cu_seqlens_q) == 920 &&
                   offsetof(flash3_quantize_params, max_seqlen_q) == 1240 &&
                   offsetof(flash3_quantize_params, backend) == 1256 &&
                   offsetof(flash3_quantize_params, workspace_size) == 1280,
               "flash3_quantize_params");

_Static_assert(offsetof(flash3_backward_params, dout) == 8 &&
                   offsetof(flash3_backward_params, dlse) == 88 &&
                   offsetof(flash3_backward_params, q) == 168 &&
                   offsetof(flash3_backward_params, k) == 248 &&
                   offsetof(flash3_backward_params, v) == 328 &&
                   offsetof(flash3_backward_params, out) == 408 &&
                   offsetof(flash3_backward_params, lse) == 488 &&
                   offsetof(flash3_backward_params, dq) == 568 &&
                   offsetof(flash3_backward_params, dk) == 648 &&
                   offsetof(flash3_backward_params, dv) == 728,
               "tensors of flash3_backward_params");
_Static_assert(offsetof(flash3_backward_params, softmax_scale) == 808 &&
                   offsetof(flash3_backward_params, causal) == 812 &&
                   offsetof(flash3_backward_params, window) == 816 &&
                   offsetof(flash3_backward_params, deterministic) == 820 &&
                   offsetof(flash3_backward_params, window_left) == 824 &&
                   offsetof(flash3_backward_params, window_right) == 832 &&
                   offsetof(flash3_backward_params, backend) == 840 &&
                   offsetof(flash3_backward_params, num_threads) == 844 &&
                   offsetof(flash3_backward_params, stream) == 848 &&
                   offsetof(flash3_backward_params, workspace) == 856 &&
                   offsetof(flash3_backward_params, workspace_size) == 864,
               "options of flash3_backward_params");
_Static_assert(offsetof(flash3_backward_params, cu_seqlens_q) == 872 &&
                   offsetof(flash3_backward_params, cu_seqlens_k) == 952 &&
                   offsetof(flash3_backward_params, seqused_q) == 1032 &&
                   offsetof(flash3_backward_params, seqused_k) == 1112 &&
                   offsetof(flash3_backward_params, max_seqlen_q) == 1192 &&
                   offsetof(flash3_backward_params, max_seqlen_k) == 1200 &&
                   offsetof(flash3_backward_params, sink) == 1208 &&
                   offsetof(flash3_backward_params, softcap) == 1288 &&
                   offsetof(flash3_backward_params, chunk) == 1296 &&
                   offsetof(flash3_backward_params, dsink) == 1304 &&
                   offsetof(flash3_backward_params, fill_padding) == 1384,
               "what flash3_backward_params has after its first version");

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
