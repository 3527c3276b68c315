// SPDX-License-Identifier: Apache-2.0
// What the main kernel wants of each query row, and the counters of dQ's sums, or zeros in these.
// Bound by memory: one read of dOut and Out.
#include <cuda_fp16.h>

#include "core/arithmetic.hpp"
#include "hopper/backward/config.hpp"
#include "hopper/backward/find_tile.cuh"
#include "hopper/backward/rows.hpp"
#include "hopper/device/ptx/convert.cuh"
#include "hopper/device/ptx/grid.cuh"
#include "hopper/device/ptx/math.cuh"
#include "hopper/host/programmatic_launch.hpp"

namespace flash3::hopper {
namespace {

constexpr int kThreads = 256;

// Eight elements of a row, zeros past its end.
struct Piece {
  uint32_t pairs[4];
};

__device__ __forceinline__ Piece load_piece(const unsigned short* row, int col, int columns,
                                            bool aligned) {
  Piece piece{};
  if (aligned && col + 8 <= columns) {
    const uint4 x = *reinterpret_cast<const uint4*>(row + col);
    return {{x.x, x.y, x.z, x.w}};
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i < columns) piece.pairs[i / 2] |= uint32_t(row[col + i]) << (i % 2 * 16);
  }
  return piece;
}

template <Element kElement>
__device__ __forceinline__ float2 to_floats(uint32_t pair) {
  if constexpr (kElement == Element::kBFloat16) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

// A block has kRows of the rows of a query tile; kLanes threads share one, eight elements each.
template <Element kElement, int kLanes, int kRows>
__global__ void __launch_bounds__(kThreads) preprocess_kernel(PreprocessParams params) {
  launch_dependents();
  const BackwardRows& rows = params.rows;
  const int parts = rows.tiles.tile_m / kRows;
  const int index = int(blockIdx.x) / parts, part = int(blockIdx.x) - index * parts;
  const int64_t first_row = int64_t(blockIdx.x) * kRows;
  if (rows.turns != nullptr && threadIdx.x < kTurns && part == 0)
    rows.turns[int64_t(index) * kTurns + threadIdx.x] = 0;
  if (params.ticket != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *params.ticket = 0;

  const RowTile tile = find_tile(rows, index);
  if (rows.zeroed && tile.rows.capacity > 0) {  // nobody's sums are not read
    float4* const dq = reinterpret_cast<float4*>(rows.dq + first_row * rows.dq_columns);
    for (int i = threadIdx.x; i < kRows * rows.dq_columns / 4; i += kThreads) dq[i] = {};
  }
  const int query = tile.query + part * kRows, count = int(tile.rows.length) - query;
  const int64_t row_in_tensor = tile.rows.first + query;
  const unsigned short* dout = params.dout.data + tile.batch * params.dout.stride_batch +
                               tile.head * params.dout.stride_head +
                               row_in_tensor * params.dout.stride_seq;
  const unsigned short* out = params.out.data + tile.batch * params.out.stride_batch +
                              tile.head * params.out.stride_head +
                              row_in_tensor * params.out.stride_seq;
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int r = threadIdx.x / kLanes; r < kRows; r += kThreads / kLanes) {
    float sum = 0.f;
    if (r < count) {
      const Piece a = load_piece(dout + r * params.dout.stride_seq, lane * 8, params.head_dim_v,
                                 params.dout.aligned);
      const Piece b = load_piece(out + r * params.out.stride_seq, lane * 8, params.head_dim_v,
                                 params.out.aligned);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = to_floats<kElement>(a.pairs[i]), y = to_floats<kElement>(b.pairs[i]);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane != 0) continue;

    float lse = -kInfinity;
    if (r < count) {
      const auto of_row = [&](const RowView& view) {
        return view.data[tile.batch * view.stride_batch + tile.head * view.stride_head +
                         row_in_tensor + r];
      };
      lse = of_row(params.lse);
      if (params.dlse.data != nullptr) sum -= of_row(params.dlse);
    }
    const bool sees_nothing = lse == -kInfinity;
    rows.lse_log2[first_row + r] = sees_nothing ? kInfinity : lse * float(kLog2E);
    rows.delta[first_row + r] = sees_nothing ? 0.f : sum;
  }
  // Nothing here needs the kernel that lists the sequences; but who waits for this kernel, and not
  // for that one, reads the list.
  wait_for_previous_kernel();
}

using PreprocessKernel = void (*)(PreprocessParams);

// Only for head dims that the tile table has with this height.
template <Element kElement, int kRows>
PreprocessKernel kernel_of(int head_dim_v) {
  constexpr int kWidest = widest_head_dim_v(kRows);
  PreprocessKernel kernel = preprocess_kernel<kElement, 8, kRows>;
  if constexpr (kWidest > 64)
    if (head_dim_v > 64) kernel = preprocess_kernel<kElement, 16, kRows>;
  if constexpr (kWidest > 128)
    if (head_dim_v > 128) kernel = preprocess_kernel<kElement, 32, kRows>;
  return kernel;
}

template <Element kElement, int kRows>
cudaError_t launch(const PreprocessParams& params, cudaStream_t stream) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(params.rows.all_tiles() * (params.rows.tiles.tile_m / kRows)));
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  cudaLaunchAttribute overlap = programmatic_launch();
  launch.attrs = &overlap;
  launch.numAttrs = params.behind_list ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel_of<kElement, kRows>(params.head_dim_v), params);
}

template <Element kElement>
cudaError_t launch(const PreprocessParams& params, cudaStream_t stream) {
  // Most rows a block: in a ragged batch each looks its tile up.
  switch (params.rows.tiles.tile_m) {
    case 80: return launch<kElement, 80>(params, stream);
    case 96: return launch<kElement, 96>(params, stream);
    case 128: return launch<kElement, 128>(params, stream);
    default: return launch<kElement, 64>(params, stream);
  }
}

}  // namespace

cudaError_t launch_preprocess(const PreprocessParams& params, Element element,
                              cudaStream_t stream) {
  return element == Element::kFloat16 ? launch<Element::kFloat16>(params, stream)
                                      : launch<Element::kBFloat16>(params, stream);
}

}  // namespace flash3::hopper
