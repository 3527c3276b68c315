// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace flash3_torch {

// From now on CPU calls that Python's main thread makes run the handlers of signals between their
// work tiles; an exception that one raises, as KeyboardInterrupt, ends the call and is raised then.
// False: a Python error is set.
bool watch_signals();

}  // namespace flash3_torch
