// SPDX-License-Identifier: Apache-2.0
// The rules for the tensors of added_fields(), which their comments in flash3.h describe, and what
// a problem holds of them: all that is done to them alike.
#pragma once

#include <concepts>
#include <string>

#include "core/fields.hpp"
#include "core/message.hpp"
#include "core/params.hpp"
#include "core/pointers.hpp"
#include "core/tensor_checks.hpp"

namespace flash3 {

// One of them, if it is given: dtype, shape, strides, memory. batch: the number of sequences.
Status check_added_tensor(const ParamField& field, const flash3_tensor& tensor, const Field& q,
                          const Extent& batch, const Layout& layout, Pointers pointers);

// Fails where a field is given that the tensor does not go with.
template <class Params>
Status check_company(const ParamField& field, const Params& p) {
  for (int64_t i = 0; i < count_words(field.without); ++i) {
    const std::string_view name = word_at(field.without, i);
    const ParamField* const other = find_field<Params>(name);
    if (!other || other->kind != FieldKind::kTensor || !is_given(*other->tensor(&p))) continue;
    return invalid_argument(
        message(field.name, " is given and ", name, " is given; a call takes one of the two"));
  }
  return {};
}

template <class Params>
Status check_added(const Params& p, const Field& q, const Layout& layout, Pointers pointers) {
  const SequenceFields sequences = sequences_of_q(p);
  for (const ParamField& field : added_fields<Params>()) {
    if (field.kind != FieldKind::kTensor || !is_given(*field.tensor(&p))) continue;
    FLASH3_CHECK(
        check_added_tensor(field, *field.tensor(&p), q, batch_of(q, sequences), layout, pointers));
    FLASH3_CHECK(check_company(field, p));
  }
  return {};
}

void view_added(const flash3_tensor& tensor, bool packed, LseView* view);
void view_added(const flash3_tensor& tensor, bool packed, HeadsView* view);
void view_added(const flash3_tensor& tensor, bool packed, StateView* view);

// Calls visit(field, member, view) for each that the params of the problem have.
template <class P, class Visit>
void for_each_added(P& problem, const Visit& visit) {
  using Fields = FieldsOf<typename ParamsOf<P>::type>;
  const auto all = [&](const ParamField& field, auto member, auto& view) {
    visit(field, member, view);
    return true;
  };
  if constexpr (requires { Fields::visit_added_tensors(problem, all); })
    Fields::visit_added_tensors(problem, all);
}

// After the sequences of the problem are known.
template <class P>
void fill_added(const typename ParamsOf<P>::type& p, P* problem) {
  for_each_added(*problem, [&](const ParamField&, auto member, auto& view) {
    view_added(p.*member, problem->sequences_q.packed, &view);
  });
}

inline bool is_given(const LseView& view) { return view.wanted; }
inline bool is_given(const HeadsView& view) { return view.given; }
inline bool is_given(const StateView& view) { return view.given; }

// ", with max_logits" of each that a call has.
template <class P>
std::string describe_added(const P& problem) {
  std::string text;
  for_each_added(problem, [&](const ParamField& field, auto, const auto& view) {
    if (is_given(view)) append(text, message(", with ", field.name));
  });
  return text;
}

// Fails for what no kernel of the backend takes (core/backend.hpp).
template <class P, class Backend>
Status check_added_on(const P& problem, const Backend& backend) {
  Status status;
  const auto refuse = [&](std::string_view name) {
    status = unsupported(message(name, " is given but the ", backend.name(),
                                 " backend has no kernels that take it; the cpu backend has"));
  };
  if constexpr (requires { problem.dropout; })
    if (problem.dropout.given() && backend.id() != FLASH3_BACKEND_CPU) refuse("dropout_p");
  for_each_added(problem, [&](const ParamField& field, auto, const auto& view) {
    if (!status.ok() || !is_given(view) || !field.is_cpu_alone ||
        backend.id() == FLASH3_BACKEND_CPU)
      return;
    refuse(field.name);
  });
  return status;
}

}  // namespace flash3
