// SPDX-License-Identifier: Apache-2.0
// The steps of a call whose mask may be of documents: long ones run in the kernels of packed
// batches, which are faster than those that walk lists. The list of the sequences takes one more
// kernel, and each sequence begins a tile of its own, so that short ones are left to the lists.
#pragma once

#include <concepts>
#include <string>
#include <type_traits>

#include "core/documents.hpp"
#include "core/message.hpp"
#include "core/plan.hpp"
#include "cuda/host/device_info.hpp"
#include "cuda/host/launches.hpp"

namespace flash3::cuda::sm90 {

// By what there is room for, the fewest tokens, and of a document on average. Log-normal lengths of
// 526 on average gain 10 % (docs/masks.md); the others are no more than two of the widest tiles.
inline constexpr int64_t kLeastPackedTokens = 2048, kLeastMeanDocument = 256;

inline bool packs_documents(const Problem& problem) {
  return may_pack_documents(problem) && problem.seq_q >= kLeastPackedTokens &&
         problem.seq_q / problem.mask_lists.documents >= kLeastMeanDocument;
}

// Steps: those of a Route (cuda/host/route.hpp) for the call that the documents make, or its own.
template <class Steps>
struct OfDocuments {
  bool packed = false;
  Steps steps;

  // Calls what(problem) with the call that the steps are for.
  template <std::derived_from<Problem> P, class What>
  auto with_problem(const P& problem, const What& what) const {
    return packed ? what(with_packed_documents(problem)) : what(problem);
  }
};

template <std::derived_from<Problem> P, class Steps>
Status plan(const P& problem, const Device& device, size_t* workspace, OfDocuments<Steps>* made) {
  made->packed = packs_documents(problem);
  return made->with_problem(
      problem, [&](const P& own) { return plan(own, device, workspace, &made->steps); });
}

template <std::derived_from<Problem> P, class Steps>
void explain(const P& problem, const OfDocuments<Steps>& of, Explanation* out) {
  of.with_problem(problem, [&](const P& own) { explain(own, of.steps, out); });
  if (of.packed)
    out->add("documents", message("as a packed batch of up to ", problem.mask_lists.documents,
                                  " sequences, which begin where the mask says"));
}

template <std::derived_from<Problem> P, class Steps>
Status prepare(const P& problem, const OfDocuments<Steps>& of, Launches* launches) {
  return of.with_problem(problem, [&](const P& own) { return prepare(own, of.steps, launches); });
}

template <class Steps>
auto needs_of(const OfDocuments<Steps>& of)
  requires requires { needs_of(of.steps); }
{
  return needs_of(of.steps);
}

template <std::derived_from<Problem> P, class Steps>
void prepare_schedule(const P& problem, const OfDocuments<Steps>& of, void* data,
                      Launches* launches) {
  of.with_problem(problem, [&](const P& own) { prepare_schedule(own, of.steps, data, launches); });
}

}  // namespace flash3::cuda::sm90
