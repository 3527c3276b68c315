// SPDX-License-Identifier: Apache-2.0
// Arguments of a TVM-FFI call, by position, to the fields of a params structure: what each takes,
// the field's own kind says.
#pragma once

#include <tvm/ffi/c_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <string_view>

#include "core/fields.hpp"
#include "core/mask_fields.hpp"

namespace flash3_tvm_ffi {

// What a call ends with: TVM-FFI's kind of error, which Python gives the exception of that name.
struct Refusal {
  const char* kind;
  std::string message;
};

using flash3::FieldKind;
using flash3::ParamField;

struct Argument {
  std::string_view name;
  const ParamField* field;            // null: of a mask (MaskTensors)
  const ParamField* other = nullptr;  // of a window's side: the flag; of a workspace: its size

  bool is_window_side() const { return name.starts_with("window_"); }
};

// What a function takes of a mask: its memory, its numbers, and where those go that it needs. Null:
// not given.
struct MaskTensors {
  const DLTensor *mask = nullptr, *mask_fields = nullptr, *used = nullptr;

  static constexpr bool has(std::string_view name) {
    return name == "mask" || name == "mask_fields" || name == "used";
  }
  const DLTensor*& of(std::string_view name) {
    return name == "mask" ? mask : name == "used" ? used : mask_fields;
  }
};

// The arguments of a function: fields of its params, by their names, and those of a mask.
struct ArgumentList {
  Argument arguments[64] = {};
  size_t count = 0;

  // NOLINTNEXTLINE(google-explicit-constructor): a list is its arguments
  constexpr operator std::span<const Argument>() const { return {arguments, count}; }
};

template <class Params>
consteval ArgumentList arguments_of(std::string_view names) {
  ArgumentList list;
  while (!names.empty()) {
    const size_t end = names.find(' ');
    const std::string_view name = names.substr(0, end);
    names = end == std::string_view::npos ? std::string_view() : names.substr(end + 1);
    const ParamField* other = nullptr;
    if (name.starts_with("window_")) other = flash3::find_field<Params>("window");
    if (name == "workspace") other = flash3::find_field<Params>("workspace_size");
    const ParamField* field = MaskTensors::has(name) ? nullptr : flash3::find_field<Params>(name);
    if (!field && !MaskTensors::has(name)) throw "a params struct has no field of this name";
    list.arguments[list.count++] = {name, field, other};
  }
  return list;
}

struct Function {
  std::string_view name;
  std::span<const Argument> arguments;
};

inline DLTensor* dl_tensor(const TVMFFIAny& value) {
  if (value.type_index == kTVMFFIDLTensorPtr) return static_cast<DLTensor*>(value.v_ptr);
  if (value.type_index == kTVMFFITensor) return TVMFFITensorGetDLTensorPtr(value.v_ptr);
  return nullptr;
}

[[noreturn]] inline void refuse_type(const Argument& a, const char* rule) {
  throw Refusal{"TypeError", std::string(a.name) + " must be " + rule};
}

inline bool on_gpu(const DLTensor& t) {
  return t.device.device_type == kDLCUDA || t.device.device_type == kDLCUDAManaged;
}

inline void check_device(const Argument& a, const DLTensor& t) {
  const DLDeviceType type = t.device.device_type;
  if (on_gpu(t) || type == kDLCPU || type == kDLCUDAHost) return;
  throw Refusal{"ValueError", std::string(a.name) + " has DLPack device type " +
                                  std::to_string(type) + " but it must be host or CUDA memory"};
}

inline bool is_type(const DLDataType& t, int code, int bits) {
  return t.code == code && t.bits == bits && t.lanes == 1;
}

[[noreturn]] inline void refuse_dtype(const Argument& a, const DLDataType& t, const char* rule) {
  throw Refusal{"TypeError", std::string(a.name) + ".dtype = DLPack type (code " +
                                 std::to_string(t.code) + ", " + std::to_string(t.bits) +
                                 " bits, " + std::to_string(t.lanes) + " lanes) but it must be " +
                                 rule};
}

inline flash3_dtype dtype_of(const Argument& a, const DLDataType& t) {
  const auto is = [&](int code, int bits) { return is_type(t, code, bits); };
  if (a.field->dtype == FLASH3_UINT8) {
    if (is(kDLUInt, 8) || is(kDLBool, 8)) return FLASH3_UINT8;
    refuse_dtype(a, t, "uint8 or bool");
  }
  if (is(kDLFloat, 16)) return FLASH3_FLOAT16;
  if (is(kDLBfloat, 16)) return FLASH3_BFLOAT16;
  if (is(kDLFloat, 32)) return FLASH3_FLOAT32;
  if (is(kDLInt, 32)) return FLASH3_INT32;
  if (a.field->dtype == FLASH3_INT64 && is(kDLInt, 64)) return FLASH3_INT64;
  // Codes of FP8 are bytes to those who do not know it, as numpy.
  if (is(kDLFloat8_e4m3fn, 8) || is(kDLUInt, 8)) return FLASH3_FLOAT8_E4M3;
  refuse_dtype(a, t, "one of float16, bfloat16, float32, int32, float8_e4m3fn, uint8");
}

inline void* address_of(const DLTensor& t) {
  return t.data ? static_cast<char*>(t.data) + t.byte_offset : nullptr;
}

inline flash3_tensor tensor_of(const Argument& a, const DLTensor& t) {
  if (t.ndim > 4) {
    throw Refusal{"ValueError", std::string(a.name) + ".ndim = " + std::to_string(t.ndim) +
                                    " but a tensor has at most 4 dimensions"};
  }
  check_device(a, t);
  flash3_tensor made{};
  made.data = address_of(t);
  made.dtype = dtype_of(a, t.dtype);
  made.ndim = t.ndim;
  int64_t dense = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    made.shape[i] = t.shape[i];
    made.stride[i] = t.strides ? t.strides[i] : dense;
    dense *= t.shape[i] > 0 ? t.shape[i] : 1;
  }
  return made;
}

