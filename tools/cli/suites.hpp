// SPDX-License-Identifier: Apache-2.0
// The case lists of flash3 bench.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cases/case.hpp"

namespace flash3::cli {

// A case to time, and the one whose speed its own is divided by, if there is one: their samples
// are interleaved.
struct BenchPoint {
  cases::Case c;
  std::optional<cases::Case> beside;
};

// "forward": the FlashAttention papers' sweep (a fixed number of tokens, hidden size 2048 on a GPU,
// head_dim 64, 128, 256, full and causal, sequence lengths 512 … 16k); "backward": the backward of
// the same; "quick": one length of it;
// "window": one long causal sequence (32k on a GPU) under windows of 128 keys, twice as many, …,
// half the sequence, and none;
// "ragged": the sweep with its equal lengths passed as ragged, each beside its dense call; 20 draws
// of long-tailed causal lengths (64k tokens on a GPU, head_dim 64 and 128), each beside the dense
// call of the length with the same cost per token; thousands of sequences of 16 and of 64 tokens;
// one long causal sequence with a sink, and with a softcap, each beside the plain call, and with a
// window of 128 keys.
// "fp8": the sweep with e4m3 tensors and scales for blocks, each beside the call on 16-bit tensors,
// and how long flash3_quantize takes to make the ones from the others.
// "masks": masks as data.
// "decode": calls on a KV cache.
// On the CPU tokens and hidden size are smaller. Throws UsageError for another name.
std::vector<BenchPoint> bench_suite(const std::string& name, flash3_backend backend,
                                    flash3_dtype dtype = FLASH3_BFLOAT16);

// Masks as data, each forward and backward, beside the call that has the same pairs or, where none
// has, the causal, windowed or full one: causal as a range of each query; documents of log-normal
// lengths; a window with sink tokens; a prefix; lists of 10, 25 and 50 % of the blocks of 128 and
// of 64; random bits. On a GPU 4k … 32k tokens with 16 heads, on the CPU 512 … 2k with 4.
std::vector<BenchPoint> mask_suite(bool gpu, flash3_dtype dtype);

// Calls on a KV cache with 32 query heads on 8 KV heads and head_dim 128: one query for batches of
// 1 … 256 sequences and contexts of 1k … 128k keys; some of them with pages of 64, 16 and 1 keys,
// each beside the call without pages; some with other heads and head dims; 2 to 16 queries, and
// trees of 2 to 32 drafts, each beside one query; some with 512
// queries, with one query in half of the sequences and 512 in the others, and with log-uniform
// lengths, beside equal lengths with as many bytes. On the CPU all of it is smaller.
std::vector<BenchPoint> decode_suite(bool gpu, flash3_dtype dtype);

}  // namespace flash3::cli
