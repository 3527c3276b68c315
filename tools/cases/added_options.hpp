// SPDX-License-Identifier: Apache-2.0
// The integer options of a call that a case has no member for: those of flash3_forward_params that
// calls.py does not place. An id names each by its field: "/name=1".
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "core/fields.hpp"

namespace flash3::cases {

consteval size_t count_added_options() {
  size_t count = 0;
  for (const ParamField& field : added_fields<flash3_forward_params>())
    count += field.is_option() && field.kind != FieldKind::kFloat;
  return count;
}

// The values of these options, in the order of their fields.
struct AddedOptions {
  static constexpr size_t kCount = count_added_options();
  std::array<int64_t, kCount> values{};

  // Calls visit(field, value of it) for each.
  template <class Visit>
  static void visit(auto& options, const Visit& visit) {
    size_t i = 0;
    for (const ParamField& field : added_fields<flash3_forward_params>())
      if (field.is_option() && field.kind != FieldKind::kFloat) visit(field, options.values[i++]);
  }
  // The value of the option with this name; null: there is none.
  int64_t* find(std::string_view name) {
    int64_t* found = nullptr;
    visit(*this, [&](const ParamField& field, int64_t& value) {
      if (field.name == name) found = &value;
    });
    return found;
  }
  int64_t operator[](std::string_view name) const {
    int64_t found = 0;
    visit(*this, [&](const ParamField& field, int64_t value) {
      if (field.name == name) found = value;
    });
    return found;
  }
  // Writes them into the params that have these fields.
  template <class Params>
  void set(Params* params) const {
    visit(*this, [&](const ParamField& field, int64_t value) {
      const ParamField* const own = find_field<Params>(field.name);
      if (!own) return;
      if (own->kind == FieldKind::kInt32) return own->set(params, static_cast<int32_t>(value));
      own->set(params, value);
    });
  }
  bool operator==(const AddedOptions&) const = default;
};

}  // namespace flash3::cases