// The bytes of a tensor without gaps.
inline size_t bytes_of(const Argument& a, const DLTensor& t) {
  check_device(a, t);
  int64_t count = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.strides && t.shape[i] > 1 && t.strides[i] != count) {
      throw Refusal{"ValueError", std::string(a.name) + ".strides[" + std::to_string(i) +
                                      "] = " + std::to_string(t.strides[i]) +
                                      " but it must have no gaps: " + std::to_string(count)};
    }
    count *= t.shape[i];
  }
  return static_cast<size_t>(count) * ((t.dtype.bits * t.dtype.lanes + 7U) / 8U);
}

inline int64_t integer_of(const Argument& a, const TVMFFIAny& value) {
  if (value.type_index != kTVMFFIInt && value.type_index != kTVMFFIBool)
    refuse_type(a, "an integer or None");
  return value.v_int64;
}

inline int32_t int32_of(const Argument& a, const TVMFFIAny& value) {
  const int64_t given = integer_of(a, value);
  using Limits = std::numeric_limits<int32_t>;
  if (given < Limits::min() || given > Limits::max()) {
    throw Refusal{"ValueError", std::string(a.name) + " = " + std::to_string(given) +
                                    " but it must fit into 32 bits"};
  }
  return static_cast<int32_t>(given);
}

inline float number_of(const Argument& a, const TVMFFIAny& value) {
  if (value.type_index == kTVMFFIInt) return static_cast<float>(value.v_int64);
  if (value.type_index != kTVMFFIFloat) refuse_type(a, "a number or None");
  const double given = value.v_float64;
  const auto kept = static_cast<float>(given);
  // To the library 0 stands for something else.
  if ((kept == 0) == (given == 0) && std::isinf(kept) == std::isinf(given)) return kept;
  std::ostringstream sentence;
  sentence << a.name << " = " << given
           << " but it must be a number that float32 can hold, which makes " << kept << " of it";
  throw Refusal{"ValueError", sentence.str()};
}

inline std::string_view text_of(const Argument& a, const TVMFFIAny& value) {
  if (value.type_index == kTVMFFIRawStr) return value.v_c_str;
  if (value.type_index == kTVMFFISmallStr) return {value.v_bytes, value.small_str_len};
  if (value.type_index != kTVMFFIStr) refuse_type(a, "a string or None");
  const TVMFFIByteArray* bytes = TVMFFIBytesGetByteArrayPtr(value.v_ptr);
  return {bytes->data, bytes->size};
}

// The value of an enum's word.
inline int32_t value_of_word(const Argument& a, std::string_view given) {
  std::string known;
  int32_t value = 0;
  for (std::string_view rest = a.field->words; !rest.empty(); ++value) {
    const size_t end = rest.find(' ');
    const std::string_view word = rest.substr(0, end);
    rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
    if (word == "-") continue;  // what None stands for
    if (word == given) return value;
    known.append(known.empty() ? "'" : ", '").append(word).append("'");
  }
  throw Refusal{"ValueError", std::string(a.name) + " = '" + std::string(given) +
                                  "' but it must be " + known + " or None"};
}

inline DLTensor& given_tensor(const Argument& a, const TVMFFIAny& value) {
  DLTensor* t = dl_tensor(value);
  if (!t) refuse_type(a, "a tensor or None");
  return *t;
}

