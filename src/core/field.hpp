// SPDX-License-Identifier: Apache-2.0
// A field of a params struct as a value. fields.hpp, which is generated, has the table of each
// struct; the core, the bindings, the cases and the fuzzers treat fields by it that need nothing of
// their own. Takes the C header alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include "flash3/flash3.h"
#include "flash3/mask.h"

namespace flash3 {

enum class FieldKind : unsigned char { kTensor, kFloat, kInt32, kInt64, kUint64, kSize, kAddress };

struct ParamField {
  std::string_view name;
  FieldKind kind;
  unsigned offset;
  bool is_written = false;                 // a tensor of results
  bool is_context = false;                 // the struct's size, or where the call runs
  bool is_flag = false;                    // 0 or 1
  bool is_rows = false;                    // a tensor with a row for each token and head
  flash3_dtype dtype = FLASH3_DTYPE_NONE;  // the only one that a tensor may have; none: a float's
  // What bindings call the values 0, 1 … of an enum, with a space between; "-": nothing is given.
  std::string_view words = {};
  // Of a tensor of added_fields(): the shapes that it may have, as calls.py calls them; the fields
  // that may not be given beside it; the field that must be, whose shape it has and whose dtype, if
  // it has not one alone, or float32; whether no GPU kernel takes it; and whether its last
  // dimension may have any stride.
  std::string_view shapes = {}, without = {}, like = {};
  bool is_cpu_alone = false;
  bool any_strides = false;

  // Whether it is a number that says what a call computes, or on which backend.
  constexpr bool is_option() const { return kind != FieldKind::kTensor && !is_context; }

  template <class T>
  T get(const void* params) const {
    T value;
    std::memcpy(static_cast<void*>(&value), static_cast<const char*>(params) + offset,
                sizeof value);
    return value;
  }
  template <class T>
  void set(void* params, T value) const {
    std::memcpy(static_cast<char*>(params) + offset, static_cast<const void*>(&value),
                sizeof value);
  }
  flash3_tensor* tensor(void* params) const {
    return reinterpret_cast<flash3_tensor*>(static_cast<char*>(params) + offset);
  }
  const flash3_tensor* tensor(const void* params) const {
    return reinterpret_cast<const flash3_tensor*>(static_cast<const char*>(params) + offset);
  }
};

template <class T>
constexpr FieldKind field_kind() {
  if constexpr (std::is_same_v<T, flash3_tensor>) return FieldKind::kTensor;
  if constexpr (std::is_same_v<T, float>) return FieldKind::kFloat;
  if constexpr (std::is_same_v<T, int32_t>) return FieldKind::kInt32;
  if constexpr (std::is_same_v<T, int64_t>) return FieldKind::kInt64;
  if constexpr (std::is_same_v<T, uint64_t>) return FieldKind::kUint64;
  if constexpr (std::is_pointer_v<T>) return FieldKind::kAddress;
  return FieldKind::kSize;
}

// How many `words` or `shapes` there are, and one of them.
constexpr int64_t count_words(std::string_view words) {
  int64_t count = !words.empty();
  for (const char c : words) count += c == ' ';
  return count;
}
constexpr std::string_view word_at(std::string_view words, int64_t i) {
  for (; i > 0; --i) words.remove_prefix(words.find(' ') + 1);
  return words.substr(0, words.find(' '));
}

constexpr bool has_word(std::string_view words, std::string_view word) {
  for (int64_t i = 0; i < count_words(words); ++i)
    if (word_at(words, i) == word) return true;
  return false;
}

// Whether a dimension that may be 1 is not, by the letter that calls.py has for it.
constexpr bool has_dim(std::string_view shape, char letter) {
  return shape.find(letter) != std::string_view::npos;
}
// Those of [1 or batch, 1 or heads_q, 1 or seq_q, seq_k], and of [1 or heads_q, 2·D + 1].
constexpr bool is_of_pairs(std::string_view shape) { return shape.ends_with('k'); }
constexpr bool is_of_distances(std::string_view shape) { return shape.ends_with('d'); }

// The sizes of a tensor of added_fields() with one of its `shapes`; rows: those of lse; distance:
// D.
template <class Shape>
constexpr Shape shape_of_added(std::string_view shape, int64_t batch, int64_t heads_q, Shape rows,
                               int64_t seq_k, int64_t distance) {
  const int64_t heads = has_dim(shape, 'h') ? heads_q : 1;
  if (shape == "heads") return {heads_q};
  if (shape == "batch_heads") return {batch, heads_q};
  if (shape == "rows") return rows;
  if (shape == "state") return {2};
  if (is_of_distances(shape)) return {heads, 2 * distance + 1};
  const bool packed = rows.size() == 2;
  return {has_dim(shape, 'b') && !packed ? batch : 1, heads,
          has_dim(shape, 'q') ? rows[rows.size() - 1] : 1, seq_k};
}

// FLASH3_FIELD(causal, .is_flag = true), where Params is the struct.
#define FLASH3_FIELD(member, ...)                                    \
  ParamField {                                                       \
    .name = #member, .kind = field_kind<decltype(Params::member)>(), \
    .offset = offsetof(Params, member), __VA_ARGS__                  \
  }

// kFields: all fields of a params struct, in its order.
template <class Params>
struct FieldsOf;

// The field of this name; null: the struct has none.
template <class Params>
constexpr const ParamField* find_field(std::string_view name) {
  for (const ParamField& field : FieldsOf<Params>::kFields)
    if (field.name == name) return &field;
  return nullptr;
}

// The fields after those that tools/codegen/calls.py places: what only hands fields on takes each
// of these by its name.
template <class Params>
constexpr std::span<const ParamField> added_fields() {
  return std::span<const ParamField>(FieldsOf<Params>::kFields).subspan(FieldsOf<Params>::kListed);
}

template <class Params>
consteval size_t count_tensors() {
  size_t count = 0;
  for (const ParamField& field : FieldsOf<Params>::kFields)
    count += field.kind == FieldKind::kTensor;
  return count;
}

// Calls visit(value of a, value of b) with an option's own type.
template <class Visit>
auto visit_values(const ParamField& field, const void* a, const void* b, const Visit& visit) {
  switch (field.kind) {
    case FieldKind::kFloat: return visit(field.get<float>(a), field.get<float>(b));
    case FieldKind::kInt32: return visit(field.get<int32_t>(a), field.get<int32_t>(b));
    case FieldKind::kUint64: return visit(field.get<uint64_t>(a), field.get<uint64_t>(b));
    default: return visit(field.get<int64_t>(a), field.get<int64_t>(b));
  }
}

}  // namespace flash3
