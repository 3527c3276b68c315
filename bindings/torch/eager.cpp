// SPDX-License-Identifier: Apache-2.0
// flash3._eager: a forward call, plain or on a KV cache, from Python around torch's dispatcher,
// which takes longer than all else that the host does for a short call. It takes Python's options
// as the caller gave them, or an operator's arguments, in one dict, and does what the operators
// `forward` (ops.cpp) and `attention_with_kv_cache` (kv_cache.cpp) do for calls that nothing but
// the operator's kernel would see; it leaves every other call to the operator: what the library
// refuses too, so that there is one place that copies tensors with gaps and makes exceptions.
//
// Tensors are read through torch's table of DLPack functions, which are plain C, and the rest is
// Python's limited API: one binary for every CPython from 3.10 on and every torch that has the
// table.
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
// After Python.h
#include <ATen/dlpack.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "eager_options.hpp"
#include "flash3/plan.h"
#include "flash3/schedule.h"
#include "runtime.hpp"

namespace {

using namespace flash3_eager;

// References are counted by the interpreter's functions, not by the macros of the headers that this
// is compiled with: since 3.12 False and None are immortal, and an older macro counts them down.
struct DropReference {
  void operator()(PyObject* object) const { Py_DecRef(object); }
};
using Owned = std::unique_ptr<PyObject, DropReference>;

// What every call asks of torch, found once; the references last as long as the process.
struct Torch {
  const DLPackExchangeAPI* dlpack;
  PyObject *tensor_type, *parameter_type;
  PyObject *empty_like, *new_empty, *new_empty_strided;
  PyObject *contiguous, *float32;  // named arguments: a memory format, a dtype
  PyObject *is_neg, *requires_grad, *count_dispatch_modes, *count_function_modes;
  PyObject *is_grad_enabled, *is_any_autocast_enabled, *are_transforms_active, *is_tracing;
  PyObject *get_num_threads, *current_device;  // current_device: null in a torch without CUDA
};
Torch torch;

// A variable of one of torch's modules. It has the value idle while what it tells of is not used.
struct Variable {
  PyObject *dictionary, *name, *idle;

  bool is_idle() const {
    PyObject* value = PyDict_GetItemWithError(dictionary, name);
    return value && PyObject_RichCompareBool(value, idle, Py_EQ) == 1;
  }
};
Variable profiler_enabled, forward_ad_level;

// Whether a function without arguments gives something that counts as true. An error counts as true
// as well: the operator then meets the reason.
bool is_true(PyObject* function) {
  const Owned answer(PyObject_CallNoArgs(function));
  return !answer || PyObject_IsTrue(answer.get()) != 0;
}

bool is_any_negated(const Inputs& inputs) {
  for (const Input& in : inputs) {
    const Owned answer(PyObject_CallFunctionObjArgs(torch.is_neg, in.tensor, nullptr));
    if (!answer || PyObject_IsTrue(answer.get()) != 0) return true;
  }
  return false;
}

bool is_any_required(const Inputs& inputs) {
  for (const Input& in : inputs) {
    const Owned answer(PyObject_GetAttr(in.tensor, torch.requires_grad));
    if (!answer || answer.get() != Py_False) return true;
  }
  return false;
}

// Whether something in this thread must see the operator or the tensors, or changes what they mean:
// autocast, transforms, tracing, modes, the profiler.
bool needs_dispatcher(const Inputs& inputs) {
  return is_true(torch.is_any_autocast_enabled) || is_true(torch.are_transforms_active) ||
         is_true(torch.count_dispatch_modes) || is_true(torch.count_function_modes) ||
         is_true(torch.is_tracing) || !profiler_enabled.is_idle() || !forward_ad_level.is_idle() ||
         is_any_negated(inputs);
}

bool is_plain(PyObject* x) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  return type == torch.tensor_type || type == torch.parameter_type;
}

bool are_plain(const Inputs& inputs) {
  return std::all_of(inputs.begin(), inputs.end(),
                     [](const Input& in) { return is_plain(in.tensor); });
}

