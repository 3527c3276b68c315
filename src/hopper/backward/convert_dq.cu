// dQ from its float32 sums, which lie in the order of the tensor cores' registers. Bound by memory.
//
// A tile of tile_m queries is cut into blocks of 64 × 64, row by row. A block's float
// (i · 128 + t) · 4 + r is element 4i + r of thread t's fragment (device/tile/mma.cuh).
#include "hopper/backward/rows.hpp"
#include "hopper/device/element.cuh"

namespace flash3::hopper {
namespace {

constexpr int kThreads = 128;
constexpr int kBlock = 64;
constexpr int kPaddedRow = kBlock + 8;  // keeps the eight rows of a warp's store in different banks

template <Element kElement>
__global__ void __launch_bounds__(kThreads) convert_kernel(ConvertParams params) {
  __shared__ __align__(16) uint16_t tile[kBlock][kPaddedRow];
  const BackwardRows& rows = params.rows;
  const int column_blocks = rows.dq_columns / kBlock;
  const int blocks_per_head = rows.padded_q / kBlock * column_blocks;
  const int blocks_per_tile = params.tile_m / kBlock * column_blocks;
  const int block = blockIdx.x % blocks_per_head;
  const int head_index = int(blockIdx.x / blocks_per_head);
  const int head = head_index % rows.heads_q, batch = head_index / rows.heads_q;
  const int in_tile = block % blocks_per_tile;
  const int first_query =
      block / blocks_per_tile * params.tile_m + in_tile / column_blocks * kBlock;
  const int first_col = in_tile % column_blocks * kBlock;
  if (first_query >= rows.seq_q || first_col >= params.head_dim) return;

  const int thread = threadIdx.x;
  const float4* sums =
      reinterpret_cast<const float4*>(rows.dq + int64_t(blockIdx.x) * kBlock * kBlock) + thread;
  const int row = thread / 32 * 16 + thread % 32 / 4, col = thread % 4 * 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 x = sums[i * kThreads];
    const float scale = params.softmax_scale;
    *reinterpret_cast<uint32_t*>(&tile[row][8 * i + col]) =
        pack2<kElement>(x.x * scale, x.y * scale);
    *reinterpret_cast<uint32_t*>(&tile[row + 8][8 * i + col]) =
        pack2<kElement>(x.z * scale, x.w * scale);
  }
  __syncthreads();

  const int piece = thread % 8 * 8;
  unsigned short* dq = params.dq.data + batch * params.dq.stride_batch +
                       head * params.dq.stride_head + first_col + piece;
  const int columns = params.head_dim - first_col - piece;
  if (columns <= 0) return;
  for (int r = thread / 8; r < kBlock && first_query + r < rows.seq_q; r += kThreads / 8) {
    unsigned short* to = dq + (first_query + r) * params.dq.stride_seq;
    if (params.dq.aligned && columns >= 8) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&tile[r][piece]);
    } else {
      for (int c = 0; c < 8 && c < columns; ++c) to[c] = tile[r][piece + c];
    }
  }
}

}  // namespace

cudaError_t launch_convert_dq(const ConvertParams& params, Element element, cudaStream_t stream) {
  const BackwardRows& rows = params.rows;
  const int64_t blocks =
      int64_t(rows.batch) * rows.heads_q * (rows.padded_q / kBlock) * (rows.dq_columns / kBlock);
  const dim3 grid{unsigned(blocks)};
  if (element == Element::kFloat16) {
    convert_kernel<Element::kFloat16><<<grid, kThreads, 0, stream>>>(params);
  } else {
    convert_kernel<Element::kBFloat16><<<grid, kThreads, 0, stream>>>(params);
  }
  return cudaPeekAtLastError();
}

}  // namespace flash3::hopper
