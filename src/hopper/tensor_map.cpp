#include "hopper/tensor_map.hpp"

#include <cuda.h>

#include <cstdint>
#include <cstring>

#include "core/message.hpp"
#include "hopper/driver.hpp"

namespace flash3::hopper {
namespace {

constexpr int kElementBytes = 2;

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {
  static const auto function = driver_function<EncodeTiled>("cuTensorMapEncodeTiled", 12000);
  return function;
}

// A dimension of size 1 is never stepped over; TMA still wants a stride that it could take.
int64_t stride_bytes(int64_t size, int64_t stride) {
  return size > 1 ? stride * kElementBytes : 16;
}

bool stride_fits(int64_t size, int64_t stride) {
  const int64_t bytes = stride_bytes(size, stride);
  return bytes % 16 == 0 && bytes < (int64_t{1} << 40);
}

}  // namespace

bool tma_can_address(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 &&
         stride_fits(view.seq, view.stride_seq) && stride_fits(view.heads, view.stride_head) &&
         stride_fits(view.batch, view.stride_batch);
}

Status encode_tensor_map(const TensorView& view, int box_rows, int box_dims, TensorMap* map) {
  const EncodeTiled encode = encode_tiled();
  if (!encode)
    return {FLASH3_CUDA_ERROR,
            "the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12.0 or later"};

  const cuuint64_t sizes[4] = {cuuint64_t(view.dim), cuuint64_t(view.seq), cuuint64_t(view.heads),
                               cuuint64_t(view.batch)};
  const cuuint64_t strides[3] = {cuuint64_t(stride_bytes(view.seq, view.stride_seq)),
                                 cuuint64_t(stride_bytes(view.heads, view.stride_head)),
                                 cuuint64_t(stride_bytes(view.batch, view.stride_batch))};
  const cuuint32_t box[4] = {cuuint32_t(box_dims), cuuint32_t(box_rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const auto swizzle =
      box_dims * kElementBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  CUtensorMap encoded;
  // The 16-bit kinds differ only in arithmetic that a copy does not do.
  const CUresult result =
      encode(&encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, view.data, sizes, strides, box,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return {FLASH3_CUDA_ERROR,
            message("cuTensorMapEncodeTiled failed with code ", int(result), " for shape [",
                    view.batch, ", ", view.seq, ", ", view.heads, ", ", view.dim, "], strides [",
                    view.stride_batch, ", ", view.stride_seq, ", ", view.stride_head, ", 1]")};
  }
  static_assert(sizeof encoded == sizeof *map);
  std::memcpy(map, &encoded, sizeof encoded);
  return {};
}

}  // namespace flash3::hopper
