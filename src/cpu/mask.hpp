// SPDX-License-Identifier: Apache-2.0
// Masks as data (flash3/mask.h), and those of dropout: how the CPU makes one. mask_reader.hpp is
// how it reads one of the former.
#pragma once

#include "core/problem.hpp"

namespace flash3::cpu {

Status make_mask(const MaskProblem& problem);
Status make_dropout_mask(const DropoutMaskProblem& problem);

}  // namespace flash3::cpu
