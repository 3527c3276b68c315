// The epilogue of one warpgroup's 64 rows: registers → shared memory, in the place of Q → global
// memory.
#pragma once

#include "hopper/device/ptx/stmatrix.cuh"
#include "hopper/device/sink.cuh"
#include "hopper/device/tma.cuh"
#include "hopper/forward/kernel.cuh"

namespace flash3::hopper {

// The warpgroup's rows in the output: from this query on, of the heads of this group (HeadPack).
struct OutputRows {
  int query, head_group, batch;

  // How many there are; ≤ 0 behind the end of the sequence.
  __device__ __forceinline__ int count(const ForwardParams& params) const {
    return min(params.pack.queries, params.schedule.seq_q - query) * params.pack.heads;
  }
  __device__ __forceinline__ uint16_t* output(const ForwardParams& params, int row) const {
    return params.out_data + batch * params.out_stride_batch +
           head(params, row) * params.out_stride_head +
           int64_t(query + params.pack.query_of(row)) * params.out_stride_seq;
  }
  __device__ __forceinline__ int head(const ForwardParams& params, int row) const {
    return head_group * params.pack.heads + params.pack.head_of(row);
  }
  // Only if there is an LSE.
  __device__ __forceinline__ float* lse(const ForwardParams& params, int row) const {
    return params.lse + batch * params.lse_stride_batch +
           head(params, row) * params.lse_stride_head + query + params.pack.query_of(row);
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
    if (row < rows.count(params)) *rows.lse(params, row) = lse[h];
  }
}

// Takes the sinks of a thread's two rows into their normalisation and LSE.
__device__ __forceinline__ void add_sinks(const ForwardParams& params, const OutputRows& rows,
                                          int row_in_warpgroup, float (&inverse_sum)[2],
                                          float (&lse)[2]) {
  if (params.sink.data == nullptr) return;
  const int count = rows.count(params);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_in_warpgroup + 8 * h;
    if (row < count)
      add_sink(load_sink(params.sink, rows.head(params, row)), inverse_sum[h], lse[h]);
  }
}

// Rows that see no key at all: output 0, LSE −∞, or the sink where there is one.
template <class Traits>
__device__ __forceinline__ void store_empty(const ForwardParams& params, const OutputRows& rows,
                                            int thread) {
  const int count = rows.count(params);
  for (int row = thread / 32; row < count; row += 4) {
    uint16_t* out = rows.output(params, row);
    for (int col = thread % 32; col < params.head_dim_v; col += 32) out[col] = 0;
  }
  if (params.lse != nullptr && thread < count) {
    *rows.lse(params, thread) = params.sink.data != nullptr
                                    ? load_sink(params.sink, rows.head(params, thread))
                                    : -kInfinity;
  }
}

// Shared memory is read out when thread 0 has passed tma_store_wait_read().
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

  if (params.out_by_tma) {
    if (thread == 0 && rows.count(params) > 0) {
#pragma unroll
      for (int c = 0; c < OutTile::kChunks; ++c) {
        tma_store(&params.out,
                  QueryCoordinates{c * OutTile::kChunk, rows.query, rows.head_group, rows.batch},
                  staging + c * OutTile::kChunkBytes);
      }
      tma_store_commit();
    }
  } else {
    // Row strides or a base address that TMA does not take: element by element.
    const int count = rows.count(params);
    for (int r = thread / 32; r < count; r += 4) {
      uint16_t* out = rows.output(params, r);
      for (int col = lane; col < params.head_dim_v; col += 32) {
        out[col] =
            reinterpret_cast<const uint16_t*>(staging + OutTile::offset(r, col / 8 * 8))[col % 8];
      }
    }
    sync(NamedBarrier::kOutputStaged, warpgroup, kWarpgroupThreads);
  }
}

}  // namespace flash3::hopper
