// What the main kernel wants of each query row, and the zeros that dQ is added to. Bound by memory:
// one read of dOut and Out, one write of dQ's sums.
#include <cuda_fp16.h>

#include "hopper/backward/rows.hpp"
#include "hopper/device/element.cuh"
#include "hopper/device/ptx/grid.cuh"
#include "hopper/device/ptx/math.cuh"

namespace flash3::hopper {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 64;  // of a block
constexpr float kLog2E = 1.44269504088896341f;

FLASH3_HOST_DEVICE constexpr int blocks_of_a_head(const BackwardRows& rows) {
  return (rows.padded_q + kRows - 1) / kRows;
}

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

// kLanes threads share a row, eight elements each.
template <Element kElement, int kLanes>
__global__ void __launch_bounds__(kThreads) preprocess_kernel(PreprocessParams params) {
  launch_dependents();
  const BackwardRows& rows = params.rows;
  const int blocks_per_head = blocks_of_a_head(rows);
  const int block = blockIdx.x % blocks_per_head;
  const int64_t head_index = blockIdx.x / blocks_per_head;  // [batch, head]
  const int head = int(head_index % rows.heads_q), batch = int(head_index / rows.heads_q);

  const int64_t first_row = head_index * rows.padded_q + block * kRows;
  const int count = min(kRows, rows.padded_q - block * kRows);
  float4* const dq = reinterpret_cast<float4*>(rows.dq + first_row * rows.dq_columns);
  for (int i = threadIdx.x; i < count * rows.dq_columns / 4; i += kThreads) dq[i] = {};

  if (rows.turns != nullptr) {
    // Of the query tile whose first row lies here, if there is one.
    const int tile_m = rows.turns_of_tile_rows, tile = (block * kRows + tile_m - 1) / tile_m;
    if (threadIdx.x < kTurns && tile * tile_m < block * kRows + count)
      rows.turns[(head_index * (rows.padded_q / tile_m) + tile) * kTurns + threadIdx.x] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.ticket = 0;
  }

  const unsigned short* dout =
      params.dout.data + batch * params.dout.stride_batch + head * params.dout.stride_head;
  const unsigned short* out =
      params.out.data + batch * params.out.stride_batch + head * params.out.stride_head;
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int r = threadIdx.x / kLanes; r < kRows; r += kThreads / kLanes) {
    const int query = block * kRows + r;
    float sum = 0.f;
    if (query < rows.seq_q) {
      const Piece a = load_piece(dout + query * params.dout.stride_seq, lane * 8, params.head_dim_v,
                                 params.dout.aligned);
      const Piece b = load_piece(out + query * params.out.stride_seq, lane * 8, params.head_dim_v,
                                 params.out.aligned);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = to_floats<kElement>(a.pairs[i]), y = to_floats<kElement>(b.pairs[i]);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane != 0 || r >= count) continue;

    float lse = -kInfinity;
    if (query < rows.seq_q) {
      lse =
          params.lse.data[batch * params.lse.stride_batch + head * params.lse.stride_head + query];
      if (params.dlse.data != nullptr)
        sum -= params.dlse
                   .data[batch * params.dlse.stride_batch + head * params.dlse.stride_head + query];
    }
    const bool sees_nothing = lse == -kInfinity;
    rows.lse_log2[first_row + r] = sees_nothing ? kInfinity : lse * kLog2E;
    rows.delta[first_row + r] = sees_nothing ? 0.f : sum;
  }
}

template <Element kElement>
void launch(const PreprocessParams& params, cudaStream_t stream) {
  const int64_t blocks =
      int64_t(params.rows.batch) * params.rows.heads_q * blocks_of_a_head(params.rows);
  const dim3 grid{unsigned(blocks)};
  if (params.head_dim_v <= 64) {
    preprocess_kernel<kElement, 8><<<grid, kThreads, 0, stream>>>(params);
  } else if (params.head_dim_v <= 128) {
    preprocess_kernel<kElement, 16><<<grid, kThreads, 0, stream>>>(params);
  } else {
    preprocess_kernel<kElement, 32><<<grid, kThreads, 0, stream>>>(params);
  }
}

}  // namespace

cudaError_t launch_preprocess(const PreprocessParams& params, Element element,
                              cudaStream_t stream) {
  if (element == Element::kFloat16) {
    launch<Element::kFloat16>(params, stream);
  } else {
    launch<Element::kBFloat16>(params, stream);
  }
  return cudaPeekAtLastError();
}

}  // namespace flash3::hopper
