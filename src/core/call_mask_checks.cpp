// SPDX-License-Identifier: Apache-2.0
// The mask of a call.
#include <utility>

#include "core/mask_checks.hpp"
#include "core/message.hpp"
#include "core/params.hpp"

namespace flash3 {
namespace {

// What a mask does not know of. A page table and cache_batch_idx only tell where key j lies.
template <class CallParams>
Status check_company(const CallParams& p) {
  [[maybe_unused]] const auto refuse = [](const char* name, const char* why) {
    return unsupported(message("mask is given and ", name, " is given; ", why));
  };
  if constexpr (requires { p.page_table; }) {
    constexpr const char kMoved[] = "a mask counts keys from the first of k, and knows no new ones";
    if (is_given(p.leftpad_k)) return refuse("leftpad_k", kMoved);
    if (is_given(p.k_new)) return refuse("k_new", kMoved);
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

// The call has the lengths that the mask was made with, by their kinds; what they hold is on the
// device.
Status check_same_lengths(int mask, int call) {
  constexpr std::pair<int, const char*> kAll[] = {{FLASH3_MASK_CU_SEQLENS_Q, "cu_seqlens_q"},
                                                  {FLASH3_MASK_CU_SEQLENS_K, "cu_seqlens_k"},
                                                  {FLASH3_MASK_SEQUSED_Q, "seqused_q"},
                                                  {FLASH3_MASK_SEQUSED_K, "seqused_k"}};
  for (const auto& [bit, name] : kAll) {
    if ((mask & bit) == (call & bit)) continue;
    return invalid_argument(
        call & bit ? message("mask is given and ", name, " is given, but mask->lengths = ", mask,
                             " lacks ", bit, "; make the mask with ", name)
                   : message("mask->lengths = ", mask, " has ", bit, " but ", name,
                             " is all zero; the mask was made with ", name));
  }
  return {};
}

Status check_fields(const MaskLists& lists, const Problem& p) {
  const MaskShape& s = lists.shape;
  const int call = lengths_given(p.sequences_q, p.sequences_k);
  FLASH3_CHECK(check_same_lengths(lists.lengths, call));
  if (call != 0)
    FLASH3_CHECK(check_field("mask->batch", s.batch, "the number of sequences", p.batch));
  FLASH3_CHECK(check_shared_field("mask->batch", s.batch, "q.shape[0]", p.batch));
  FLASH3_CHECK(check_shared_field("mask->heads", s.heads,
                                  p.sequences_q.packed ? "q.shape[1]" : "q.shape[2]", p.heads_q));
  FLASH3_CHECK(check_field("mask->seq_q", s.seq_q,
                           p.sequences_q.packed ? "the most queries of a sequence" : "q.shape[1]",
                           p.seq_q));
  FLASH3_CHECK(check_field("mask->seq_k", s.seq_k,
                           p.sequences_k.packed ? "the most keys of a sequence"
                           : p.cache.paged      ? "max_pages * page_size"
                                                : "k.shape[1]",
                           p.seq_k));
  return check_mask_shape(lists);
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
  FLASH3_CHECK(check_fields(lists, *problem));
  FLASH3_CHECK(check_same_band(normalised(problem->mask_rule), lists.rule));
  problem->mask_lists = lists;
  problem->mask_rule = lists.rule;
  return {};
}

}  // namespace

MaskLists mask_lists(const flash3_mask& m) {
  MaskLists lists;
  lists.given = true;
  lists.shape = {m.batch,  m.heads,  m.seq_q,          m.seq_k,
                 m.ranges, m.blocks, m.partial_blocks, m.granularity};
  lists.documents = m.documents;
  lists.rule = normalised(
      {m.window_left, m.window_right, m.chunk, m.mask_alignment == FLASH3_ALIGN_TOP_LEFT});
  lists.lengths = m.lengths;
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
