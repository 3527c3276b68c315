// SPDX-License-Identifier: Apache-2.0
// What calls share that torch makes around its dispatcher and by it: where the library's workspace
// lies in memory that torch allocates for it, and Python's signals.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flash3/flash3.h"

namespace flash3_torch {

constexpr size_t kWorkspaceAlignment = FLASH3_WORKSPACE_ALIGNMENT;  // not every allocator gives it

// How much to allocate for a workspace of this size.
constexpr size_t workspace_allocation(size_t bytes) { return bytes + kWorkspaceAlignment; }

inline void* align_workspace(void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  return reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) / kWorkspaceAlignment *
                                 kWorkspaceAlignment);
}

// From now on CPU calls that Python's main thread makes run the handlers of signals between their
// work tiles; an exception that one raises, as KeyboardInterrupt, ends the call and is raised then.
// False: a Python error is set.
bool watch_signals();

}  // namespace flash3_torch
