# SPDX-License-Identifier: Apache-2.0
"""flash3.arrays with results that the caller's library makes (like=), and arrays of a GPU by their protocols."""
import ctypes
import re

import ml_dtypes
import numpy as np
import pytest
import torch

import flash3
from conftest import DLPackOnly
from flash3 import _streams, arrays


def make(dtype=np.float32, seq=33, heads_q=4, heads_k=2, dim=32):
    g = np.random.default_rng(0)
    return [g.standard_normal((2, seq, heads, dim)).astype(dtype) for heads in (heads_q, heads_k, heads_k)]


class Namespace:
    """A library of the array API whose arrays show their DLPack interface alone."""
    __name__ = "library"
    float16, float32, uint8 = np.float16, np.float32, np.uint8

    def __init__(self):
        self.made = []

    def empty(self, shape, *, dtype, device):
        return self.full(shape, 7, dtype=dtype, device=device)

    def zeros(self, shape, *, dtype, device):
        return self.full(shape, 0, dtype=dtype, device=device)

    def full(self, shape, value, *, dtype, device):
        self.made.append(device)
        return Array(np.full(shape, value, dtype), self)


class Array(DLPackOnly):
    def __init__(self, array, library):
        super().__init__(array)
        self.library, self.device = library, "its device"

    def __array_namespace__(self):
        return self.library


LIKE = {"numpy": (np, np.asarray), "numpy array": (np.zeros(1), np.asarray), "torch": (torch, np.asarray),
        "torch tensor": (torch.zeros(1), np.asarray), "function": (lambda shape, dtype, device: np.empty(shape, dtype), np.asarray),
        "array API": (Array(np.zeros(1), Namespace()), lambda x: x.array)}


@pytest.mark.parametrize("like,values", LIKE.values(), ids=LIKE)
def test_forward_and_backward(like, values):
    q, k, v = make()
    sink = np.linspace(-1, 1, 4, dtype=np.float32)
    made = arrays.forward(q, k, v, like=like, causal=True, sink=sink)
    wanted = flash3.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    for a, b in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(values(a), b)
    gradients = arrays.backward(wanted[0], q, k, v, *made, like=like, causal=True, sink=sink)
    for a, b in zip(gradients, flash3.attention_backward(wanted[0], q, k, v, *wanted, causal=True, sink=sink), strict=True):
        np.testing.assert_array_equal(values(a), b)
        assert type(a) is type(made[0])
    assert arrays.backward(wanted[0], q, k, v, *made, like=like)[3] is None


def test_an_array_is_made_on_the_device_of_like():
    library = Namespace()
    q, k, v = (Array(x, library) for x in make())
    out, lse = arrays.forward(q, k, v, like=q)
    assert type(out) is Array and library.made == ["its device"] * 2
    np.testing.assert_array_equal(out.array, flash3.attention(q, k, v))


def test_given_results_are_kept():
    q, k, v = make()
    out = np.empty_like(q)
    made, lse = arrays.forward(q, k, v, out, like=np)
    assert made is out and lse.shape == (2, 4, 33)
    np.testing.assert_array_equal(out, flash3.attention(q, k, v))
    assert arrays.forward(q, k, v, out) is None
    for call, name in ((lambda: arrays.forward(q, k, v), "out"), (lambda: arrays.backward(out, q, k, v, out, lse, None, k, v), "dq"),
                       (lambda: arrays.merge(q, lse), "out")):
        with pytest.raises(TypeError, match=f"{name} is None and so is like; give memory for it, or what makes it"):
            call()


def test_dtypes():
    q, k, v = make(ml_dtypes.bfloat16)
    for like, of in ((np, ml_dtypes.bfloat16), (torch, torch.bfloat16)):
        assert arrays.forward(q, k, v, like=like)[0].dtype == of
    wide, _ = arrays.forward(q, k, v, like=torch, out_dtype=torch.float32)
    assert (wide.bfloat16() == arrays.forward(q, k, v, like=torch)[0]).all()
    asked = []
    arrays.forward(q, k, v, like=lambda *what: asked.append(what) or np.empty(what[0], getattr(ml_dtypes, what[1], what[1])))
    assert asked == [((2, 33, 4, 32), "bfloat16", "cpu"), ((2, 4, 33), "float32", "cpu")]


def test_rows_of_no_token():
    """A library's results hold there what flash3.attention has; 7 is what Namespace.empty leaves."""
    q, k, v = make()
    used = np.array([5, 33], np.int32)
    for like in (torch, np, Array(np.zeros(1), Namespace())):
        out, lse = (getattr(x, "array", x) for x in arrays.forward(q, k, v, like=like, seqused_q=used, seqused_k=used))
        assert not out[0, 5:].any() and out[0, :5].any() and (lse[0, :, 5:] == -np.inf).all()


