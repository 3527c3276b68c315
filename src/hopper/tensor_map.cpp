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

struct Dimension {
  int64_t size;
  int64_t stride;  // elements
  int box;
};

// The dimensions outside of dim, from the inside to the outside.
template <int kCount>
Status encode(const TensorView& view, int box_dims, const Dimension (&outer)[kCount],
              TensorMap* map) {
  const EncodeTiled encode = encode_tiled();
  if (!encode)
    return {FLASH3_CUDA_ERROR,
            "the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12.0 or later"};

  cuuint64_t sizes[kCount + 1] = {cuuint64_t(view.dim)}, strides[kCount];
  cuuint32_t box[kCount + 1] = {cuuint32_t(box_dims)}, element_strides[kCount + 1] = {1};
  for (int i = 0; i < kCount; ++i) {
    sizes[i + 1] = cuuint64_t(outer[i].size);
    strides[i] = cuuint64_t(stride_bytes(outer[i].size, outer[i].stride));
    box[i + 1] = cuuint32_t(outer[i].box);
    element_strides[i + 1] = 1;
  }
  const auto swizzle =
      box_dims * kElementBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  CUtensorMap encoded;
  // The 16-bit kinds differ only in arithmetic that a copy does not do.
  const CUresult result =
      encode(&encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kCount + 1, view.data, sizes, strides, box,
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

}  // namespace

bool tma_can_address(const TensorView& view, const HeadPack& pack) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 &&
         stride_fits(view.seq, view.stride_seq) && stride_fits(view.heads, view.stride_head) &&
         stride_fits(view.heads / pack.heads, view.stride_head * pack.heads) &&
         stride_fits(view.batch, view.stride_batch);
}

Status encode_key_map(const TensorView& view, int box_rows, int box_dims, TensorMap* map) {
  return encode(view, box_dims,
                {{view.seq, view.stride_seq, box_rows},
                 {view.heads, view.stride_head, 1},
                 {view.batch, view.stride_batch, 1}},
                map);
}

Status encode_query_map(const TensorView& view, const HeadPack& pack, int box_dims,
                        TensorMap* map) {
  return encode(view, box_dims,
                {{pack.heads, view.stride_head, pack.heads},
                 {view.seq, view.stride_seq, pack.queries},
                 {view.heads / pack.heads, view.stride_head * pack.heads, 1},
                 {view.batch, view.stride_batch, 1}},
                map);
}

}  // namespace flash3::hopper
