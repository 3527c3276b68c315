// SPDX-License-Identifier: Apache-2.0
// Makes dQ of its float32 sums, which lie in the order of the tensor cores' registers. Memory
// bounds it.
//
// The main kernel cuts a tile of tile_m queries into blocks of dq_queries × 64, row by row. A
// block's float (i · 128 + t) · 4 + r is element 4i + r of thread t's fragment
// (device/tile.cuh), of the block or of its transpose.
#include "cuda/device/ptx/arithmetic.cuh"
#include "cuda/device/ptx/sync.cuh"
#include "cuda/host/programmatic_launch.hpp"
#include "cuda/sm90/backward/auxiliary_kernels.hpp"
#include "cuda/sm90/backward/find_tile.cuh"
#include "cuda/sm90/backward/tile_height.hpp"

namespace flash3::cuda::sm90 {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 64;
constexpr int kPaddedRow =
    kColumns + 8;  // keeps the eight rows of a warp's store in different banks

// What dQ is written as: kElement, or float32.
template <Element kElement>
struct Rounded {
  using Type = uint16_t;
  struct Pair {
    uint32_t bits;
    __device__ __forceinline__ Pair(float x, float y) : bits(pack2<kElement>(x, y)) {}
    __device__ __forceinline__ Type first() const { return Type(bits); }
    __device__ __forceinline__ Type second() const { return Type(bits >> 16); }
    __device__ __forceinline__ void store(Type* at) const {
      *reinterpret_cast<uint32_t*>(at) = bits;
    }
  };
};
struct Unrounded {
  using Type = float;
  struct Pair {
    float2 pair;
    __device__ __forceinline__ Pair(float x, float y) : pair(make_float2(x, y)) {}
    __device__ __forceinline__ Type first() const { return pair.x; }
    __device__ __forceinline__ Type second() const { return pair.y; }
    __device__ __forceinline__ void store(Type* at) const { *reinterpret_cast<float2*>(at) = pair; }
  };
};

// A block of threads has a block of dQ.
template <class Out, int kTileM>
__global__ void __launch_bounds__(kThreads) convert_kernel(ConvertParams params) {
  using Type = typename Out::Type;
  using Pair = typename Out::Pair;
  constexpr BackwardConfig kTile{.tile_m = kTileM};
  constexpr int kQueries = kTile.dq_queries();
  static_assert(kQueries % 8 == 0 && (kTile.dq_transposed() || kQueries == 64));
  __shared__ __align__(16) Type staged[kQueries][kPaddedRow];
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
    const Pair a(x.x * scale, x.y * scale), b(x.z * scale, x.w * scale);
    if constexpr (kTile.dq_transposed()) {
      staged[8 * i + col][row] = a.first();
      staged[8 * i + col + 1][row] = a.second();
      staged[8 * i + col][row + 8] = b.first();
      staged[8 * i + col + 1][row + 8] = b.second();
    } else {
      a.store(&staged[row][8 * i + col]);
      b.store(&staged[row + 8][8 * i + col]);
    }
  }
  __syncthreads();

  constexpr int kPiece = 16 / sizeof(Type), kPieces = kColumns / kPiece;
  const int piece = thread % kPieces * kPiece;
  Type* dq = static_cast<Type*>(params.dq.data) + tile.batch * params.dq.stride_batch +
             tile.head * params.dq.stride_head +
             (tile.rows.first + first_query) * params.dq.stride_seq + first_col + piece;
  const int columns = params.head_dim - first_col - piece;
  if (columns <= 0) return;
  for (int r = thread / kPieces; r < kQueries && r < capacity; r += kThreads / kPieces) {
    Type* to = dq + r * params.dq.stride_seq;
    uint4 x = *reinterpret_cast<const uint4*>(&staged[r][piece]);
    if (r >= count) x = {};  // unused rows
    if (params.dq.aligned && columns >= kPiece) {
      *reinterpret_cast<uint4*>(to) = x;
    } else {
      for (int c = 0; c < kPiece && c < columns; ++c)
        to[c] = r < count ? staged[r][piece + c] : Type(0);
    }
  }
}

using ConvertKernel = void (*)(ConvertParams);

template <class Out>
cudaError_t launch(const ConvertParams& params, cudaStream_t stream) {
  const BackwardWorkspace& workspace = params.workspace;
  ConvertKernel kernel = nullptr;
  int blocks = workspace.all_tiles() * (workspace.dq_columns / kColumns);
  with_tile_height(workspace.tiles.tile_m, [&](auto tile_m) {
    kernel = convert_kernel<Out, tile_m.value>;
    blocks *= tile_m.value / BackwardConfig{.tile_m = tile_m.value}.dq_queries();
  });
  return launch_overlapping(kernel, dim3(unsigned(blocks)), kThreads, stream, params);
}

}  // namespace

cudaError_t launch_convert_dq(const ConvertParams& params, FloatType type, cudaStream_t stream) {
  switch (type) {
    case FloatType::kFloat16: return launch<Rounded<Element::kFloat16>>(params, stream);
    case FloatType::kBFloat16: return launch<Rounded<Element::kBFloat16>>(params, stream);
    default: return launch<Unrounded>(params, stream);
  }
}

}  // namespace flash3::cuda::sm90
