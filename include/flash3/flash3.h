/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * flash3: exact attention for NVIDIA Hopper GPUs, and for CPUs. The C interface.
 *
 *     out = softmax(softmax_scale · Q·Kᵀ + mask) · V
 *     lse = log Σ exp(softmax_scale · Q·Kᵀ + mask)
 *
 * with ragged batches, sinks, a soft cap, chunks and growing caches, tile by tile with an online
 * softmax (FlashAttention-3, arXiv:2407.08608). flash3_backward computes the gradients of both. The
 * score matrix is never stored. flash3_quantize (quantize.h) makes FP8 tensors for flash3_forward,
 * and flash3_merge (merge.h) merges results of parts of the keys.
 *
 * How to call it
 *   1. Zero-initialise a flash3_forward_params, set struct_size, describe the tensors.
 *   2. flash3_forward_workspace() returns the bytes of scratch memory that the call needs.
 *   3. flash3_forward() enqueues the work on params.stream (Hopper), or does it (CPU).
 *   flash3_backward, flash3_quantize and flash3_merge are called in the same way.
 *
 * Rules
 *   - The caller owns every buffer. The library never allocates device memory, synchronises,
 *     prints or exits.
 *   - Every function that can fail returns a flash3_status. After anything but FLASH3_OK,
 *     flash3_last_error() holds a message that names the field, both values and the rule; nothing
 *     has been launched or written, except by a call that was cancelled (interrupt.h).
 *   - Safe from many threads on many streams; calls can be captured into a CUDA graph.
 */
#ifndef FLASH3_FLASH3_H_
#define FLASH3_FLASH3_H_

#include <stddef.h>
#include <stdint.h>

#include "flash3/export.h"
#include "flash3/types.h"
#include "flash3/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A list of work that several calls share: schedule.h. */
typedef struct flash3_schedule flash3_schedule;

/** Which keys each query sees, as lists in the caller's memory: mask.h. */
typedef struct flash3_mask flash3_mask;