@pytest.mark.parametrize("scales", ["tensor", "heads", "blocks"])
def test_quantize(scales):
    q, k, v = make(np.float16, seq=150)
    wanted = flash3.quantize(q, k, v, scales=scales, rotate=True)
    for like in (np, torch):
        made = arrays.quantize(q, k, v, like=like, scales=scales, rotate=True)
        for a, b in zip(made, wanted, strict=True):
            a = a.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) if a.dtype == torch.float8_e4m3fn else np.asarray(a)
            np.testing.assert_array_equal(a.astype(np.float32), np.asarray(b, np.float32))
    # A library without FP8: codes, which the other calls take as they are.
    codes = arrays.quantize(q, k, v, like=Array(np.zeros(1), Namespace()), scales=scales, rotate=True)
    assert all(type(x) is arrays.E4M3 and (x.codes.array == w.view(np.uint8)).all() for x, w in zip(codes[:3], wanted[:3]))
    out, _ = arrays.forward(*codes[:3], like=np, out_dtype="float32", **dict(zip(("q_scale", "k_scale", "v_scale"), codes[3:])))
    attended = flash3.attention(**wanted._asdict(), out_dtype=np.float32)
    np.testing.assert_array_equal(out, attended)
    only_k = arrays.quantize(k=k, like=np, scales=scales)
    assert [x is None for x in only_k] == [True, False, True, True, False, True]
    for call, message in ((lambda: arrays.quantize(q, like=np, scales="rows"), "scales = 'rows' but it must be one of 'tensor'"),
                          (lambda: arrays.quantize(like=np), "q, k and v are None; at least one of them must be given")):
        with pytest.raises(ValueError, match=message):
            call()


def test_merge():
    q, k, v = make(seq=40)
    parts = [flash3.attention(q[:1], k[:1, i:i + 20], v[:1, i:i + 20], return_lse=True) for i in (0, 20)]
    out_parts, lse_parts = (np.stack([x[0] for x in of]) for of in zip(*parts))
    out, lse = arrays.merge(out_parts, lse_parts, like=torch, out_dtype="float16")
    assert out.dtype == torch.float16
    wanted, wanted_lse = flash3.attention(q[:1], k[:1], v[:1], return_lse=True)
    np.testing.assert_allclose(out, wanted[0], atol=1e-3)
    np.testing.assert_allclose(lse, wanted_lse[0], atol=1e-5)
    with pytest.raises(ValueError, match=r"out_parts.ndim = 3 but it must be 4, \[parts, rows, heads, head_dim_v\]"):
        arrays.merge(out_parts[0], lse_parts, like=torch)


def fake_jax():
    """An array as jax has them, told by the module of its type; and the module."""
    class Like:
        __module__, __name__, empty, full = "jaxlib._jax", "jax.numpy", None, None

        def __array_namespace__(self):
            return self
    return Like()


def test_what_like_must_be():
    q, k, v = make()
    class NoFloat16(Namespace):
        float16 = None
    for like, error, message in (
            (fake_jax(), TypeError, "like is of jax, whose arrays must not be written to; take numpy or cupy"),
            ([1], TypeError, "like is a list but it must be an array with __array_namespace__, a module as numpy, cupy or torch, or a"),
            (re, TypeError, "like is a module but it must be"),
            (lambda *what: np.empty((1, 2, 3, 4, 5), np.float32), ValueError, "out.ndim = 5 but a tensor has at most 4 dimensions"),
            (lambda *what: np.empty((2, 33, 4, 8), np.float32), ValueError, "out.shape[3] = 8 but v.shape[3] = 32"),
            (lambda *what: np.empty(what[0], np.float64), TypeError, "out.dtype = float64 but it must be one of"),
            (lambda *what: np.broadcast_to(np.float32(0), what[0]), ValueError, "out is read-only memory, which an output cannot be"),
            (lambda *what: None, TypeError, "out is a NoneType but it must be a torch tensor, a numpy array, or an object with")):
        with pytest.raises(error, match=re.escape(message)):
            arrays.forward(q, k, v, like=like)
    with pytest.raises(ValueError, match="out is an array of jax, which must not be written to"):
        arrays.forward(q, k, v, fake_jax())
    with pytest.raises(ValueError, match=re.escape("like made out on cuda:3 but q is on cpu; results must be made there")):
        arrays.forward(q, k, v, like=lambda shape, dtype, device: OnGpu(q, device=3))


class OnGpu:
    """Host memory that says that it is a GPU's, with the stream that it was asked for."""

    def __init__(self, array, device=0):
        self.array, self.device, self.streams = array, device, []

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, *, stream, **others):
        self.streams.append(stream)
        return self.array.__dlpack__(**others)


