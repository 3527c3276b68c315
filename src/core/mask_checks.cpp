// SPDX-License-Identifier: Apache-2.0
#include "core/mask_checks.hpp"

#include <algorithm>

#include "core/message.hpp"
#include "core/params.hpp"

namespace flash3 {
namespace {

using Params = flash3_mask_params;

// ---- what a mask is made from ----

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
  return check_room("max_partial_blocks", p.max_partial_blocks);
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
  const Field f{"ranges", "[1 or batch, 1 or heads_q, 2 * n, seq_q]", 4, p.ranges};
  FLASH3_CHECK(check_source(f, FLASH3_INT32, p, pointers));
  const int64_t bounds = p.ranges.shape[2];
  if (bounds < 2 || bounds % 2 != 0 || bounds > 2 * kMostMaskRanges)
    return invalid_argument(message(f.part("shape", 2), " = ", bounds,
                                    " but it must be 2 * n, with n from 1 to ", kMostMaskRanges));
  return check_dimension(f, 3, "seq_q", p.seq_q);
}

Status check_documents(const Params& p, Pointers pointers) {
  const Field f{"documents", "[1 or batch, seq_k]", 2, p.documents};
  FLASH3_CHECK(check_source(f, FLASH3_INT32, p, pointers));
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

// Whether the borders of the caller's blocks are multiples of so many queries and keys.
bool is_multiple(const Params& p, int size) {
  return p.block_rows % size == 0 && p.block_keys % size == 0;
}

// Fills what follows from the source; a mask that has none is shared by all.
Status take_source(const Params& p, Pointers pointers, MaskProblem* problem) {
  const char* name = nullptr;
  FLASH3_CHECK(find_source(p, &name));
  MaskShape& shape = problem->shape;
  shape = {1, 1, p.seq_q, p.seq_k, 1};
  const auto take = [&](MaskSource source, const flash3_tensor& t) {
    problem->source = source;
    problem->tensor = mask_tensor(t);
    shape.batch = t.shape[0];
    if (t.ndim > 2) shape.heads = t.shape[1];
    return Status();
  };
  if (!name) return {};
  if (is_given(p.ranges)) {
    FLASH3_CHECK(check_ranges(p, pointers));
    shape.ranges = p.ranges.shape[2] / 2;
    return take(MaskSource::kRanges, p.ranges);
  }
  if (is_given(p.documents)) {
    FLASH3_CHECK(check_documents(p, pointers));
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
      if (!is_multiple(p, kMaskQuarter) || !mask_rule_of(p).is_none()) return s.blocks;
      // The last keys may fill a part of a quarter.
      return p.seq_k % kMaskQuarter == 0 ? 0 : std::min<int64_t>(s.blocks, s.lists());
  }
  return s.blocks;
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
  if (fits_memory(s)) return {};
  return invalid_argument(message("the mask of batch ", s.batch, ", heads ", s.heads, ", seq_q ",
                                  s.seq_q, ", seq_k ", s.seq_k, ", ", s.blocks, " blocks and ",
                                  s.partial_blocks, " partial ones takes more than 2^52 bytes"));
}

// The same for all that mean the same.
MaskRule normalised(MaskRule rule) {
  rule.window_left = std::max<Index>(rule.window_left, -1);
  rule.window_right = std::max<Index>(rule.window_right, -1);
  return rule;
}

// ---- the mask of a call ----

// What a mask does not know of: lengths, and keys that lie elsewhere.
template <class CallParams>
Status check_company(const CallParams& p) {
  const auto refuse = [](const char* name, const char* why) {
    return unsupported(message("mask is given and ", name, " is given; ", why));
  };
  constexpr const char kLengths[] = "the sequences of a call with a mask have one length";
  if (is_given(p.cu_seqlens_q)) return refuse("cu_seqlens_q", kLengths);
  if (is_given(p.cu_seqlens_k)) return refuse("cu_seqlens_k", kLengths);
  if (is_given(p.seqused_q)) return refuse("seqused_q", kLengths);
  if (is_given(p.seqused_k)) return refuse("seqused_k", kLengths);
  if constexpr (requires { p.page_table; }) {
    constexpr const char kCache[] = "a mask lists keys by their places in k, which is no cache";
    if (is_given(p.page_table)) return refuse("page_table", kCache);
    if (is_given(p.cache_batch_idx)) return refuse("cache_batch_idx", kCache);
    if (is_given(p.leftpad_k)) return refuse("leftpad_k", kCache);
    if (is_given(p.k_new)) return refuse("k_new", kCache);
    if (is_given(p.qv)) return refuse("qv", "latent attention knows the band alone");
    if (is_given(p.tree_mask))
      return invalid_argument(
          "mask is given and tree_mask is given; tree_mask is the mask of the call");
    if (p.compute == FLASH3_COMPUTE_FP8)
      return refuse("compute = 1 (fp8)",
                    "bring q, k and v to FP8 with flash3_quantize before, or leave it out");
  }
  return {};
}

Status check_field(const char* name, int64_t given, const char* of_call, int64_t needed) {
  if (given == needed) return {};
  return invalid_argument(message(name, " = ", given, " but ", of_call, " = ", needed,
                                  "; the mask was made for calls of another size"));
}

Status check_shared_field(const char* name, int64_t given, const char* of_call, int64_t needed) {
  if (given == 1 || given == needed) return {};
  return invalid_argument(message(name, " = ", given, " but ", of_call, " = ", needed,
                                  "; a mask is the same for all, 1, or has its own for each"));
}

Status check_fields(const MaskShape& s, const Problem& p) {
  FLASH3_CHECK(check_shared_field("mask->batch", s.batch, "q.shape[0]", p.batch));
  FLASH3_CHECK(check_shared_field("mask->heads", s.heads, "q.shape[2]", p.heads_q));
  FLASH3_CHECK(check_field("mask->seq_q", s.seq_q, "q.shape[1]", p.seq_q));
  FLASH3_CHECK(check_field("mask->seq_k", s.seq_k, "k.shape[1]", p.seq_k));
  return check_mask_shape(s);
}

// A call that has a band says it as the mask does.
Status check_same_band(const MaskRule& call, const MaskRule& mask) {
  if (call.is_none()) return {};
  const auto differs = [](const char* name, int64_t of_call, int64_t of_mask) {
    if (of_call == of_mask) return Status();
    return invalid_argument(message(name, " = ", of_call, " but the mask was made with ", of_mask,
                                    "; the band of a call with a mask is none, or the mask's"));
  };
  FLASH3_CHECK(differs("window_left", call.window_left, mask.window_left));
  FLASH3_CHECK(differs("window_right (0: causal)", call.window_right, mask.window_right));
  FLASH3_CHECK(differs("chunk", call.chunk, mask.chunk));
  return differs("mask_alignment", call.top_left, mask.top_left);
}

template <class CallParams>
Status take(const CallParams& p, Problem* problem) {
  if (!p.mask) return {};
  FLASH3_CHECK(check_company(p));
  const MaskLists lists = mask_lists(*p.mask);
  FLASH3_CHECK(check_fields(lists.shape, *problem));
  FLASH3_CHECK(check_same_band(normalised(problem->mask_rule), lists.rule));
  problem->mask_lists = lists;
  problem->mask_rule = lists.rule;
  return {};
}

}  // namespace

Status make_mask_problem(const Params* params, Pointers pointers, MaskProblem* problem) {
  WholeParams<Params> whole;
  FLASH3_CHECK(whole.read(params));
  const Params& p = *whole;
  FLASH3_CHECK(check_sizes_of(p));
  FLASH3_CHECK(check_band(p));
  FLASH3_CHECK(check_context(p));
  *problem = {};
  FLASH3_CHECK(take_source(p, pointers, problem));
  FLASH3_CHECK(find_room(p, problem));
  problem->rule = normalised(mask_rule_of(p));
  problem->backend = static_cast<flash3_backend>(p.backend);
  problem->num_threads = p.num_threads;
  problem->stream = p.stream;
  return {};
}

Status check_mask_shape(const MaskShape& s) {
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
  if (fits_memory(s)) return {};
  return invalid_argument("mask is larger than any that flash3_mask_make makes");
}

MaskLists mask_lists(const flash3_mask& m) {
  MaskLists lists;
  lists.given = true;
  lists.shape = {m.batch,  m.heads,  m.seq_q,          m.seq_k,
                 m.ranges, m.blocks, m.partial_blocks, m.granularity};
  lists.rule = normalised(
      {m.window_left, m.window_right, m.chunk, m.mask_alignment == FLASH3_ALIGN_TOP_LEFT});
  lists.data = m.data;
  lists.size = m.size;
  lists.key = m.key;
  return lists;
}

Status take_mask(const flash3_forward_params& params, Problem* problem) {
  return take(params, problem);
}
Status take_mask(const flash3_backward_params& params, Problem* problem) {
  return take(params, problem);
}

}  // namespace flash3
