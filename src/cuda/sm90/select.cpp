// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/select.hpp"

#include <string>

#include "core/message.hpp"
#include "cuda/host/route.hpp"
#include "cuda/sm90/backward/plan.hpp"
#include "cuda/sm90/decode/latent/plan.hpp"
#include "cuda/sm90/documents.hpp"
#include "cuda/sm90/family.hpp"
#include "cuda/sm90/host/bias_params.hpp"

namespace flash3::cuda::sm90 {
namespace {

// Of the sequences that run in the decode kernel most have one query, or a few drafts: rows for
// sixteen queries of each head would cost them more than a second item costs the others.
constexpr Index kLikelyQueries = 4;

// Whether the call says how products in FP8 are summed up, of which the decode kernels have none.
bool asks_for_fp8_sums(const ForwardProblem& problem) {
  return problem.fp8_sums != FLASH3_FP8_SUMS_AUTO;
}

bool reads_cache(const ForwardProblem& problem) {
  return problem.has_cache() || problem.widens_keys();
}

bool has_few_queries(const ForwardProblem& problem) {
  return problem.sequences_q.bounded && problem.seq_q <= kMostDecodeQueries;
}

bool has_many_keys(const ForwardProblem& problem) {
  return !problem.sequences_k.bounded || problem.seq_k >= kLeastDecodeKeys;
}

// Whether all of a call is best left to the decode kernels: few queries look at a cache, or at many
// keys, or there is what no forward kernel has. Neither the number of sequences nor that of heads
// counts. Without a cache asks_for_fp8_sums() keeps a call from them.
bool is_decode(const ForwardProblem& problem) {
  if (is_latent(problem) || problem.tree.given) return true;
  if (problem.mask_lists.given || is_biased(problem) || !has_few_queries(problem)) return false;
  return reads_cache(problem) ||
         (decodes(problem) && !asks_for_fp8_sums(problem) && has_many_keys(problem));
}

std::string why_decode(const ForwardProblem& problem) {
  if (is_latent(problem)) return "keys have latent and rope parts";
  if (problem.tree.given) return "a tree mask, of drafts that are to be verified";
  if (has_few_queries(problem)) {
    const std::string few = message("at most ", kMostDecodeQueries, " queries a sequence");
    if (problem.has_cache()) return message(few, ", and k and v are a cache");
    if (problem.widens_keys()) return message(few, ", and k and v are FP8");
    return message(few, ", and ", kLeastDecodeKeys, " keys or more");
  }
  const std::string unreadable = why_unreadable(problem);
  return "the forward kernels cannot read k and v: " +
         (unreadable.empty() ? why_no_choice(problem) : unreadable);
}

// Packed queries that look at the used keys of a dense tensor are a server's too; a training batch
// packs both sides or pads both, and has no FP8 keys.
bool keys_are_a_cache(const ForwardProblem& problem) {
  const Sequences& k = problem.sequences_k;
  return reads_cache(problem) ||
         (problem.sequences_q.packed && !k.packed && k.has_used && has_many_keys(problem));
}

// Whether a call of the forward kernels has, or may have, sequences of few queries.
bool has_decode(const ForwardProblem& problem) {
  const bool queries_differ = problem.sequences_q.packed || problem.sequences_q.has_used;
  return !problem.mask_lists.given && !is_biased(problem) && decodes(problem) &&
         (problem.has_cache() || !asks_for_fp8_sums(problem)) && queries_differ &&
         keys_are_a_cache(problem);
}

// FP8 kernels keep no largest score, and those on an FP8 cache have a value's scale in each score.
Status check_max_logits(const ForwardProblem& problem) {
  if (!problem.max_logits.wanted || !problem.has_fp8_keys()) return {};
  return unsupported(
      "max_logits is given but k and v are FP8, or become it; the hopper backend has max_logits of "
      "float16 and bfloat16 keys only");
}

// Kernels of biased scores walk no lists over pages, and neither do those of FP8; FP8 kernels with
// a softcap walk no lists, nor do those that widen keys.
Status check_mask(const ForwardProblem& problem) {
  if (!problem.mask_lists.given) return {};
  const KvCache& cache = problem.cache;
  if ((cache.paged || cache.has_batch_idx) && (problem.has_fp8_keys() || is_biased(problem)))
    return unsupported(message(
        "mask is given and ", cache.paged ? "page_table" : "cache_batch_idx", " is given but ",
        problem.has_fp8_keys() ? "k and v are FP8" : message(bias_name(problem), " is given"),
        "; the hopper backend takes them with float16 and bfloat16 keys only, and plain scores or "
        "a softcap; the cpu backend takes all"));
  if (!problem.has_fp8_keys()) return {};
  if (problem.widens_keys())
    return unsupported(
        message("mask is given and q.dtype = ", dtype_name(problem.dtype), " but k and v are ",
                dtype_name(problem.kv_dtype),
                "; the hopper backend takes a mask where q, k and v are of one dtype"));
  if (problem.softcap == 0.f) return {};
  return unsupported(
      "mask is given and softcap is given but k and v are FP8; the hopper backend caps the scores "
      "of a call with a mask for float16 and bfloat16 keys only");
}

// Decode kernels have no biased scores, nor have those that widen keys; those of FP8 add what
// depends on the distance alone.
Status check_bias(const ForwardProblem& problem) {
  if (!is_biased(problem)) return {};
  const char* const name = bias_name(problem);
  if (is_latent(problem))
    return unsupported(message(name,
                               " is given and qv is given or k has latent and rope parts; "
                               "the hopper backend takes one of the two"));
  if (problem.widens_keys())
    return unsupported(message(name, " is given and q.dtype = ", dtype_name(problem.dtype),
                               " but k and v are ", dtype_name(problem.kv_dtype),
                               "; the hopper backend takes it where q, k and v are of one dtype"));
  if (problem.has_fp8_keys() && problem.bias.given)
    return unsupported(
        "bias is given but k and v are FP8, or become it; the hopper backend takes it with "
        "float16 and bfloat16 keys only, and alibi_slopes and bias_table with any");
  return {};
}

// What the forward kernels alone can do: no decode kernel takes the call where they cannot.
Status check_readable(const ForwardProblem& problem, const BestChoices& best) {
  const bool lists = problem.mask_lists.given;
  if (best.any() || !(lists || is_biased(problem))) return {};
  const std::string unreadable = why_unreadable(problem);
  return unsupported(message(lists ? "mask" : bias_name(problem), " is given but ",
                             unreadable.empty() ? why_no_choice(problem) : unreadable));
}

Status plan_decode(const ForwardProblem& problem, const Device& device, Index most_queries,
                   Index likely_queries, size_t* workspace, ForwardSteps* steps) {
  return plan(problem, device, most_queries, likely_queries, workspace, &steps->decode.emplace());
}

// What the forward kernels do with what comes before them.
void explain_forward(const ForwardProblem& problem, const ForwardSteps& steps, Explanation* out) {
  explain_kernel(problem, *steps.forward, out);
  explain_append(problem, steps.append, out);
  explain(problem, *steps.forward, out);
}

void explain_both(const ForwardProblem& problem, const ForwardSteps& steps, Explanation* out) {
  out->add("kernel", message(steps.forward->kernel->id, ", ", steps.decode->kernel->id));
  out->add("why", message("a sequence of at most ", kMostDecodeQueries,
                          " queries runs in the decode kernel and any other in the forward "
                          "kernel, as it would alone"));
  Explanation forward, decode;
  explain_forward(problem, steps, &forward);
  explain(problem, *steps.decode, &decode);
  out->add("forward", forward);
  out->add("decode", decode);
}

}  // namespace

Status plan(const ForwardProblem& problem, const Device& device, size_t* workspace,
            ForwardSteps* steps) {
  FLASH3_CHECK(check_latent(problem));
  FLASH3_CHECK(check_max_logits(problem));
  FLASH3_CHECK(check_mask(problem));
  FLASH3_CHECK(check_bias(problem));
  steps->append = plan_append(problem, workspace);
  if (!problem.has_output()) return check_append_alone(problem);
  const auto decode_all = [&] {
    return plan_decode(problem, device, problem.seq_q, problem.seq_q, workspace, steps);
  };
  if (is_decode(problem)) return decode_all();
  BestChoices best;
  if (why_unreadable(problem).empty()) best = best_choices(problem, device.multiprocessors);
  if (reads_cache(problem)) FLASH3_CHECK(check_readable(problem, best));
  if (reads_cache(problem) && !best.any()) return decode_all();

  FLASH3_CHECK(plan(problem, transformed_q(problem, steps->append), device, best, workspace,
                    &steps->forward.emplace()));
  if (!has_decode(problem)) return {};
  steps->forward->least_queries = int(kMostDecodeQueries) + 1;
  return plan_decode(problem, device, kMostDecodeQueries, kLikelyQueries, workspace, steps);
}

void explain(const ForwardProblem& problem, const ForwardSteps& steps, Explanation* out) {
  if (steps.forward && steps.decode) return explain_both(problem, steps, out);
  if (steps.forward) return explain_forward(problem, steps, out);
  out->add("kernel", steps.decode ? steps.decode->kernel->id : append_name(problem));
  out->add("why",
           steps.decode ? why_decode(problem) : "no query: all that there is to do is to append");
  explain_append(problem, steps.append, out);
  if (steps.decode) explain(problem, *steps.decode, out);
}

Status prepare(const ForwardProblem& problem, const ForwardSteps& steps, Launches* launches) {
  FLASH3_CHECK(check_latent(problem));
  const TensorView q = transformed_q(problem, steps.append);
  prepare_append(problem, steps.append, launches);
  if (steps.decode) FLASH3_CHECK(prepare(problem, q, *steps.decode, launches));
  return steps.forward ? prepare(problem, q, *steps.forward, launches) : Status();
}

ScheduleNeeds needs_of(const ForwardSteps& steps) {
  return steps.decode ? needs_of(*steps.decode) : ScheduleNeeds{};
}

void prepare_schedule(const ForwardProblem& problem, const ForwardSteps& steps, void* data,
                      Launches* launches) {
  if (steps.decode) prepare_schedule(problem, *steps.decode, data, launches);
}

const Family& family() {
  static constexpr Family kHopper = {
      .needs = "9.0",
      // WGMMA is of this capability alone.
      .takes = [](const Capability& c) { return c == Capability{9, 0}; },
      .forward = Route<ForwardProblem, OfDocuments<ForwardSteps>>::make,
      .backward = Route<BackwardProblem, OfDocuments<BackwardPlan>>::make,
  };
  return kHopper;
}

}  // namespace flash3::cuda::sm90
