// SPDX-License-Identifier: Apache-2.0
#include "core/alias_checks.hpp"

#include <algorithm>
#include <cassert>
#include <concepts>
#include <string_view>

#include "core/message.hpp"
#include "core/problem.hpp"

namespace flash3 {
namespace {

// ---- whether two strided tensors have a byte in common ----
//
// They do if  a + Σ i_d · s_d = b + Σ j_d · t_d  for indices i and j within their shapes and an
// offset within an element each. With j counted from its other end all terms are positive:
//
//     Σ stride · x = target,   0 ≤ x ≤ most
//
// which a search over x, the largest stride first, decides: what the smaller strides can still add
// up to leaves two or three values of each x where no tensor overlaps itself.

struct Term {
  int64_t stride, most;
};

class Terms {
 public:
  // An index of so many steps of one of the two tensors.
  void add(int64_t stride, int64_t most) {
    if (stride == 0 || most == 0) return;
    int at = 0;
    while (at < count_ && terms_[at].stride > stride) ++at;
    if (at < count_ && terms_[at].stride == stride) return void(terms_[at].most += most);
    std::copy_backward(terms_.begin() + at, terms_.begin() + count_, terms_.begin() + count_ + 1);
    terms_[at] = {stride, most};
    ++count_;
  }

  // Whether the terms can add up to the target. A search that takes too long, which no tensors but
  // those made for it need, says no: a call that may be right is not refused.
  bool reach(int64_t target) {
    int64_t rest = 0;
    for (int i = count_; i-- > 0;) {
      rest_[i] = rest;
      rest += terms_[i].stride * terms_[i].most;
    }
    int steps = 1 << 14;
    return target >= 0 && target <= rest && search(0, target, &steps);
  }

 private:
  static constexpr int kMost = 10;  // four dimensions and the bytes of an element, of two tensors

  bool search(int i, int64_t target, int* steps) const {
    if (target == 0) return true;
    if (i == count_ || --*steps < 0) return false;
    const auto [stride, most] = terms_[i];
    const int64_t least = target > rest_[i] ? (target - rest_[i] + stride - 1) / stride : 0;
    for (int64_t x = std::min(most, target / stride); x >= least; --x)
      if (search(i + 1, target - x * stride, steps)) return true;
    return false;
  }

  std::array<Term, kMost> terms_{};    // the largest stride first
  std::array<int64_t, kMost> rest_{};  // what the terms after each can add up to
  int count_ = 0;
};

// In units of so many bytes, of which all strides, sizes and addresses are multiples.
void add_terms(const flash3_tensor* tensor, int64_t bytes, int64_t unit, Terms* terms) {
  if (!tensor) return terms->add(1, bytes / unit - 1);
  const int64_t element = dtype_size(tensor->dtype) / unit;
  terms->add(1, element - 1);
  for (int d = 0; d < tensor->ndim; ++d)
    if (tensor->shape[d] > 1) terms->add(tensor->stride[d] * element, tensor->shape[d] - 1);
}

}  // namespace

void CallMemory::add(const char* name, const flash3_tensor& tensor, bool written, bool by_page) {
  int64_t last = 0;
  for (int d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape[d] == 0) return;
    if (tensor.shape[d] > 1) last += (tensor.shape[d] - 1) * tensor.stride[d];
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
  const auto bytes =
      static_cast<uintptr_t>(last + 1) * static_cast<uintptr_t>(dtype_size(tensor.dtype));
  assert(count_ < kMost);
  parts_[count_++] = {name, &tensor, begin, begin + bytes, written, by_page};
}

void CallMemory::add(const char* name, const void* data, size_t bytes, bool written) {
  if (!data || bytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  assert(count_ < kMost);
  parts_[count_++] = {name, nullptr, begin, begin + bytes, written, false};
}

bool CallMemory::share_bytes(const Part& a, const Part& b) {
  if (a.begin >= b.end || b.begin >= a.end) return false;
  const auto unit_of = [](const Part& part) {
    return part.tensor ? int64_t{dtype_size(part.tensor->dtype)} : 1;
  };
  // An address is a multiple of the size of its elements.
  const int64_t unit = std::min(unit_of(a), unit_of(b));
  Terms terms;
  for (const Part* part : {&a, &b})
    add_terms(part->tensor, static_cast<int64_t>(part->end - part->begin), unit, &terms);
  return terms.reach(static_cast<int64_t>(b.end - a.begin) / unit - 1);
}

// Pages of the same number. Where the first two share nothing, later ones may only if they are not
// equally far apart; such tensors are compared as wholes.
bool CallMemory::share_page(const Part& a, const Part& b) {
  if (a.tensor->shape[0] > 1 && b.tensor->shape[0] > 1 &&
      a.tensor->stride[0] * dtype_size(a.tensor->dtype) !=
          b.tensor->stride[0] * dtype_size(b.tensor->dtype))
    return share_bytes(a, b);
  flash3_tensor first_a = *a.tensor, first_b = *b.tensor;
  first_a.shape[0] = first_b.shape[0] = 1;
  CallMemory first;
  first.add(a.name, first_a, true);
  first.add(b.name, first_b, true);
  return share_bytes(first.parts_[0], first.parts_[1]);
}

Status CallMemory::check(size_t checked) const {
  for (size_t i = 0; i < count_; ++i) {
    for (size_t j = std::max(i + 1, checked); j < count_; ++j) {
      const Part &a = parts_[i], &b = parts_[j];
      if (!a.written && !b.written) continue;
      if (a.by_page && b.by_page ? !share_page(a, b) : !share_bytes(a, b)) continue;
      const bool both = a.written && b.written;
      const Part& written = a.written ? a : b;
      const Part& other = &written == &a ? b : a;
      std::string text =
          message(written.name, " at ", hex(reinterpret_cast<const void*>(written.begin)), " and ",
                  other.name, " at ", hex(reinterpret_cast<const void*>(other.begin)),
                  " share memory, but the call writes ", both ? "both" : written.name,
                  "; what it writes must lie in no other tensor of the call");
      if (std::string_view(a.name) == "k" && std::string_view(b.name) == "v")
        append(text, ", but for v in the rows of k where k_new alone is given");
      return invalid_argument(std::move(text));
    }
  }
  return {};
}

template <AnyProblem P>
size_t add_tensors(const typename ParamsOf<P>::type& params, const P& problem, CallMemory* memory) {
  const auto add = [&](const char* name, auto member, auto* data, const char* access) -> Status {
    if (!data) return {};  // not there, or not looked at
    // Values that are appended with their keys lie in those: check_shared_rows() sees to it.
    if constexpr (std::same_as<P, ForwardProblem>)
      if (member == &flash3_forward_params::v && problem.append.given && !problem.append.has_v)
        return {};
    // In transformers' caches k and v are pages of one pool, of which the table never names two
    // that meet.
    bool by_page = false;
    if constexpr (std::same_as<P, ForwardProblem>)
      by_page = (problem.cache.paged || problem.cache.has_batch_idx) &&
                (member == &flash3_forward_params::k || member == &flash3_forward_params::v);
    memory->add(name, params.*member, access == kWrite, by_page);
    return {};
  };
  static_cast<void>(visit_pointers(problem, add));
  return memory->count();
}

template size_t add_tensors(const flash3_forward_params&, const ForwardProblem&, CallMemory*);
template size_t add_tensors(const flash3_backward_params&, const BackwardProblem&, CallMemory*);
template size_t add_tensors(const flash3_quantize_params&, const QuantizeProblem&, CallMemory*);
template size_t add_tensors(const flash3_merge_params&, const MergeProblem&, CallMemory*);

}  // namespace flash3
