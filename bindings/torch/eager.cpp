// SPDX-License-Identifier: Apache-2.0
// flash3._eager: one plain forward call from Python around torch's dispatcher, which takes longer
// than all else that the host does for a short call. It does what the operator `inference` does
// (ops.cpp) for calls that nothing but the operator's kernel would see, and leaves every other call
// to the operator: what the library refuses too, so that there is one place that copies tensors
// with gaps and makes exceptions.
//
// Tensors are read through torch's table of DLPack functions, which are plain C, and the rest is
// Python's limited API: one binary for every CPython from 3.10 on and every torch that has the
// table.
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
// Behind Python.h
#include <ATen/dlpack.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "flash3/plan.h"
#include "workspace.hpp"

namespace {

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
  PyObject *empty_like, *new_empty, *contiguous;  // contiguous: the named argument
  PyObject *is_neg, *requires_grad;
  PyObject *is_grad_enabled, *is_any_autocast_enabled, *are_transforms_active, *is_tracing;
  PyObject *count_dispatch_modes, *count_function_modes;
  PyObject *get_num_threads, *current_device;  // current_device: null in a torch without CUDA
};
Torch torch;

// A variable of one of torch's modules. It has the value idle while nobody uses what it tells of.
struct Variable {
  PyObject *dictionary, *name, *idle;

  bool is_idle() const {
    PyObject* value = PyDict_GetItemWithError(dictionary, name);
    return value && PyObject_RichCompareBool(value, idle, Py_EQ) == 1;
  }
};
Variable profiler_enabled, forward_ad_level;

// Whether a function without arguments gives something that counts as true. An error counts as true
// as well: the operator meets what is behind it.
bool is_true(PyObject* function) {
  const Owned answer(PyObject_CallNoArgs(function));
  return !answer || PyObject_IsTrue(answer.get()) != 0;
}

bool is_any_true(PyObject* function, PyObject* const (&tensors)[3]) {
  for (PyObject* x : tensors) {
    const Owned answer(PyObject_CallFunctionObjArgs(function, x, nullptr));
    if (!answer || PyObject_IsTrue(answer.get()) != 0) return true;
  }
  return false;
}

bool is_any_required(PyObject* const (&tensors)[3]) {
  for (PyObject* x : tensors) {
    const Owned answer(PyObject_GetAttr(x, torch.requires_grad));
    if (!answer || answer.get() != Py_False) return true;
  }
  return false;
}

// Whether something in this thread must see the operator or the tensors, or changes what they mean:
// autocast, transforms, tracing, modes, the profiler, autograd.
bool needs_dispatcher(PyObject* const (&tensors)[3]) {
  return is_true(torch.is_any_autocast_enabled) || is_true(torch.are_transforms_active) ||
         is_true(torch.count_dispatch_modes) || is_true(torch.count_function_modes) ||
         is_true(torch.is_tracing) || !profiler_enabled.is_idle() || !forward_ad_level.is_idle() ||
         (is_true(torch.is_grad_enabled) && is_any_required(tensors)) ||
         is_any_true(torch.is_neg, tensors);
}

bool is_plain(PyObject* x) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  return type == torch.tensor_type || type == torch.parameter_type;
}

flash3_dtype dtype_of(DLDataType type) {
  if (type.lanes != 1) return FLASH3_DTYPE_NONE;
  if (type.code == kDLBfloat && type.bits == 16) return FLASH3_BFLOAT16;
  if (type.code == kDLFloat && type.bits == 16) return FLASH3_FLOAT16;
  if (type.code == kDLFloat && type.bits == 32) return FLASH3_FLOAT32;
  return FLASH3_DTYPE_NONE;  // the operator's to take, as FP8, or to refuse
}

// False for a tensor without memory of its own, or that no call of `inference` can be for.
bool describe(PyObject* x, flash3_tensor* field, DLDevice* device) {
  DLTensor t{};
  if (torch.dlpack->dltensor_from_py_object_no_sync(x, &t) != 0) return false;
  field->dtype = dtype_of(t.dtype);
  if (!t.data || field->dtype == FLASH3_DTYPE_NONE || t.ndim != 4 || !t.strides) return false;
  field->data = static_cast<char*>(t.data) + t.byte_offset;
  field->ndim = t.ndim;
  std::memcpy(field->shape, t.shape, sizeof field->shape);
  std::memcpy(field->stride, t.strides, sizeof field->stride);
  *device = t.device;
  return true;
}

bool is_same(DLDevice a, DLDevice b) {
  return a.device_type == b.device_type && a.device_id == b.device_id;
}

// Where the call runs. False on another GPU than the current one: making it current for the call is
// left to the operator.
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

// The options in the forms that they nearly always have; every other form is the operator's to
// judge.
bool set_number(PyObject* given, float* field) {
  if (!PyFloat_CheckExact(given) && !PyLong_CheckExact(given)) return false;
  *field = static_cast<float>(PyFloat_AsDouble(given));
  return *field >= 0;  // -1: an integer that no double holds
}

bool set_scale(PyObject* given, flash3_forward_params* params) {
  if (given == Py_None) return true;
  return set_number(given, &params->softmax_scale) && params->softmax_scale > 0;  // 0: the default
}