flash3_dtype dtype_of(DLDataType type) {
  if (type.lanes != 1) return FLASH3_DTYPE_NONE;
  if (type.code == kDLBfloat && type.bits == 16) return FLASH3_BFLOAT16;
  if (type.code == kDLFloat && type.bits == 16) return FLASH3_FLOAT16;
  if (type.code == kDLFloat && type.bits == 32) return FLASH3_FLOAT32;
  if (type.code == kDLInt && type.bits == 32) return FLASH3_INT32;
  if (type.code == kDLInt && type.bits == 64) return FLASH3_INT64;
  return FLASH3_DTYPE_NONE;  // the operator's to take, as FP8, or to refuse
}

// False for a tensor without memory of its own, or that no call can be for.
bool describe(PyObject* x, flash3_tensor* field, DLDevice* device) {
  DLTensor t{};
  if (torch.dlpack->dltensor_from_py_object_no_sync(x, &t) != 0) return false;
  field->dtype = dtype_of(t.dtype);
  if (!t.data || field->dtype == FLASH3_DTYPE_NONE || t.ndim < 1 || t.ndim > 4 || !t.strides)
    return false;
  field->data = static_cast<char*>(t.data) + t.byte_offset;
  field->ndim = t.ndim;
  std::copy_n(t.shape, t.ndim, field->shape);
  std::copy_n(t.strides, t.ndim, field->stride);
  *device = t.device;
  return true;
}

bool is_same(DLDevice a, DLDevice b) {
  return a.device_type == b.device_type && a.device_id == b.device_id;
}

// False for what is no schedule's memory: contiguous bytes of this device.
bool describe_schedule(PyObject* x, DLDevice device, flash3_schedule* schedule) {
  DLTensor t{};
  if (!is_plain(x) || torch.dlpack->dltensor_from_py_object_no_sync(x, &t) != 0) return false;
  schedule->data = static_cast<char*>(t.data) + t.byte_offset;
  schedule->size = t.ndim == 1 ? static_cast<size_t>(t.shape[0]) : 0;
  return t.ndim == 1 && t.dtype.code == kDLUInt && t.dtype.bits == 8 && t.dtype.lanes == 1 &&
         (schedule->size <= 1 || t.strides[0] == 1) && is_same(t.device, device);
}

// Heads before rows become rows before heads, which the library has.
void swap_heads(flash3_tensor* t) {
  std::swap(t->shape[1], t->shape[2]);
  std::swap(t->stride[1], t->stride[2]);
}

// False unless all are tensors of the device of the first one.
bool describe(const Inputs& inputs, bool heads_first, DLDevice* device) {
  for (const Input& in : inputs) {
    DLDevice own{};
    if (!describe(in.tensor, in.field, &own)) return false;
    if (&in == &inputs.front()) *device = own;
    if (!is_same(own, *device)) return false;
    if (!in.is_rows || !heads_first) continue;
    if (in.field->ndim != 4) return false;
    swap_heads(in.field);
  }
  return true;
}

// Where the call runs. False on another GPU than the current one, which is left to the operator.
bool set_device(DLDevice device, flash3_forward_params* params) {
  if (device.device_type == kDLCPU) {
    const Owned threads(PyObject_CallNoArgs(torch.get_num_threads));
    params->num_threads = threads ? static_cast<int32_t>(PyLong_AsLong(threads.get())) : -1;
    return params->num_threads >= 1;
  }
  if (device.device_type != kDLCUDA || !torch.current_device) return false;
  const Owned current(PyObject_CallNoArgs(torch.current_device));
  return current && PyLong_AsLong(current.get()) == device.device_id &&
         torch.dlpack->current_work_stream(kDLCUDA, device.device_id, &params->stream) == 0;
}

