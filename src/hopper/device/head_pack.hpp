// SPDX-License-Identifier: Apache-2.0
// Packed heads: which query and which head a row of a tile is. Several query heads of one KV head
// can share a tile (GQA), so that a short sequence still fills it and K and V are read once for all
// of them. Integers only, host and device.
#pragma once

#include "core/arithmetic.hpp"
#include "core/host_device.hpp"

namespace flash3::hopper {

// The 64 rows of a warpgroup are `heads` heads of `queries` queries:
//
//   row r  is  query r / heads, head r % heads    (both counted from the warpgroup's first)
//
// What remains where heads does not divide 64 is left idle. One head: row r is query r.
struct HeadPack {
  static constexpr int kRows = 64;

  int heads = 1;
  int queries = kRows;
  int reciprocal = 1 << 16;  // r / heads = r · reciprocal >> 16

  // 1 ≤ heads ≤ kRows.
  static constexpr HeadPack of(int heads) {
    return {heads, kRows / heads, ceil_div(1 << 16, heads)};
  }

  FLASH3_HOST_DEVICE constexpr int rows() const { return heads * queries; }
  FLASH3_HOST_DEVICE constexpr int query_of(int row) const { return row * reciprocal >> 16; }
  FLASH3_HOST_DEVICE constexpr int head_of(int row) const { return row - query_of(row) * heads; }
};

constexpr bool divides_exactly() {
  for (int heads = 1; heads <= HeadPack::kRows; ++heads) {
    const HeadPack pack = HeadPack::of(heads);
    for (int row = 0; row < HeadPack::kRows; ++row) {
      if (pack.query_of(row) != row / heads || pack.head_of(row) != row % heads) return false;
    }
  }
  return true;
}
static_assert(divides_exactly(), "the reciprocal is not precise enough");

}  // namespace flash3::hopper
