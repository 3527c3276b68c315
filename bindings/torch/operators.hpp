// SPDX-License-Identifier: Apache-2.0
// clang-format off
// Written by tools/codegen/call_fields.py from the C headers and tools/codegen/calls.py; not to be edited.
// torch.ops.flash3: the operators' schemas, and the params of the call that each makes.
#pragma once

#include "arguments.hpp"

namespace flash3_torch {

inline constexpr Schema<flash3_forward_params> kForward(
    "forward(Tensor q, Tensor k, Tensor v, float softmax_scale=0., bool causal=False, bool heads_first=False, "
    "SymInt window_left=-1, SymInt window_right=-1, float softcap=0., SymInt chunk=0, Tensor? sink=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, bool deterministic=False, Tensor? q_scale=None, Tensor? "
    "k_scale=None, Tensor? v_scale=None, bool compute_fp8=False, SymInt rotation_seed=0, SymInt sm_margin=0, "
    "int fp8_sums=0, ScalarType? out_dtype=None, Tensor? qv=None, Tensor? mask=None, int[] mask_fields=[], int "
    "mask_alignment=0, Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? bias_table=None, float "
    "dropout_p=0., SymInt dropout_seed=0, SymInt dropout_offset=0, Tensor? dropout_state=None) -> (Tensor, "
    "Tensor)");

inline constexpr Schema<flash3_forward_params> kInference(
    "inference(Tensor q, Tensor k, Tensor v, float softmax_scale=0., bool causal=False, bool "
    "heads_first=False, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.) -> Tensor");

inline constexpr Schema<flash3_forward_params> kForwardOut(
    "forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, float softmax_scale=0., bool "
    "causal=False, bool heads_first=False, SymInt window_left=-1, SymInt window_right=-1, float softcap=0., "
    "SymInt chunk=0, Tensor? sink=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? "
    "seqused_q=None, Tensor? seqused_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, bool "
    "deterministic=False, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, bool "
    "compute_fp8=False, SymInt rotation_seed=0, SymInt sm_margin=0, int fp8_sums=0, Tensor? qv=None, bool "
    "fill_padding=False, Tensor? mask=None, int[] mask_fields=[], int mask_alignment=0, Tensor(c!)? "
    "max_logits=None, Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? bias_table=None, float "
    "dropout_p=0., SymInt dropout_seed=0, SymInt dropout_offset=0, Tensor? dropout_state=None) -> ()");

inline constexpr Schema<flash3_backward_params> kBackward(
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float "
    "softmax_scale=0., bool causal=False, bool heads_first=False, SymInt window_left=-1, SymInt "
    "window_right=-1, float softcap=0., SymInt chunk=0, Tensor? sink=None, Tensor? cu_seqlens_q=None, Tensor? "
    "cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, SymInt max_seqlen_q=0, SymInt "
    "max_seqlen_k=0, bool deterministic=False, Tensor? mask=None, int[] mask_fields=[], int mask_alignment=0, "
    "Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? bias_table=None, float dropout_p=0., SymInt "
    "dropout_seed=0, SymInt dropout_offset=0, Tensor? dropout_state=None) -> (Tensor, Tensor, Tensor, Tensor)");

inline constexpr Schema<flash3_backward_params> kBackwardOut(
    "backward_out(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!) "
    "dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dsink, float softmax_scale=0., bool causal=False, bool "
    "heads_first=False, SymInt window_left=-1, SymInt window_right=-1, float softcap=0., SymInt chunk=0, "
    "Tensor? sink=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? "
    "seqused_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, bool deterministic=False, bool "
    "fill_padding=False, Tensor? mask=None, int[] mask_fields=[], int mask_alignment=0, Tensor? "
    "alibi_slopes=None, Tensor? bias=None, Tensor? bias_table=None, Tensor(e!)? dbias=None, Tensor(f!)? "
    "dbias_table=None, Tensor(g!)? dalibi_slopes=None, float dropout_p=0., SymInt dropout_seed=0, SymInt "
    "dropout_offset=0, Tensor? dropout_state=None) -> ()");

inline constexpr Schema<flash3_quantize_params> kQuantize(
    "quantize(Tensor? q=None, Tensor? k=None, Tensor? v=None, int scale_ndim=3, SymInt heads_k=0, Tensor? "
    "rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=False, SymInt rotary_offset_q=0, SymInt "
    "rotary_offset_k=0, bool rotate=False, SymInt rotation_seed=0, Tensor? cu_seqlens_q=None, Tensor? "
    "cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, SymInt max_seqlen_q=0, SymInt "
    "max_seqlen_k=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

inline constexpr Schema<flash3_quantize_params> kQuantizeOut(
    "quantize_out(Tensor? q, Tensor? k, Tensor? v, Tensor(a!)? q_out, Tensor(b!)? k_out, Tensor(c!)? v_out, "
    "Tensor(d!)? q_scale, Tensor(e!)? k_scale, Tensor(f!)? v_scale, Tensor? rotary_cos=None, Tensor? "
    "rotary_sin=None, bool rotary_interleaved=False, SymInt rotary_offset_q=0, SymInt rotary_offset_k=0, bool "
    "rotate=False, SymInt rotation_seed=0, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? "
    "seqused_q=None, Tensor? seqused_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0) -> ()");

inline constexpr Schema<flash3_forward_params> kAttentionWithKvCache(
    "attention_with_kv_cache(Tensor q, Tensor k_cache, Tensor v_cache, float softmax_scale=0., bool "
    "causal=False, Tensor? seqused_k=None, Tensor? page_table=None, SymInt window_left=-1, SymInt "
    "window_right=-1, float softcap=0., SymInt chunk=0, Tensor? sink=None, Tensor? cache_batch_idx=None, "
    "Tensor? leftpad_k=None, Tensor? cu_seqlens_q=None, Tensor? seqused_q=None, SymInt max_seqlen_q=0, SymInt "
    "max_seqlen_k=0, SymInt sm_margin=0, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor? schedule=None, SymInt schedule_key=0, Tensor? qv=None, Tensor? tree_mask=None, bool rotate=False, "
    "SymInt rotation_seed=0, Tensor? mask=None, int[] mask_fields=[], int mask_alignment=0, Tensor? "
    "alibi_slopes=None, Tensor? bias=None, Tensor? bias_table=None) -> (Tensor, Tensor)");

inline constexpr Schema<flash3_forward_params> kAttentionWithKvCacheAppend(
    "attention_with_kv_cache_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k_new, Tensor? "
    "v_new, Tensor? cu_seqlens_k_new=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? "
    "rotary_offsets=None, bool rotary_interleaved=False, float softmax_scale=0., bool causal=False, Tensor? "
    "seqused_k=None, Tensor? page_table=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0., "
    "SymInt chunk=0, Tensor? sink=None, Tensor? cache_batch_idx=None, Tensor? leftpad_k=None, Tensor? "
    "cu_seqlens_q=None, Tensor? seqused_q=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, SymInt "
    "sm_margin=0, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? schedule=None, "
    "SymInt schedule_key=0, Tensor? qv=None, Tensor? tree_mask=None, bool rotate=False, SymInt "
    "rotation_seed=0, Tensor? mask=None, int[] mask_fields=[], int mask_alignment=0, Tensor? "
    "alibi_slopes=None, Tensor? bias=None, Tensor? bias_table=None) -> (Tensor, Tensor)");

inline constexpr Schema<flash3_forward_params> kAttentionWithKvCacheOut(
    "attention_with_kv_cache_out(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) out, Tensor(d!)? "
    "lse, Tensor? k_new, Tensor? v_new, Tensor? cu_seqlens_k_new=None, Tensor? rotary_cos=None, Tensor? "
    "rotary_sin=None, Tensor? rotary_offsets=None, bool rotary_interleaved=False, float softmax_scale=0., bool "
    "causal=False, Tensor? seqused_k=None, Tensor? page_table=None, SymInt window_left=-1, SymInt "
    "window_right=-1, float softcap=0., SymInt chunk=0, Tensor? sink=None, Tensor? cache_batch_idx=None, "
    "Tensor? leftpad_k=None, Tensor? cu_seqlens_q=None, Tensor? seqused_q=None, SymInt max_seqlen_q=0, SymInt "
    "max_seqlen_k=0, SymInt sm_margin=0, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor? schedule=None, SymInt schedule_key=0, Tensor? qv=None, Tensor? tree_mask=None, bool rotate=False, "
    "SymInt rotation_seed=0, bool fill_padding=False, Tensor? mask=None, int[] mask_fields=[], int "
    "mask_alignment=0, Tensor(e!)? max_logits=None, Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? "
    "bias_table=None) -> ()");

inline constexpr Schema<flash3_forward_params> kKvCacheSchedule(
    "kv_cache_schedule(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k_new, Tensor? v_new, Tensor? "
    "cu_seqlens_k_new=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? rotary_offsets=None, "
    "bool rotary_interleaved=False, float softmax_scale=0., bool causal=False, Tensor? seqused_k=None, Tensor? "
    "page_table=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0., SymInt chunk=0, Tensor? "
    "sink=None, Tensor? cache_batch_idx=None, Tensor? leftpad_k=None, Tensor? cu_seqlens_q=None, Tensor? "
    "seqused_q=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, SymInt sm_margin=0, Tensor? q_scale=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, ScalarType? out_dtype=None, Tensor? qv=None, Tensor? "
    "tree_mask=None, bool rotate=False, SymInt rotation_seed=0, int mask_alignment=0, Tensor? "
    "alibi_slopes=None, Tensor? bias=None, Tensor? bias_table=None) -> (Tensor, SymInt)");

inline constexpr Schema<flash3_forward_params> kKvCacheScheduleOut(
    "kv_cache_schedule_out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor(a!) schedule, SymInt schedule_key, "
    "Tensor? k_new, Tensor? v_new, Tensor? cu_seqlens_k_new=None, Tensor? rotary_cos=None, Tensor? "
    "rotary_sin=None, Tensor? rotary_offsets=None, bool rotary_interleaved=False, float softmax_scale=0., bool "
    "causal=False, Tensor? seqused_k=None, Tensor? page_table=None, SymInt window_left=-1, SymInt "
    "window_right=-1, float softcap=0., SymInt chunk=0, Tensor? sink=None, Tensor? cache_batch_idx=None, "
    "Tensor? leftpad_k=None, Tensor? cu_seqlens_q=None, Tensor? seqused_q=None, SymInt max_seqlen_q=0, SymInt "
    "max_seqlen_k=0, SymInt sm_margin=0, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "ScalarType? out_dtype=None, Tensor? qv=None, Tensor? tree_mask=None, bool rotate=False, SymInt "
    "rotation_seed=0, int mask_alignment=0, Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? "
    "bias_table=None) -> ()");

inline constexpr Schema<flash3_merge_params> kMerge(
    "merge(Tensor out_parts, Tensor lse_parts, Tensor? sink=None, ScalarType? out_dtype=None) -> (Tensor, "
    "Tensor)");

inline constexpr Schema<flash3_merge_params> kMergeOut(
    "merge_out(Tensor out_parts, Tensor lse_parts, Tensor(a!) out, Tensor(b!)? lse, Tensor? sink=None) -> ()");

inline constexpr Schema<flash3_mask_params> kMaskMake(
    "mask_make(Tensor like, Tensor? ranges, Tensor? documents, Tensor? dense, Tensor? block_counts, Tensor? "
    "block_indices, SymInt batch=0, SymInt heads_q=0, SymInt seq_q=0, SymInt seq_k=0, bool causal=False, "
    "SymInt window_left=-1, SymInt window_right=-1, SymInt chunk=0, int mask_alignment=0, SymInt block_rows=0, "
    "SymInt block_keys=0, SymInt max_blocks=0, SymInt max_partial_blocks=0, Tensor? bits=None, Tensor? "
    "bit_blocks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? "
    "seqused_k=None, SymInt max_documents=0) -> (Tensor, int[])");

inline constexpr Schema<flash3_mask_params> kMaskData(
    "mask_data(Tensor like, Tensor? ranges, Tensor? documents, Tensor? dense, Tensor? block_counts, Tensor? "
    "block_indices, SymInt batch=0, SymInt heads_q=0, SymInt seq_q=0, SymInt seq_k=0, bool causal=False, "
    "SymInt window_left=-1, SymInt window_right=-1, SymInt chunk=0, int mask_alignment=0, SymInt block_rows=0, "
    "SymInt block_keys=0, SymInt max_blocks=0, SymInt max_partial_blocks=0, Tensor? bits=None, Tensor? "
    "bit_blocks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? "
    "seqused_k=None, SymInt max_documents=0) -> Tensor");

inline constexpr const char* kSchemas[] = {kForward.text, kInference.text, kForwardOut.text, kBackward.text,
                                           kBackwardOut.text, kQuantize.text, kQuantizeOut.text,
                                           kAttentionWithKvCache.text, kAttentionWithKvCacheAppend.text,
                                           kAttentionWithKvCacheOut.text, kKvCacheSchedule.text,
                                           kKvCacheScheduleOut.text, kMerge.text, kMergeOut.text,
                                           kMaskMake.text, kMaskData.text};

// What flash3._eager takes: Python's options, a name each.

inline constexpr char kAttentionOptions[] =
    "causal window softmax_scale softcap chunk sink cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "seqused_q seqused_k deterministic q_scale k_scale v_scale out_dtype compute rotation_seed sm_margin "
    "fp8_sums return_lse qv mask_alignment max_logits alibi_slopes bias bias_table dropout_state dropout_p "
    "seed offset mask";

inline constexpr char kAttentionWithKvCacheOptions[] =
    "seqused_k page_table cache_batch_idx leftpad_k k_new v_new cu_seqlens_k_new rotary_cos rotary_sin "
    "rotary_offsets rotary_interleaved causal window softmax_scale softcap chunk sink cu_seqlens_q "
    "max_seqlen_q max_seqlen_k seqused_q q_scale k_scale v_scale rotate rotation_seed sm_margin schedule "
    "tree_mask out_dtype return_lse qv mask_alignment max_logits alibi_slopes bias bias_table mask";

}  // namespace flash3_torch
