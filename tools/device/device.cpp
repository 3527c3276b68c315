// SPDX-License-Identifier: Apache-2.0
#include "device/device.hpp"

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "cuda/host/cuda_status.hpp"
#include "device/compare.hpp"

namespace flash3::device {
namespace {

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code) + " (" +
                           cudaGetErrorName(code) + ")");
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class Graph {
 public:
  Graph() = default;
  ~Graph() {
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  cudaGraph_t& get() { return graph_; }

 private:
  cudaGraph_t graph_ = nullptr;
};

class DeviceMemory final : public cases::Memory {
 public:
  DeviceMemory() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~DeviceMemory() override { cudaStreamDestroy(stream_); }

  std::shared_ptr<void> allocate(size_t bytes) override {
    void* p = nullptr;
    check(cudaMalloc(&p, bytes > 0 ? bytes : 1), "cudaMalloc");
    return {p, cudaFree};
  }
  void copy_in(void* to, const void* from_host, size_t bytes) override {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, stream_), "copy to device");
    finish();
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, stream_),
          "copy from device");
    finish();
  }
  void fill(void* to, std::byte value, size_t bytes) override {
    if (bytes == 0) return;
    check(cudaMemsetAsync(to, static_cast<int>(value), bytes, stream_), "cudaMemsetAsync");
  }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_),
          "copy on the device");
  }
  bool equal(const void* a, const void* b, size_t bytes) override {
    if (bytes == 0) return true;
    if (!differ_) differ_ = allocate(sizeof(int));
    fill(differ_.get(), std::byte{0}, sizeof(int));
    check(note_difference(a, b, bytes, static_cast<int*>(differ_.get()), stream_),
          "comparing on the device");
    int differ = 0;
    copy_out(&differ, differ_.get(), sizeof differ);
    return differ == 0;
  }
  void finish() override { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  double time(const std::function<void()>& work) override {
    check(cudaEventRecord(start_.get(), stream_), "cudaEventRecord");
    work();
    check(cudaEventRecord(stop_.get(), stream_), "cudaEventRecord");
    check(cudaEventSynchronize(stop_.get()), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start_.get(), stop_.get()), "cudaEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
  }
  std::function<void()> record(const std::function<void()>& work) override {
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    Graph graph;
    try {
      work();
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph.get());  // the stream is as it was; the graph is broken
      throw;
    }
    check(cudaStreamEndCapture(stream_, &graph.get()), "cudaStreamEndCapture");
    cudaGraphExec_t executable = nullptr;
    check(cudaGraphInstantiate(&executable, graph.get(), 0), "cudaGraphInstantiate");
    const std::shared_ptr<CUgraphExec_st> owner(executable, cudaGraphExecDestroy);
    return [this, owner] { check(cudaGraphLaunch(owner.get(), stream_), "cudaGraphLaunch"); };
  }
  void* stream() const override { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  Event start_, stop_;
  std::shared_ptr<void> differ_;  // an int
};

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

std::vector<Gpu> gpus(std::string* reason) {
  int count = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&count); code != cudaSuccess || count == 0) {
    *reason = code == cudaSuccess ? "no CUDA device is visible" : cuda::why_no_device(code);
    return {};
  }
  std::vector<Gpu> found;
  for (int i = 0; i < count; ++i) {
    Gpu gpu;
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    char bus_id[32] = "";
    check(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, i), "cudaDeviceGetPCIBusId");
    gpu.name = properties.name;
    gpu.pci_bus_id = bus_id;
    gpu.compute_major = properties.major;
    gpu.compute_minor = properties.minor;
    gpu.sms = properties.multiProcessorCount;
    gpu.max_clock_hz = 1e3 * attribute(cudaDevAttrClockRate, i);
    gpu.memory_bytes = properties.totalGlobalMem;
    found.push_back(gpu);
  }
  return found;
}

CudaVersions cuda_versions() {
  CudaVersions versions;
  int number = 0;
  if (cudaRuntimeGetVersion(&number) == cudaSuccess) versions.runtime = version_text(number);
  if (cudaDriverGetVersion(&number) == cudaSuccess && number > 0)
    versions.driver = version_text(number);
  return versions;
}

std::unique_ptr<cases::Memory> make_device_memory() { return std::make_unique<DeviceMemory>(); }

}  // namespace flash3::device
