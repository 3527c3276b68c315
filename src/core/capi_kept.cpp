// SPDX-License-Identifier: Apache-2.0
// The C functions that make what the caller keeps in memory of its own: schedules and masks.
#include "core/backend.hpp"
#include "core/guarded.hpp"
#include "core/kept.hpp"

namespace flash3 {
namespace {

// ---- schedules that the caller keeps ----

flash3_status answer_schedule_size(const flash3_forward_params* params, size_t* bytes) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_result(bytes, "bytes"));
    ForwardProblem problem;
    PlannedCall<ForwardProblem> call;
    FLASH3_CHECK(plan_params(params, Pointers::kOptional, &problem, &call));
    *bytes = call.plan ? call.plan->schedule_needs().bytes : 0;
    return {};
  });
}

flash3_status schedule(const flash3_forward_params* params, flash3_schedule* made) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_result(made, "schedule"));
    ForwardProblem problem;
    PlannedCall<ForwardProblem> call;
    FLASH3_CHECK(plan_params(params, Pointers::kOptional, &problem, &call));
    FLASH3_CHECK(check_schedule_aliases(params, problem, call, *made));
    return make_schedule(problem, call, made);
  });
}

// ---- masks ----

flash3_status answer_mask_size(const flash3_mask_params* params, size_t* bytes) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_result(bytes, "bytes"));
    MaskProblem problem;
    FLASH3_CHECK(make_mask_problem(params, Pointers::kOptional, &problem));
    *bytes = mask_bytes(problem.shape, problem.documents);
    return {};
  });
}

flash3_status mask(const flash3_mask_params* params, flash3_mask* made) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_result(made, "mask"));
    return make_mask(params, made);
  });
}

flash3_status mask_description(const flash3_mask_params* params, flash3_mask* described) {
  return guarded([&]() -> Status {
    FLASH3_CHECK(check_result(described, "mask"));
    return describe_mask(params, described);
  });
}

flash3_status answer_mask_used(const flash3_mask* mask, void* stream, int64_t* blocks,
                               int64_t* partial_blocks, int64_t* documents) {
  return guarded([&]() -> Status {
    if (!mask) return invalid_argument("mask is null; it must be one that was made");
    FLASH3_CHECK(check_result(blocks, "blocks"));
    FLASH3_CHECK(check_result(partial_blocks, "partial_blocks"));
    FLASH3_CHECK(check_result(documents, "documents"));
    MaskCounts counts{};
    FLASH3_CHECK(count_mask(*mask, stream, &counts));
    *blocks = counts.blocks, *partial_blocks = counts.partial_blocks;
    *documents = counts.documents;
    return {};
  });
}

}  // namespace
}  // namespace flash3

extern "C" {

flash3_status flash3_forward_schedule_size(const flash3_forward_params* params, size_t* bytes) {
  return flash3::answer_schedule_size(params, bytes);
}

flash3_status flash3_forward_schedule(const flash3_forward_params* params,
                                      flash3_schedule* schedule) {
  return flash3::schedule(params, schedule);
}

flash3_status flash3_mask_size(const flash3_mask_params* params, size_t* bytes) {
  return flash3::answer_mask_size(params, bytes);
}

flash3_status flash3_mask_describe(const flash3_mask_params* params, flash3_mask* mask) {
  return flash3::mask_description(params, mask);
}

flash3_status flash3_mask_make(const flash3_mask_params* params, flash3_mask* mask) {
  return flash3::mask(params, mask);
}

flash3_status flash3_mask_used(const flash3_mask* mask, void* stream, int64_t* blocks,
                               int64_t* partial_blocks, int64_t* documents) {
  return flash3::answer_mask_used(mask, stream, blocks, partial_blocks, documents);
}

}  // extern "C"
