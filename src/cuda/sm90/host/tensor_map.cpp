// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/host/tensor_map.hpp"

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "core/message.hpp"
#include "cuda/host/driver.hpp"

namespace flash3::cuda::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {
  static const auto function = driver_function<EncodeTiled>("cuTensorMapEncodeTiled", 12000);
  return function;
}

// A dimension of size 1 is never stepped over; TMA still wants a stride that it could take.
int64_t stride_bytes(int64_t size, int64_t stride, int element_bytes) {
  return size > 1 ? stride * element_bytes : 16;
}

bool stride_fits(int64_t size, int64_t stride, int element_bytes) {
  const int64_t bytes = stride_bytes(size, stride, element_bytes);
  return bytes % 16 == 0 && bytes < (int64_t{1} << 40);
}

struct Dimension {
  int64_t size;
  int64_t stride;  // elements
  int box;
};

// The step from one of all rows to the next, and how many there are; no rows: they are not evenly
// spread.
struct RowGrid {
  int64_t rows, stride, rows_per_batch;
};

RowGrid row_grid(const TensorView& view) {
  constexpr int64_t kMostRows = int64_t{1} << 30;
  constexpr int64_t kAnyStride = 16;  // nothing is stepped over
  if (view.batch <= 1 && view.seq <= 1) return {1, kAnyStride, 0};
  if (view.batch <= 1) return {view.seq, view.stride_seq, 0};
  if (view.seq <= 1) return {view.batch, view.stride_batch, 1};
  if (view.stride_seq == 0 || view.stride_batch % view.stride_seq != 0) return {};
  const int64_t per_batch = view.stride_batch / view.stride_seq;
  if (per_batch < 0 || per_batch > kMostRows / view.batch) return {};
  return {(view.batch - 1) * per_batch + view.seq, view.stride_seq, per_batch};
}

// The dimensions outside of dim, from the inside to the outside.
template <int kCount>
Status encode(const TensorView& view, const Box& inner, const Dimension (&outer)[kCount],
              TensorMap* map) {
  const EncodeTiled encode = encode_tiled();
  if (!encode)
    return {FLASH3_CUDA_ERROR,
            "the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12.0 or later"};

  cuuint64_t sizes[kCount + 1] = {cuuint64_t(view.dim)}, strides[kCount];
  cuuint32_t box[kCount + 1] = {cuuint32_t(inner.dims)}, element_strides[kCount + 1] = {1};
  for (int i = 0; i < kCount; ++i) {
    sizes[i + 1] = cuuint64_t(outer[i].size);
    strides[i] = cuuint64_t(stride_bytes(outer[i].size, outer[i].stride, inner.element_bytes));
    box[i + 1] = cuuint32_t(outer[i].box);
    element_strides[i + 1] = 1;
  }
  const auto swizzle = inner.dims * inner.element_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                                               : CU_TENSOR_MAP_SWIZZLE_64B;
  CUtensorMap encoded;
  // Kinds of a size differ only in arithmetic that a copy does not do.
  const auto run = [&] {
    return encode(
        &encoded,
        inner.element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        kCount + 1, view.data, sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        inner.l2_bytes == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                              : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = run();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has called nothing of the CUDA runtime has no context yet, which the runtime
    // makes current when it needs one, and the driver does not.
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess)
      result = run();
  }
  if (result != CUDA_SUCCESS) {
    return {FLASH3_CUDA_ERROR,
            message("cuTensorMapEncodeTiled failed: ",
                    cudaGetErrorString(static_cast<cudaError_t>(result)), " (", int(result),
                    ") for shape [", view.batch, ", ", view.seq, ", ", view.heads, ", ", view.dim,
                    "], strides [", view.stride_batch, ", ", view.stride_seq, ", ",
                    view.stride_head, ", 1]")};
  }
  static_assert(sizeof encoded == sizeof *map);
  std::memcpy(map, &encoded, sizeof encoded);
  return {};
}

}  // namespace

TensorView tensor_rows(const TensorView& view, const Sequences& sequences) {
  TensorView rows = view;
  if (!sequences.packed) return rows;
  rows.batch = 1;
  rows.seq = sequences.rows;
  return rows;
}

bool tma_can_address(const TensorView& view, RowIndexing rows, int element_bytes) {
  const auto fits = [&](int64_t size, int64_t stride) {
    return stride_fits(size, stride, element_bytes);
  };
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0 || !fits(view.heads, view.stride_head))
    return false;
  if (rows == RowIndexing::kBySequence)
    return fits(view.seq, view.stride_seq) && fits(view.batch, view.stride_batch);
  const RowGrid grid = row_grid(view);
  return grid.rows > 0 && fits(2, grid.stride) && grid.stride < int64_t{1} << 32;
}

int cache_box_rows(const KvCache& cache, int tile_n) {
  if (!cache.paged) return tile_n;
  if (cache.has_leftpad) return 0;  // keys begin anywhere in a page
  constexpr int kLeastRows = 16, kSwizzleRows = 8;
  const int rows = int(std::gcd(cache.page_size, Index{tile_n}));
  return rows >= kLeastRows && rows % kSwizzleRows == 0 ? rows : 0;
}

TensorView mappable(const TensorView& view, void* address) {
  if (view.batch > 0 && view.seq > 0 && view.heads > 0) return view;
  TensorView none;
  none.data = address;
  none.heads = 1;
  none.dim = view.dim;
  return none;
}

Status encode_map(const TensorView& view, RowIndexing rows, const Box& box, TensorMap* map,
                  RowMap* row_map) {
  const Dimension heads = {view.heads, view.stride_head, box.heads};
  if (rows == RowIndexing::kBySequence) {
    *row_map = {false, 0};
    // A map has no dimension of size 0: of no rows it has one, and the schedule has no tile.
    const int64_t seq = std::max<int64_t>(view.seq, 1), batch = std::max<int64_t>(view.batch, 1);
    return encode(view, box,
                  {heads, {seq, view.stride_seq, box.rows}, {batch, view.stride_batch, 1}}, map);
  }
  const RowGrid grid = row_grid(view);
  *row_map = {true, int(grid.rows_per_batch)};
  // kRaggedEnd steps of it are −kRaggedEnd rows, modulo 2^64.
  static_assert(kRaggedEnd == 1 << 30);
  const int64_t wrap = (int64_t{1} << 34) / box.element_bytes - grid.stride;
  return encode(view, box,
                {heads,
                 {kRaggedEnd, grid.stride, box.rows},
                 {grid.rows + 1, grid.stride, 1},
                 {int64_t{kRaggedEnd} + 1, wrap, 1}},
                map);
}

}  // namespace flash3::cuda::sm90
