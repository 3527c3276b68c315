// SPDX-License-Identifier: Apache-2.0
// The end of a device's context.
#pragma once

#include "core/status.hpp"

namespace flash3::cuda {

// Whether an error means that a fault has ended the context: every call then fails, until the
// process ends. Of the runtime or of the driver, whose codes have the same numbers.
bool is_context_lost(int error);

// The failure of a call that finds it so.
Status context_lost(int error);

}  // namespace flash3::cuda
