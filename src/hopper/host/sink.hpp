// SPDX-License-Identifier: Apache-2.0
// A call's sinks as the kernels take them.
#pragma once

#include "core/problem.hpp"
#include "hopper/device/views.h"

namespace flash3::hopper {

inline SinkRow sink_row(const SinkView& view) {
  return {view.data, view.dtype == FLASH3_FLOAT32   ? SinkType::kFloat32
                     : view.dtype == FLASH3_FLOAT16 ? SinkType::kFloat16
                                                    : SinkType::kBFloat16};
}

}  // namespace flash3::hopper