// Memory for the result, dense, by torch's own function. One that is made through DLPack would lie
// in a storage that torch's caching allocator does not know as its own, and record_stream() on it
// would do nothing.
Owned empty_rows(PyObject* q, const flash3_forward_params& p) {
  const int64_t* shape = p.q.shape;
  const int64_t dim = p.v.shape[p.v.ndim - 1];
  if (dim != shape[p.q.ndim - 1])
    return Owned(p.q.ndim == 4 ? PyObject_CallFunction(torch.new_empty, "O(LLLL)", q, shape[0],
                                                       shape[1], shape[2], dim)
                               : PyObject_CallFunction(torch.new_empty, "O(LLL)", q, shape[0],
                                                       shape[1], dim));
  const Owned arguments(PyTuple_Pack(1, q));
  return Owned(arguments ? PyObject_Call(torch.empty_like, arguments.get(), torch.contiguous)
                         : nullptr);
}

// The same with its heads before its rows, in memory that has them after.
Owned empty_heads_first(PyObject* q, const flash3_forward_params& p) {
  const int64_t *rows = p.q.shape, *stride = p.q.stride;
  const int64_t seq = rows[1], heads = rows[2], dim = p.v.shape[3];
  if (dim == rows[3] && stride[3] == 1 && stride[2] == dim && stride[1] == heads * dim &&
      stride[0] == seq * heads * dim)  // as q, whose strides empty_like keeps
    return Owned(PyObject_CallFunctionObjArgs(torch.empty_like, q, nullptr));
  return Owned(PyObject_CallFunction(torch.new_empty_strided, "O(LLLL)(LLLL)", q, rows[0], heads,
                                     seq, dim, seq * heads * dim, dim, heads * dim, int64_t{1}));
}

// Makes and describes it. Null: it is the operator's.
Owned empty_out(PyObject* q, Call* call) {
  flash3_forward_params* const p = &call->params;
  Owned out = call->heads_first ? empty_heads_first(q, *p) : empty_rows(q, *p);
  DLDevice device{};
  if (!out || !describe(out.get(), &p->out, &device)) return nullptr;
  if (call->heads_first) swap_heads(&p->out);
  return out;
}

Owned empty_lse(PyObject* q, const flash3_tensor& about_q) {
  const int64_t* shape = about_q.shape;
  const Owned arguments(about_q.ndim == 4
                            ? Py_BuildValue("(O(LLL))", q, shape[0], shape[2], shape[1])
                            : Py_BuildValue("(O(LL))", q, shape[1], shape[0]));
  return Owned(arguments ? PyObject_Call(torch.new_empty, arguments.get(), torch.float32)
                         : nullptr);
}

struct FreeMemory {
  void operator()(DLManagedTensorVersioned* memory) const { memory->deleter(memory); }
};
using Workspace = std::unique_ptr<DLManagedTensorVersioned, FreeMemory>;

void ignore_error(void*, const char*, const char*) {}

// By torch's allocator, which knows when the stream is done with it. Null: none could be had.
Workspace allocate(size_t bytes, DLDevice device) {
  int64_t size = static_cast<int64_t>(flash3_torch::workspace_allocation(bytes));
  DLTensor prototype{nullptr, device, 1, {kDLUInt, 8, 1}, &size, nullptr, 0};
  DLManagedTensorVersioned* made = nullptr;
  if (torch.dlpack->managed_tensor_allocator(&prototype, &made, nullptr, ignore_error) != 0)
    made = nullptr;
  return Workspace(made);
}

// Whether the call ran: what the library refuses is left to the operator, which says why.
bool run(flash3_forward_params* params, DLDevice device) {
  struct Context {
    DLDevice device;
    Workspace workspace;
  } context{device, nullptr};
  const auto give = [](size_t bytes, void* given) -> void* {
    auto* const of_call = static_cast<Context*>(given);
    of_call->workspace = allocate(bytes, of_call->device);
    return of_call->workspace ? flash3_torch::align_workspace(of_call->workspace->dl_tensor.data)
                              : nullptr;
  };
  return flash3_forward_allocating(params, give, &context) == FLASH3_OK;
}

bool run_without_lock(flash3_forward_params* params, DLDevice device) {
  PyThreadState* thread = PyEval_SaveThread();
  const bool ran = run(params, device);
  PyEval_RestoreThread(thread);
  return ran;
}

