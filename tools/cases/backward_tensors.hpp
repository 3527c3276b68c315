// SPDX-License-Identifier: Apache-2.0
// The tensors of a backward case, guarded and filled like those of cases/tensors.hpp.
#pragma once

#include "cases/tensors.hpp"

namespace flash3::cases {

// The gradients of the tensors that flash3.h has gained, a T each; all zero or empty: not wanted.
template <class T>
struct AddedGradients {
  static consteval size_t count() {
    size_t count = 0;
    for (const ParamField& field : added_fields<flash3_backward_params>())
      count += field.kind == FieldKind::kTensor && field.is_written;
    return count;
  }
  std::array<T, count()> all{};

  // Calls visit(field, T&) for each of one, or visit(field, T&, U&) for those of two.
  template <class Visit, class... Gradients>
  static void visit(const Visit& visit, Gradients&... gradients) {
    size_t i = 0;
    for (const ParamField& field : added_fields<flash3_backward_params>())
      if (field.kind == FieldKind::kTensor && field.is_written)
        visit(field, gradients.all[i]...), ++i;
  }
};

struct BackwardViews {
  flash3_tensor q{}, k{}, v{}, out{}, lse{}, dout{}, dlse{}, dq{}, dk{}, dv{};
  flash3_tensor dsink{};
  ExtraViews extra{};
  AddedGradients<flash3_tensor> added{};
};

struct BackwardTensors {
  GuardedTensor q, k, v, out, lse,
      dout;            // lse is empty if the case has none: such a call is refused
  GuardedTensor dlse;  // empty if not wanted
  GuardedTensor dq, dk, dv;
  GuardedTensor dsink;  // empty if it is not wanted
  ExtraTensors extra;
  AddedGradients<GuardedTensor> added;

  BackwardViews views() const;
};

// q, k and v after the case's seed and distribution, as for the forward; out and lse are the
// oracle's, rounded; dout and dlse N(0, 1); dq, dk, dv and dsink hold the fill pattern. "special"
// means here: a NaN in one row of q, another in one row of dout (what is infinite leaves no
// gradient that implementations could agree on). The case must be one that the library takes.
// oracle_threads 0: all cores.
BackwardTensors make_backward_tensors(const Case& c, int oracle_threads = 1);

// The call on these views, without workspace, stream or backend.
flash3_backward_params make_backward_params(const Case& c, const BackwardViews& views);

// The same without data, for questions.
flash3_backward_params make_backward_question(const Case& c);

}  // namespace flash3::cases
