// SPDX-License-Identifier: Apache-2.0
// Writes which weights dropout keeps, for whoever wants to see them (flash3/dropout.h).
#include <algorithm>

#include "core/dropout.hpp"
#include "cuda/dropout/dropout_mask.hpp"
#include "cuda/host/cuda_status.hpp"

namespace flash3::cuda {
namespace {

constexpr int kThreads = 256;

struct DropoutMaskParams {
  const long long* state;  // null: these
  unsigned long long seed, offset;
  unsigned threshold;
  int heads, seq_q, seq_k;
  long long rows;  // batch · heads · seq_q
  unsigned char* kept;
  long long stride_batch, stride_head, stride_query;
};

// As dropout_keeps(), whose index into the words would put them into local memory.
__device__ bool keeps(PhiloxKey key, unsigned threshold, unsigned batch_head, int query, int j) {
  const PhiloxWords words = DropoutGroup::of(query, j).words(batch_head, key);
  const int place = DropoutGroup::place(query, j);
  const unsigned low = place & 2 ? words.word[1] : words.word[0],
                 high = place & 2 ? words.word[3] : words.word[2];
  return ((place & 4 ? high : low) >> 16 * (place & 1) & 0xFFFF) >= threshold;
}

// A block takes one row after the other, a thread keys of it.
__global__ void __launch_bounds__(kThreads) dropout_mask_kernel(DropoutMaskParams params) {
  const PhiloxKey key = params.state == nullptr ? dropout_key(params.seed, params.offset)
                                                : dropout_key((unsigned long long)params.state[0],
                                                              (unsigned long long)params.state[1]);
  for (long long row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const int query = int(row % params.seq_q);
    const long long batch_head = row / params.seq_q;
    unsigned char* const kept = params.kept + batch_head / params.heads * params.stride_batch +
                                batch_head % params.heads * params.stride_head +
                                query * params.stride_query;
    for (int j = threadIdx.x; j < params.seq_k; j += kThreads)
      kept[j] = keeps(key, params.threshold, unsigned(batch_head), query, j);
  }
}

}  // namespace

Status launch_dropout_mask(const DropoutMaskProblem& problem) {
  if (problem.is_empty()) return {};
  DropoutMaskParams params{};
  params.state = reinterpret_cast<const long long*>(problem.state.data);
  params.seed = problem.dropout.seed, params.offset = problem.dropout.offset;
  params.threshold = problem.dropout.threshold;
  params.heads = int(problem.heads);
  params.seq_q = int(problem.seq_q), params.seq_k = int(problem.seq_k);
  params.rows = problem.batch * problem.heads * problem.seq_q;
  params.kept = problem.kept;
  params.stride_batch = problem.stride_batch, params.stride_head = problem.stride_head;
  params.stride_query = problem.stride_query;
  constexpr long long kMostBlocks = 1 << 16;
  dropout_mask_kernel<<<unsigned(std::min(params.rows, kMostBlocks)), kThreads, 0,
                        static_cast<cudaStream_t>(problem.stream)>>>(params);
  return cuda_status(cudaPeekAtLastError(), "launching the mask of dropout");
}

}  // namespace flash3::cuda
