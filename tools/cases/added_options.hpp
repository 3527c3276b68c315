// SPDX-License-Identifier: Apache-2.0
// The integer options and the tensors of a call that a case has no member for: those of
// flash3_forward_params that calls.py does not place. An id names each by its field, an option with
// its number, "/name=1", and a tensor with its shape, "/name=rows".
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "cases/text.hpp"
#include "core/fields.hpp"

namespace flash3::cases {

// How many values a field may have, of which 0 is that of a call without it; 0: any number. Those
// of a tensor are its shapes, from 1 on.
constexpr int64_t count_values(const ParamField& field) {
  if (field.kind == FieldKind::kTensor) return 1 + count_words(field.shapes);
  return field.is_flag ? 2 : count_words(field.words);
}

constexpr bool is_added_value(const ParamField& field) {
  return field.kind == FieldKind::kTensor || (field.is_option() && field.kind != FieldKind::kFloat);
}

consteval size_t count_added_values() {
  size_t count = 0;
  for (const ParamField& field : added_fields<flash3_forward_params>())
    count += is_added_value(field);
  return count;
}

consteval size_t count_added_tensors() {
  size_t count = 0;
  for (const ParamField& field : added_fields<flash3_forward_params>())
    count += field.kind == FieldKind::kTensor;
  return count;
}

// The values of these fields, in their order.
struct AddedOptions {
  static constexpr size_t kCount = count_added_values();
  std::array<int64_t, kCount> values{};

  // Calls visit(field, value of it) for each.
  template <class Visit>
  static void visit(auto& options, const Visit& visit) {
    size_t i = 0;
    for (const ParamField& field : added_fields<flash3_forward_params>())
      if (is_added_value(field)) visit(field, options.values[i++]);
  }
  // The value of the field with this name; null: there is none.
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
  // The shape of a tensor, as calls.py calls it; empty: it is not given.
  std::string_view shape_of(const ParamField& tensor) const {
    const int64_t value = (*this)[tensor.name];
    return value > 0 ? word_at(tensor.shapes, value - 1) : std::string_view();
  }
  // Writes the options into the params that have these fields.
  template <class Params>
  void set(Params* params) const {
    visit(*this, [&](const ParamField& field, int64_t value) {
      const ParamField* const own = find_field<Params>(field.name);
      if (!own || own->kind == FieldKind::kTensor) return;
      if (own->kind == FieldKind::kInt32) return own->set(params, static_cast<int32_t>(value));
      own->set(params, value);
    });
  }
  bool operator==(const AddedOptions&) const = default;
};

// What an id says of each: "/name=1", "/name=rows", or nothing of a 0.
inline std::string to_text(const AddedOptions& options) {
  std::string text;
  AddedOptions::visit(options, [&](const ParamField& field, int64_t value) {
    if (value == 0) return;
    text.append("/").append(field.name).append("=");
    if (field.kind == FieldKind::kTensor)
      text.append(options.shape_of(field));
    else
      text.append(std::to_string(value));
  });
  return text;
}

// How an id has each of them: a line each, "name=<n>" or "name=heads|rows".
inline std::string added_options_help() {
  std::string text;
  const AddedOptions none;
  AddedOptions::visit(none, [&](const ParamField& field, int64_t) {
    text.append("\n").append(field.name).append(field.shapes.empty() ? "=<n>" : "=");
    for (const char c : field.shapes) text += c == ' ' ? '|' : c;
  });
  return text;
}

// Reads one of them, without the "/"; false if it says nothing of the kind.
inline bool parse_added(std::string_view text, AddedOptions* options) {
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) return false;
  const std::string_view value = text.substr(equals + 1);
  bool good = false;
  AddedOptions::visit(*options, [&](const ParamField& field, int64_t& to) {
    if (field.name != text.substr(0, equals)) return;
    if (field.kind == FieldKind::kTensor) {
      for (int64_t i = 0; i < count_words(field.shapes); ++i)
        if (word_at(field.shapes, i) == value) to = i + 1, good = true;
      return;
    }
    good = number(value, &to);
  });
  return good;
}

}  // namespace flash3::cases