/** One forward call. Zero-initialise it, then set struct_size = sizeof(flash3_forward_params). */
typedef struct flash3_forward_params {
  size_t struct_size; /**< sizeof of this struct: which fields the caller knows */

  /** @name Tensors
   * Dimensions in this order; [batch, heads, seq, dim] memory is passed through its strides.
   * heads_q must be a multiple of heads_k (1: MHA, >1: GQA; heads_k = 1: MQA); query head h reads
   * KV head h / (heads_q / heads_k). 1 ≤ head_dim ≤ 576, and head_dim_v, which may differ, is at
   * most 512; in FP8 and a backward call both are at most 256. All four have one dtype, with two
   * exceptions: out of a 16-bit q may be float32, not rounded, for flash3_merge; and k and v, or q
   * too, may be FP8 (q_scale). Packed tensors have other dimensions (cu_seqlens_q). @{ */
  flash3_tensor q;   /**< [batch, seq_q, heads_q, head_dim]   */
  flash3_tensor k;   /**< [batch, seq_k, heads_k, head_dim]   */
  flash3_tensor v;   /**< [batch, seq_k, heads_k, head_dim_v] */
  flash3_tensor out; /**< [batch, seq_q, heads_q, head_dim_v] */
  flash3_tensor lse; /**< [batch, heads_q, seq_q] float32, natural log; all zero: not wanted */
  /** @} */

  float softmax_scale; /**< 1e-18 to 1e18; 0: 1/√head_dim, with qv 1/√(head_dim + head_dim_v) */

  /** @name Mask
   * The mask is a band around the diagonal, aligned to the bottom right corner: with i' = i + seq_k
   * − seq_q, query i sees key j if  i' − window_left ≤ j ≤ i' + window_right. A negative window is
   * unbounded on that side. causal = 1 adds j ≤ i'. mask_alignment can set i' = i instead, aligned
   * to the top left. A query that sees no key gets out = 0 and lse = −∞.
   *
   * A key that no query of its sequence sees (after seqused, or before the first query's window or
   * chunk) affects no result, even if it holds NaN. A NaN or infinity at a key that some
   * query sees reaches that query; on Hopper, in v, it can also reach queries that do not see the
   * key but share a tile with one that does (0 · ∞; at most 256 rows of one head or of a few);
   * under FLASH3_ALIGN_TOP_LEFT keys after the last query's window count there as keys that it
   * sees. The CPU keeps those clean. In a backward call likewise q, k, v and dout, and the
   * gradients. @{ */
  int32_t causal;       /**< 1: no key after i' */
  int32_t window;       /**< 1: window_left and window_right count; 0: they are ignored */
  int64_t window_left;  /**< keys before i'; < 0: all */
  int64_t window_right; /**< keys after i'; < 0: all */
  /** @} */

  /** @{ @name Where it runs */
  int32_t backend;     /**< flash3_backend */
  int32_t num_threads; /**< CPU: threads to use; 0: one per core this process may run on */
  void* stream; /**< Hopper: a cudaStream_t of the current device; NULL: the default stream */
  /** At least flash3_forward_workspace() bytes in the tensors' kind of memory, at a multiple of
   * FLASH3_WORKSPACE_ALIGNMENT; its content may be anything, and no other call may use it
   * meanwhile. */
  void* workspace;
  size_t workspace_size; /**< bytes of workspace */
  /** @} */

  /** @name Ragged batches
   * Sequences of different lengths, for q and k independently, in two forms.
   *
   * cu_seqlens_q: q, out and lse are packed: [total_q, heads_q, head_dim], [total_q, heads_q,
   * head_dim_v] and [heads_q, total_q], and so are their gradients in a backward call. Sequence b
   * has the rows from cu_seqlens_q[b] to just before cu_seqlens_q[b + 1]. With cu_seqlens_k, k and
   * v are [total_k, heads_k, dim]. One may be packed without the other.
   * cu_seqlens must not decrease, from at least 0 to at most the tensor's rows.
   *
   * seqused_q, seqused_k: only the first seqused[b] tokens of sequence b count, whether packed or
   * not; the others are ignored. Between 0 and the sequence's rows.
   *
   * Masks are aligned per sequence: seq_q and seq_k mean its own lengths. Nothing outside the
   * tokens that count is read; of out and lse only their rows are written, unless fill_padding is
   * set.
   *
   * max_seqlen: with cu_seqlens only, that of k with page_table too; no sequence has more tokens
   * that count. It bounds the choice of kernel and of workspace; 0: not known, as if one sequence
   * could have all rows. The choice does not look at the number of sequences or tokens, so that on
   * Hopper a sequence's out and lse are the same bits whatever else is in the batch. Where both
   * max_seqlen are at most 64, Hopper's forward lets sequences share tiles: a NaN or infinity in v
   * of one then reaches the out of its neighbours too.
   *
   * All of this is in the tensors' kind of memory. The CPU reads it when the call is made and
   * refuses what breaks these rules. Hopper reads it when the kernels run, so that a captured graph
   * replays with other lengths, and clamps what breaks them: no memory outside the tensors is
   * touched, and what the rows then hold is undefined. @{ */
  flash3_tensor cu_seqlens_q; /**< [batch + 1] int32 */
  flash3_tensor cu_seqlens_k; /**< [batch + 1] int32 */
  flash3_tensor seqused_q;    /**< [batch] int32 */
  flash3_tensor seqused_k;    /**< [batch] int32 */
  int64_t max_seqlen_q;       /**< tokens; 0: not known */
  int64_t max_seqlen_k;       /**< tokens; 0: not known */
  /** @} */

  /** @{ @name Sink, soft cap and chunks */
  /** One more logit for each query head, without a value: a row's weights may sum up to less than
   * 1. It is neither scaled nor capped nor masked. lse includes it; without keys it is the sink. */
  flash3_tensor sink; /**< [heads_q] float32, or the dtype of out; all zero: none */

  float softcap; /**< 1e-18 to 1e18; 0: none. Scores s become softcap · tanh(s / softcap) */
  int64_t chunk; /**< ≥ 0; 0: none. Query i sees keys of its own chunk alone: floor(j / chunk) =
                    floor(i' / chunk), with i' as above, besides what the other masks say */
  /** @} */

  /* clang-format off */
  /** @name FP8
   * q, k and v are FLASH3_FLOAT8_E4M3 and out is float16, bfloat16 or float32; or k and v alone
   * are, q is float16 or bfloat16, and out has its dtype or is float32. An element's value is
   * multiplied by its scale. All zero: 1. The shape of each of the three, float32, says what it is
   * for:
   *   - [1]: one scale for the tensor;
   *   - [batch, heads_k]: one for each sequence and KV head, wherever in a cache its keys are; q's
   *     too: that of the KV head which the query head reads;
   *   - [batch, heads, blocks]: one for each FLASH3_FP8_BLOCK tokens of each of the tensor's own
   *     heads; blocks = ceil(seq / 128);
   *   - the same of k and v with page_table, [pages, heads_k, ceil(page_size / 128)], or with
   *     cache_batch_idx, [elements, heads_k, ceil(rows of one / 128)]: those of row r of a page or
   *     an element are number r / 128, whatever leftpad_k is;
   *   - [1, heads, blocks] for packed tensors, with blocks = total / 128 + batch, rounded down:
   *     block j of sequence b is number cu_seqlens[b] / 128 + b + j.
   *
   * Scales must be finite and above 0, or what they scale is undefined; but a scale of NaN makes
   * every query that sees its block NaN. Given only with FP8 tensors.
   *
   * Scores are float32 sums of exact products, and lse comes from weights that are not rounded.
   * Before the product with v, weights are rounded to e4m3 times 256; for a cache a backend may keep
   * more bits (Hopper: float16), and where q is 16-bit it keeps those of float16 at least.
   * @{ */
  /* clang-format on */
  flash3_tensor q_scale; /**< [1], [batch, heads_k] or [batch, heads_q, blocks] float32 */
  flash3_tensor k_scale; /**< [1], [batch, heads_k] or [batch, heads_k, blocks] float32 */
  flash3_tensor v_scale; /**< [1], [batch, heads_k] or [batch, heads_k, blocks] float32 */

  /** FLASH3_COMPUTE_FP8: q, k and v are first converted to FP8 in the workspace, as flash3_quantize
   * does with scales for blocks and rotate = 1, and out has any dtype that FP8 allows. */
  int32_t compute;        /**< flash3_compute */
  uint64_t rotation_seed; /**< as in flash3_quantize_params */
  /** @} */

  /** @name KV cache
   * k and v may be a cache: memory for more keys than count; seqused_k says how many do.
   *
   * page_table: k and v are pages, [pages, page_size, heads_k, dim]; key j of sequence b is row
   * j % page_size of page page_table[b][j / page_size]. Pages may be shared, and entries after the
   * last key that counts may be anything. Not with cu_seqlens_k. max_seqlen_k, if given, bounds
   * the keys of a sequence; 0: max_pages · page_size.
   *
   * cache_batch_idx: the keys of sequence b are those of element cache_batch_idx[b] of k and v,
   * whose batch size is then its own. Neither with page_table nor with cu_seqlens_k.
   *
   * leftpad_k: the first leftpad_k[b] keys of sequence b are ignored: its key 0 is the one after
   * them. seqused_k counts them. Not with cu_seqlens_k.
   *
   * These are in the tensors' kind of memory; the CPU refuses what is out of range, Hopper clamps
   * it, as it does lengths. Not with FLASH3_COMPUTE_FP8.
   *
   * On Hopper a sequence of at most 16 queries has the same bits in out and lse with any of these,
   * whatever that number is; or with seqused_k and room for 256 keys or more alone, where no
   * sequence has more queries or they are packed. The bits of a sequence of more queries depend on
   * max_seqlen_q and on how the cache is stored too. Other sequences never matter, except with
   * head_dim 576 and qv.
   * @{ */
  flash3_tensor page_table;      /**< [batch, max_pages] int32 */
  flash3_tensor cache_batch_idx; /**< [batch] int32 */
  flash3_tensor leftpad_k;       /**< [batch] int32 */
  /** @} */

  /** @name Append
   * k_new and v_new, with seqused_k: they are first written into the cache, token n of sequence b
   * as its key seqused_k[b] + n, and then count as its last keys; seqused_k itself is not changed.
   * k and v are written then: no two sequences, nor k and v, share a row that is.
   *
   * With rotary_cos and rotary_sin, k_new and q get a rotary position embedding first
   * (flash3_quantize_params says which), in float32 with each product and each sum rounded, and
   * then rounded to their dtype: the cache has the same bits on every backend. Token n
   * of k_new gets that of position rotary_offsets[b] + n, or, without them, seqused_k[b] + n; query
   * i that of the same position with i for n where causal, a bounded window or chunk is set, and
   * with 0 for n where none is. The tables must reach the last position. q itself is not changed.
   *
   * Into an FP8 cache: k_new and v_new that are FP8 too are copied as they are. Otherwise they are
   * float16 or bfloat16, q's dtype if that is one of the two; each element, k_new's with its
   * embedding, which is not rounded to 16 bits then, is divided by the scale of the row where it
   * goes (k_scale, v_scale; 1 without) and rounded to e4m3, to nearest even, ±448 at most; NaN
   * stays NaN, as 0x7F. An embedding needs a q and a k_new of 16 bits.
   *
   * Where v is a part of k's rows (v.data points into the first, and the strides are the same),
   * k_new alone is given, which writes both, and no embedding may reach that part.
   * @{ */
  flash3_tensor k_new; /**< [batch, seq_new, heads_k, head_dim] or [total_new, heads_k, head_dim] */
  flash3_tensor v_new; /**< the same with head_dim_v; all zero: v is a part of k */
  flash3_tensor cu_seqlens_k_new; /**< [batch + 1] int32: k_new and v_new are packed */
  flash3_tensor rotary_cos;       /**< [positions, rotary_dim / 2] float32 or the dtype of q */
  flash3_tensor rotary_sin;       /**< the same shape and dtype */
  flash3_tensor rotary_offsets;   /**< [batch] int32; all zero: seqused_k */
  int32_t rotary_interleaved;     /**< 1: dimensions 2i and 2i + 1 */
  /** @} */

  /** Multiprocessors that a forward leaves to others on Hopper, ≥ 0; no result depends on it. */
  int32_t sm_margin;
  /** One of flash3_forward_schedule (schedule.h), on which no result depends; NULL: its own. */
  const flash3_schedule* schedule;
  /** A second part of q, which is multiplied with v: scores are softmax_scale · (Q·Kᵀ + Qv·Vᵀ), as
   * those of multi-head latent attention (DeepSeek-V2), whose v is the latent part of a key and k
   * the other. out's shape and q's dtype; head_dim + head_dim_v ≤ 576, no FP8; all zero: none. */
  flash3_tensor qv;
  int32_t fp8_sums; /**< flash3_fp8_sums, where q is FP8 or becomes it; a CPU's are float32 */
  /** Which drafts a query sees: bit j of query i's word says whether it sees key seq_k − seq_q +
   * j, with its sequence's lengths; all see the keys before those. At most 64 queries a
   * sequence (packed: max_seqlen_q). Neither with causal, window, chunk nor with rotary_cos. */
  flash3_tensor tree_mask; /**< [batch, seq_q] or [total_q] int64; all zero: none */
  /** 1: q and k_new, with their embedding if they get one, are multiplied by D·H/√n, as
   * flash3_quantize_params says, before they are rounded: for a cache whose keys all are. head_dim
   * ≤ 256; neither may be FP8; v is not rotated, and no part of k where k_new is given. */
  int32_t rotate;
  /** 1: rows of no token, those that cu_seqlens_q leaves out and those from seqused_q on, become 0,
   * and −∞ of lse, for results in uninitialised memory; 0: they stay as they are. */
  int32_t fill_padding;
  int32_t mask_alignment; /**< flash3_mask_alignment, for each sequence; not with tree_mask */
  /** Written: [heads_q] or [batch, heads_q, seq_q] float32: the largest score that each head saw,
   * or each row, laid out as lse: scaled, capped, with bias, bias_table and alibi_slopes; −∞ where
   * none was seen. The sink is no score. Where a score is NaN, that of its row and of its head is
   * undefined. On a GPU k and v are neither FP8 nor become it, and out and lse may differ in their
   * last bits from those of a call without. Has no gradient. All zero: not wanted. */
  flash3_tensor max_logits;
  /** One of flash3_mask_make (mask.h), of this call's sizes, in pages max_pages · page_size keys;
   * NULL: the band alone. The band of the call is none, or that of the mask. With lengths, the mask
   * was made with the same. Neither with leftpad_k, k_new, qv or tree_mask, nor, on Hopper, with
   * FP8 and a softcap; a page table or cache_batch_idx goes neither with FP8 nor a bias there. */
  const flash3_mask* mask;
  /** [heads_q] or [batch, heads_q] float32: slopes of ALiBi, finite. The slope times the distance
   * of i' and j is subtracted from the scaled and capped score of query i and key j, with i' as in
   * Mask. Not with tree_mask. All zero: none. */
  flash3_tensor alibi_slopes;
  /** [1 or batch, 1 or heads_q, 1 or seq_q, seq_k] float16, bfloat16 or float32: what is added to
   * the scaled and capped score of query i and key j; finite, or −∞, which hides the pair, on a GPU
   * not its NaNs. Any strides. For packed queries the first dimension is 1 and the third 1 or
   * total_q. Column j is key j of its sequence; with cu_seqlens_k or page_table there are as many
   * as a sequence may have keys, or more; not all is read. Not with tree_mask. All zero: none. */
  flash3_tensor bias;
  /** [1 or heads_q, 2·D + 1] float32: a bias by distance, finite or −∞, which hides the pair. Entry
   * clamp(j − i', −D, D) + D is added to the scaled and capped score of query i and key j, with i'
   * as in Mask. Not with tree_mask. All zero: none. */
  flash3_tensor bias_table;

  /** @name Dropout
   * A weight is dropped with the probability dropout_p, rounded to a multiple of 2^-16; the others
   * are divided by 1 − dropout_p. lse, max_logits and the sums of weights include all weights, and
   * the sink is not dropped. Which are dropped depends on seed, offset, sequence, query head, and
   * the places of query and key in their sequence alone (dropout.h). Not with FP8, qv or
   * tree_mask. @{ */
  float dropout_p;         /**< from 0, none, to below 1 */
  uint64_t dropout_seed;   /**< not read where dropout_state is given */
  uint64_t dropout_offset; /**< likewise: with each, a seed drops other weights */
  /** [2] int64: the seed and the offset in the tensors' kind of memory, read when the kernels run:
   * a captured graph replays with other ones. Not with qv, tree_mask. Has no gradient. All
   * zero: the two numbers instead. */
  flash3_tensor dropout_state;
  /** @} */
} flash3_forward_params;

