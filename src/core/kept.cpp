// SPDX-License-Identifier: Apache-2.0
// Schedules and plans that the caller keeps. (Masks: kept_mask.cpp.)
#include "core/kept.hpp"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

#include "core/alias_checks.hpp"
#include "core/explain.hpp"
#include "core/mask_checks.hpp"
#include "core/message.hpp"
#include "core/option_checks.hpp"
#include "core/params.hpp"
#include "core/pointers.hpp"
#include "core/tensor_checks.hpp"

namespace flash3 {
namespace {

void add(const Sequences& s, Hash* hash) {
  hash->add(s.packed, s.has_used, s.rows, s.max_length, s.bounded);
}

// Whatever a schedule may depend on beside what the lengths hold.
uint64_t key_of(const ForwardProblem& p, const PlannedCall<ForwardProblem>& call) {
  Hash hash;
  hash.add(p.dtype, p.kv_dtype, p.out_dtype, p.batch, p.seq_q, p.seq_k, p.heads_q, p.heads_k,
           p.head_dim, p.head_dim_v, p.qv.dim);
  add(p.sequences_q, &hash);
  add(p.sequences_k, &hash);
  p.mask_rule.visit([&](auto... parts) { hash.add(parts...); });
  hash.add(p.softcap > 0.f, p.tree.given);
  hash.add(p.cache.paged, p.cache.page_size, p.cache.has_batch_idx, p.cache.has_leftpad);
  hash.add(p.append.given, p.append.has_v, p.append.rotary.given);
  if (p.append.given) add(p.append.sequences, &hash);
  hash.add(p.sm_margin, p.quantizes);
  if (call.plan) hash.add(call.backend->id(), call.plan->schedule_needs().variant);
  return hash.key();
}

Status check_length(const char* name, bool given, const void* data) {
  if (!given || data) return {};
  return invalid_argument(
      message(name, ".data is null; a schedule is made from the lengths that it holds"));
}

Status check_lengths_are_there(const ForwardProblem& p) {
  const Sequences &q = p.sequences_q, &k = p.sequences_k, &added = p.append.sequences;
  FLASH3_CHECK(check_length("cu_seqlens_q", q.packed, q.cu));
  FLASH3_CHECK(check_length("cu_seqlens_k", k.packed, k.cu));
  FLASH3_CHECK(check_length("seqused_q", q.has_used, q.used));
  FLASH3_CHECK(check_length("seqused_k", k.has_used, k.used));
  FLASH3_CHECK(check_length("leftpad_k", p.cache.has_leftpad, p.cache.leftpad));
  return check_length("cu_seqlens_k_new", added.packed, added.cu);
}

Status check_room(const flash3_schedule& schedule, const PlannedCall<ForwardProblem>& call) {
  return check_scratch(*call.backend,
                       {"schedule->data", "schedule->size", schedule.data, schedule.size},
                       call.plan->schedule_needs().bytes, "flash3_forward_schedule_size");
}

Status check_key(const flash3_schedule& schedule, uint64_t key) {
  if (schedule.key == key) return {};
  return invalid_argument(message(
      "schedule->key = ", schedule.key, " but this call needs ", key,
      "; flash3_forward_schedule sets it, for calls with the sizes, fields, mask, sm_margin, "
      "backend and device of its params"));
}

}  // namespace

Status check_schedule(const ForwardProblem& problem, const PlannedCall<ForwardProblem>& call) {
  if (!problem.schedule) return {};
  FLASH3_CHECK(check_key(*problem.schedule, key_of(problem, call)));
  return call.plan ? check_room(*problem.schedule, call) : Status();
}

Status check_schedule_aliases(const flash3_forward_params* params, const ForwardProblem& problem,
                              const PlannedCall<ForwardProblem>& call,
                              const flash3_schedule& schedule) {
  const size_t bytes = call.plan ? call.plan->schedule_needs().bytes : 0;
  if (bytes == 0) return {};
  WholeParams<flash3_forward_params> whole;
  FLASH3_CHECK(whole.read(params));
  CallMemory memory;
  const size_t tensors = add_tensors(*whole, problem, &memory);
  memory.add("schedule->data", schedule.data, bytes, true);
  return memory.check(tensors);
}

Status make_schedule(const ForwardProblem& problem, const PlannedCall<ForwardProblem>& call,
                     flash3_schedule* schedule) {
  const uint64_t key = key_of(problem, call);
  if (schedule->key != 0) FLASH3_CHECK(check_key(*schedule, key));
  if (call.plan) {
    FLASH3_CHECK(check_lengths_are_there(problem));
    FLASH3_CHECK(check_room(*schedule, call));
    FLASH3_CHECK(call.plan->make_schedule(problem, schedule->data));
  }
  schedule->key = key;
  return {};
}

namespace {

Status differs(std::string_view field, const auto& planned, const auto& given) {
  return invalid_argument(message(field, " = ", given, " but the plan was made for ", planned,
                                  "; only addresses, stream and workspace may change"));
}

Status check_same_form(const char* name, const flash3_tensor& planned, const flash3_tensor& given) {
  if (given.dtype != planned.dtype)
    return differs(message(name, ".dtype"), dtype_name(planned.dtype), dtype_name(given.dtype));
  if (given.ndim != planned.ndim) return differs(message(name, ".ndim"), planned.ndim, given.ndim);
  for (int d = 0; d < planned.ndim; ++d) {
    const auto part = [&](const char* of) { return message(name, of, "[", d, "]"); };
    if (given.shape[d] != planned.shape[d])
      return differs(part(".shape"), planned.shape[d], given.shape[d]);
    if (given.stride[d] != planned.stride[d])
      return differs(part(".stride"), planned.stride[d], given.stride[d]);
  }
  if (given.data && !is_given(planned))
    return differs(message(name, ".data"), "null", hex(given.data));
  return {};
}

// Copies by TMA and wide loads are planned by where addresses lie in 16 bytes.
Status check_address(const char* name, const flash3_tensor& planned, const flash3_tensor& given) {
  constexpr uintptr_t kAlignment = 16;
  const auto aligned = [](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % kAlignment == 0;
  };
  FLASH3_CHECK(check_data({name, "", given.ndim, given}, Pointers::kRequired));
  if (aligned(given.data) || !aligned(planned.data)) return {};
  return invalid_argument(message(name, ".data = ", hex(given.data),
                                  " but the plan was made for a multiple of ", kAlignment));
}

// A mask of the same sizes and band, whose lists may say something else.
Status take_same_mask(const flash3_mask* given, Problem* problem) {
  MaskLists& planned = problem->mask_lists;
  if (planned.given != (given != nullptr))
    return differs("mask", planned.given ? "given" : "null", given ? "given" : "null");
  if (!given) return {};
  const MaskLists lists = mask_lists(*given);
  const auto check = [](const char* name, int64_t of_plan, int64_t own) {
    return of_plan == own ? Status() : differs(name, of_plan, own);
  };
  const MaskShape &plan = planned.shape, &own = lists.shape;
  FLASH3_CHECK(check("mask->batch", plan.batch, own.batch));
  FLASH3_CHECK(check("mask->heads", plan.heads, own.heads));
  FLASH3_CHECK(check("mask->seq_q", plan.seq_q, own.seq_q));
  FLASH3_CHECK(check("mask->seq_k", plan.seq_k, own.seq_k));
  FLASH3_CHECK(check("mask->documents", planned.documents, lists.documents));
  FLASH3_CHECK(check("mask->window_left", planned.rule.window_left, lists.rule.window_left));
  FLASH3_CHECK(check("mask->window_right", planned.rule.window_right, lists.rule.window_right));
  FLASH3_CHECK(check("mask->chunk", planned.rule.chunk, lists.rule.chunk));
  FLASH3_CHECK(check("mask->mask_alignment", planned.rule.top_left, lists.rule.top_left));
  FLASH3_CHECK(check_mask_shape(lists));
  planned = lists;
  return {};
}

}  // namespace

template <AnyProblem P>
template <class Problem, class Visit>
Status KeptPlan<P>::visit_given(Problem& problem, const Visit& visit) const {
  uint32_t given = given_;
  return visit_pointers(problem,
                        [&](const char* name, auto member, auto& pointer, const char*) -> Status {
                          const bool is_given = given % 2 != 0;
                          given /= 2;
                          return is_given ? visit(name, member, pointer) : Status();
                        });
}

template <AnyProblem P>
Status KeptPlan<P>::make(const Params* params, std::unique_ptr<flash3_plan>* plan) {
  auto made = std::make_unique<KeptPlan>();
  FLASH3_CHECK(read_params(params, &made->params_));
  made->params_.struct_size = sizeof made->params_;
  FLASH3_CHECK(plan_params(&made->params_, Pointers::kOptional, &made->problem_, &made->call_));
  static_assert(count_tensors<Params>() <= 32);
  uint32_t tensor = 1;
  FLASH3_CHECK(visit_pointers(made->problem_,
                              [&](const char*, auto member, const auto&, const char*) -> Status {
                                if (is_given(made->params_.*member)) made->given_ |= tensor;
                                tensor *= 2;
                                return {};
                              }));
  made->find_compared();
  *plan = std::move(made);
  return {};
}

template <AnyProblem P>
size_t KeptPlan<P>::workspace_bytes() const {
  return call_.plan ? call_.plan->workspace_bytes() : 0;
}

template <AnyProblem P>
std::string KeptPlan<P>::explain() const {
  return explain_call(problem_, call_);
}

template <AnyProblem P>
Status KeptPlan<P>::run(const Params* params) const {
  WholeParams<Params> whole;
  FLASH3_CHECK(whole.read(params));
  const Params& given = *whole;
  if (!differs_in_addresses_alone(given)) FLASH3_CHECK(check_same_call(given));
  P problem = problem_;
  FLASH3_CHECK(take_addresses(given, &problem));
  if constexpr (std::same_as<P, ForwardProblem>) FLASH3_CHECK(check_shared_rows(problem));
  problem.stream = given.stream;
  problem.workspace = given.workspace;
  problem.workspace_size = given.workspace_size;
  if constexpr (std::same_as<P, ForwardProblem>) problem.schedule = given.schedule;
  if constexpr (requires { given.mask; }) FLASH3_CHECK(take_same_mask(given.mask, &problem));
  FLASH3_CHECK(check_aliases(given, problem));
  if (call_.plan) FLASH3_CHECK(check_memory(*call_.backend, problem));
  FLASH3_CHECK(check_workspace(problem, call_));
  FLASH3_CHECK(check_scratch_aliases(&given, problem, call_));
  return call_.plan ? call_.plan->launch(problem) : Status();
}

template <AnyProblem P>
void KeptPlan<P>::find_compared() {
  static_assert(sizeof params_ <= UINT16_MAX);
  std::array<uint16_t, kMostCompared> changing{};  // where fields begin that may
  size_t count = 0;
  const auto add = [&](const auto& field) {
    assert(count + 1 < kMostCompared);
    changing[count++] = static_cast<uint16_t>(reinterpret_cast<const char*>(&field) -
                                              reinterpret_cast<const char*>(&params_));
  };
  static_cast<void>(visit_given(problem_, [&](const char*, auto member, const auto&) -> Status {
    add((params_.*member).data);
    return {};
  }));
  add(params_.stream);
  add(params_.workspace);
  add(params_.workspace_size);
  if constexpr (std::same_as<P, ForwardProblem>) add(params_.schedule);
  if constexpr (requires { params_.mask; }) add(params_.mask);
  std::sort(changing.begin(), changing.begin() + count);
  static_assert(sizeof params_.workspace_size == sizeof(void*));  // all are of one size
  uint16_t begin = 0;
  for (size_t i = 0; i < count; ++i) {
    if (begin < changing[i]) compared_[compared_count_++] = {begin, changing[i]};
    begin = static_cast<uint16_t>(changing[i] + sizeof(void*));
  }
  if (begin < sizeof params_) compared_[compared_count_++] = {begin, sizeof params_};
}

// Two calls mostly differ in nothing else: a comparison of all other bytes then takes the place of
// one a field. Where bytes differ that mean nothing, check_same_call() has the answer.
template <AnyProblem P>
bool KeptPlan<P>::differs_in_addresses_alone(const Params& given) const {
  const auto* const planned = reinterpret_cast<const char*>(&params_);
  const auto* const now = reinterpret_cast<const char*>(&given);
  return std::all_of(compared_.begin(), compared_.begin() + compared_count_, [&](Bytes bytes) {
    return std::memcmp(planned + bytes.begin, now + bytes.begin, bytes.end - bytes.begin) == 0;
  });
}

template <AnyProblem P>
Status KeptPlan<P>::check_same_call(const Params& given) const {
  FLASH3_CHECK(
      visit_pointers(problem_, [&](const char* name, auto member, const auto&, const char*) {
        return check_same_form(name, params_.*member, given.*member);
      }));
  return visit_options(params_, given, [](std::string_view name, auto planned, auto now) {
    return planned == now ? Status() : differs(name, planned, now);
  });
}

template <AnyProblem P>
Status KeptPlan<P>::take_addresses(const Params& given, P* problem) const {
  return visit_given(*problem, [&](const char* name, auto member, auto*& pointer) -> Status {
    FLASH3_CHECK(check_address(name, params_.*member, given.*member));
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>((given.*member).data);
    return {};
  });
}

template class KeptPlan<ForwardProblem>;
template class KeptPlan<BackwardProblem>;
template class KeptPlan<QuantizeProblem>;
template class KeptPlan<MergeProblem>;

}  // namespace flash3
