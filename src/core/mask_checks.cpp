// SPDX-License-Identifier: Apache-2.0
// What a mask is made from.
#include "core/mask_checks.hpp"

#include <algorithm>

#include "core/message.hpp"
#include "core/params.hpp"

namespace flash3 {
namespace {

using Params = flash3_mask_params;

Status check_size(const char* name, int64_t size) {
  if (size >= 0 && size <= kMaxSize) return {};
  return invalid_argument(message(name, " = ", size, " but a size must be from 0 to ", kMaxSize));
}

Status check_room(const char* name, int64_t room) {
  if (room >= 0 && room <= kMaxSize) return {};
  return invalid_argument(message(name, " = ", room, " but it must be from 0 to ", kMaxSize));
}

Status check_sizes_of(const Params& p) {
  FLASH3_CHECK(check_size("batch", p.batch));
  FLASH3_CHECK(check_size("heads_q", p.heads_q));
  FLASH3_CHECK(check_size("seq_q", p.seq_q));
  FLASH3_CHECK(check_size("seq_k", p.seq_k));
  if (p.batch * p.heads_q > kMaxSize)
    return invalid_argument(message("batch = ", p.batch, " and heads_q = ", p.heads_q,
                                    "; batch * heads_q must be at most ", kMaxSize));
  FLASH3_CHECK(check_room("max_blocks", p.max_blocks));
  FLASH3_CHECK(check_room("max_partial_blocks", p.max_partial_blocks));
  return check_room("max_documents", p.max_documents);
}

// The name of the source that is given; null: none.
Status find_source(const Params& p, const char** source) {
  *source = nullptr;
  Status status;
  visit_sources(p, [&](const char* name, const flash3_tensor& t) {
    // The tensor beside a source is none itself.
    if (&t == &p.block_indices || &t == &p.bit_blocks) return;
    if (!is_given(t) || !status.ok()) return;
    if (*source)
      status = invalid_argument(
          message(*source, " is given and ", name, " is given; a mask has at most one source"));
    *source = name;
  });
  if (status.ok() && is_given(p.block_indices) != is_given(p.block_counts))
    return invalid_argument(
        is_given(p.block_counts)
            ? "block_counts is given but block_indices is all zero; they belong together"
            : "block_indices is given but block_counts is all zero; they belong together");
  if (status.ok() && is_given(p.bit_blocks) && !is_given(p.bits))
    return invalid_argument(
        "bit_blocks is given but bits is all zero; bits holds the blocks that bit_blocks names");
  return status;
}

// A dimension that is `size`, or 1 for all.
Status check_shared(const Field& f, int dim, const char* name, int64_t size) {
  const int64_t own = f.tensor.shape[dim];
  if (own == 1 || own == size) return {};
  return invalid_argument(message(f.part("shape", dim), " = ", own, " but ", name, " = ", size,
                                  "; it must be 1, for all, or ", name));
}

Status check_dimension(const Field& f, int dim, const char* name, int64_t size) {
  if (f.tensor.shape[dim] == size) return {};
  return invalid_argument(message(f.part("shape", dim), " = ", f.tensor.shape[dim], " but ", name,
                                  " = ", size, "; they must be the same"));
}

Status check_dtype(const Field& f, flash3_dtype dtype) {
  if (f.tensor.dtype == dtype) return {};
  return invalid_argument(message(f.name, ".dtype = ", static_cast<int32_t>(f.tensor.dtype),
                                  " but it must be ", static_cast<int32_t>(dtype), " (",
                                  dtype_name(dtype), ")"));
}

Status check_source(const Field& f, flash3_dtype dtype, const Params& p, Pointers pointers) {
  FLASH3_CHECK(check_dtype(f, dtype));
  FLASH3_CHECK(check_sizes(f));
  FLASH3_CHECK(check_shared(f, 0, "batch", p.batch));
  if (f.ndim > 2) FLASH3_CHECK(check_shared(f, 1, "heads_q", p.heads_q));
  FLASH3_CHECK(check_strides(f));
  return check_data(f, pointers);
}

// A source that is packed as the queries or the keys are.
Status check_packed(const Field& f, const char* lengths) {
  if (f.tensor.shape[0] == 1) return {};
  return invalid_argument(message(f.part("shape", 0), " = ", f.tensor.shape[0], " but ", lengths,
                                  " is given; of packed sequences it must be 1"));
}

Status check_block_size(const char* name, int32_t size) {
  if (size > 0 && size % 8 == 0) return {};
  return invalid_argument(message(name, " = ", size, " but it must be a positive multiple of 8"));
}

Status check_blocks(const Params& p, Pointers pointers) {
  FLASH3_CHECK(check_block_size("block_rows", p.block_rows));
  FLASH3_CHECK(check_block_size("block_keys", p.block_keys));
  const Field counts{"block_counts", "[1 or batch, 1 or heads_q, blocks of rows]", 3,
                     p.block_counts};
  const Field indices{"block_indices", "[1 or batch, 1 or heads_q, blocks of rows, most]", 4,
                      p.block_indices};
  FLASH3_CHECK(check_source(counts, FLASH3_INT32, p, pointers));
  FLASH3_CHECK(check_source(indices, FLASH3_INT32, p, pointers));
  FLASH3_CHECK(check_dimension(counts, 2, "ceil(seq_q / block_rows)",
                               ceil_div(p.seq_q, int64_t{p.block_rows})));
  for (int d = 0; d < 3; ++d) FLASH3_CHECK(check_same({indices, d}, {counts, d}, "shape"));
  return {};
}

Status check_ranges(const Params& p, Pointers pointers) {
  const Field f{"ranges",
                is_given(p.cu_seqlens_q) ? "[1, 1 or heads_q, 2 * n, total_q]"
                                         : "[1 or batch, 1 or heads_q, 2 * n, seq_q]",
                4, p.ranges};
  FLASH3_CHECK(check_source(f, FLASH3_INT32, p, pointers));
  const int64_t bounds = p.ranges.shape[2];
  if (bounds < 2 || bounds % 2 != 0 || bounds > 2 * kMostMaskRanges)
    return invalid_argument(message(f.part("shape", 2), " = ", bounds,
                                    " but it must be 2 * n, with n from 1 to ", kMostMaskRanges));
  if (is_given(p.cu_seqlens_q)) return check_packed(f, "cu_seqlens_q");
  return check_dimension(f, 3, "seq_q", p.seq_q);
}

Status check_documents(const Params& p, Pointers pointers) {
  const Field f{"documents", is_given(p.cu_seqlens_k) ? "[1, total_k]" : "[1 or batch, seq_k]", 2,
                p.documents};
  FLASH3_CHECK(check_source(f, FLASH3_INT32, p, pointers));
  if (is_given(p.cu_seqlens_k)) return check_packed(f, "cu_seqlens_k");
  return check_dimension(f, 1, "seq_k", p.seq_k);
}

Status check_dense(const Params& p, Pointers pointers) {
  const Field f{"dense", "[1 or batch, 1 or heads_q, seq_q, seq_k]", 4, p.dense};
  FLASH3_CHECK(check_source(f, FLASH3_UINT8, p, pointers));
  FLASH3_CHECK(check_dimension(f, 2, "seq_q", p.seq_q));
  return check_dimension(f, 3, "seq_k", p.seq_k);
}

Status check_bits(const Params& p, Pointers pointers) {
  const Field f{"bits", "[1 or batch, 1 or heads_q, seq_q, ceil(seq_k / 8)]", 4, p.bits};
  FLASH3_CHECK(check_source(f, FLASH3_UINT8, p, pointers));
  FLASH3_CHECK(check_dimension(f, 2, "seq_q", p.seq_q));
  return check_dimension(f, 3, "ceil(seq_k / 8)", ceil_div(p.seq_k, int64_t{8}));
}

Status check_bit_blocks(const Params& p, Pointers pointers) {
  const Field which{"bit_blocks", "[1 or batch, 1 or heads_q, blocks of queries, blocks of keys]",
                    4, p.bit_blocks};
  const Field bits{"bits", "[blocks, 128, 16] beside bit_blocks", 3, p.bits};
  FLASH3_CHECK(check_source(which, FLASH3_INT32, p, pointers));
  FLASH3_CHECK(check_dimension(which, 2, "ceil(seq_q / 128)", ceil_div(p.seq_q, kMaskBlock)));
  FLASH3_CHECK(check_dimension(which, 3, "ceil(seq_k / 128)", ceil_div(p.seq_k, kMaskBlock)));
  FLASH3_CHECK(check_dtype(bits, FLASH3_UINT8));
  FLASH3_CHECK(check_sizes(bits));
  FLASH3_CHECK(check_dimension(bits, 1, "FLASH3_MASK_BLOCK", kMaskBlock));
  FLASH3_CHECK(check_dimension(bits, 2, "FLASH3_MASK_BLOCK / 8", kMaskBlock / 8));
  FLASH3_CHECK(check_strides(bits));
  return check_data(bits, pointers);
}

MaskTensor mask_tensor(const flash3_tensor& t) {
  const auto stride = [&](int d) { return t.shape[d] > 1 ? t.stride[d] : 0; };
  MaskTensor made{t.data};
  made.stride_batch = stride(0);
  if (t.ndim > 2) made.stride_head = stride(1);
  if (t.ndim > 3) made.stride_row = stride(2);
  made.size = t.shape[t.ndim - 1];
  return made;
}

// ---- lengths ----

SequenceFields fields_of_q(const Params& p) {
  return {{"cu_seqlens_q", "[batch + 1]", 1, p.cu_seqlens_q},
          {"seqused_q", "[batch]", 1, p.seqused_q},
          "seq_q",
          0};
}
SequenceFields fields_of_k(const Params& p) {
  return {{"cu_seqlens_k", "[batch + 1]", 1, p.cu_seqlens_k},
          {"seqused_k", "[batch]", 1, p.seqused_k},
          "seq_k",
          0};
}

// longest: seq_q or seq_k. The rows of packed tensors are not known, but where a source has them.
Status take_lengths(const SequenceFields& f, int64_t batch, int64_t longest, Pointers pointers,
                    Sequences* sequences) {
  FLASH3_CHECK(check_sequence_fields(f, pointers));
  if (f.packed() && f.cu.tensor.shape[0] != batch + 1)
    return invalid_argument(message(f.cu.part("shape", 0), " = ", f.cu.tensor.shape[0],
                                    " but batch = ", batch, "; it must be batch + 1"));
  if (f.has_used()) FLASH3_CHECK(check_dimension(f.used, 0, "batch", batch));
  sequences->packed = f.packed(), sequences->has_used = f.has_used();
  sequences->cu = static_cast<const int*>(f.cu.tensor.data);
  sequences->used = static_cast<const int*>(f.used.tensor.data);
  sequences->rows = f.packed() ? kMaxSize : longest;
  sequences->max_length = longest;
  return {};
}

// Whether the borders of the caller's blocks are multiples of so many queries and keys.
bool is_multiple(const Params& p, int size) {
  return p.block_rows % size == 0 && p.block_keys % size == 0;
}

// Fills what follows from the source; a mask that has none is shared by all.
Status take_source(const Params& p, Pointers pointers, MaskProblem* problem) {
  const char* name = nullptr;
  FLASH3_CHECK(find_source(p, &name));
  MaskShape& shape = problem->shape;
  const bool differ = problem->lengths() != 0;  // then each sequence has lists of its own
  shape = {differ ? p.batch : 1, 1, p.seq_q, p.seq_k, 1};
  const auto take = [&](MaskSource source, const flash3_tensor& t) {
    problem->source = source;
    problem->tensor = mask_tensor(t);
    if (!differ) shape.batch = t.shape[0];
    if (t.ndim > 2) shape.heads = t.shape[1];
    return Status();
  };
  if (!name) return {};
  if (is_given(p.ranges)) {
    FLASH3_CHECK(check_ranges(p, pointers));
    shape.ranges = p.ranges.shape[2] / 2;
    if (problem->sequences_q.packed) problem->sequences_q.rows = p.ranges.shape[3];
    return take(MaskSource::kRanges, p.ranges);
  }
  if (is_given(p.documents)) {
    FLASH3_CHECK(check_documents(p, pointers));
    if (problem->sequences_k.packed) problem->sequences_k.rows = p.documents.shape[1];
    return take(MaskSource::kDocuments, p.documents);
  }
  if (is_given(p.dense)) {
    FLASH3_CHECK(check_dense(p, pointers));
    return take(MaskSource::kDense, p.dense);
  }
  if (is_given(p.bit_blocks)) {
    FLASH3_CHECK(check_bit_blocks(p, pointers));
    const int64_t blocks = p.bits.shape[0];
    problem->block_bits = {p.bits.data, blocks, blocks > 1 ? p.bits.stride[0] : 0,
                           p.bits.stride[1]};
    return take(MaskSource::kBitBlocks, p.bit_blocks);
  }
  if (is_given(p.bits)) {
    FLASH3_CHECK(check_bits(p, pointers));
    return take(MaskSource::kBits, p.bits);
  }
  FLASH3_CHECK(check_blocks(p, pointers));
  problem->counts = mask_tensor(p.block_counts);
  problem->block_rows = p.block_rows, problem->block_keys = p.block_keys;
  if (!is_multiple(p, kMaskBlock)) shape.granularity = kMaskQuarter;
  return take(MaskSource::kBlocks, p.block_indices);
}

// Blocks that can be seen in a way that neither a range of their rows tells nor their quarters.
int64_t most_partial_blocks(const Params& p, const MaskProblem& problem) {
  const MaskShape& s = problem.shape;
  switch (problem.source) {
    case MaskSource::kBand:
    case MaskSource::kDocuments: return 0;
    case MaskSource::kRanges: return s.ranges > 1 ? s.blocks : 0;
    case MaskSource::kDense:
    case MaskSource::kBits:
    case MaskSource::kBitBlocks: return s.blocks;
    case MaskSource::kBlocks:
      if (is_multiple(p, kMaskBlock)) return 0;
      if (!is_multiple(p, kMaskQuarter) || !mask_rule_of(p).is_none() || problem.lengths() != 0)
        return s.blocks;
      // The last keys may fill a part of a quarter.
      return p.seq_k % kMaskQuarter == 0 ? 0 : std::min<int64_t>(s.blocks, s.lists());
  }
  return s.blocks;
}

// Whether documents can be computed as packed sequences: those of one sequence, whose queries are
// its keys', under a band that is the same from document to document.
bool may_pack(const MaskProblem& problem) {
  const MaskShape& s = problem.shape;
  return problem.source == MaskSource::kDocuments && problem.lengths() == 0 && s.batch == 1 &&
         s.seq_q == s.seq_k && problem.rule.chunk == 0;
}

// Parts of the memory that are each below this add up to what an int64 holds with room to spare.
constexpr int64_t kMostPartBytes = int64_t{1} << 52;

// Whether all parts are. The first three sizes of a mask are below 2^31.
bool fits_memory(const MaskShape& s) {
  const auto fits = [](int64_t count, int64_t each) {
    int64_t bytes = 0;
    return !__builtin_mul_overflow(count, each, &bytes) && bytes < kMostPartBytes;
  };
  return fits(s.lists(), sizeof(MaskList)) && fits(s.key_lists(), sizeof(MaskList)) &&
         fits(s.ranges * s.batch * s.heads, s.rows() * int64_t{sizeof(MaskRange)}) &&
         fits(s.blocks, sizeof(MaskBlock)) && fits(s.partial_blocks, kMaskWords * 4);
}

Status find_room(const Params& p, MaskProblem* problem) {
  MaskShape& s = problem->shape;
  int64_t all = 0;
  const bool countable = !__builtin_mul_overflow(int64_t{s.lists()}, int64_t{s.k_blocks()}, &all);
  if (!countable || all > kMaxSize) {
    if (p.max_blocks == 0)
      return invalid_argument(message("max_blocks = 0 but the mask can have more than ", kMaxSize,
                                      " blocks; say how many it may have"));
    all = kMaxSize;
  }
  s.blocks = p.max_blocks > 0 ? std::min(p.max_blocks, all) : all;
  const int64_t partial = most_partial_blocks(p, *problem);
  s.partial_blocks = p.max_partial_blocks > 0 ? std::min(p.max_partial_blocks, partial) : partial;
  problem->documents = may_pack(*problem) ? std::min<int64_t>(p.max_documents, s.seq_k) : 0;
  if (fits_memory(s)) return {};
  return invalid_argument(message("the mask of batch ", s.batch, ", heads ", s.heads, ", seq_q ",
                                  s.seq_q, ", seq_k ", s.seq_k, ", ", s.blocks, " blocks and ",
                                  s.partial_blocks, " partial ones takes more than 2^52 bytes"));
}

}  // namespace

MaskRule normalised(MaskRule rule) {
  rule.window_left = std::max<Index>(rule.window_left, -1);
  rule.window_right = std::max<Index>(rule.window_right, -1);
  return rule;
}

Status make_mask_problem(const Params* params, Pointers pointers, MaskProblem* problem) {
  WholeParams<Params> whole;
  FLASH3_CHECK(whole.read(params));
  const Params& p = *whole;
  FLASH3_CHECK(check_sizes_of(p));
  FLASH3_CHECK(check_band(p));
  FLASH3_CHECK(check_context(p));
  *problem = {};
  FLASH3_CHECK(take_lengths(fields_of_q(p), p.batch, p.seq_q, pointers, &problem->sequences_q));
  FLASH3_CHECK(take_lengths(fields_of_k(p), p.batch, p.seq_k, pointers, &problem->sequences_k));
  FLASH3_CHECK(take_source(p, pointers, problem));
  problem->rule = normalised(mask_rule_of(p));
  FLASH3_CHECK(find_room(p, problem));
  problem->backend = static_cast<flash3_backend>(p.backend);
  problem->num_threads = p.num_threads;
  problem->stream = p.stream;
  return {};
}

Status check_mask_shape(const MaskLists& mask) {
  const MaskShape& s = mask.shape;
  FLASH3_CHECK(check_size("mask->batch", s.batch));
  FLASH3_CHECK(check_size("mask->heads", s.heads));
  FLASH3_CHECK(check_size("mask->seq_q", s.seq_q));
  FLASH3_CHECK(check_size("mask->seq_k", s.seq_k));
  if (s.batch * s.heads > kMaxSize)
    return invalid_argument(message("mask->batch = ", s.batch, " and mask->heads = ", s.heads,
                                    "; their product must be at most ", kMaxSize));
  if (s.ranges < 1 || s.ranges > kMostMaskRanges)
    return invalid_argument(
        message("mask->ranges = ", s.ranges, " but it must be from 1 to ", kMostMaskRanges));
  if (s.granularity != kMaskBlock && s.granularity != kMaskQuarter)
    return invalid_argument(message("mask->granularity = ", s.granularity, " but it must be ",
                                    kMaskQuarter, " or ", kMaskBlock));
  FLASH3_CHECK(check_room("mask->blocks", s.blocks));
  FLASH3_CHECK(check_room("mask->partial_blocks", s.partial_blocks));
  FLASH3_CHECK(check_room("mask->documents", mask.documents));
  if (fits_memory(s)) return {};
  return invalid_argument("mask is larger than any that flash3_mask_make makes");
}

}  // namespace flash3
