// SPDX-License-Identifier: Apache-2.0
// A mask as TVM-FFI's functions hand it on: its memory, and its numbers in host memory, a tensor
// each.
#pragma once

#include "arguments.hpp"
#include "core/mask_fields.hpp"

namespace flash3_tvm_ffi {

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