bool set_window(PyObject* given, flash3_forward_params* params) {
  if (given == Py_None) return true;
  if (!PyTuple_CheckExact(given) || PyTuple_Size(given) != 2) return false;
  int64_t sides[2];
  for (int i = 0; i < 2; ++i) {
    PyObject* side = PyTuple_GetItem(given, i);
    if (!PyLong_CheckExact(side)) return false;
    sides[i] = PyLong_AsLongLong(side);
    if (sides[i] == -1 && PyErr_Occurred()) return false;  // more than 64 bits
  }
  params->window = sides[0] >= 0 || sides[1] >= 0;
  params->window_left = sides[0];
  params->window_right = sides[1];
  return true;
}

bool set_options(PyObject* causal, PyObject* window, PyObject* scale, PyObject* softcap,
                 flash3_forward_params* params) {
  params->window_left = params->window_right = -1;
  if (causal != Py_True && causal != Py_False) return false;
  params->causal = causal == Py_True;
  return set_number(softcap, &params->softcap) && set_scale(scale, params) &&
         set_window(window, params);
}

// Memory for the result, dense, by torch's own function. One that is made through DLPack would lie
// in a storage that torch's caching allocator does not know as its own, and record_stream() on it
// would do nothing. It is allocated for the current stream, on which the call runs as well.
Owned empty_out(PyObject* q, const flash3_forward_params& p) {
  const int64_t dim = p.v.shape[3];
  if (dim != p.q.shape[3])
    return Owned(PyObject_CallFunction(torch.new_empty, "O(LLLL)", q, p.q.shape[0], p.q.shape[1],
                                       p.q.shape[2], dim));
  const Owned arguments(PyTuple_Pack(1, q));
  return Owned(arguments ? PyObject_Call(torch.empty_like, arguments.get(), torch.contiguous)
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
  flash3_plan* made = nullptr;
  if (flash3_forward_plan(params, &made) != FLASH3_OK) return false;
  const std::unique_ptr<flash3_plan, void (*)(flash3_plan*)> plan(made, flash3_plan_destroy);
  size_t bytes = 0;
  if (flash3_plan_workspace(made, &bytes) != FLASH3_OK) return false;
  Workspace workspace;
  if (bytes > 0) {
    workspace = allocate(bytes, device);
    if (!workspace) return false;
    params->workspace = flash3_torch::align_workspace(workspace->dl_tensor.data);
    params->workspace_size = bytes;
  }
  return flash3_forward_run(made, params) == FLASH3_OK;
}

// The result; null: the operator is to do it, and a Python error that is then set says nothing.
Owned attend(PyObject* const (&tensors)[3], PyObject* const* options) {
  for (PyObject* x : tensors)
    if (!is_plain(x)) return nullptr;
  flash3_forward_params params{};
  params.struct_size = sizeof params;
  if (!set_options(options[0], options[1], options[2], options[3], &params)) return nullptr;
  if (needs_dispatcher(tensors)) return nullptr;
  DLDevice device{}, device_k{}, device_v{};
  if (!describe(tensors[0], &params.q, &device) || !describe(tensors[1], &params.k, &device_k) ||
      !describe(tensors[2], &params.v, &device_v) || !is_same(device, device_k) ||
      !is_same(device, device_v) || !set_device(device, &params))
    return nullptr;
  Owned out = empty_out(tensors[0], params);
  DLDevice device_out{};
  if (!out || !describe(out.get(), &params.out, &device_out)) return nullptr;
  PyThreadState* thread = PyEval_SaveThread();
  const bool ran = run(&params, device);
  PyEval_RestoreThread(thread);
  return ran ? std::move(out) : nullptr;
}

PyObject* attention(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 7) {
    PyErr_Format(PyExc_TypeError, "_eager.attention takes 7 arguments but %zd are given", count);
    return nullptr;
  }
  PyObject* const tensors[3] = {arguments[0], arguments[1], arguments[2]};
  if (Owned out = attend(tensors, arguments + 3)) return out.release();
  PyErr_Clear();
  Py_IncRef(Py_None);
  return Py_None;
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
  const Owned contiguous(find("torch", "contiguous_format"));
  return contiguous &&
         (torch.contiguous = Py_BuildValue("{sO}", "memory_format", contiguous.get())) &&
         (torch.new_empty = PyObject_GetAttrString(torch.tensor_type, "new_empty")) &&
         (torch.is_neg = PyObject_GetAttrString(torch.tensor_type, "is_neg")) &&
         (torch.requires_grad = PyUnicode_InternFromString("requires_grad")) &&
         find_variable("torch.autograd.profiler", "_is_profiler_enabled", PyBool_FromLong(0),
                       &profiler_enabled) &&
         find_variable("torch.autograd.forward_ad", "_current_level", PyLong_FromLong(-1),
                       &forward_ad_level) &&
         find_dlpack();
}

PyMethodDef methods[] = {
    {"attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attention)),
     METH_FASTCALL,
     "attention(q, k, v, causal, window, softmax_scale, softcap): the result, or None for a call "
     "that is the operator's"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_eager", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

// NOLINTNEXTLINE(bugprone-reserved-identifier): so Python names the function of a module _eager
PyMODINIT_FUNC PyInit__eager() {
  if (find_torch()) return PyModule_Create(&definition);
  PyErr_Clear();
  PyErr_SetString(
      PyExc_ImportError,
      "this torch has no table of DLPack functions, or hides what shows who watches a call");
  return nullptr;
}