/** What flash3_forward() would return, given memory and workspace; if it is not FLASH3_OK,
 * flash3_last_error() holds the reason. Reads no data and launches nothing. */
FLASH3_API flash3_status flash3_forward_supported(const flash3_forward_params* params);

/** Bytes of workspace that this call needs; a CPU's change with num_threads and its cores. */
FLASH3_API flash3_status flash3_forward_workspace(const flash3_forward_params* params,
                                                  size_t* bytes);

/** Computes out and, if given, lse. */
FLASH3_API flash3_status flash3_forward(const flash3_forward_params* params);

/** Which kernel this call runs and why, as lines of "name: value". Writes at most *size bytes with
 * the final NUL to buffer (NULL: none) and sets *size to the bytes that the whole text takes. */
FLASH3_API flash3_status flash3_forward_explain(const flash3_forward_params* params, char* buffer,
                                                size_t* size);

/** One backward call: from the gradient of the forward's outputs to that of its inputs.
 *
 * With
 *
 *     S = softmax_scale · Q·Kᵀ + mask,  P = exp(S − lse),  dP = dOut·Vᵀ,
 *     delta = rowsum(dOut ∘ Out) − dlse,  dS = P ∘ (dP − delta)
 *
 * it computes
 *
 *     dQ = softmax_scale · dS·K,  dK = softmax_scale · dSᵀ·Q,  dV = Pᵀ·dOut
 *
 * (FlashAttention-2, alg. 2), S and P again tile by tile: memory beyond the tensors is O(seq),
 * never the score matrix. Zero-initialise it, then set struct_size =
 * sizeof(flash3_backward_params).
 *
 * With softcap dS is multiplied by 1 − tanh²(softmax_scale · Q·Kᵀ / softcap) too. With dropout dP,
 * and P in dV, are those of the kept weights divided by 1 − dropout_p. With a sink
 *
 *     dsink = −Σ exp(sink − lse) · delta     over the rows of its head.
 *
 * q, k, v, out and lse are those of the forward call, and mask, softmax_scale, softcap, sink,
 * biases, alibi_slopes, dropout, lengths and dtype must be the same. Gradients of rows that see
 * nothing, of keys that no query sees, and of tokens after seqused are exactly 0; every element of
 * dq, dk and dv is written, except rows of packed tensors that belong to no sequence, unless
 * fill_padding is set. */
