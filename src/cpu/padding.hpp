// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/padding.hpp"

namespace flash3::cpu {

void fill_padding(const Padding& padding);

}  // namespace flash3::cpu
