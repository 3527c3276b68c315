// SPDX-License-Identifier: Apache-2.0
// Attention on a Hopper GPU, captured once into a CUDA graph and replayed: the library neither
// allocates nor synchronises, so a call becomes a node of the graph.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <flash3/flash3.hpp>
#include <vector>

constexpr int64_t kBatch = 2, kSeq = 1000, kHeads = 8, kDim = 128;
constexpr size_t kCount = kBatch * kSeq * kHeads * kDim, kBytes = kCount * sizeof(uint16_t);

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// bfloat16 is the upper half of a float.
uint16_t to_bfloat16(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
float to_float(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

flash3::Tensor view(void* data) {
  return flash3::tensor(data, FLASH3_BFLOAT16, {kBatch, kSeq, kHeads, kDim});
}

int main() {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK) {
    std::printf("no Hopper GPU: skipped (%s)\n", flash3_last_error());
    return 0;
  }
  std::vector<uint16_t> q(kCount), k(kCount), v(kCount), out(kCount), expected(kCount);
  const auto inputs = [&](float seed) {
    for (size_t i = 0; i < kCount; ++i) {
      q[i] = to_bfloat16(std::sin(seed + 0.1f * static_cast<float>(i)));
      k[i] = to_bfloat16(std::cos(seed + 0.3f * static_cast<float>(i)));
      v[i] = to_bfloat16(std::sin(seed + 0.7f * static_cast<float>(i)));
    }
  };

  void *device_q, *device_k, *device_v, *device_out, *workspace = nullptr;
  for (void** memory : {&device_q, &device_k, &device_v, &device_out})
    check(cudaMalloc(memory, kBytes));
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

  flash3::Forward call{.q = view(device_q), .k = view(device_k), .v = view(device_v)};
  call.out = view(device_out);
  call.causal = true;
  call.stream = stream;
  call.workspace_size = flash3::workspace(call);
  if (call.workspace_size > 0) check(cudaMalloc(&workspace, call.workspace_size));
  call.workspace = workspace;
  std::printf("%s", flash3::explain(call).c_str());

  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  flash3::forward(call);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));

  // Each replay computes what now lies in the buffers; the CPU backend computes the same.
  float worst = 0;
  for (const float seed : {0.f, 1.f, 2.f}) {
    inputs(seed);
    check(cudaMemcpyAsync(device_q, q.data(), kBytes, cudaMemcpyHostToDevice, stream));
    check(cudaMemcpyAsync(device_k, k.data(), kBytes, cudaMemcpyHostToDevice, stream));
    check(cudaMemcpyAsync(device_v, v.data(), kBytes, cudaMemcpyHostToDevice, stream));
    check(cudaGraphLaunch(replay, stream));
    check(cudaMemcpyAsync(out.data(), device_out, kBytes, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));

    flash3::forward({.q = view(q.data()),
                     .k = view(k.data()),
                     .v = view(v.data()),
                     .out = view(expected.data()),
                     .causal = true});
    for (size_t i = 0; i < kCount; ++i)
      worst = std::max(worst, std::abs(to_float(out[i]) - to_float(expected[i])));
  }
  std::printf("3 replays, largest difference to the CPU: %g\n", worst);

  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  for (void* memory : {device_q, device_k, device_v, device_out, workspace})
    check(cudaFree(memory));
  return worst < 0.02f ? 0 : 1;  // outputs are at most 1; bfloat16 has 8 bits
}
