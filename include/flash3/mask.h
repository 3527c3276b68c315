/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * Masks as data: which keys each query sees, listed once and read by any number of calls. */
#ifndef FLASH3_MASK_H_
#define FLASH3_MASK_H_

#include "flash3/flash3.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Queries, and keys, of a block: a mask lists blocks of so many queries by so many keys. */
#define FLASH3_MASK_BLOCK 128

/** Ranges of keys that a query can see in all. */
#define FLASH3_MASK_MOST_RANGES 8

/** In bit_blocks of flash3_mask_params: a block of which all pairs are seen. */
#define FLASH3_MASK_ALL_SEEN (-1)

/** What a mask is made from. Zero-initialise it, then set struct_size = sizeof(flash3_mask_params).
 *
 * A query sees a key if the band lets it, as in a call (flash3_forward_params), and the source
 * does. At most one source is given; without one the mask is the band. Sources are read when the
 * mask is made and never again. */
typedef struct flash3_mask_params {
  size_t struct_size; /**< sizeof of this struct: which fields the caller knows */

  /** @{ @name The calls that read it */
  int64_t batch;   /**< ≥ 0 */
  int64_t heads_q; /**< ≥ 0 */
  int64_t seq_q;   /**< ≥ 0 */
  int64_t seq_k;   /**< ≥ 0 */
  /** @} */

  /** @{ @name The band, as in flash3_forward_params */
  int32_t causal;         /**< 1: no key after i' */
  int32_t window;         /**< 1: window_left and window_right count */
  int64_t window_left;    /**< keys before i'; < 0: all */
  int64_t window_right;   /**< keys after i'; < 0: all */
  int64_t chunk;          /**< ≥ 0; 0: none */
  int32_t mask_alignment; /**< flash3_mask_alignment */
  /** @} */

  /** @{ @name Sources
   * Dimensions of size 1 in place of batch or heads_q stand for all; the lists are then shared. */
  /** Ranges of keys: [1 or batch, 1 or heads_q, 2·n, seq_q] int32, n from 1 to
   * FLASH3_MASK_MOST_RANGES. Query i sees key j if row 2r, column i holds at most j and row 2r + 1
   * holds more than j for any r. Any integers may be there: what lies outside [0, seq_k) is cut. */
  flash3_tensor ranges;
  /** Documents: [1 or batch, seq_k] int32, a number for each key. Query i sees the keys of the run
   * of equal numbers that holds key i' = i + seq_k − seq_q; none where i' is no key. */
  flash3_tensor documents;
  /** One byte a pair: [1 or batch, 1 or heads_q, seq_q, seq_k] uint8; 0: hidden. */
  flash3_tensor dense;
  /** Blocks of block_rows queries by block_keys keys: how many each row of blocks sees,
   * [1 or batch, 1 or heads_q, ⌈seq_q / block_rows⌉] int32, and which, the same with a fourth
   * dimension of at least so many; what comes after the count is not read. A count above that
   * dimension is cut to it, one below 0 counts as 0, and a number that is no block is passed over.
   * @{ */
  flash3_tensor block_counts;
  flash3_tensor block_indices;
  int32_t block_rows; /**< a positive multiple of 8 */
  int32_t block_keys; /**< the same */
  /** @} */
  /** @} */

  /** @{ @name Room
   * Blocks that the lists have room for. Where a mask has more it is empty: no query sees any key,
   * and flash3_mask_used() says so. */
  int64_t max_blocks;         /**< ≥ 0; 0: the most that there can be */
  int64_t max_partial_blocks; /**< of those, the ones that need a bit for each pair; likewise */
  /** @} */

  /** @{ @name Where it runs */
  int32_t backend;     /**< flash3_backend */
  int32_t num_threads; /**< CPU: threads to use; 0: one per core this process may run on */
  void* stream;        /**< Hopper: a cudaStream_t of the current device */
  /** @} */

  /** @{ @name Bits
   * One more source, of which what is said of Sources holds too. */
  /** A bit a pair: [1 or batch, 1 or heads_q, seq_q, ⌈seq_k / 8⌉] uint8. Query i sees key j if bit
   * j mod 8 of byte ⌊j / 8⌋ of its row is 1; bit 0 has the value 1, bit 7 the value 128. Bits after
   * the last key do not count. */
  flash3_tensor bits;
  /** Given, bits holds some blocks alone, and this says which: [1 or batch, 1 or heads_q,
   * ⌈seq_q / FLASH3_MASK_BLOCK⌉, ⌈seq_k / FLASH3_MASK_BLOCK⌉] int32. bits is then [blocks,
   * FLASH3_MASK_BLOCK, FLASH3_MASK_BLOCK / 8]: for each block its queries, and the bits of their
   * keys. A number from 0 to blocks − 1 is that block, FLASH3_MASK_ALL_SEEN says that all pairs
   * are seen, and any other that none is. Places may share a block of bits. */
  flash3_tensor bit_blocks;
  /** @} */

  /** @{ @name Lengths
   * Those of a call whose sequences differ in length (flash3_forward_params), int32. seq_q and
   * seq_k are then what the call has as max_seqlen_q and max_seqlen_k, or where it has none the
   * rows of its tensors; and batch is the number of sequences. A call must have the same lengths as
   * its mask was made with.
   *
   * A source counts queries and keys from the first of their sequence. With cu_seqlens_q, ranges is
   * [1, 1 or heads_q, 2·n, total_q], and with cu_seqlens_k documents is [1, total_k]. Other sources
   * keep their dimensions: what they hold after the end of a sequence does not count. */
  flash3_tensor cu_seqlens_q; /**< [batch + 1] */
  flash3_tensor cu_seqlens_k; /**< [batch + 1] */
  flash3_tensor seqused_q;    /**< [batch] */
  flash3_tensor seqused_k;    /**< [batch] */
  /** @} */

  /** Room for where so many documents begin, ≥ 0. On a GPU a call of one sequence then computes
   * long documents as packed sequences, which is faster than by lists. It counts if all sequences
   * share documents, seq_q is seq_k, and there are neither chunks nor lengths. Where a mask has
   * more documents it is empty, as above. */
  int64_t max_documents;
} flash3_mask_params;

