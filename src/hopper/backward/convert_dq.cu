// SPDX-License-Identifier: Apache-2.0
// Makes dQ of its float32 sums, which lie in the order of the tensor cores' registers. Memory
// bounds it.
//
// The main kernel cuts a tile of tile_m queries into blocks of dq_queries × 64, row by row. A
// block's float (i · 128 + t) · 4 + r is element 4i + r of thread t's fragment
// (device/tile/mma.cuh), of the block or of its transpose.
#include "hopper/backward/auxiliary_kernels.hpp"
#include "hopper/backward/find_tile.cuh"
#include "hopper/backward/tile_height.hpp"
#include "hopper/device/ptx/arithmetic.cuh"
#include "hopper/device/ptx/sync.cuh"
#include "hopper/host/programmatic_launch.hpp"

namespace flash3::hopper {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 64;
constexpr int kPaddedRow =
    kColumns + 8;  // keeps the eight rows of a warp's store in different banks

// A block of threads has a block of dQ.
template <Element kElement, int kTileM>
__global__ void __launch_bounds__(kThreads) convert_kernel(ConvertParams params) {
  constexpr BackwardConfig kTile{.tile_m = kTileM};
  constexpr int kQueries = kTile.dq_queries();
  static_assert(kQueries % 8 == 0 && (kTile.dq_transposed() || kQueries == 64));
  __shared__ __align__(16) uint16_t staged[kQueries][kPaddedRow];
  const BackwardWorkspace& workspace = params.workspace;
  const int column_blocks = workspace.dq_columns / kColumns;
  const int blocks_per_tile = kTileM / kQueries * column_blocks;
  const int index = int(blockIdx.x) / blocks_per_tile,
            in_tile = int(blockIdx.x) - index * blocks_per_tile;
  const SequenceTile tile = find_tile(workspace, index);
  const int first_query = tile.query + in_tile / column_blocks * kQueries;
  const int first_col = in_tile % column_blocks * kColumns;
  const int count = int(tile.rows.length) - first_query,
            capacity = int(tile.rows.capacity) - first_query;
  wait_for_previous_kernel();
  if (capacity <= 0 || first_col >= params.head_dim) return;

  const int thread = threadIdx.x;
  const float4* sums =
      reinterpret_cast<const float4*>(workspace.dq + int64_t(blockIdx.x) * kQueries * kColumns) +
      thread;
  const int row = thread / 32 * 16 + thread % 32 / 4, col = thread % 4 * 2;
  const float scale = params.softmax_scale;
  const bool written = workspace.zeroed || workspace.dq_semaphores[int64_t(index) * kDqParts] > 0;
#pragma unroll
  for (int i = 0; i < kQueries / 8; ++i) {
    const float4 x = written ? sums[i * kThreads] : float4{};
    const uint32_t a = pack2<kElement>(x.x * scale, x.y * scale),
                   b = pack2<kElement>(x.z * scale, x.w * scale);
    if constexpr (kTile.dq_transposed()) {
      staged[8 * i + col][row] = uint16_t(a);
      staged[8 * i + col + 1][row] = uint16_t(a >> 16);
      staged[8 * i + col][row + 8] = uint16_t(b);
      staged[8 * i + col + 1][row + 8] = uint16_t(b >> 16);
    } else {
      *reinterpret_cast<uint32_t*>(&staged[row][8 * i + col]) = a;
      *reinterpret_cast<uint32_t*>(&staged[row + 8][8 * i + col]) = b;
    }
  }
  __syncthreads();

  const int piece = thread % 8 * 8;
  unsigned short* dq = params.dq.data + tile.batch * params.dq.stride_batch +
                       tile.head * params.dq.stride_head +
                       (tile.rows.first + first_query) * params.dq.stride_seq + first_col + piece;
  const int columns = params.head_dim - first_col - piece;
  if (columns <= 0) return;
  for (int r = thread / 8; r < kQueries && r < capacity; r += kThreads / 8) {
    unsigned short* to = dq + r * params.dq.stride_seq;
    uint4 x = *reinterpret_cast<const uint4*>(&staged[r][piece]);
    if (r >= count) x = {};  // unused rows
    if (params.dq.aligned && columns >= 8) {
      *reinterpret_cast<uint4*>(to) = x;
    } else {
      for (int c = 0; c < 8 && c < columns; ++c) to[c] = r < count ? staged[r][piece + c] : 0;
    }
  }
}

using ConvertKernel = void (*)(ConvertParams);

template <Element kElement>
cudaError_t launch(const ConvertParams& params, cudaStream_t stream) {
  const BackwardWorkspace& workspace = params.workspace;
  ConvertKernel kernel = nullptr;
  int blocks = workspace.all_tiles() * (workspace.dq_columns / kColumns);
  with_tile_height(workspace.tiles.tile_m, [&](auto tile_m) {
    kernel = convert_kernel<kElement, tile_m.value>;
    blocks *= tile_m.value / BackwardConfig{.tile_m = tile_m.value}.dq_queries();
  });
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(blocks));
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  cudaLaunchAttribute overlap = programmatic_launch();
  launch.attrs = &overlap;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

}  // namespace

cudaError_t launch_convert_dq(const ConvertParams& params, Element element, cudaStream_t stream) {
  return element == Element::kFloat16 ? launch<Element::kFloat16>(params, stream)
                                      : launch<Element::kBFloat16>(params, stream);
}

}  // namespace flash3::hopper
