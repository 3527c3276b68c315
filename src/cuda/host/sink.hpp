// SPDX-License-Identifier: Apache-2.0
// A call's sinks as the kernels take them.
#pragma once

#include "core/problem.hpp"
#include "cuda/host/element_type.hpp"

namespace flash3::cuda {

inline SinkRow sink_row(const SinkView& view) { return {view.data, float_type(view.dtype)}; }

}  // namespace flash3::cuda
