// torch.ops.flash3: the C interface as torch operators, on torch's stable ABI. One binary for every
// Python and every torch from 2.10 on: it links libtorch_cpu alone, and finds what only a torch
// with CUDA has when a CUDA tensor comes.
//
// Here tensors become flash3_tensors and results are allocated; the library checks the call. Fake
// kernels, autograd and autocast are registered in flash3/_torch.py.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "flash3/flash3.h"

namespace {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

constexpr int64_t kWorkspaceAlignment = 256;

// "flash3: invalid argument: q.shape[2] = …": flash3/_torch.py makes the Python exception of it.
[[noreturn]] void fail(flash3_status status, const std::string& sentence) {
  throw std::runtime_error("flash3: " + std::string(flash3_status_name(status)) + ": " + sentence);
}

void check(flash3_status status) {
  if (status != FLASH3_OK) fail(status, flash3_last_error());
}

void check_torch(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS)
    fail(FLASH3_INTERNAL_ERROR, std::string(what) + " failed inside torch");
}

struct Device {
  int32_t type = 0, index = 0;
  bool is_cuda() const { return type == aoti_torch_device_type_cuda(); }
  bool operator==(const Device&) const = default;
  std::string name() const {
    if (is_cuda()) return "cuda:" + std::to_string(index);
    return type == aoti_torch_device_type_cpu() ? "cpu" : "device type " + std::to_string(type);
  }
};

Device device_of(const char* name, const Tensor& t) {
  if (!t.defined())
    fail(FLASH3_INVALID_ARGUMENT,
         std::string(name) + ".dtype is none: it must be a tensor, not None");
  Device device;
  check_torch(aoti_torch_get_device_type(t.get(), &device.type), "get_device_type");
  check_torch(aoti_torch_get_device_index(t.get(), &device.index), "get_device_index");
  if (!device.is_cuda()) device.index = 0;
  return device;
}

int32_t torch_dtype_of(const Tensor& t) {
  int32_t dtype = 0;
  check_torch(aoti_torch_get_dtype(t.get(), &dtype), "get_dtype");
  return dtype;
}

flash3_dtype dtype_of(const char* name, const Tensor& t) {
  const int32_t dtype = torch_dtype_of(t);
  if (dtype == aoti_torch_dtype_bfloat16()) return FLASH3_BFLOAT16;
  if (dtype == aoti_torch_dtype_float16()) return FLASH3_FLOAT16;
  if (dtype == aoti_torch_dtype_float32()) return FLASH3_FLOAT32;
  if (dtype == aoti_torch_dtype_int32()) return FLASH3_INT32;
  if (dtype == aoti_torch_dtype_float8_e4m3fn())
    fail(FLASH3_UNSUPPORTED,
         std::string(name) + ".dtype = float8_e4m3fn; these operators take no FP8");
  const char* known = dtype == aoti_torch_dtype_float64() ? "float64"
                      : dtype == aoti_torch_dtype_int64() ? "int64"
                                                          : "another one";
  fail(FLASH3_INVALID_ARGUMENT, std::string(name) + ".dtype = " + known +
                                    " but it must be float16, bfloat16 or float32, and int32 for "
                                    "lengths");
}

Tensor empty(const Sizes& sizes, int32_t dtype, const Device& device) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= sizes[d] > 0 ? sizes[d] : 1;
  }
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                       strides.data(), dtype, device.type, device.index, &handle),
              "an allocation");
  return Tensor(handle);
}

Tensor empty_of_shape(const Tensor& like, const Device& device) {
  const auto sizes = like.sizes();
  return empty(Sizes(sizes.begin(), sizes.end()), torch_dtype_of(like), device);
}

// The current stream of a device. Only libtorch_cuda has the function, and a torch without CUDA has
// no CUDA tensor that could bring us here.
void* current_stream(int32_t device_index) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library
               ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
               : nullptr;
  }();
  if (!function) fail(FLASH3_UNSUPPORTED, "q is a CUDA tensor but this torch has no CUDA streams");
  void* stream = nullptr;
  check_torch(function(device_index, &stream), "get_current_cuda_stream");
  return stream;
}

