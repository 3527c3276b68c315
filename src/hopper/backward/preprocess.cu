// SPDX-License-Identifier: Apache-2.0
// Computes what the main kernel needs of each query, and clears the semaphores of dQ or its sums.
// Memory bounds it: one read of dOut and Out.
#include "core/arithmetic.hpp"
#include "hopper/backward/auxiliary_kernels.hpp"
#include "hopper/backward/find_tile.cuh"
#include "hopper/backward/tile_height.hpp"
#include "hopper/device/ptx/arithmetic.cuh"
#include "hopper/device/ptx/sync.cuh"
#include "hopper/host/programmatic_launch.hpp"

namespace flash3::hopper {
namespace {

constexpr int kThreads = 256;

// Eight elements of a row; zeros past its end.
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
    return {float16_to_float(uint16_t(pair)), float16_to_float(uint16_t(pair >> 16))};
  }
}

// A block has a query tile of kRows queries; kLanes threads share one, eight elements each.
template <Element kElement, int kLanes, int kRows>
__global__ void __launch_bounds__(kThreads) preprocess_kernel(PreprocessParams params) {
  static_assert(kRows % (32 / kLanes) == 0, "the lanes of a warp all have a row, or none has");
  launch_dependents();
  const BackwardWorkspace& workspace = params.workspace;
  const int64_t first_row = int64_t(blockIdx.x) * kRows;
  if (workspace.dq_semaphores != nullptr && threadIdx.x < kDqParts)
    workspace.dq_semaphores[int64_t(blockIdx.x) * kDqParts + threadIdx.x] = 0;
  if (params.ticket != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *params.ticket = 0;

  const SequenceTile tile = find_tile(workspace, int(blockIdx.x));
  // Nothing reads the sums of a tile without rows.
  if (workspace.zeroed && tile.rows.capacity > 0) {
    float4* const dq = reinterpret_cast<float4*>(workspace.dq + first_row * workspace.dq_columns);
    for (int i = threadIdx.x; i < kRows * workspace.dq_columns / 4; i += kThreads) dq[i] = {};
  }
  const int count = int(tile.rows.length) - tile.query;
  const int64_t row_in_tensor = tile.rows.first + tile.query;
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
    workspace.lse_log2[first_row + r] = sees_nothing ? kInfinity : lse * float(kLog2E);
    workspace.delta[first_row + r] = sees_nothing ? 0.f : sum;
  }
  // This kernel does not read the list of sequences. But the kernels that wait for it, and not for
  // the one that writes the list, do.
  wait_for_previous_kernel();
}

using PreprocessKernel = void (*)(PreprocessParams);

// Instantiated for the head dims that the tile table has with this height.
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

template <Element kElement>
cudaError_t launch(const PreprocessParams& params, cudaStream_t stream) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(params.workspace.all_tiles()));
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  cudaLaunchAttribute overlap = programmatic_launch();
  launch.attrs = &overlap;
  launch.numAttrs = params.behind_list ? 1 : 0;
  PreprocessKernel kernel = nullptr;
  with_tile_height(params.workspace.tiles.tile_m, [&](auto tile_m) {
    kernel = kernel_of<kElement, tile_m.value>(params.head_dim_v);
  });
  return cudaLaunchKernelEx(&launch, kernel, params);
}

}  // namespace

cudaError_t launch_preprocess(const PreprocessParams& params, Element element,
                              cudaStream_t stream) {
  return element == Element::kFloat16 ? launch<Element::kFloat16>(params, stream)
                                      : launch<Element::kBFloat16>(params, stream);
}

}  // namespace flash3::hopper