// The memory that the call's schedule is. False: it is the operator's to refuse.
bool set_schedule(PyObject* given, DLDevice device, flash3_schedule* schedule) {
  int64_t key = 0;  // a flash3.Schedule, which is a named tuple: (data, key)
  if (!PyTuple_Check(given) || PyTuple_CheckExact(given) || PyTuple_Size(given) != 2 ||
      !integer_of(PyTuple_GetItem(given, 1), &key) ||
      !describe_schedule(PyTuple_GetItem(given, 0), device, schedule))
    return false;
  schedule->key = static_cast<uint64_t>(key);
  return true;
}

struct Results {
  Owned out,
      lse;  // no out: the operator is to do it, and a Python error that is then set says nothing
};

// The results of attention(q, k, v), or of attention to a cache; call->with_lse may be set before.
Results attend(PyObject* const* arguments, const Options& options, bool is_cache, Call* call) {
  flash3_forward_params* const p = &call->params;
  p->struct_size = sizeof *p;
  p->fill_padding = 1;
  PyObject *const q = arguments[0], *const given = arguments[3];
  call->inputs = {{q, &p->q, true}, {arguments[1], &p->k, true}, {arguments[2], &p->v, true}};
  // What autograd records comes here often, and is told by little.
  const bool grad = is_true(torch.is_grad_enabled);
  if (!are_plain(call->inputs) || (grad && is_any_required(call->inputs))) return {};
  if (!PyDict_CheckExact(given) || !set_options(given, options, call)) return {};
  if (call->inputs.size() > 3 &&
      (!are_plain(call->inputs) || (grad && is_any_required(call->inputs))))
    return {};
  DLDevice device{}, device_out{};
  if (needs_dispatcher(call->inputs) || !describe(call->inputs, call->heads_first, &device) ||
      p->q.ndim < 3 || p->v.ndim < (is_cache ? 4 : 3) || !set_device(device, p))
    return {};
  flash3_schedule schedule{};
  if (call->schedule != Py_None) {
    if (!set_schedule(call->schedule, device, &schedule)) return {};
    p->schedule = &schedule;
  }
  Results made{empty_out(q, call), call->with_lse ? empty_lse(q, p->q) : Owned()};
  if (!made.out ||
      (call->with_lse && (!made.lse || !describe(made.lse.get(), &p->lse, &device_out))) ||
      !run_without_lock(p, device))
    return {};
  return made;
}

// None, which Python's functions return of a call that is the operator's.
PyObject* none() {
  PyErr_Clear();
  Py_IncRef(Py_None);
  return Py_None;
}

bool has_count(Py_ssize_t count, Py_ssize_t wanted) {
  if (count == wanted) return true;
  PyErr_Format(PyExc_TypeError, "it takes %zd arguments but %zd are given", wanted, count);
  return false;
}

Options attention_options, cache_options, forward_arguments;

// out, or (out, lse).
PyObject* call(PyObject* const* arguments, Py_ssize_t count, const Options& options,
               bool is_cache) {
  if (!has_count(count, 4)) return nullptr;
  Call call;
  Results made = attend(arguments, options, is_cache, &call);
  if (!made.out) return none();
  return made.lse ? PyTuple_Pack(2, made.out.get(), made.lse.get()) : made.out.release();
}

PyObject* attention(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call(arguments, count, attention_options, false);
}
PyObject* attention_with_kv_cache(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call(arguments, count, cache_options, true);
}

// (out, lse or None)
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!has_count(count, 5)) return nullptr;
  Call call;
  call.with_lse = arguments[4] == Py_True;
  Results made = attend(arguments, forward_arguments, false, &call);
  if (!made.out) return none();
  return PyTuple_Pack(2, made.out.get(), made.lse ? made.lse.get() : Py_None);
}

// A new reference, or null with an error set.
PyObject* find(const char* module, const char* name) {
  const Owned found(PyImport_ImportModule(module));
  return found ? PyObject_GetAttrString(found.get(), name) : nullptr;
}

// idle: a new reference.
bool find_variable(const char* module, const char* name, PyObject* idle, Variable* variable) {
  Owned found(PyImport_ImportModule(module));
  if (!found) return false;
  // The module stays, and its dictionary with it.
  *variable = {PyModule_GetDict(found.release()), PyUnicode_InternFromString(name), idle};
  return variable->name && idle && PyDict_GetItemWithError(variable->dictionary, variable->name);
}

