// SPDX-License-Identifier: Apache-2.0
#include "core/tree_checks.hpp"

#include "core/message.hpp"

namespace flash3 {
namespace {

using Params = flash3_forward_params;

bool is_packed(const Params& p) { return is_given(p.cu_seqlens_q); }

Status check_form_of(const Field& tree, const Field& q, bool packed) {
  const flash3_tensor& t = tree.tensor;
  if (t.dtype != FLASH3_INT64)
    return invalid_argument(message("tree_mask.dtype = ", static_cast<int32_t>(t.dtype),
                                    " but it must be 6 (int64); tree_mask that is not given is ",
                                    "all zero"));
  FLASH3_CHECK(check_sizes(tree));
  if (packed) {
    FLASH3_CHECK(check_same({tree, 0}, {q, 0}, "total_q"));
  } else {
    FLASH3_CHECK(check_same({tree, 0}, {q, 0}, "batch size"));
    FLASH3_CHECK(check_same({tree, 1}, {q, 1}, "seq_q"));
  }
  return check_strides(tree);
}

// A word has a bit for each query of its sequence.
Status check_queries(const Params& p, const Field& q) {
  const bool packed = is_packed(p);
  const int64_t most = packed ? p.max_seqlen_q : q.tensor.shape[1];
  if (most <= kMostDrafts && (most > 0 || !packed)) return {};
  return invalid_argument(message(packed ? "max_seqlen_q" : q.part("shape", 1), " = ", most,
                                  " but it must be ", packed ? "from 1 to " : "at most ",
                                  kMostDrafts,
                                  " with tree_mask, which has a bit for each query of a sequence"));
}

// tree_mask is the whole mask, and knows no positions.
Status check_company(const Params& p) {
  const auto without = [](const char* name, int64_t value) {
    return invalid_argument(message("tree_mask is given and ", name, " = ", value,
                                    "; tree_mask is the mask of the call"));
  };
  if (p.causal != 0) return without("causal", p.causal);
  if (p.window != 0) return without("window", p.window);
  if (p.chunk != 0) return without("chunk", p.chunk);
  if (is_given(p.rotary_cos))
    return invalid_argument(
        "tree_mask is given and rotary_cos is given; drafts of one depth have one position, which "
        "the call does not know: embed q and k_new before it");
  if (p.compute == FLASH3_COMPUTE_FP8)
    return unsupported(
        "tree_mask is given but compute = 1 (fp8); drafts are verified in the dtype of q, k and v");
  return {};
}

}  // namespace

Status check_tree(const Params& p, const Field& q, Pointers pointers) {
  if (!is_given(p.tree_mask)) return {};
  const bool packed = is_packed(p);
  const Field tree{"tree_mask", packed ? "[total_q]" : "[batch, seq_q]", packed ? 1 : 2,
                   p.tree_mask};
  FLASH3_CHECK(check_form_of(tree, q, packed));
  FLASH3_CHECK(check_queries(p, q));
  FLASH3_CHECK(check_company(p));
  return check_data(tree, pointers);
}

TreeMask tree_mask(const Params& p) {
  const flash3_tensor& t = p.tree_mask;
  if (!is_given(t)) return {};
  const bool has_batches = !is_packed(p) && t.shape[0] > 1;
  return {true, static_cast<const uint64_t*>(t.data), has_batches ? t.stride[0] : 0};
}

}  // namespace flash3