// The arguments of an operator, taken from its stack one after the other.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : stack_(stack) {}
  template <class T>
  T next() {
    return torch::stable::detail::to<T>(*stack_++);
  }
  Tensor tensor() { return next<Tensor>(); }
  MaybeTensor maybe_tensor() { return next<MaybeTensor>(); }

 private:
  StableIValue* stack_;
};

// What forward and backward have in common, in the schema's order.
struct Options {
  MaybeTensor sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  int64_t max_seqlen_q, max_seqlen_k;
  double softmax_scale;
  bool causal;
  int64_t window_left, window_right;
  double softcap;
  int64_t chunk;
  bool deterministic;

  explicit Options(Arguments& a)
      : sink(a.maybe_tensor()),
        cu_seqlens_q(a.maybe_tensor()),
        cu_seqlens_k(a.maybe_tensor()),
        seqused_q(a.maybe_tensor()),
        seqused_k(a.maybe_tensor()),
        max_seqlen_q(a.next<int64_t>()),
        max_seqlen_k(a.next<int64_t>()),
        softmax_scale(a.next<double>()),
        causal(a.next<bool>()),
        window_left(a.next<int64_t>()),
        window_right(a.next<int64_t>()),
        softcap(a.next<double>()),
        chunk(a.next<int64_t>()),
        deterministic(a.next<bool>()) {}
};
#define FLASH3_OPTIONS                                                                        \
  "Tensor? sink=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "                 \
  "Tensor? seqused_q=None, Tensor? seqused_k=None, SymInt max_seqlen_q=0, "                   \
  "SymInt max_seqlen_k=0, float softmax_scale=0., bool causal=False, SymInt window_left=-1, " \
  "SymInt window_right=-1, float softcap=0., SymInt chunk=0, bool deterministic=False"

// One call: its params, and the tensors that they point to.
template <class Params>
class Call {
 public:
  Call(const Tensor& q, const Options& o) : device_(device_of("q", q)) {
    params.struct_size = sizeof params;
    optional_input("sink", &params.sink, o.sink);
    optional_input("cu_seqlens_q", &params.cu_seqlens_q, o.cu_seqlens_q);
    optional_input("cu_seqlens_k", &params.cu_seqlens_k, o.cu_seqlens_k);
    optional_input("seqused_q", &params.seqused_q, o.seqused_q);
    optional_input("seqused_k", &params.seqused_k, o.seqused_k);
    params.max_seqlen_q = o.max_seqlen_q;
    params.max_seqlen_k = o.max_seqlen_k;
    params.softmax_scale = static_cast<float>(o.softmax_scale);
    params.causal = o.causal;
    params.window = o.window_left >= 0 || o.window_right >= 0;
    params.window_left = o.window_left;
    params.window_right = o.window_right;
    params.softcap = static_cast<float>(o.softcap);
    params.chunk = o.chunk;
    if (device_.is_cuda()) {
      params.stream = current_stream(device_.index);
    } else {
      params.num_threads = static_cast<int32_t>(torch::stable::get_num_threads());
    }
  }

  // A last dimension with gaps is copied; any other stride is passed on.
  void input(const char* name, flash3_tensor* field, const Tensor& t) {
    device_of(name, t);  // says so if there is no tensor
    const int64_t last = t.dim() - 1;
    const bool has_gaps = last >= 0 && t.size(last) > 1 && t.stride(last) != 1;
    set(name, field, has_gaps ? torch::stable::contiguous(t) : t);
  }
  void optional_input(const char* name, flash3_tensor* field, const MaybeTensor& t) {
    if (t) input(name, field, *t);
  }
  void output(const char* name, flash3_tensor* field, const Tensor& t) { set(name, field, t); }

  const Device& device() const { return device_; }

