// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "cases/tensors.hpp"
#include "device/bench_kernels.hpp"
#include "device/ceiling_instances.hpp"
#include "device/device.hpp"

namespace flash3::device {
namespace {

using cuda::Element;

constexpr double kWarmSeconds = 0.4;
constexpr double kLaunchSeconds = 20e-3;  // short enough to fit the time asked for

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code) + " (" +
                           cudaGetErrorName(code) + ")");
}

const CeilingInstance& find_instance(flash3_dtype dtype, int head_dim) {
  const auto& instances = [&]() -> const CeilingInstance(&)[3] {
    switch (dtype) {
      case FLASH3_FLOAT16: return CeilingInstances<Element::kFloat16>::all;
      case FLASH3_BFLOAT16: return CeilingInstances<Element::kBFloat16>::all;
      case FLASH3_FLOAT8_E4M3: return CeilingInstances<Element::kE4m3>::all;
      default: throw std::runtime_error("the ceiling is for float16, bfloat16 and e4m3");
    }
  }();
  for (const CeilingInstance& instance : instances)
    if (instance.head_dim == head_dim) return instance;
  throw std::runtime_error("the ceiling is for head_dim 64, 128 and 256, not " +
                           std::to_string(head_dim));
}

// Throws if the figure cannot be one.
void check_result(const CeilingResult& result, const std::vector<CeilingBlock>& blocks,
                  int threads) {
  // NOTE: 0.2 % for the cycles that a block's two reads of the clock miss.
  if (result.peak_percent > 100.2) {
    char text[160];
    std::snprintf(text, sizeof text,
                  "the ceiling came out at %.1f %% of what the tensor cores can do in the cycles "
                  "counted: the compiler has dropped products",
                  result.peak_percent);
    throw std::runtime_error(text);
  }
  for (const CeilingBlock& block : blocks)
    for (int i = 0; i < threads; ++i)
      if (!std::isfinite(block.sink[i]) || block.sink[i] == 0)
        throw std::runtime_error(
            "the ceiling's accumulators are not those of N(0, 1) operands: thread " +
            std::to_string(i) + " added up " + std::to_string(block.sink[i]));
}

}  // namespace

void require_bench_kernels(const std::string&) {}

CeilingResult measure_ceiling(flash3_dtype dtype, int head_dim, double seconds, const Gpu& gpu,
                              Monitor& monitor, cases::Memory& memory) {
  const CeilingInstance& instance = find_instance(dtype, head_dim);
  const auto normal = [&](flash3_dtype type, int64_t count, uint64_t seed) {
    std::vector<std::byte> values(size_t(count * cases::element_size(type)));
    cases::fill_normal(values.data(), type, count, seed);
    auto copy = memory.allocate(values.size());
    memory.copy_in(copy.get(), values.data(), values.size());
    return copy;
  };
  const auto data = normal(dtype, int64_t(instance.shared_bytes) / cases::element_size(dtype), 1);
  const auto scores = normal(FLASH3_FLOAT32, instance.scores, 2);

  std::vector<CeilingBlock> blocks(size_t(gpu.sms));
  const size_t block_bytes = blocks.size() * sizeof(CeilingBlock);
  const auto device_blocks = memory.allocate(block_bytes);
  const auto clear = [&] {
    std::fill(blocks.begin(), blocks.end(), CeilingBlock{});
    memory.copy_in(device_blocks.get(), blocks.data(), block_bytes);
  };

  check(cudaFuncSetAttribute(instance.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(instance.shared_bytes)),
        "cudaFuncSetAttribute");
  const double per_clock = flops_per_clock_per_sm(dtype);
  const double expected = 0.85 * gpu.max_clock_hz * per_clock;  // FLOP/s of an SM
  const int rounds = std::max(1, int(kLaunchSeconds * expected / instance.flops));
  void *data_pointer = data.get(), *scores_pointer = scores.get(),
       *blocks_pointer = device_blocks.get();
  void* arguments[] = {reinterpret_cast<void*>(&data_pointer),
                       reinterpret_cast<void*>(&scores_pointer), const_cast<int*>(&rounds),
                       reinterpret_cast<void*>(&blocks_pointer)};
  const auto run = [&](int launches) {
    return memory.time([&] {
      for (int i = 0; i < launches; ++i) {
        check(cudaLaunchKernel(instance.kernel, dim3(unsigned(gpu.sms)),
                               dim3(unsigned(instance.threads)), arguments, instance.shared_bytes,
                               static_cast<cudaStream_t>(memory.stream())),
              "launch of the ceiling kernel");
      }
    });
  };
  const auto launches_in = [](double time, double one = kLaunchSeconds) {
    return std::max(1, int(std::ceil(time / one)));
  };
  clear();
  run(1);  // loads the kernel
  const int warm_launches = launches_in(kWarmSeconds);
  const double launch_seconds = run(warm_launches) / warm_launches;
  const int launches = launches_in(seconds, launch_seconds);

  clear();
  monitor.start();
  CeilingResult result;
  result.dtype = dtype, result.head_dim = head_dim, result.keys = instance.keys;
  result.seconds = run(launches);
  result.reading = monitor.stop();
  memory.copy_out(blocks.data(), device_blocks.get(), block_bytes);

  double cycles = 0;  // of all SMs
  for (const CeilingBlock& block : blocks) cycles += double(block.cycles);
  result.flops = instance.flops * rounds * gpu.sms * launches;
  result.clock_hz = cycles / gpu.sms / result.seconds;
  result.peak_percent = 100 * result.flops / (cycles * per_clock);
  check_result(result, blocks, instance.threads);
  return result;
}

}  // namespace flash3::device
