// SPDX-License-Identifier: Apache-2.0
// Options of flash3.attention and flash3.attention_with_kv_cache, and the arguments of
// torch.ops.flash3.forward, as the fields of a call, read from a dict of them by their names. A
// part of eager.cpp, which includes Python.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "operators.hpp"

namespace flash3_eager {

using flash3::FieldKind;
using flash3::ParamField;

// A tensor of a call, and where its description goes.
struct Input {
  PyObject* tensor;
  flash3_tensor* field;
  bool is_rows;  // has a row for each token and head
};
using Inputs = std::vector<Input>;

// An option of Python's functions or an operator's: a field, or one of those below.
enum class Special {
  kField,
  kWindow,
  kSide,
  kScale,
  kSchedule,
  kWithLse,
  kHeadsFirst,
  kIgnored,
  kUnknown
};
struct Named {
  std::string_view name;
  Special special;
};
// Options that are no field, or are read otherwise than its kind says.
inline constexpr Named kOthers[] = {
    {"window", Special::kWindow},          {"window_left", Special::kSide},
    {"window_right", Special::kSide},      {"softmax_scale", Special::kScale},
    {"schedule", Special::kSchedule},      {"return_lse", Special::kWithLse},
    {"heads_first", Special::kHeadsFirst}, {"deterministic", Special::kIgnored},  // of gradients
};

struct Option {
  PyObject* name;  // interned, as the names of keyword arguments mostly are
  Special special;
  const ParamField* field;
};

// The options that a function takes.
struct Options {
  std::vector<Option> known;

  // False with a Python error set.
  bool add(std::string_view name) {
    PyObject* const interned = PyUnicode_InternFromString(std::string(name).c_str());
    if (!interned) return false;
    const ParamField* const field = flash3_torch::field_of<flash3_forward_params>(name);
    const auto* const other = std::ranges::find(kOthers, name, &Named::name);
    const Special special = other != std::end(kOthers) ? other->special
                            : field                    ? Special::kField
                                                       : Special::kUnknown;
    known.push_back({interned, special, field});
    return true;
  }

  bool find(std::string_view names) {
    while (!names.empty())
      if (!add(flash3_torch::take_word(&names))) return false;
    return true;
  }

  // What an operator takes in addition to q, k and v.
  bool find_arguments(const flash3_torch::Schema<flash3_forward_params>& schema) {
    for (size_t i = 3; i < schema.count; ++i)
      if (!add(schema.arguments[i].name)) return false;
    return true;
  }

  const Option* operator[](PyObject* name) const {
    for (const Option& option : known)
      if (option.name == name) return &option;
    for (const Option& option : known)
      if (PyUnicode_Check(name) && PyUnicode_Compare(option.name, name) == 0) return &option;
    return nullptr;
  }
};

// One call: what is read of its arguments.
struct Call {
  flash3_forward_params params{};
  Inputs inputs;
  PyObject* schedule = Py_None;
  bool with_lse = false;
  bool heads_first = false;  // [batch, heads, seq, dim]
};

// The options in the forms that they nearly always have; every other form is the operator's to
// check, as is a number that float32 makes 0 or infinite.
inline bool set_number(PyObject* given, const ParamField& field, Call* call) {
  if (!PyFloat_CheckExact(given) && !PyLong_CheckExact(given)) return false;
  const double value = PyFloat_AsDouble(given);
  return value >= 0 && flash3_torch::store(field, value, &call->params);
}

inline bool integer_of(PyObject* given, int64_t* value) {
  if (!PyLong_CheckExact(given)) return false;
  *value = PyLong_AsLongLong(given);
  return *value != -1 || !PyErr_Occurred();  // more than 64 bits
}

// The value of an enum's word.
inline bool set_word(PyObject* given, const ParamField& field, Call* call) {
  if (!PyUnicode_Check(given)) return false;
  std::string_view words = field.words;
  for (int32_t value = 0; !words.empty(); ++value) {
    const std::string word(flash3_torch::take_word(&words));
    if (PyUnicode_CompareWithASCIIString(given, word.c_str()) != 0) continue;
    field.set(&call->params, value);
    return word != "-";
  }
  return false;
}

inline bool set_field(PyObject* given, const ParamField& field, Call* call) {
  const bool may_be_none = field.kind == FieldKind::kTensor || field.kind == FieldKind::kInt64 ||
                           field.words.starts_with("-");
  if (given == Py_None) return may_be_none;
  if (field.kind == FieldKind::kTensor)
    return call->inputs.push_back({given, field.tensor(&call->params), field.is_rows}), true;
  if (field.kind == FieldKind::kFloat) return set_number(given, field, call);
  if (field.is_flag) {
    field.set(&call->params, int32_t{given == Py_True});
    return given == Py_True || given == Py_False;
  }
  if (!field.words.empty()) return set_word(given, field, call);
  int64_t value = 0;
  return integer_of(given, &value) && value >= 0 &&
         flash3_torch::store(field, value, &call->params);
}

inline bool set_window(PyObject* given, flash3_forward_params* params) {
  if (given == Py_None) return true;
  return PyTuple_CheckExact(given) && PyTuple_Size(given) == 2 &&
         integer_of(PyTuple_GetItem(given, 0), &params->window_left) &&
         integer_of(PyTuple_GetItem(given, 1), &params->window_right);
}

// Any negative number is no bound.
inline bool set_side(PyObject* given, const ParamField& field, flash3_forward_params* params) {
  int64_t side = 0;
  return integer_of(given, &side) && flash3_torch::store(field, side, params);
}

inline bool set_flag(PyObject* given, bool* flag) {
  *flag = given == Py_True;
  return PyBool_Check(given) != 0;
}

inline bool set_option(PyObject* given, const Option& option, Call* call) {
  switch (option.special) {
    case Special::kField: return set_field(given, *option.field, call);
    case Special::kWindow: return set_window(given, &call->params);
    case Special::kSide: return set_side(given, *option.field, &call->params);
    case Special::kScale:  // 0 is the default's, which None asks for
      if (given == Py_None) return true;
      return set_number(given, *option.field, call) && call->params.softmax_scale > 0;
    case Special::kSchedule: call->schedule = given; return true;
    case Special::kWithLse: return set_flag(given, &call->with_lse);
    case Special::kHeadsFirst: return set_flag(given, &call->heads_first);
    case Special::kIgnored: return PyBool_Check(given) != 0;
    case Special::kUnknown: return given == Py_None;
  }
  return false;
}

inline bool set_options(PyObject* given, const Options& options, Call* call) {
  flash3_torch::begin_window(&call->params);
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(given, &at, &name, &value);) {
    const Option* const option = options[name];
    if (!option || !set_option(value, *option, call)) return false;
  }
  flash3_torch::finish_window(&call->params);
  return true;
}

}  // namespace flash3_eager
