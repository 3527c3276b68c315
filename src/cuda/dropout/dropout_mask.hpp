// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/problem.hpp"

namespace flash3::cuda {

Status launch_dropout_mask(const DropoutMaskProblem& problem);

}  // namespace flash3::cuda
