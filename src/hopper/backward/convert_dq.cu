// SPDX-License-Identifier: Apache-2.0
// dQ from its float32 sums, which lie in the order of the tensor cores' registers. Bound by memory.
//
// A tile of tile_m queries is cut into blocks of block_queries × 64, row by row. A block's float
// (i · 128 + t) · 4 + r is element 4i + r of thread t's fragment (device/tile/mma.cuh), of the
// block or of its transpose.
#include "hopper/backward/find_tile.cuh"
#include "hopper/backward/rows.hpp"
#include "hopper/device/ptx/convert.cuh"
#include "hopper/device/ptx/grid.cuh"
#include "hopper/host/programmatic_launch.hpp"

namespace flash3::hopper {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 64;
constexpr int kMaxQueries = 96;
constexpr int kPaddedRow =
    kColumns + 8;  // keeps the eight rows of a warp's store in different banks

template <Element kElement>
__global__ void __launch_bounds__(kThreads) convert_kernel(ConvertParams params) {
  __shared__ __align__(16) uint16_t tile[kMaxQueries][kPaddedRow];
  const BackwardRows& rows = params.rows;
  const int block_queries = params.block_queries;
  const int column_blocks = rows.dq_columns / kColumns;
  const int blocks_per_tile = rows.tiles.tile_m / block_queries * column_blocks;
  const int index = int(blockIdx.x) / blocks_per_tile,
            in_tile = int(blockIdx.x) - index * blocks_per_tile;
  const RowTile whose = find_tile(rows, index);
  const int first_query = whose.query + in_tile / column_blocks * block_queries;
  const int first_col = in_tile % column_blocks * kColumns;
  const int count = int(whose.rows.length) - first_query,
            capacity = int(whose.rows.capacity) - first_query;
  wait_for_previous_kernel();
  if (capacity <= 0 || first_col >= params.head_dim) return;

  const int thread = threadIdx.x;
  const float4* sums =
      reinterpret_cast<const float4*>(rows.dq + int64_t(blockIdx.x) * block_queries * kColumns) +
      thread;
  const int row = thread / 32 * 16 + thread % 32 / 4, col = thread % 4 * 2;
  const float scale = params.softmax_scale;
  const bool written = rows.zeroed || rows.turns[int64_t(index) * kTurns] > 0;
  for (int i = 0; i < block_queries / 8; ++i) {
    const float4 x = written ? sums[i * kThreads] : float4{};
    const uint32_t a = pack2<kElement>(x.x * scale, x.y * scale),
                   b = pack2<kElement>(x.z * scale, x.w * scale);
    if (params.transposed) {
      tile[8 * i + col][row] = uint16_t(a);
      tile[8 * i + col + 1][row] = uint16_t(a >> 16);
      tile[8 * i + col][row + 8] = uint16_t(b);
      tile[8 * i + col + 1][row + 8] = uint16_t(b >> 16);
    } else {
      *reinterpret_cast<uint32_t*>(&tile[row][8 * i + col]) = a;
      *reinterpret_cast<uint32_t*>(&tile[row + 8][8 * i + col]) = b;
    }
  }
  __syncthreads();

  const int piece = thread % 8 * 8;
  unsigned short* dq = params.dq.data + whose.batch * params.dq.stride_batch +
                       whose.head * params.dq.stride_head +
                       (whose.rows.first + first_query) * params.dq.stride_seq + first_col + piece;
  const int columns = params.head_dim - first_col - piece;
  if (columns <= 0) return;
  for (int r = thread / 8; r < block_queries && r < capacity; r += kThreads / 8) {
    unsigned short* to = dq + r * params.dq.stride_seq;
    uint4 x = *reinterpret_cast<const uint4*>(&tile[r][piece]);
    if (r >= count) x = {};  // unused rows
    if (params.dq.aligned && columns >= 8) {
      *reinterpret_cast<uint4*>(to) = x;
    } else {
      for (int c = 0; c < 8 && c < columns; ++c) to[c] = r < count ? tile[r][piece + c] : 0;
    }
  }
}

}  // namespace

cudaError_t launch_convert_dq(const ConvertParams& params, Element element, cudaStream_t stream) {
  const BackwardRows& rows = params.rows;
  const int blocks =
      rows.all_tiles() * (rows.tiles.tile_m / params.block_queries) * (rows.dq_columns / kColumns);
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(blocks));
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  cudaLaunchAttribute overlap = programmatic_launch();
  launch.attrs = &overlap;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch,
                            element == Element::kFloat16 ? convert_kernel<Element::kFloat16>
                                                         : convert_kernel<Element::kBFloat16>,
                            params);
}

}  // namespace flash3::hopper
