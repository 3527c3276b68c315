// SPDX-License-Identifier: Apache-2.0
// Masks as data (flash3/mask.h): how the CPU makes one. mask_reader.hpp is how it reads one.
#pragma once

#include "core/mask_problem.hpp"

namespace flash3::cpu {

Status make_mask(const MaskProblem& problem);

}  // namespace flash3::cpu
