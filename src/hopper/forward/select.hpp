// Which kernel runs a forward call, and with what: the one place that decides. supports(),
// workspace_size(), explain() and forward() all ask here.
#pragma once

#include <span>
#include <string>

#include "core/problem.hpp"
#include "hopper/device_info.hpp"
#include "hopper/element.hpp"
#include "hopper/forward/config.hpp"

namespace flash3::hopper {

struct ForwardKernel {
  std::string id;  // "fwd_bf16_d128_band"
  Element element;
  ForwardConfig config;
  const void* function;  // for cudaLaunchKernel
};

// Every kernel built in, in the order of the tile table.
std::span<const ForwardKernel> forward_kernels();

// An input that TMA cannot address, copied to aligned rows in the workspace before the kernel runs.
struct PackedCopy {
  bool needed = false;
  size_t offset = 0;  // into the workspace
  int64_t row = 0;    // elements from one row to the next
};

// Rows, keys, the band's bounds and their sums are 32-bit in the kernel.
inline constexpr int64_t kMaxLength = int64_t{1} << 30;

struct ForwardPlan {
  const ForwardKernel* kernel = nullptr;
  PackedCopy q, k, v;
  bool out_by_tma = false;
  bool dynamic = false;  // blocks take tiles from a counter in the workspace
  size_t counter_offset = 0;
  size_t workspace_bytes = 0;

  int m_tiles = 0;         // query tiles per head
  int heads_in_group = 0;  // see device/scheduler.cuh
  int batch_heads = 0;
  int tiles = 0;
  int grid = 0;  // blocks
};

Status plan_forward(const ForwardProblem& problem, const Device& device, ForwardPlan* plan);

}  // namespace flash3::hopper
