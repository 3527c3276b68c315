// SPDX-License-Identifier: Apache-2.0
// The rule of flash3.h for memory that two tensors of a call share: what the call writes lies in no
// other tensor, and in neither its workspace nor its schedule nor its mask.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "core/pointers.hpp"
#include "core/status.hpp"

namespace flash3 {

// The memory of a call: strided tensors, and regions without gaps.
class CallMemory {
 public:
  // A tensor without elements is left out. by_page: all such tensors are read and written at the
  // same first index, as k and v of a paged cache are, so that only elements with the same first
  // index must not share memory.
  void add(const char* name, const flash3_tensor& tensor, bool written, bool by_page = false);
  void add(const char* name, const void* data, size_t bytes, bool written);

  // Fails for the first two of which at least one is written and which have a byte in common. The
  // first `checked` of all that were added are not compared with each other.
  Status check(size_t checked = 0) const;

  size_t count() const { return count_; }

 private:
  struct Part {
    const char* name;
    const flash3_tensor* tensor;  // null: a region
    uintptr_t begin, end;         // of its first byte, and after its last
    bool written, by_page;
  };
  static bool share_bytes(const Part& a, const Part& b);
  static bool share_page(const Part& a, const Part& b);

  // The tensors of the largest params, the workspace, the schedule and the mask.
  static constexpr size_t kMost =
      std::max(count_tensors<flash3_forward_params>(), count_tensors<flash3_backward_params>()) + 3;
  std::array<Part, kMost> parts_;  // NOLINT: only the first count_ are ever looked at
  size_t count_ = 0;
};

// Every tensor of the call that has memory. `problem` is what the params became; the tensors that
// it has no address of are not looked at. Returns how many there are.
template <AnyProblem P>
size_t add_tensors(const typename ParamsOf<P>::type& params, const P& problem, CallMemory* memory);

template <AnyProblem P>
Status check_aliases(const typename ParamsOf<P>::type& params, const P& problem) {
  CallMemory memory;
  add_tensors(params, problem, &memory);
  return memory.check();
}

}  // namespace flash3
