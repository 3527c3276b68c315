// SPDX-License-Identifier: Apache-2.0
// torch.ops.flash3.mask_make, mask_data and mask_used, and the masks that attention takes: a tensor
// of bytes, and the fields of flash3_mask after its size, in their order.
#include "call.hpp"
#include "core/mask_fields.hpp"
#include "operators.hpp"

namespace flash3_torch {

flash3_mask mask_of(const Tensor& t, const std::vector<int64_t>& fields) {
  if (torch_dtype_of(t) != aoti_torch_dtype_uint8() || t.dim() != 1 || !t.is_contiguous())
    fail(FLASH3_INVALID_ARGUMENT,
         "mask.data is no contiguous uint8 tensor of 1 dimension but it must be as mask_make gives "
         "it");
  if (fields.size() != flash3::kMaskFields)
    fail(FLASH3_INVALID_ARGUMENT,
         "mask_fields has " + std::to_string(fields.size()) + " numbers but it must have the " +
             std::to_string(flash3::kMaskFields) + " that mask_make gives");
  flash3_mask mask{};
  mask.data = t.data_ptr(), mask.size = static_cast<size_t>(t.numel());
  const std::span<const int64_t, flash3::kMaskFields> numbers(fields);
  if (const auto misfit = flash3::set_mask_fields(numbers, &mask))
    fail(FLASH3_INVALID_ARGUMENT,
         "mask_fields holds " + std::to_string(*misfit) + " but it must be as mask_make gives it");
  return mask;
}

namespace {

struct Made {
  Tensor data;
  flash3_mask mask{};
};

Made make(const Schema<flash3_mask_params>& schema, StableIValue* stack) {
  Call<flash3_mask_params> call(schema, stack);
  call.describe_tensors();
  const auto guard = call.on_device();
  size_t bytes = 0;
  check(flash3_mask_size(&call.params, &bytes));
  Made made{empty_aligned(bytes, call.device)};
  made.mask.data = made.data.data_ptr(), made.mask.size = bytes;
  check(flash3_mask_make(&call.params, &made.mask));
  return made;
}

}  // namespace

// (the mask's memory, its fields)
void mask_make(StableIValue* stack, uint64_t, uint64_t) {
  const Made made = make(kMaskMake, stack);
  const auto fields = flash3::mask_fields(made.mask);
  stack[0] = torch::stable::detail::from(made.data);
  stack[1] = torch::stable::detail::from(std::vector<int64_t>(fields.begin(), fields.end()));
}

// The mask's memory. For graphs, whose values are tensors: its fields are known when they are made.
void mask_data(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(make(kMaskData, stack).data);
}

// (blocks, partial blocks, documents): what the mask needs. Waits for the current stream.
void mask_used(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::to;
  const Tensor data = to<Tensor>(stack[0]);
  const auto fields = to<std::vector<int64_t>>(stack[1]);
  const flash3_mask mask = mask_of(data, fields);
  const Device device = device_of("mask.data", data);
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (device.is_cuda()) guard.emplace(device.index);
  int64_t blocks = 0, partial = 0, documents = 0;
  check(flash3_mask_used(&mask, device.is_cuda() ? current_stream(device.index) : nullptr, &blocks,
                         &partial, &documents));
  stack[0] = torch::stable::detail::from(blocks);
  stack[1] = torch::stable::detail::from(partial);
  stack[2] = torch::stable::detail::from(documents);
}

}  // namespace flash3_torch
