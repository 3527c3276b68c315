// SPDX-License-Identifier: Apache-2.0
// flash3_dropout_mask: its rules, and the choice of the backend that writes the mask.
#include "core/added_checks.hpp"
#include "core/alias_checks.hpp"
#include "core/backend.hpp"
#include "core/guarded.hpp"
#include "core/message.hpp"
#include "core/params.hpp"
#include "flash3/dropout.h"

namespace flash3 {
namespace {

Status check_kept(const flash3_tensor& t) {
  const Field field{"kept", "[batch, heads_q, seq_q, seq_k]", 4, t};
  if (t.dtype != FLASH3_UINT8)
    return invalid_argument(message("kept.dtype = ", dtype_name(t.dtype), " but it must be ",
                                    dtype_name(FLASH3_UINT8)));
  FLASH3_CHECK(check_sizes(field));
  FLASH3_CHECK(check_strides(field));
  FLASH3_CHECK(check_no_overlap(field));
  return check_data(field, Pointers::kRequired);
}

Status check_state(const flash3_tensor& t, const Field& kept) {
  if (!is_given(t)) return {};
  const ParamField* const field = find_field<flash3_forward_params>("dropout_state");
  const Layout layout{false, false};
  return check_added_tensor(*field, t, nullptr, {kept, {kept, 0}, {}, layout, Pointers::kRequired});
}

DropoutMaskProblem problem_of(const flash3_dropout_mask_params& p) {
  DropoutMaskProblem made;
  made.dropout = {dropout_threshold(p.dropout_p), p.dropout_seed, p.dropout_offset};
  made.state = state_view(p.dropout_state);
  const TensorView kept = view(p.kept);
  made.kept = static_cast<uint8_t*>(kept.data);
  made.batch = kept.batch, made.heads = kept.seq, made.seq_q = kept.heads, made.seq_k = kept.dim;
  made.stride_batch = kept.stride_batch, made.stride_head = kept.stride_seq;
  made.stride_query = kept.stride_head;
  made.backend = static_cast<flash3_backend>(p.backend);
  made.num_threads = p.num_threads;
  made.stream = p.stream;
  return made;
}

Status check_memory(const Backend& backend, const DropoutMaskProblem& problem) {
  FLASH3_CHECK(check_access(backend, "kept", ".data", problem.kept, kWrite));
  return problem.state.data
             ? check_access(backend, "dropout_state", ".data", problem.state.data, kRead)
             : Status();
}

Status dropout_mask(const flash3_dropout_mask_params* params) {
  WholeParams<flash3_dropout_mask_params> whole;
  FLASH3_CHECK(whole.read(params));
  const flash3_dropout_mask_params& p = *whole;
  FLASH3_CHECK(check_kept(p.kept));
  FLASH3_CHECK(check_dropout_p(p.dropout_p));
  FLASH3_CHECK(check_state(p.dropout_state, {"kept", "", 4, p.kept}));
  FLASH3_CHECK(check_context(p));
  const DropoutMaskProblem problem = problem_of(p);
  if (problem.is_empty()) return {};
  CallMemory memory;
  memory.add("kept", p.kept, true);
  if (problem.state.data) memory.add("dropout_state", p.dropout_state, false);
  FLASH3_CHECK(memory.check(0));
  return on_backend(problem.backend, "call", [&](const Backend& backend) -> Status {
    FLASH3_CHECK(backend.available());
    FLASH3_CHECK(check_memory(backend, problem));
    return backend.make_dropout_mask(problem);
  });
}

}  // namespace

Status check_dropout_p(float p) {
  if (p >= 0.f && p < 1.f) return {};
  return invalid_argument(message("dropout_p = ", p, " but it must be from 0 (none) to below 1"));
}

}  // namespace flash3

extern "C" flash3_status flash3_dropout_mask(const flash3_dropout_mask_params* params) {
  return flash3::guarded([&] { return flash3::dropout_mask(params); });
}
