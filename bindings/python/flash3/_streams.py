# SPDX-License-Identifier: Apache-2.0
"""What __cuda_array_interface__ leaves to who reads it: waiting for the stream that it names, by the CUDA driver through ctypes."""
import ctypes
import functools

_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
LEGACY_DEFAULT = 1  # the default stream, as __cuda_array_interface__ and DLPack number it: 0 is no stream to them


@functools.cache
def _driver():
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise RuntimeError("no NVIDIA driver found (libcuda.so.1), without which there is no memory of a GPU") from None


def _check(driver, name, *arguments):
    if status := getattr(driver, name)(*arguments):
        raise RuntimeError(f"{name} failed with CUDA error {status}")


def device_of(data):
    """The GPU that an address is of."""
    ordinal, driver = ctypes.c_int(), _driver()
    _check(driver, "cuInit", 0)
    _check(driver, "cuPointerGetAttribute", ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(data))
    return ordinal.value


def wait(stream, other, device):
    """What is enqueued on stream from now on comes after all that other has by now; both are of this GPU."""
    driver, context, event = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver, "cuInit", 0)
    _check(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _check(driver, "cuCtxPushCurrent_v2", context)
        try:
            _check(driver, "cuEventCreate", ctypes.byref(event), _NO_TIMING)
            try:
                _check(driver, "cuEventRecord", event, ctypes.c_void_p(other))
                _check(driver, "cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)
            finally:
                _check(driver, "cuEventDestroy_v2", event)
        finally:
            _check(driver, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        _check(driver, "cuDevicePrimaryCtxRelease_v2", device)