  template <class Workspace, class Run>
  void run(const Workspace& workspace_of, const Run& run) {
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    if (device_.is_cuda()) guard.emplace(device_.index);
    size_t bytes = 0;
    check(workspace_of(&params, &bytes));
    std::optional<Tensor> workspace;  // torch's allocators know when the stream is done with it
    if (bytes > 0) {
      workspace = empty({static_cast<int64_t>(bytes) + kWorkspaceAlignment},
                        aoti_torch_dtype_uint8(), device_);
      const auto address = reinterpret_cast<uintptr_t>(workspace->data_ptr());
      params.workspace = reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) /
                                                 kWorkspaceAlignment * kWorkspaceAlignment);
      params.workspace_size = bytes;
    }
    check(run(&params));
  }

  Params params = {};

 private:
  void set(const char* name, flash3_tensor* field, const Tensor& t) {
    const Device device = device_of(name, t);
    if (device != device_)
      fail(FLASH3_INVALID_ARGUMENT, std::string(name) + ".device = " + device.name() +
                                        " but q.device = " + device_.name() +
                                        "; all tensors must be on one device");
    const auto sizes = t.sizes(), strides = t.strides();
    if (sizes.size() > 4)
      fail(FLASH3_INVALID_ARGUMENT, std::string(name) + ".ndim = " + std::to_string(sizes.size()) +
                                        " but a tensor has at most 4 dimensions");
    field->data = t.data_ptr();
    field->dtype = dtype_of(name, t);
    field->ndim = static_cast<int32_t>(sizes.size());
    for (size_t d = 0; d < sizes.size(); ++d) {
      field->shape[d] = sizes[d];
      field->stride[d] = strides[d];
    }
    alive_.push_back(t);
  }

  Device device_;
  std::vector<Tensor> alive_;
};

// Rows that belong to no token are not written by the library. Where there may be such rows they
// get what a query without keys gets, but for rows between packed sequences on a GPU: there the
// lengths cannot be looked at, and a fill would cost up to 15 % of a short call.
bool may_leave_rows(const Options& o, const Device& device) {
  return o.seqused_q || (o.cu_seqlens_q && !device.is_cuda());
}

void run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                 const MaybeTensor& lse, const Options& o) {
  Call<flash3_forward_params> call(q, o);
  call.input("q", &call.params.q, q);
  call.input("k", &call.params.k, k);
  call.input("v", &call.params.v, v);
  call.output("out", &call.params.out, out);
  if (lse) call.output("lse", &call.params.lse, *lse);
  call.run(flash3_forward_workspace, flash3_forward);
}

struct Gradients {
  Tensor dq, dk, dv;
  MaybeTensor dsink;
};

struct BackwardInputs {
  Tensor dout;
  MaybeTensor dlse;
  Tensor q, k, v, out, lse;

  explicit BackwardInputs(Arguments& a)
      : dout(a.tensor()),
        dlse(a.maybe_tensor()),
        q(a.tensor()),
        k(a.tensor()),
        v(a.tensor()),
        out(a.tensor()),
        lse(a.tensor()) {}
};

void run_backward(const BackwardInputs& in, const Gradients& gradients, const Options& o) {
  Call<flash3_backward_params> call(in.q, o);
  call.params.deterministic = o.deterministic;
  call.input("dout", &call.params.dout, in.dout);
  call.optional_input("dlse", &call.params.dlse, in.dlse);
  call.input("q", &call.params.q, in.q);
  call.input("k", &call.params.k, in.k);
  call.input("v", &call.params.v, in.v);
  call.input("out", &call.params.out, in.out);
  call.input("lse", &call.params.lse, in.lse);
  call.output("dq", &call.params.dq, gradients.dq);
  call.output("dk", &call.params.dk, gradients.dk);
  call.output("dv", &call.params.dv, gradients.dv);
  if (gradients.dsink) call.output("dsink", &call.params.dsink, *gradients.dsink);
  call.run(flash3_backward_workspace, flash3_backward);
}

