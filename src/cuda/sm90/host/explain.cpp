// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/host/explain.hpp"

#include "core/message.hpp"
#include "cuda/sm90/host/kernel_kind.hpp"

namespace flash3::cuda::sm90 {

std::string explain_mask(const Problem& problem) {
  if (problem.mask_lists.given)
    return "the mask lists blocks of keys: only blocks that are seen in part are masked";
  if (!may_hide(problem)) return "no pair is masked";
  return "the mask is a band: only tiles on its edges are masked";
}

void explain_scores(ScoreKind score, BiasTerms terms, Explanation* out) {
  if (terms != BiasTerms::kNone && terms != BiasTerms::kDropout)
    out->add("scores", "with what depends on their place, added tile by tile");
  if (score == ScoreKind::kSoftcap)
    out->add("scores", "capped by a polynomial; those above half the cap are remapped first");
}

void explain_copy(const char* name, const PackedCopy& copy, Explanation* out) {
  if (!copy.needed) return;
  out->add("copy", message(name, " first goes to rows of ", copy.row,
                           " elements: TMA needs a 16-byte aligned base and strides of 16 bytes"));
}

}  // namespace flash3::cuda::sm90
