// SPDX-License-Identifier: Apache-2.0
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
// After Python.h
#include "flash3/flash3.h"
#include "runtime.hpp"

namespace flash3_torch {
namespace {

unsigned long main_thread = 0;
// What a handler has raised, until the interpreter runs again; only for who holds its lock.
PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;

int raise_kept(void*) {
  PyErr_Restore(type, value, traceback);
  type = value = traceback = nullptr;
  return -1;
}

// flash3's calls do not hold the interpreter's lock. Python runs handlers in its main thread alone,
// and no other thread may ask for the lock once the interpreter ends: it would never come back.
int run_handlers() {
  if (PyThread_get_thread_ident() != main_thread || !Py_IsInitialized()) return 0;
  const PyGILState_STATE lock = PyGILState_Ensure();
  bool raised = type != nullptr;
  if (!raised && !PyErr_Occurred() && PyErr_CheckSignals() != 0) {
    PyErr_Fetch(&type, &value, &traceback);
    // The call returns an error, of which others may make an exception: this one comes after it.
    Py_AddPendingCall(raise_kept, nullptr);
    raised = true;
  }
  PyGILState_Release(lock);
  return raised;
}

}  // namespace

bool watch_signals() {
  PyObject* threading = PyImport_ImportModule("threading");
  PyObject* thread = threading ? PyObject_CallMethod(threading, "main_thread", nullptr) : nullptr;
  PyObject* ident = thread ? PyObject_GetAttrString(thread, "ident") : nullptr;
  if (ident) main_thread = PyLong_AsUnsignedLong(ident);
  const bool found = ident && !PyErr_Occurred();
  Py_DecRef(ident);  // not a macro, as in eager.cpp
  Py_DecRef(thread);
  Py_DecRef(threading);
  if (found) flash3_set_interrupt(run_handlers);
  return found;
}

}  // namespace flash3_torch
