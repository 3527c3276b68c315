// SPDX-License-Identifier: Apache-2.0
// The kernels that only measure: the ablation's (ablation.hpp), the ceiling's (ceiling.hpp) and the
// traced ones (trace.hpp). They take as long to compile as a family of the library's own, so a
// build holds them only where FLASH3_BENCH_KERNELS is on: for make bench and for the tests.
#pragma once

#include <string>

namespace flash3::device {

// Throws std::runtime_error, with `what` and the way to such a build, if this program holds none.
void require_bench_kernels(const std::string& what);

}  // namespace flash3::device