def test_dlpack_handshake():
    q, k, v = (OnGpu(x, 1) for x in make(np.float16))
    for stream, told in ((None, 1), (0x1234, 0x1234)):
        arrays.forward_supported(q, k, v, q, stream=stream)  # false where there is a GPU: the library sees what memory it is
        assert q.streams.pop() == q.streams.pop() == k.streams.pop() == told
    with pytest.raises(ValueError, match="q is on a GPU, and results are made there for torch tensors alone; .* or makes them by like="):
        flash3.attention(q, k, v)


def test_dlpack_of_read_only_memory():
    q, k, v = make()
    frozen = q.copy()
    frozen.flags.writeable = False
    out, _ = arrays.forward(DLPackOnly(frozen), k, v, like=np)
    np.testing.assert_array_equal(out, flash3.attention(q, k, v))
    with pytest.raises(ValueError, match="out is read-only memory, which an output cannot be"):
        arrays.forward(q, k, v, DLPackOnly(frozen))


class CudaArray:
    """An array as Numba and old CuPy show them; owner keeps the memory."""

    def __init__(self, shape, typestr, address, owner=None, **others):
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": tuple(shape), "typestr": typestr, "data": (address, False), "version": 3, **others}


class Driver:
    """The CUDA driver's functions that are needed to wait for a stream, on paper."""

    def __init__(self, fails=None):
        self.calls, self.fails = [], fails

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *(a.value if hasattr(a, "value") else a for a in arguments if isinstance(a, (int, ctypes.c_void_p)))))
            if name == "cuPointerGetAttribute":
                arguments[0]._obj.value = 2
            if name == "cuEventCreate":
                arguments[0]._obj.value = 77
            return 400 if name == self.fails else 0
        return call


def test_cuda_array_interface_waits_for_its_stream(monkeypatch):
    x = np.zeros((1, 4, 2, 32), np.float16)

    def ask(mine, **interface):
        driver = Driver()
        monkeypatch.setattr(_streams, "_driver", lambda: driver)
        q = CudaArray(x.shape, "<f2", x.ctypes.data, **interface)
        arrays.forward_supported(q, q, q, q, stream=mine)
        return [call for call in driver.calls if call[0] not in ("cuInit", "cuPointerGetAttribute")]

    once = ask(None, stream=0x55)[:7]
    assert once == [("cuDevicePrimaryCtxRetain", 2), ("cuCtxPushCurrent_v2", None), ("cuEventCreate", 2),
                    ("cuEventRecord", 77, 0x55), ("cuStreamWaitEvent", 1, 77, 0), ("cuEventDestroy_v2", 77), ("cuCtxPopCurrent_v2",)]
    assert ("cuStreamWaitEvent", 0x99, 77, 0) in ask(0x99, stream=0x55) and ("cuEventRecord", 77, 1) in ask(0x99, stream=1)
    assert ask(None, stream=1) == ask(0x55, stream=0x55) == ask(None, stream=None) == ask(0x99) == []
    driver = Driver(fails="cuStreamWaitEvent")
    monkeypatch.setattr(_streams, "_driver", lambda: driver)
    with pytest.raises(RuntimeError, match="cuStreamWaitEvent failed with CUDA error 400"):
        _streams.wait(1, 2, 0)
    assert [call[0] for call in driver.calls][-3:] == ["cuEventDestroy_v2", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_cuda_array_interface_refusals(monkeypatch):
    monkeypatch.setattr(_streams, "_driver", Driver)
    q, k, v = make(np.float16)
    good = dict(shape=q.shape, typestr="<f2", address=q.ctypes.data)
    for change, error, message in (
            (dict(stream=0), ValueError, "q.__cuda_array_interface__['stream'] = 0 but it must be None, 1, 2 or a cudaStream_t"),
            (dict(mask=object()), TypeError, "q has a mask, which its memory does not show"),
            (dict(strides=(3, 2, 2, 2)), ValueError, "q.strides = (3, 2, 2, 2) bytes but they must be multiples of 2"),
            (dict(typestr="<c8"), TypeError, "q.dtype = <c8 but it must be one of")):
        with pytest.raises(error, match=re.escape(message)):
            arrays.forward(CudaArray(**{**good, **change}), k, v, q)
    with pytest.raises(ValueError, match="out is read-only memory, which an output cannot be"):
        arrays.forward(q, k, v, CudaArray(**good, data=(q.ctypes.data, True)))


def test_workspace_of_any_array():
    q, k, v = make(np.float16)
    out, lse = arrays.forward(q, k, v, like=np)
    results = [np.empty_like(x) for x in (q, k, v)]
    size = arrays.backward_workspace(out, q, k, v, out, lse, *results)
    room = np.empty(size + 256, np.uint8)
    room = room[-room.ctypes.data % 256:][:size]
    arrays.backward(out, q, k, v, out, lse, *results, workspace=DLPackOnly(room))
    for a, b in zip(results, flash3.attention_backward(out, q, k, v, out, lse)):
        np.testing.assert_array_equal(a, b)
    for given, error, message in ((DLPackOnly(room[::2]), ValueError, "workspace.strides = (2,) but it must have no gaps: (1,)"),
                                  (room.astype(np.complex64), TypeError,
                                   "workspace.dtype = complex64 but it must be one of uint8"),
                                  ("room", TypeError, "workspace is a str but it must be a tensor or (address, bytes)"),
                                  (DLPackOnly(room[:64]), ValueError, f"workspace_size = 64 but this call needs {size} bytes")):
        with pytest.raises(error, match=re.escape(message)):
            arrays.backward(out, q, k, v, out, lse, *results, workspace=given)


class TorchDLPack:
    """A torch tensor as CuPy shows its arrays: by DLPack, with torch's handshake."""

    def __init__(self, x):
        self.x = x

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)