// Writes one argument that is not None into params.
inline void set(const Argument& a, const TVMFFIAny& value, void* params) {
  const ParamField& field = *a.field;
  switch (field.kind) {
    case FieldKind::kTensor: return field.set(params, tensor_of(a, given_tensor(a, value)));
    case FieldKind::kAddress: {
      const DLTensor& t = given_tensor(a, value);
      a.other->set(params, bytes_of(a, t));
      return field.set(params, address_of(t));
    }
    case FieldKind::kFloat: return field.set(params, number_of(a, value));
    case FieldKind::kInt32:
      if (field.is_flag) return field.set(params, int32_t{integer_of(a, value) != 0});
      if (!field.words.empty()) return field.set(params, value_of_word(a, text_of(a, value)));
      return field.set(params, int32_of(a, value));
    default:
      if (a.is_window_side()) a.other->set(params, int32_t{1});
      return field.set(params, integer_of(a, value));
  }
}

// Reads what is given into params and masks; the first tensor that is given, which tells where the
// call runs.
inline const DLTensor* read(std::span<const Argument> known, std::span<const TVMFFIAny> given,
                            void* params, MaskTensors* masks) {
  if (given.size() > known.size()) {
    throw Refusal{"TypeError", std::to_string(given.size()) +
                                   " arguments are given but the function has " +
                                   std::to_string(known.size())};
  }
  const DLTensor* first = nullptr;
  for (const Argument& a : known) {
    if (a.is_window_side()) a.field->set(params, int64_t{-1});
  }
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].type_index == kTVMFFINone) continue;
    const Argument& a = known[i];
    if (!a.field) {
      masks->of(a.name) = &given_tensor(a, given[i]);
      continue;
    }
    set(a, given[i], params);
    if (!first && a.field->kind == FieldKind::kTensor) first = dl_tensor(given[i]);
  }
  return first;
}

// A mask as TVM-FFI's functions hand it on: its memory, and its numbers in host memory, a tensor
// each.

inline constexpr Argument kMask{"mask", nullptr}, kMaskFields{"mask_fields", nullptr},
    kUsed{"used", nullptr};

// The memory of a tensor of so many int64 that the host reads or writes.
inline std::span<int64_t> numbers(const Argument& a, const DLTensor* t, size_t count) {
  const auto refuse = [&](const char* kind, const std::string& what) {
    throw Refusal{kind, std::string(a.name) + what + " but it must be an int64 tensor of " +
                            std::to_string(count) + " in host memory"};
  };
  if (!t) refuse("TypeError", " is None");
  if (!is_type(t->dtype, kDLInt, 64)) refuse_dtype(a, t->dtype, "int64");
  if (t->ndim != 1) refuse("ValueError", ".ndim = " + std::to_string(t->ndim));
  if (t->shape[0] != static_cast<int64_t>(count))
    refuse("ValueError", ".shape[0] = " + std::to_string(t->shape[0]));
  if (const DLDeviceType type = t->device.device_type; type != kDLCPU && type != kDLCUDAHost)
    refuse("ValueError", " has DLPack device type " + std::to_string(type));
  bytes_of(a, *t);  // that it has no gaps
  return {static_cast<int64_t*>(address_of(*t)), count};
}

inline bool is_given(const MaskTensors& masks) { return masks.mask || masks.mask_fields; }

// A mask that has its memory alone.
inline flash3_mask memory_of(const MaskTensors& masks) {
  if (!masks.mask) throw Refusal{"TypeError", "mask is None but it must be a tensor"};
  flash3_mask mask{};
  mask.size = bytes_of(kMask, *masks.mask);
  mask.data = address_of(*masks.mask);
  return mask;
}

// One that mask_make made.
inline flash3_mask mask_of(const MaskTensors& masks) {
  if (!masks.mask || !masks.mask_fields) {
    const char* given = masks.mask ? "mask" : "mask_fields";
    const char* none = masks.mask ? "mask_fields" : "mask";
    throw Refusal{"ValueError", std::string(given) + " is given but " + none +
                                    " is None; mask_make makes them together"};
  }
  flash3_mask mask = memory_of(masks);
  const std::span<const int64_t> given =
      numbers(kMaskFields, masks.mask_fields, flash3::kMaskFields);
  if (const auto misfit = flash3::set_mask_fields(given.first<flash3::kMaskFields>(), &mask))
    throw Refusal{"ValueError", "mask_fields holds " + std::to_string(*misfit) +
                                    " but it must be as mask_make gives it"};
  return mask;
}

}  // namespace flash3_tvm_ffi
