// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "core/alias_checks.hpp"
#include "core/kept.hpp"
#include "core/message.hpp"
#include "core/params.hpp"

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

}  // namespace flash3