bool find_dlpack() {
  const Owned capsule(PyObject_GetAttrString(torch.tensor_type, "__dlpack_c_exchange_api__"));
  if (!capsule) return false;
  torch.dlpack = static_cast<const DLPackExchangeAPI*>(
      PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  return torch.dlpack && torch.dlpack->header.version.major == DLPACK_MAJOR_VERSION &&
         torch.dlpack->dltensor_from_py_object_no_sync;
}

bool find_torch() {
  constexpr const char* kTorch = "torch._C";
  const struct {
    PyObject** place;
    const char *module, *name;
  } wanted[] = {
      {&torch.tensor_type, "torch", "Tensor"},
      {&torch.parameter_type, "torch.nn", "Parameter"},
      {&torch.empty_like, "torch", "empty_like"},
      {&torch.is_grad_enabled, kTorch, "is_grad_enabled"},
      {&torch.is_any_autocast_enabled, kTorch, "_is_any_autocast_enabled"},
      {&torch.are_transforms_active, kTorch, "_are_functorch_transforms_active"},
      {&torch.is_tracing, kTorch, "_is_tracing"},
      {&torch.count_dispatch_modes, kTorch, "_len_torch_dispatch_stack"},
      {&torch.count_function_modes, kTorch, "_len_torch_function_stack"},
      {&torch.get_num_threads, kTorch, "get_num_threads"},
  };
  for (const auto& each : wanted) {
    *each.place = find(each.module, each.name);
    if (!*each.place) return false;
  }
  torch.current_device = find(kTorch, "_cuda_getDevice");
  PyErr_Clear();
  const Owned contiguous(find("torch", "contiguous_format")), float32(find("torch", "float32"));
  return contiguous && float32 &&
         (torch.contiguous = Py_BuildValue("{sO}", "memory_format", contiguous.get())) &&
         (torch.float32 = Py_BuildValue("{sO}", "dtype", float32.get())) &&
         (torch.new_empty = PyObject_GetAttrString(torch.tensor_type, "new_empty")) &&
         (torch.new_empty_strided =
              PyObject_GetAttrString(torch.tensor_type, "new_empty_strided")) &&
         (torch.is_neg = PyObject_GetAttrString(torch.tensor_type, "is_neg")) &&
         (torch.requires_grad = PyUnicode_InternFromString("requires_grad")) &&
         find_variable("torch.autograd.profiler", "_is_profiler_enabled", PyBool_FromLong(0),
                       &profiler_enabled) &&
         find_variable("torch.autograd.forward_ad", "_current_level", PyLong_FromLong(-1),
                       &forward_ad_level) &&
         attention_options.find(flash3_torch::kAttentionOptions) &&
         cache_options.find(flash3_torch::kAttentionWithKvCacheOptions) &&
         forward_arguments.find_arguments(flash3_torch::kForward) && find_dlpack();
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) noexcept {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"attention", fast(attention), METH_FASTCALL,
     "attention(q, k, v, options): what flash3.attention(q, k, v, **options) returns, or None for "
     "a call that is the operator's"},
    {"attention_with_kv_cache", fast(attention_with_kv_cache), METH_FASTCALL,
     "attention_with_kv_cache(q, k_cache, v_cache, options): the same of a call on a KV cache"},
    {"forward", fast(forward), METH_FASTCALL,
     "forward(q, k, v, arguments, with_lse): what torch.ops.flash3.forward(q, k, v, **arguments) "
     "returns, without with_lse None for lse, or None for a call that is the operator's"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_eager", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__eager() {  // NOLINT(bugprone-reserved-identifier): Python's name for it
  if (find_torch() && flash3_torch::watch_signals()) return PyModule_Create(&definition);
  PyErr_Clear();
  PyErr_SetString(
      PyExc_ImportError,
      "this torch has no table of DLPack functions, or hides what shows who watches a call");
  return nullptr;
}
