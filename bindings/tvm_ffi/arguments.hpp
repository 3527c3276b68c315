// SPDX-License-Identifier: Apache-2.0
// Arguments of a TVM-FFI call, by position, to the fields of a params structure.
#pragma once

#include <flash3/flash3.h>
#include <tvm/ffi/c_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <string_view>

namespace flash3_tvm_ffi {

// What a call ends with: TVM-FFI's kind of error, which Python gives the exception of that name.
struct Refusal {
  const char* kind;
  std::string message;
};

enum class Kind {
  tensor,
  flag,    // int32_t, 0 or 1
  number,  // float
  int32,
  int64,        // also a seed's 64 bits
  window_side,  // int64_t; given, it sets the flag `window` too; None: unbounded
  backend,      // "auto", "hopper" or "cpu"
  compute,      // "fp8"
  workspace,    // a tensor without gaps, of any dtype: the address, and behind it the bytes
};

struct Argument {
  const char* name;
  Kind kind;
  size_t offset;
  size_t other = 0;  // of a window side: the flag; of a workspace: its size
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

inline flash3_dtype dtype_of(const Argument& a, const DLDataType& t) {
  const auto is = [&](int code, int bits) {
    return t.code == code && t.bits == bits && t.lanes == 1;
  };
  if (is(kDLFloat, 16)) return FLASH3_FLOAT16;
  if (is(kDLBfloat, 16)) return FLASH3_BFLOAT16;
  if (is(kDLFloat, 32)) return FLASH3_FLOAT32;
  if (is(kDLInt, 32)) return FLASH3_INT32;
  // Codes of FP8 are bytes to those who do not know it, as numpy.
  if (is(kDLFloat8_e4m3fn, 8) || is(kDLUInt, 8)) return FLASH3_FLOAT8_E4M3;
  throw Refusal{"TypeError", std::string(a.name) + ".dtype = DLPack type (code " +
                                 std::to_string(t.code) + ", " + std::to_string(t.bits) +
                                 " bits, " + std::to_string(t.lanes) +
                                 " lanes) but it must be one of float16, bfloat16, float32, int32, "
                                 "float8_e4m3fn, uint8"};
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

inline int32_t backend_of(const Argument& a, std::string_view name) {
  for (const auto backend : {FLASH3_BACKEND_AUTO, FLASH3_BACKEND_HOPPER, FLASH3_BACKEND_CPU}) {
    if (name == flash3_backend_name(backend)) return backend;
  }
  throw Refusal{"ValueError", std::string(a.name) + " = '" + std::string(name) +
                                  "' but it must be one of 'auto', 'hopper', 'cpu'"};
}

// Writes one argument that is not None into params.
inline void set(const Argument& a, const TVMFFIAny& value, char* params) {
  const auto store = [&](size_t offset, const auto& x) {
    std::memcpy(params + offset, static_cast<const void*>(&x), sizeof x);
  };
  switch (a.kind) {
    case Kind::tensor:
    case Kind::workspace: {
      const DLTensor* t = dl_tensor(value);
      if (!t) refuse_type(a, "a tensor or None");
      if (a.kind == Kind::tensor) return store(a.offset, tensor_of(a, *t));
      store(a.other, bytes_of(a, *t));
      return store(a.offset, address_of(*t));
    }
    case Kind::flag: return store(a.offset, static_cast<int32_t>(integer_of(a, value) != 0));
    case Kind::number: return store(a.offset, number_of(a, value));
    case Kind::int32: return store(a.offset, int32_of(a, value));
    case Kind::int64: return store(a.offset, integer_of(a, value));
    case Kind::window_side:
      store(a.other, int32_t{1});
      return store(a.offset, integer_of(a, value));
    case Kind::backend: return store(a.offset, backend_of(a, text_of(a, value)));
    case Kind::compute:
      if (const auto name = text_of(a, value); name != "fp8") {
        throw Refusal{"ValueError",
                      "compute = '" + std::string(name) + "' but it must be 'fp8' or None"};
      }
      return store(a.offset, int32_t{FLASH3_COMPUTE_FP8});
  }
}

// Reads what is given into params; the first tensor that is given, which tells where the call runs.
inline const DLTensor* read(std::span<const Argument> known, std::span<const TVMFFIAny> given,
                            char* params) {
  if (given.size() > known.size()) {
    throw Refusal{"TypeError", std::to_string(given.size()) +
                                   " arguments are given but the function has " +
                                   std::to_string(known.size())};
  }
  const DLTensor* first = nullptr;
  for (const Argument& a : known) {
    if (a.kind == Kind::window_side) std::memset(params + a.offset, 0xFF, sizeof(int64_t));  // -1
  }
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].type_index == kTVMFFINone) continue;
    set(known[i], given[i], params);
    if (!first && known[i].kind == Kind::tensor) first = dl_tensor(given[i]);
  }
  return first;
}

}  // namespace flash3_tvm_ffi