def as_cuda_array(x, stream=None):
    typestr = {torch.float16: "<f2", torch.float32: "<f4", torch.uint8: "|u1"}[x.dtype]
    return CudaArray(x.shape, typestr, x.data_ptr(), x, strides=tuple(n * x.element_size() for n in x.stride()), stream=stream)


@pytest.mark.gpu
@pytest.mark.parametrize("show", [TorchDLPack, as_cuda_array], ids=["dlpack", "cuda_array_interface"])
def test_gpu_arrays(show):
    q, k, v = (torch.from_numpy(x).cuda() for x in make(np.float16))

    def like(shape, dtype, device):
        assert device == f"cuda:{q.device.index}"
        return show(torch.empty(shape, dtype=getattr(torch, dtype), device=device))

    of = (lambda shown: shown.x) if show is TorchDLPack else (lambda shown: shown.owner)
    out, lse = map(of, arrays.forward(show(q), show(k), show(v), like=like, causal=True))
    wanted, wanted_lse = flash3.attention(q, k, v, causal=True, return_lse=True)
    torch.cuda.synchronize()
    assert (out == wanted).all() and (lse == wanted_lse).all()
    made = arrays.backward(*map(show, (wanted, q, k, v, wanted, wanted_lse)), like=like, causal=True, deterministic=True)
    exact = flash3.attention_backward(wanted, q, k, v, wanted, wanted_lse, causal=True, deterministic=True)
    torch.cuda.synchronize()
    assert all((of(a) == b).all() for a, b in zip(made[:3], exact[:3])) and made[3] is None
    by_torch = arrays.forward(q, k, v, like=q, causal=True)
    torch.cuda.synchronize()
    assert (by_torch[0] == wanted).all() and by_torch[0].device == q.device
    with pytest.raises(ValueError, match="like made out on cpu but q is on cuda"):
        arrays.forward(q, k, v, like=np)


@pytest.mark.gpu
def test_gpu_stream_of_the_interface():
    """q becomes what it is on a stream that is far behind; the call has another stream."""
    q, k, v = (torch.from_numpy(x).cuda() for x in make(np.float16))
    wanted = flash3.attention(q, k, v)
    torch.cuda.synchronize()
    for show in (as_cuda_array, None):
        late, slow, mine = torch.zeros_like(q), torch.cuda.Stream(), torch.cuda.Stream()
        out = torch.empty_like(q)
        with torch.cuda.stream(slow):
            torch.cuda._sleep(200_000_000)
            late.copy_(q)
            shown = show(late, slow.cuda_stream) if show else TorchDLPack(late)
            arrays.forward(shown, k, v, out, stream=mine.cuda_stream)
        mine.synchronize()
        assert (out == wanted).all()


@pytest.mark.gpu
def test_gpu_cupy():
    """CuPy's own arrays, on a stream of its own that waits for no other."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    on_host = make(np.float16)
    q, k, v = map(torch.from_numpy, on_host)
    wanted, wanted_lse = flash3.attention(q.cuda(), k.cuda(), v.cuda(), causal=True, return_lse=True)
    exact = flash3.attention_backward(wanted, q.cuda(), k.cuda(), v.cuda(), wanted, wanted_lse, causal=True, deterministic=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        q, k, v = map(cupy.asarray, on_host)
        options = dict(causal=True, stream=stream.ptr)
        out, lse = arrays.forward(q, k, v, like=q, **options)
        made = arrays.backward(out, q, k, v, out, lse, like=cupy, deterministic=True, **options)
        used = cupy.asarray([5, 33], dtype=cupy.int32)
        ragged, _ = arrays.forward(q, k, v, like=q, seqused_q=used, seqused_k=used, **options)
        assert type(out) is type(q) and out.device == q.device
        for a, b in zip((out, lse, *made[:3]), (wanted, wanted_lse, *exact[:3])):
            np.testing.assert_array_equal(cupy.asnumpy(a), b.cpu().numpy())
        assert not ragged[0, 5:].any() and ragged[0, :5].any()
