// SPDX-License-Identifier: Apache-2.0
// Most batches have no row to fill: every block looks at the lengths and ends. Where there are
// some, all blocks share each gap, since most often there is one, after the last sequence.
#include <algorithm>
#include <cstdint>

#include "core/arithmetic.hpp"
#include "cuda/device/ptx/sync.cuh"
#include "cuda/host/cuda_status.hpp"
#include "cuda/host/programmatic_launch.hpp"
#include "cuda/varlen/padding.hpp"

namespace flash3::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostBlocks = 132;  // along x: a multiprocessor each
constexpr int kMostGroups = 64;   // along z, of kThreads gaps

// A tensor as lines of units of unit_bytes, one a row and head, or where side_by_side is set one a
// head, with as many units as there are rows. Strides are in bytes.
struct FilledTensor {
  char* data;
  Index stride_batch, stride_seq, stride_head;
  Index heads, line_units;
  int unit_bytes;
  bool side_by_side;
  uint32_t bits;
  Sequences sequences;
};

struct FillParams {
  FilledTensor tensors[kMostPadded];
  Index batch;
};

// Units of a line from `lane` on, in steps of a warp.
template <class Unit>
__device__ void fill_line(char* line, Index units, Unit value) {
  auto* const at = reinterpret_cast<Unit*>(line);
  for (Index i = threadIdx.x % 32; i < units; i += 32) at[i] = value;
}

__device__ void fill_line(const FilledTensor& tensor, char* line, Index units) {
  const uint32_t bits = tensor.bits;
  if (tensor.unit_bytes == 16) {
    fill_line(line, units, make_uint4(bits, bits, bits, bits));
  } else if (tensor.unit_bytes == 4) {
    fill_line(line, units, bits);
  } else {
    fill_line(line, units, uint16_t(0));
  }
}

__device__ void fill_gap(const FilledTensor& tensor, const RowGap& gap) {
  const Index rows = gap.end - gap.begin;
  const Index lines = tensor.side_by_side ? tensor.heads : rows * tensor.heads;
  const Index units = tensor.side_by_side ? rows : tensor.line_units;
  char* const first =
      tensor.data + gap.element * tensor.stride_batch + gap.begin * tensor.stride_seq;
  for (Index line = blockIdx.x * kWarps + threadIdx.x / 32; line < lines;
       line += Index{gridDim.x} * kWarps) {
    const Index row = line / tensor.heads, head = line % tensor.heads;
    fill_line(tensor, first + row * tensor.stride_seq + head * tensor.stride_head, units);
  }
}

__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ FillParams params) {
  __shared__ RowGap gaps[kThreads];
  __shared__ int found;
  wait_for_previous_kernel();
  const FilledTensor& tensor = params.tensors[blockIdx.y];
  // Without seqused a packed sequence ends where the next one begins.
  const bool inside = tensor.sequences.has_used;
  const Index all = gap_count(tensor.sequences, params.batch);
  const Index count = inside || all < 2 ? all : 2;
  for (Index first = Index{blockIdx.z} * kThreads; first < count;
       first += Index{gridDim.z} * kThreads) {
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    const Index i = first + threadIdx.x;
    if (i < count) {
      const RowGap gap =
          row_gap(tensor.sequences, params.batch, inside || i == 0 ? i : params.batch);
      if (gap.begin < gap.end) gaps[atomicAdd(&found, 1)] = gap;
    }
    __syncthreads();
    for (int g = 0; g < found; ++g) fill_gap(tensor, gaps[g]);
    __syncthreads();
  }
}

bool in_units_of(const TensorView& view, int element_bytes, int unit_bytes) {
  const auto fits = [&](Index elements) { return elements * element_bytes % unit_bytes == 0; };
  return reinterpret_cast<uintptr_t>(view.data) % uintptr_t(unit_bytes) == 0 && fits(view.dim) &&
         fits(view.stride_batch) && fits(view.stride_seq) && fits(view.stride_head);
}

FilledTensor filled_tensor(const PaddedTensor& padded) {
  TensorView view = padded.view;
  const Index bytes = padded.element_bytes;
  FilledTensor filled{};
  filled.side_by_side = view.dim == 1 && view.stride_seq == 1;
  if (!filled.side_by_side && (view.heads == 1 || view.stride_head == view.dim)) {
    view.dim *= view.heads;
    view.heads = 1;
    view.stride_head = 0;
  }
  filled.data = static_cast<char*>(view.data);
  filled.stride_batch = view.stride_batch * bytes;
  filled.stride_seq = view.stride_seq * bytes;
  filled.stride_head = view.stride_head * bytes;
  filled.heads = view.heads;
  filled.unit_bytes = !filled.side_by_side && in_units_of(view, int(bytes), 16) ? 16 : int(bytes);
  filled.line_units = view.dim * bytes / filled.unit_bytes;
  filled.bits = padded.bits;
  filled.sequences = padded.sequences;
  return filled;
}

}  // namespace

Status launch_fill_padding(const Padding& padding, void* stream) {
  FillParams params{};
  params.batch = padding.batch;
  Index lines = 0, gaps = 0;
  unsigned count = 0;
  for (int i = 0; i < padding.count; ++i) {
    const PaddedTensor& padded = padding.tensors[i];
    const Sequences& sequences = padded.sequences;
    const Index rows = sequences.rows * (sequences.packed ? 1 : padding.batch);
    if (rows == 0 || padded.view.heads == 0 || padded.view.dim == 0) continue;
    params.tensors[count++] = filled_tensor(padded);
    lines = std::max(lines, rows * padded.view.heads);
    if (sequences.has_used) gaps = std::max(gaps, gap_count(sequences, padding.batch));
  }
  if (count == 0) return {};

  const dim3 blocks(unsigned(std::clamp<Index>(lines / kWarps, 1, kMostBlocks)), count,
                    unsigned(std::clamp<Index>(ceil_div(gaps, Index{kThreads}), 1, kMostGroups)));
  return cuda_status(launch_overlapping(fill_kernel, blocks, kThreads, stream, params),
                     "launching the kernel that fills rows of no token");
}

}  // namespace flash3::cuda
