// Which kernel runs a backward call, and with what: the one place that decides.
#pragma once

#include <span>
#include <string>

#include "core/problem.hpp"
#include "hopper/backward/config.hpp"
#include "hopper/device_info.hpp"
#include "hopper/element.hpp"
#include "hopper/packed_copy.hpp"

namespace flash3::hopper {

struct BackwardKernel {
  std::string id;  // "bwd_bf16_d128_band_64x128"
  Element element;
  BackwardConfig config;
  const void* function;  // for cudaLaunchKernel
};

// Every kernel built in, in the order of the tile table.
std::span<const BackwardKernel> backward_kernels();

struct BackwardPlan {
  const BackwardKernel* kernel = nullptr;

  PackedCopy q, k, v, dout;
  bool dk_by_tma = false, dv_by_tma = false;

  // Offsets into the workspace; see BackwardRows in params.h.
  size_t lse_offset = 0, delta_offset = 0, dq_offset = 0;
  size_t turns_offset = 0, ticket_offset = 0;  // only if deterministic
  size_t workspace_bytes = 0;

  int padded_q = 0;
  int n_tiles = 0;
  int kv_heads = 0;  // batch · heads_k
  int kv_heads_at_a_time = 1;
  int grid = 0;  // blocks: one for each tile of keys

  bool deterministic = false;  // blocks add to dQ in turn: turn_of() in params.h
};

Status plan_backward(const BackwardProblem& problem, const Device& device, BackwardPlan* plan);

}  // namespace flash3::hopper
