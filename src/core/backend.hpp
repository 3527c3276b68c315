// SPDX-License-Identifier: Apache-2.0
// What a backend answers, the registry of those built in, and the choice of the one that runs a
// call.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "core/message.hpp"
#include "core/option_checks.hpp"
#include "core/padding.hpp"
#include "core/plan.hpp"

namespace flash3 {

// Stateless; all members may be called from many threads at once.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual flash3_backend id() const = 0;
  virtual const char* name() const = 0;
  // Can this machine run it at all? If not, why.
  virtual Status available() const = 0;
  // What it runs on, in words.
  virtual std::string describe() const = 0;
  // Whether this backend can read and write at address; null counts as yes. Fails where nobody can
  // tell: the device's context is lost.
  virtual Status can_access(const void* address, bool* accessible) const = 0;
  // Memory that no other backend can touch: all others refuse it, since host code cannot tell
  // device memory from its own.
  virtual Status owns(const void*, bool* owned) const {
    *owned = false;
    return {};
  }

  // The largest head dims that it takes; all smaller ones too.
  virtual DimLimits head_dims(flash3_head_dims_of calls) const { return limits_of(calls); }

  // The one entry for each kind of problem; fails where this backend cannot run it, and says why:
  // what available() says comes first. A problem that it is given never quantizes and never fills
  // padding: core/quantized_forward.hpp and core/dispatch.cpp do both around it.
  virtual Status plan(const ForwardProblem& problem, PlanPointer<ForwardProblem>* plan) const = 0;
  virtual Status plan(const BackwardProblem& problem, PlanPointer<BackwardProblem>* plan) const = 0;
  virtual Status plan(const QuantizeProblem& problem, PlanPointer<QuantizeProblem>* plan) const = 0;
  virtual Status plan(const MergeProblem& problem, PlanPointer<MergeProblem>* plan) const = 0;

  // Which of its devices a call runs on now, as a number.
  virtual Status device(uint64_t* number) const {
    *number = 0;
    return {};
  }
  // Writes the mask (core/mask_lists.hpp), after what is on the problem's stream. What it reads and
  // where it writes have been checked.
  virtual Status make_mask(const MaskProblem& problem) const = 0;
  // What a mask in this memory takes, once the stream has come to its end.
  virtual Status read_mask_counts(const MaskShape& shape, const void* data, void* stream,
                                  MaskCounts* counts) const = 0;

  // Writes which weights dropout keeps, after what is on the problem's stream.
  virtual Status make_dropout_mask(const DropoutMaskProblem&) const {
    return unsupported(
        message("the ", name(), " backend does not write masks of dropout; the cpu backend does"));
  }

  // Fills rows of no token, after what is on the stream.
  virtual Status fill_padding(const Padding& padding, void* stream) const = 0;

  // Writes the largest of so many rows of each head, −∞ if there are none, after what is on the
  // stream; a NaN is passed over. rows: those of a head side by side.
  virtual Status max_of_rows(const LseView& rows, int64_t count, int64_t heads, const LseView& out,
                             void* stream) const = 0;
};

// Built-in backends, best first: [hopper,] cpu.
std::span<const Backend* const> backends();

// The backend by id; null if it was not built in.
const Backend* find_backend(flash3_backend id);

// The backend `id`, which is one that is built in, and not auto.
Status built_in_backend(flash3_backend id, const Backend** backend);

// The backend `id` if it is built in and this machine can run it; for auto, the first such.
Status available_backend(flash3_backend id, const Backend** backend);

// A plan, and the backend that made it and runs it.
template <AnyProblem P>
struct PlannedCall {
  const Backend* backend = nullptr;
  PlanPointer<P> plan;
};

// Calls attempt() with the backend `id`; for auto with one after the other, the best first, until
// it succeeds. On failure the status tells why: for auto, each backend's reason. what: "call".
Status on_backend(flash3_backend id, const char* what,
                  const std::function<Status(const Backend&)>& attempt);

// Plans the call on the backend `id`, if that is built in, available, can access every tensor, and
// supports the call; on auto: on the first such. On failure *call is empty and the status tells
// why: for auto, each backend's reason.
template <AnyProblem P>
Status plan_call(const P& problem, flash3_backend id, PlannedCall<P>* call);

// Checks the params, fills *problem and plans the call on the backend that they ask for. A call
// with nothing to write is valid and needs no backend: *call stays empty.
template <AnyProblem P, class Params>
Status plan_params(const Params* params, Pointers pointers, P* problem, PlannedCall<P>* call) {
  FLASH3_CHECK(make_problem(params, pointers, problem));
  return problem->is_empty() ? Status() : plan_call(*problem, problem->backend, call);
}

// Whether the backend can access every tensor of the problem.
template <AnyProblem P>
Status check_memory(const Backend& backend, const P& problem);

// Whether the backend can access an address. `field` and `member`: its name; access: "read" …
Status check_access(const Backend& backend, const char* field, const char* member,
                    const void* address, const char* access);

// Memory that a call is given to work in, and what messages call it.
struct Scratch {
  const char *data_name, *size_name;
  const void* data;
  size_t size;
};

// Whether it is what a call needs, as the C function `teller` told.
Status check_scratch(const Backend& backend, const Scratch& scratch, size_t needed,
                     const char* teller);

// Whether the problem's workspace, and the schedule and the mask that it was given, are what its
// plan needs.
template <AnyProblem P>
Status check_workspace(const P& problem, const PlannedCall<P>& call);

// Whether the call's workspace lies in none of its tensors, and what it writes in neither its
// schedule nor its mask; check_aliases() has compared the tensors with each other. `params` are
// those that became the problem.
template <AnyProblem P, class Params>
Status check_scratch_aliases(const Params* params, const P& problem, const PlannedCall<P>& call);

const char* backend_name(flash3_backend id);

// Defined by each backend that is built in.
const Backend& cpu_backend();
const Backend& hopper_backend();

}  // namespace flash3