/** @{ @name What flash3_mask::lengths is made of */
#define FLASH3_MASK_CU_SEQLENS_Q 1 /**< cu_seqlens_q was given */
#define FLASH3_MASK_CU_SEQLENS_K 2 /**< cu_seqlens_k */
#define FLASH3_MASK_SEQUSED_Q 4    /**< seqused_q */
#define FLASH3_MASK_SEQUSED_K 8    /**< seqused_k */
/** @} */

/** A mask. The caller sets data and size; flash3_mask_make() sets all else, and a call that is
 * given the mask refuses it where any of that has changed or does not fit the call. The memory
 * holds, for each block of queries, the blocks of keys that any of them sees, and of each whether
 * all pairs are seen, or all of some quarters, or a range of keys of each query, or which bits
 * tell; and the same the other way round for a backward call. Calls may share a mask while its
 * memory stays as it is, on any streams, after the one that made it. */
struct flash3_mask {
  void* data;             /**< the caller's, in the tensors' kind of memory, at a multiple of 256 */
  size_t size;            /**< bytes of it */
  uint64_t key;           /**< tells whether what follows belongs together; from 1 to INT64_MAX */
  int64_t batch;          /**< 1: the same for all */
  int64_t heads;          /**< 1: the same for all */
  int64_t seq_q;          /**< of the calls */
  int64_t seq_k;          /**< of the calls */
  int64_t window_left;    /**< < 0: unbounded */
  int64_t window_right;   /**< < 0: unbounded; 0 of a causal mask */
  int64_t chunk;          /**< 0: none */
  int32_t mask_alignment; /**< flash3_mask_alignment */
  int32_t ranges;         /**< ranges of keys that it holds of each query */
  int64_t blocks;         /**< room of the lists */
  int64_t partial_blocks; /**< room for bits */
  int32_t granularity;    /**< 64: made from blocks that 128 does not divide; else 128 */
  int32_t lengths;        /**< the sum of FLASH3_MASK_CU_SEQLENS_Q …: which it was made with */
  int64_t documents;      /**< room for where documents begin; 0: it does not say */
};

/** @{ @name Making a mask */
/** Bytes that a mask of these params takes. */
FLASH3_API flash3_status flash3_mask_size(const flash3_mask_params* params, size_t* bytes);

/** Sets all fields of a mask of these params but data, as flash3_mask_make() will, and size to the
 * bytes that it takes: for questions, and for programs that are compiled before they run. */
FLASH3_API flash3_status flash3_mask_describe(const flash3_mask_params* params, flash3_mask* mask);

/** Enqueues the making of the mask on params.stream. It can be captured in a CUDA graph; nothing
 * that lies in device memory is read on the host. */
FLASH3_API flash3_status flash3_mask_make(const flash3_mask_params* params, flash3_mask* mask);

/** Blocks that the mask needs, of those the ones that need bits, and documents, to give it just
 * that room. It waits for the stream, where the mask was made. Above the mask's room: the mask is
 * empty. A mask without room for documents has not counted them: 0. */
FLASH3_API flash3_status flash3_mask_used(const flash3_mask* mask, void* stream, int64_t* blocks,
                                          int64_t* partial_blocks, int64_t* documents);
/** @} */

#ifdef __cplusplus
}
#endif

#endif /* FLASH3_MASK_H_ */
