// SPDX-License-Identifier: Apache-2.0
// Arguments of torch's operators, and of flash3._eager, as fields of a call's params. The schemas
// are in operators.hpp, which is generated; of their text is made here which argument goes where.
// Nothing of torch or Python.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include "core/fields.hpp"

namespace flash3_torch {

using flash3::FieldKind;
using flash3::ParamField;

// The next word of a text that is split by `between`.
constexpr std::string_view take_word(std::string_view* text, std::string_view between = " ") {
  const size_t end = text->find(between);
  const std::string_view word = text->substr(0, end);
  *text = end == std::string_view::npos ? std::string_view() : text->substr(end + between.size());
  return word;
}

enum class Type : unsigned char {
  kTensor,
  kMaybeTensor,
  kFloat,
  kFlag,
  kInteger,
  kIntegers,
  kDtype
};

struct Argument {
  std::string_view name;
  Type type = Type::kTensor;
  const ParamField* field = nullptr;  // null: one of Extras (call.hpp)
  bool is_cache = false;              // is never copied, also where it is only read
};

constexpr Type type_of(std::string_view text) {
  if (text.starts_with("Tensor")) return text.ends_with('?') ? Type::kMaybeTensor : Type::kTensor;
  if (text == "float") return Type::kFloat;
  if (text == "bool") return Type::kFlag;
  if (text == "int[]") return Type::kIntegers;
  return text == "ScalarType?" ? Type::kDtype : Type::kInteger;
}

// The field that an argument is; null: none that is a tensor or an option.
template <class Params>
constexpr const ParamField* field_of(std::string_view name) {
  if (name == "k_cache") name = "k";
  if (name == "v_cache") name = "v";
  if (name == "compute_fp8") name = "compute";
  const ParamField* field = flash3::find_field<Params>(name);
  return field && !field->is_context ? field : nullptr;
}

// An operator's schema, and its arguments in their order.
template <class Params>
struct Schema {
  static constexpr size_t kMost = 64;

  const char* text;
  Argument arguments[kMost] = {};
  size_t count = 0;

  // NOLINTNEXTLINE(google-explicit-constructor): a schema is its text
  consteval Schema(const char* schema) : text(schema) {
    std::string_view rest = schema;
    take_word(&rest, "(");
    rest = rest.substr(0, rest.find(") ->"));
    while (!rest.empty()) {
      std::string_view argument = take_word(&rest, ", ");
      const std::string_view type = take_word(&argument), name = take_word(&argument, "=");
      arguments[count++] = {name, type_of(type), field_of<Params>(name), name.ends_with("_cache")};
    }
  }
};

// Whether float32 holds a number: to the library 0 stands for something else.
inline bool fits_float(double value) {
  const auto kept = static_cast<float>(value);
  return (kept == 0) == (value == 0) && std::isinf(kept) == std::isinf(value);
}

// Writes a number into its field; false: it does not fit.
inline bool store(const ParamField& field, double value, void* params) {
  field.set(params, static_cast<float>(value));
  return fits_float(value);
}
inline bool store(const ParamField& field, int64_t value, void* params) {
  if (field.kind != FieldKind::kInt32) return field.set(params, value), true;
  field.set(params, static_cast<int32_t>(value));
  using Limits = std::numeric_limits<int32_t>;
  return value >= Limits::min() && value <= Limits::max();
}

// A side that is not given is unbounded; either that is makes a window.
template <class Params>
void begin_window(Params* params) {
  if constexpr (requires { params->window; }) params->window_left = params->window_right = -1;
}
template <class Params>
void finish_window(Params* params) {
  if constexpr (requires { params->window; })
    params->window = params->window_left >= 0 || params->window_right >= 0;
}

}  // namespace flash3_torch
