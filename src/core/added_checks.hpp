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

// How many keys a sequence of the call may have, and what says so.
struct KeyCount {
  std::string name;
  int64_t count = 0;
  bool is_exact = false;  // k has a row for each
};

template <class Params>
KeyCount key_count(const Params& p, const Layout& layout) {
  int64_t rows = p.k.shape[layout.packed_k ? 0 : 1];
  std::string name = layout.packed_k ? "k.shape[0]" : "k.shape[1]";
  bool is_paged = false;
  if constexpr (requires { p.page_table; }) is_paged = is_given(p.page_table);
  if constexpr (requires { p.page_table; })
    if (is_paged) rows *= p.page_table.shape[1], name = "page_table.shape[1] * k.shape[1]";
  if (!is_paged && !layout.packed_k) return {name, rows, true};
  if (p.max_seqlen_k > 0 && p.max_seqlen_k < rows) return {"max_seqlen_k", p.max_seqlen_k};
  return {name, rows};
}

// What these tensors are checked against. batch: the number of sequences.
struct AddedContext {
  const Field& q;
  Extent batch;
  KeyCount keys;
  const Layout& layout;
  Pointers pointers;
};

// One of them, which is given: dtype, shape, strides, memory. like: the tensor whose shape it has,
// or null.
Status check_added_tensor(const ParamField& field, const flash3_tensor& tensor,
                          const flash3_tensor* like, const AddedContext& context);

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
  const AddedContext context{q, batch_of(q, sequences), key_count(p, layout), layout, pointers};
  for (const ParamField& field : added_fields<Params>()) {
    if (field.kind != FieldKind::kTensor || !is_given(*field.tensor(&p))) continue;
    const ParamField* const like = find_field<Params>(field.like);
    FLASH3_CHECK(
        check_added_tensor(field, *field.tensor(&p), like ? like->tensor(&p) : nullptr, context));
    FLASH3_CHECK(check_company(field, p));
  }
  return {};
}

void view_added(const flash3_tensor& tensor, const Problem& problem, LseView* view);
void view_added(const flash3_tensor& tensor, const Problem& problem, HeadsView* view);
void view_added(const flash3_tensor& tensor, const Problem& problem, BiasView* view);
void view_added(const flash3_tensor& tensor, const Problem& problem, BiasTableView* view);
void view_added(const flash3_tensor& tensor, const Problem& problem, StateView* view);
StateView state_view(const flash3_tensor& tensor);

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
    view_added(p.*member, *problem, &view);
  });
}

inline bool is_given(const LseView& view) { return view.wanted; }
template <class View>
  requires requires(const View& view) { view.given; }
bool is_given(const View& view) {
  return view.given;
}

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
  for_each_added(problem, [&](const ParamField& field, auto, const auto& view) {
    if (!status.ok() || !is_given(view) || !field.is_cpu_alone ||
        backend.id() == FLASH3_BACKEND_CPU)
      return;
    status = unsupported(message(field.name, " is given but the ", backend.name(),
                                 " backend has no kernels that take it; the cpu backend has"));
  });
  return status;
}

}  // namespace flash3
