// SPDX-License-Identifier: Apache-2.0
// Pairwise coverage: few rows in which every two levels of every two factors meet at least once.
#pragma once

#include <vector>

namespace flash3::cases {

// sizes[f]: number of levels of factor f. Each row holds one level per factor. Deterministic.
std::vector<std::vector<int>> pairwise(const std::vector<int>& sizes);

}  // namespace flash3::cases
