// SPDX-License-Identifier: Apache-2.0
// The numbers of a flash3_mask, all that it has beside its memory, in the struct's order: bindings
// hand a mask on as its memory and these. Takes the C header alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>

#include "flash3/mask.h"

namespace flash3 {

inline constexpr size_t kMaskFields = 15;

// Calls visit(field) for each.
template <class MaskStruct, class Visit>
void visit_mask_fields(MaskStruct& mask, const Visit& visit) {
  visit(mask.key), visit(mask.batch), visit(mask.heads), visit(mask.seq_q), visit(mask.seq_k);
  visit(mask.window_left), visit(mask.window_right), visit(mask.chunk), visit(mask.mask_alignment);
  visit(mask.ranges), visit(mask.blocks), visit(mask.partial_blocks);
  visit(mask.granularity), visit(mask.lengths), visit(mask.documents);
}

inline std::array<int64_t, kMaskFields> mask_fields(const flash3_mask& mask) {
  std::array<int64_t, kMaskFields> fields{};
  size_t next = 0;
  visit_mask_fields(mask, [&](auto field) { fields[next++] = static_cast<int64_t>(field); });
  return fields;
}

// Sets them. Returns a number that its field cannot hold; nothing where all fit.
inline std::optional<int64_t> set_mask_fields(std::span<const int64_t, kMaskFields> fields,
                                              flash3_mask* mask) {
  std::optional<int64_t> misfit;
  size_t next = 0;
  visit_mask_fields(*mask, [&](auto& field) {
    const int64_t given = fields[next++];
    field = static_cast<std::remove_reference_t<decltype(field)>>(given);
    if (static_cast<int64_t>(field) != given) misfit = given;
  });
  return misfit;
}

}  // namespace flash3