void check_dims(const char* name, const Tensor& t) {
  if (t.dim() == 3 || t.dim() == 4) return;
  fail(FLASH3_INVALID_ARGUMENT, std::string(name) + ".ndim = " + std::to_string(t.dim()) +
                                    " but it must be 4, [batch, seq, heads, dim], or packed 3, "
                                    "[total, heads, dim]");
}

// forward(q, k, v, options) -> (out, lse)
void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensor q = a.tensor(), k = a.tensor(), v = a.tensor();
  const Options o(a);
  check_dims("q", q);
  check_dims("v", v);
  const Device device = device_of("q", q);
  const auto sizes = q.sizes();
  Sizes out_sizes(sizes.begin(), sizes.end());
  out_sizes.back() = v.size(v.dim() - 1);
  // [batch, seq, heads, dim] -> [batch, heads, seq]; packed [total, heads, dim] -> [heads, total]
  Sizes lse_sizes(sizes.begin(), sizes.end() - 1);
  std::swap(lse_sizes[lse_sizes.size() - 1], lse_sizes[lse_sizes.size() - 2]);
  Tensor out = empty(out_sizes, torch_dtype_of(q), device);
  Tensor lse = empty(lse_sizes, aoti_torch_dtype_float32(), device);
  if (may_leave_rows(o, device)) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
  }
  run_forward(q, k, v, out, lse, o);
  stack[0] = torch::stable::detail::from(out);
  stack[1] = torch::stable::detail::from(lse);
}

// forward_out(q, k, v, out, lse, options) -> ()
void forward_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const Tensor q = a.tensor(), k = a.tensor(), v = a.tensor(), out = a.tensor();
  const MaybeTensor lse = a.maybe_tensor();
  run_forward(q, k, v, out, lse, Options(a));
}

// backward(dout, dlse, q, k, v, out, lse, options) -> (dq, dk, dv, dsink); no sink: dsink is empty
void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const BackwardInputs in(a);
  const Options o(a);
  const Device device = device_of("q", in.q);
  Gradients made{
      empty_of_shape(in.q, device), empty_of_shape(in.k, device), empty_of_shape(in.v, device), {}};
  if (o.sink) made.dsink = empty_of_shape(*o.sink, device);
  if (!device.is_cuda()) {  // as in forward: rows between packed sequences
    if (o.cu_seqlens_q) torch::stable::zero_(made.dq);
    if (o.cu_seqlens_k) torch::stable::zero_(made.dk), torch::stable::zero_(made.dv);
  }
  run_backward(in, made, o);
  stack[0] = torch::stable::detail::from(made.dq);
  stack[1] = torch::stable::detail::from(made.dk);
  stack[2] = torch::stable::detail::from(made.dv);
  stack[3] = torch::stable::detail::from(
      made.dsink ? *made.dsink : empty({0}, aoti_torch_dtype_float32(), device));
}

// backward_out(dout, dlse, q, k, v, out, lse, dq, dk, dv, dsink, options) -> ()
void backward_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments a(stack);
  const BackwardInputs in(a);
  const Gradients given{a.tensor(), a.tensor(), a.tensor(), a.maybe_tensor()};
  run_backward(in, given, Options(a));
}

}  // namespace

STABLE_TORCH_LIBRARY(flash3, m) {
  m.def("forward(Tensor q, Tensor k, Tensor v, " FLASH3_OPTIONS ") -> (Tensor, Tensor)");
  m.def("forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, " FLASH3_OPTIONS
        ") -> ()");
  m.def(
      "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, " FLASH3_OPTIONS ") -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "backward_out(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dsink, " FLASH3_OPTIONS
      ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash3, CPU, m) {
  m.impl("forward", forward);
  m.impl("forward_out", forward_out);
  m.impl("backward", backward);
  m.impl("backward_out", backward_out);
}

STABLE_TORCH_LIBRARY_IMPL(flash3, CUDA, m) {
  m.impl("forward", forward);
  m.impl("forward_out", forward_out);
  m.impl("backward", backward);
  m.impl("backward_out", backward_out);
}
