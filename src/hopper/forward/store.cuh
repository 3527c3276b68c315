// The epilogue of one warpgroup's 64 rows: registers → shared memory, in the place of Q → global
// memory.
#pragma once

#include "hopper/device/ptx/stmatrix.cuh"
#include "hopper/device/sink.cuh"
#include "hopper/device/tma.cuh"
#include "hopper/forward/rows.cuh"

namespace flash3::hopper {

// The rows of a warp in the output; a row is counted from the warpgroup's first.
struct OutputRows {
  const ForwardParams& params;
  const OwnRows& own;

  __device__ __forceinline__ int token(int row) const {
    return own.query + params.pack.query_of(row);
  }
  // False: idle, or behind the end of the sequence.
  __device__ __forceinline__ bool exists(int row) const {
    return token(row) < own.sequence.q_length && row < params.pack.rows();
  }
  __device__ __forceinline__ int head(int row) const {
    return own.head_group * params.pack.heads + params.pack.head_of(row);
  }
  __device__ __forceinline__ uint16_t* output(int row) const {
    return params.out_data + own.sequence.batch * params.out_stride_batch +
           head(row) * params.out_stride_head +
           (int64_t(own.sequence.q_first) + token(row)) * params.out_stride_seq;
  }
  // Only if there is an LSE.
  __device__ __forceinline__ float* lse(int row) const {
    return params.lse + own.sequence.batch * params.lse_stride_batch +
           head(row) * params.lse_stride_head + own.sequence.q_first + token(row);
  }
};

// lse[h] belongs to row_in_warpgroup + 8·h; each quad has its rows four times over, one thread
// writes.
__device__ __forceinline__ void store_lse(const ForwardParams& params, const OutputRows& rows,
                                          int row_in_warpgroup, const float (&lse)[2]) {
  if (params.lse == nullptr || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_in_warpgroup + 8 * h;
    if (rows.exists(row)) *rows.lse(row) = lse[h];
  }
}

// Takes the sinks of a thread's two rows into their normalisation and LSE.
__device__ __forceinline__ void add_sinks(const ForwardParams& params, const OutputRows& rows,
                                          int row_in_warpgroup, float (&inverse_sum)[2],
                                          float (&lse)[2]) {
  if (params.sink.data == nullptr) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_in_warpgroup + 8 * h;
    if (rows.exists(row)) add_sink(load_sink(params.sink, rows.head(row)), inverse_sum[h], lse[h]);
  }
}

// Rows that see no key at all: output 0, LSE −∞, or the sink where there is one. Each warp its own.
template <class Traits>
__device__ __forceinline__ void store_empty(const ForwardParams& params, const OutputRows& rows,
                                            int thread) {
  const int lane = thread % 32, first_row = thread / 32 * kWarpRows;
  for (int row = first_row; row < first_row + kWarpRows; ++row) {
    if (!rows.exists(row)) continue;
    uint16_t* out = rows.output(row);
    for (int col = lane; col < params.head_dim_v; col += 32) out[col] = 0;
  }
  const int row = first_row + lane;
  if (params.lse != nullptr && lane < kWarpRows && rows.exists(row))
    *rows.lse(row) =
        params.sink.data != nullptr ? load_sink(params.sink, rows.head(row)) : -kInfinity;
}

// Shared memory is read out when lane 0 of each warp has passed tma_store_wait_read().
template <class Traits>
__device__ __forceinline__ void store_output(const ForwardParams& params, const OutputRows& rows,
                                             uint8_t* staging,
                                             const float (&r_o)[Traits::OutTile::kCols / 2],
                                             int warpgroup, int thread) {
  using OutTile = typename Traits::OutTile;
  // All four warps have read Q.
  sync(NamedBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);

  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane % 16;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(staging));
#pragma unroll
  for (int col = 0; col < OutTile::kCols; col += 16) {
    const float* r = &r_o[col / 2];
    stmatrix_x4(base + OutTile::offset(row, col + lane / 16 * 8),
                pack2<Traits::kElement>(r[0], r[1]), pack2<Traits::kElement>(r[2], r[3]),
                pack2<Traits::kElement>(r[4], r[5]), pack2<Traits::kElement>(r[6], r[7]));
  }
  fence_shared_for_async_proxy();
  sync(NamedBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);

  const int first_row = thread / 32 * kWarpRows;
  if (params.out_by_tma) {
    // The warpgroup's rows in one go, or those of each slot.
    const int slot_rows = params.schedule.slot_rows;
    const bool begins = slot_rows == 0 ? thread == 0 : lane == 0 && first_row % slot_rows == 0;
    const SequenceRows& s = rows.own.sequence;
    if (begins && rows.token(first_row) < s.q_length) {
      BoxAt at = box_at(params.out_rows, s.batch, s.q_first, s.q_length, rows.token(first_row),
                        rows.head(0));
#pragma unroll
      for (int c = 0; c < OutTile::kChunks; ++c) {
        at.dim = c * OutTile::kChunk;
        tma_store(&params.out, at,
                  staging + c * OutTile::kChunkBytes + first_row * OutTile::kRowBytes);
      }
      tma_store_commit();
    }
  } else {
    // Row strides or a base address that TMA does not take: element by element.
    for (int r = first_row; r < first_row + kWarpRows; ++r) {
      if (!rows.exists(r)) continue;
      uint16_t* out = rows.output(r);
      for (int col = lane; col < params.head_dim_v; col += 32) {
        out[col] =
            reinterpret_cast<const uint16_t*>(staging + OutTile::offset(r, col / 8 * 8))[col % 8];
      }
    }
    sync(NamedBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);
  }
}

}  // namespace flash3::hopper