typedef struct flash3_backward_params {
  size_t struct_size; /**< sizeof of this struct: which fields the caller knows */

  /** @{ @name Tensors */
  flash3_tensor dout; /**< [batch, seq_q, heads_q, head_dim_v] gradient of out */
  flash3_tensor dlse; /**< [batch, heads_q, seq_q] float32, gradient of lse; all zero: none */
  flash3_tensor q;    /**< [batch, seq_q, heads_q, head_dim]   */
  flash3_tensor k;    /**< [batch, seq_k, heads_k, head_dim]   */
  flash3_tensor v;    /**< [batch, seq_k, heads_k, head_dim_v] */
  flash3_tensor out;  /**< [batch, seq_q, heads_q, head_dim_v] */
  flash3_tensor lse;  /**< [batch, heads_q, seq_q] float32; required */

  /** The gradients have the dtype of q; with 16-bit tensors all three may be float32, to be added
   * to those of other parts of the keys. With the out and lse of all keys, the gradients of the
   * parts add up to those of all. */
  flash3_tensor dq; /**< [batch, seq_q, heads_q, head_dim]   */
  flash3_tensor dk; /**< [batch, seq_k, heads_k, head_dim]; GQA: summed over the query heads */
  flash3_tensor dv; /**< [batch, seq_k, heads_k, head_dim_v] */
  /** @} */

  /** @{ @name Scale and mask */
  float softmax_scale; /**< as in flash3_forward_params, down to window_right */
  int32_t causal;
  int32_t window;
  int32_t deterministic; /**< 1: the same bits each time on the same kind of device; 0: the order of
                            float32 sums may vary from call to call */
  int64_t window_left;
  int64_t window_right;
  /** @} */

  /** @{ @name Where it runs */
  int32_t backend; /**< as in flash3_forward_params, to the end */
  int32_t num_threads;
  void* stream;
  void* workspace;
  size_t workspace_size;
  /** @} */

  /** @{ @name Ragged batches, sink, soft cap and chunks */
  flash3_tensor cu_seqlens_q; /**< as in flash3_forward_params, to chunk */
  flash3_tensor cu_seqlens_k;
  flash3_tensor seqused_q;
  flash3_tensor seqused_k;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  flash3_tensor sink;
  float softcap;
  int64_t chunk;
  /** @} */

  flash3_tensor dsink;  /**< [heads_q], dtype of sink, which must be given; all zero: not wanted */
  int32_t fill_padding; /**< 1: rows of dq, dk and dv that belong to no sequence become 0 */
  int32_t mask_alignment;     /**< as in flash3_forward_params */
  const flash3_mask* mask;    /**< as in flash3_forward_params, to the end */
  flash3_tensor alibi_slopes; /**< as in flash3_forward_params */
  flash3_tensor bias;         /**< as in flash3_forward_params */
  flash3_tensor bias_table;   /**< as in flash3_forward_params */
  /** Written: [1 or batch, 1 or heads_q, 1 or seq_q, seq_k] float32 or the dtype of bias: its
   * gradient, summed in float32 over the dimensions that bias has one element of; 0 where no query
   * sees the key. Any strides. The shape of bias, which must be given. All zero: not wanted. */
  flash3_tensor dbias;
  /** Written: [1 or heads_q, 2·D + 1] float32: the gradient of bias_table. The shape of bias_table,
   * which must be given. All zero: not wanted. */
  flash3_tensor dbias_table;
  /** Written: [heads_q] or [batch, heads_q] float32: the gradient of alibi_slopes. The shape of
   * alibi_slopes, which must be given. All zero: not wanted. */
  flash3_tensor dalibi_slopes;
  float dropout_p;             /**< as in flash3_forward_params, to dropout_state */
  uint64_t dropout_seed;       /**< likewise */
  uint64_t dropout_offset;     /**< likewise */
  flash3_tensor dropout_state; /**< likewise */
} flash3_backward_params;

