// SPDX-License-Identifier: Apache-2.0
// Computes what the main kernel needs of each query, and clears the semaphores of dQ or its sums.
// Memory bounds it: one read of dOut and Out.
#include "core/arithmetic.hpp"
#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/ptx/sync.cuh"
#include "cuda/host/programmatic_launch.hpp"
#include "cuda/sm90/backward/auxiliary_kernels.hpp"
#include "cuda/sm90/backward/find_tile.cuh"
#include "cuda/sm90/backward/tile_height.hpp"

namespace flash3::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

// Eight elements of a row; zeros past its end.
struct Piece {
  uint32_t pairs[4];
};

template <bool kAligned>
__device__ __forceinline__ Piece load_piece(const unsigned short* row, int col, int columns) {
  Piece piece{};
  if constexpr (kAligned) {
    uint4 x{};
    if (col < columns) x = *reinterpret_cast<const uint4*>(row + col);
    piece = {{x.x, x.y, x.z, x.w}};
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
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

// A thread's share of kRows rows, every kStep-th from `first` on: eight columns of dOut and Out.
// The first lane of a row also has its LSE and dLSE.
template <int kRows>
struct OwnRows {
  Piece dout[kRows], out[kRows];
  float lse[kRows], dlse[kRows];

  template <int kStep, bool kAligned>
  __device__ __forceinline__ void load(const PreprocessParams& params, const SequenceTile& tile,
                                       int first, int count, int lane) {
    const int64_t row_in_tensor = tile.rows.first + tile.query;
    const auto row_of = [&](const ElementView& view, int row) {
      return static_cast<const unsigned short*>(view.data) + tile.batch * view.stride_batch +
             tile.head * view.stride_head + (row_in_tensor + row) * view.stride_seq;
    };
    const auto float_of = [&](const RowView& view, int row) {
      return view.data[tile.batch * view.stride_batch + tile.head * view.stride_head +
                       row_in_tensor + row];
    };
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + i * kStep;
      dout[i] = out[i] = {};
      lse[i] = -kInfinity, dlse[i] = 0.f;
      if (row >= count) continue;
      dout[i] = load_piece<kAligned>(row_of(params.dout, row), lane * 8, params.head_dim_v);
      out[i] = load_piece<kAligned>(row_of(params.out, row), lane * 8, params.head_dim_v);
      if (lane != 0) continue;
      lse[i] = float_of(params.lse, row);
      if (params.dlse.data != nullptr) dlse[i] = float_of(params.dlse, row);
    }
  }

  // This thread's share of Σ dOut · Out of the i-th row.
  template <Element kElement>
  __device__ __forceinline__ float product(int i) const {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = to_floats<kElement>(dout[i].pairs[j]),
                   y = to_floats<kElement>(out[i].pairs[j]);
      sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
    }
    return sum;
  }
};

// Clears the semaphores and the ticket of the main kernel, and the sums that it adds to.
template <int kRows>
__device__ __forceinline__ void clear_workspace(const PreprocessParams& params,
                                                const SequenceTile& tile) {
  const BackwardWorkspace& workspace = params.workspace;
  if (workspace.dq_semaphores != nullptr && threadIdx.x < kDqParts)
    workspace.dq_semaphores[int64_t(blockIdx.x) * kDqParts + threadIdx.x] = 0;
  if (params.ticket != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *params.ticket = 0;
  // Nothing reads the sums of a tile without rows.
  if (!workspace.zeroed || tile.rows.capacity <= 0) return;
  const int quads = kRows * workspace.dq_columns / 4;
  float4* const dq = reinterpret_cast<float4*>(workspace.dq) + int64_t(blockIdx.x) * quads;
  for (int i = threadIdx.x; i < quads; i += kThreads) dq[i] = {};
}

// A block has a query tile of kRows queries; kLanes threads share a query. kAligned: rows are whole
// pieces of 16 bytes, and a thread issues all of its loads before anything else.
template <Element kElement, int kLanes, int kRows, bool kAligned>
__global__ void __launch_bounds__(kThreads) preprocess_kernel(PreprocessParams params) {
  constexpr int kStep = kThreads / kLanes;  // rows that the block has at once
  constexpr int kAtOnce = kAligned ? ceil_div(kRows, kStep) : 1;
  static_assert(kRows % (32 / kLanes) == 0, "the lanes of a warp all have a row, or none has");
  launch_dependents();
  const BackwardWorkspace& workspace = params.workspace;
  const SequenceTile tile = find_tile(workspace, int(blockIdx.x));
  const int count = min(int(tile.rows.length) - tile.query, kRows);
  const int lane = threadIdx.x % kLanes;
  const int64_t first_row = int64_t(blockIdx.x) * kRows;
#pragma unroll 1
  for (int first = threadIdx.x / kLanes; first < kRows; first += kAtOnce * kStep) {
    OwnRows<kAtOnce> own;
    own.template load<kStep, kAligned>(params, tile, first, count, lane);
    if (first < kStep) clear_workspace<kRows>(params, tile);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * kStep;
      if (row >= kRows) break;
      float sum = own.template product<kElement>(i);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane != 0) continue;
      const bool sees_nothing = own.lse[i] == -kInfinity;
      workspace.lse_log2[first_row + row] = sees_nothing ? kInfinity : own.lse[i] * float(kLog2E);
      workspace.delta[first_row + row] = sees_nothing ? 0.f : sum - own.dlse[i];
    }
  }
  // This kernel does not read the list of sequences. The kernels after it do, and they wait for
  // this one alone: so it must not end before the list is written.
  wait_for_previous_kernel();
}

using PreprocessKernel = void (*)(PreprocessParams);

// Instances for the head dims that the tile table has with this height. Rows that are not whole
// pieces of 16 bytes have one kernel for all head dims.
template <Element kElement, int kRows>
PreprocessKernel kernel_of(int head_dim_v, bool aligned) {
  constexpr int kWidest = widest_head_dim_v(kRows);
  if (!aligned) return preprocess_kernel<kElement, 32, kRows, false>;
  PreprocessKernel kernel = preprocess_kernel<kElement, 8, kRows, true>;
  if constexpr (kWidest > 64)
    if (head_dim_v > 64) kernel = preprocess_kernel<kElement, 16, kRows, true>;
  if constexpr (kWidest > 128)
    if (head_dim_v > 128) kernel = preprocess_kernel<kElement, 32, kRows, true>;
  return kernel;
}

template <Element kElement>
cudaError_t launch(const PreprocessParams& params, cudaStream_t stream) {
  PreprocessKernel kernel = nullptr;
  const bool aligned = params.dout.aligned && params.out.aligned && params.head_dim_v % 8 == 0;
  with_tile_height(params.workspace.tiles.tile_m, [&](auto tile_m) {
    kernel = kernel_of<kElement, tile_m.value>(params.head_dim_v, aligned);
  });
  return launch_overlapping(kernel, dim3(unsigned(params.workspace.all_tiles())), kThreads, stream,
                            params, params.behind_list);
}

}  // namespace

cudaError_t launch_preprocess(const PreprocessParams& params, Element element,
                              cudaStream_t stream) {
  return element == Element::kFloat16 ? launch<Element::kFloat16>(params, stream)
                                      : launch<Element::kBFloat16>(params, stream);
}

}  // namespace flash3::cuda::sm90
