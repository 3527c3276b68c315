// SPDX-License-Identifier: Apache-2.0
// Steps of decoding on a Hopper GPU, captured once into a CUDA graph: a schedule, and then every
// layer of a model with it. Each replay reads the lengths from device memory, so that one graph
// serves sequences that grow. The CPU backend checks the results.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <flash3/schedule.hpp>
#include <vector>

namespace {

constexpr int64_t kLayers = 3, kBatch = 4, kHeads = 8, kKvHeads = 2, kDim = 128;
constexpr int64_t kPageSize = 16, kMaxPages = 8, kPages = kBatch * kMaxPages;
constexpr int kSteps = 90;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// bfloat16 is the upper half of a float.
uint16_t to_bfloat16(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
float to_float(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

// What a call reads and writes, one after the other, of all layers.
struct Buffers {
  uint16_t *q, *k_new, *v_new, *out, *k, *v;
  int32_t *lengths, *table;
};

constexpr int64_t kQuery = kBatch * kHeads * kDim, kToken = kBatch * kKvHeads * kDim,
                  kCache = kPages * kPageSize * kKvHeads * kDim;
// Numbers of 16 bits that a step brings, and those of the whole model.
constexpr int64_t kInputs = kLayers * (kQuery + 2 * kToken),
                  kNumbers = kInputs + kLayers * (kQuery + 2 * kCache),
                  kBytes = 2 * kNumbers + 4 * (kBatch + kPages);

Buffers buffers_in(unsigned char* memory) {
  Buffers b{};
  b.q = reinterpret_cast<uint16_t*>(memory);
  b.k_new = b.q + kLayers * kQuery;
  b.v_new = b.k_new + kLayers * kToken;
  b.out = b.v_new + kLayers * kToken;
  b.k = b.out + kLayers * kQuery;
  b.v = b.k + kLayers * kCache;
  b.lengths = reinterpret_cast<int32_t*>(b.v + kLayers * kCache);
  b.table = b.lengths + kBatch;
  return b;
}

flash3::Forward layer_call(const Buffers& b, int64_t layer) {
  const auto rows = [](uint16_t* data, int64_t heads) {
    return flash3::tensor(data, FLASH3_BFLOAT16, {kBatch, 1, heads, kDim});
  };
  const auto pages = [](uint16_t* data) {
    return flash3::tensor(data, FLASH3_BFLOAT16, {kPages, kPageSize, kKvHeads, kDim});
  };
  flash3::Forward call{.q = rows(b.q + layer * kQuery, kHeads)};
  call.k = pages(b.k + layer * kCache), call.v = pages(b.v + layer * kCache);
  call.out = rows(b.out + layer * kQuery, kHeads);
  call.k_new = rows(b.k_new + layer * kToken, kKvHeads);
  call.v_new = rows(b.v_new + layer * kToken, kKvHeads);
  call.seqused_k = flash3::index_tensor(b.lengths, kBatch);
  call.page_table = flash3::page_table_tensor(b.table, kBatch, kMaxPages);
  call.causal = true;
  return call;
}

// The step's queries, keys and values, as layers would make them.
void make_inputs(const Buffers& b, int step) {
  for (int64_t i = 0; i < kInputs; ++i)
    b.q[i] = to_bfloat16(std::sin(0.37f * float(i % 7919) + 1.3f * float(step)));
}

void run_on_cpu(const Buffers& b) {
  for (int64_t layer = 0; layer < kLayers; ++layer) flash3::forward(layer_call(b, layer));
}

}  // namespace

int main() {
  if (flash3_backend_available(FLASH3_BACKEND_HOPPER) != FLASH3_OK) {
    std::printf("no Hopper GPU: skipped (%s)\n", flash3_last_error());
    return 0;
  }
  std::vector<unsigned char> host_memory(kBytes), from_device(kBytes);
  const Buffers host = buffers_in(host_memory.data());
  for (int64_t b = 0; b < kBatch; ++b) host.lengths[b] = int32_t(7 * b);  // the first one is new
  for (int64_t i = 0; i < kPages; ++i) host.table[i] = int32_t(i * 13 % kPages);  // in any order

  void *device_memory, *workspace = nullptr, *schedule_memory = nullptr;
  cudaStream_t stream;
  check(cudaMalloc(&device_memory, kBytes));
  check(cudaMemcpy(device_memory, host_memory.data(), kBytes, cudaMemcpyHostToDevice));
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Buffers device = buffers_in(static_cast<unsigned char*>(device_memory));

  // All layers need the same: one after the other they share workspace and schedule.
  flash3::Forward first = layer_call(device, 0);
  first.stream = stream;
  const size_t workspace_size = flash3::workspace(first),
               schedule_size = flash3::schedule_size(first);
  if (workspace_size > 0) check(cudaMalloc(&workspace, workspace_size));
  if (schedule_size > 0) check(cudaMalloc(&schedule_memory, schedule_size));

  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const flash3::Schedule schedule = flash3::schedule(first, schedule_memory, schedule_size);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    flash3::Forward call = layer_call(device, layer);
    call.schedule = &schedule;
    call.stream = stream;
    call.workspace = workspace, call.workspace_size = workspace_size;
    flash3::forward(call);
  }
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));

  float worst = 0;
  for (int step = 0; step < kSteps; ++step) {
    make_inputs(host, step);
    check(cudaMemcpyAsync(device.q, host.q, 2 * kInputs, cudaMemcpyHostToDevice, stream));
    check(
        cudaMemcpyAsync(device.lengths, host.lengths, 4 * kBatch, cudaMemcpyHostToDevice, stream));
    check(cudaGraphLaunch(replay, stream));
    check(
        cudaMemcpyAsync(from_device.data(), device_memory, kBytes, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    run_on_cpu(host);
    const Buffers got = buffers_in(from_device.data());
    for (int64_t i = 0; i < kLayers * kQuery; ++i)
      worst = std::max(worst, std::abs(to_float(got.out[i]) - to_float(host.out[i])));
    for (int64_t b = 0; b < kBatch; ++b) ++host.lengths[b];
  }
  const Buffers got = buffers_in(from_device.data());
  const bool same_cache = std::memcmp(got.k, host.k, 2 * 2 * kLayers * kCache) == 0;
  std::printf("%d replays of %d layers, largest difference to the CPU: %g; caches %s\n", kSteps,
              int(kLayers), double(worst), same_cache ? "equal" : "differ");

  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  for (void* memory : {device_memory, workspace, schedule_memory}) check(cudaFree(memory));
  return worst < 0.02f && same_cache ? 0 : 1;  // outputs are at most 1; bfloat16 has 8 bits
}