/** @{ @name Backward calls */
/** As their forward counterparts. */
FLASH3_API flash3_status flash3_backward_supported(const flash3_backward_params* params);
FLASH3_API flash3_status flash3_backward_workspace(const flash3_backward_params* params,
                                                   size_t* bytes);
FLASH3_API flash3_status flash3_backward(const flash3_backward_params* params);
FLASH3_API flash3_status flash3_backward_explain(const flash3_backward_params* params, char* buffer,
                                                 size_t* size);
/** @} */

/** FLASH3_OK if this backend (auto: any) can run here; otherwise FLASH3_UNSUPPORTED. */
FLASH3_API flash3_status flash3_backend_available(flash3_backend backend);

/** What this backend (auto: the first that can run) runs on, in words: "NVIDIA H200, 132 SMs",
 * "AVX3_ZEN4, 2 threads". Same buffer rule as _explain. */
FLASH3_API flash3_status flash3_backend_describe(flash3_backend backend, char* buffer,
                                                 size_t* size);

/** @{ Static names: "hopper", "bfloat16", "invalid argument"; "unknown" for any other value. */
FLASH3_API const char* flash3_backend_name(flash3_backend backend);
FLASH3_API const char* flash3_dtype_name(flash3_dtype dtype);
FLASH3_API const char* flash3_status_name(flash3_status status);
/** @} */

/** The sentence of this thread's last failed call, valid until its next one; "": none failed. */
FLASH3_API const char* flash3_last_error(void);
/** The version of the library that runs, as FLASH3_VERSION_STRING gives that of the headers. */
FLASH3_API const char* flash3_version(void);

#ifdef __cplusplus
}
#endif

/* The other calls, which take the types above. */
#include "flash3/interrupt.h"
#include "flash3/merge.h"
#include "flash3/quantize.h"

#endif /* FLASH3_FLASH3_H_ */
