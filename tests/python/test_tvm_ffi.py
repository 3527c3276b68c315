# SPDX-License-Identifier: Apache-2.0
"""libflash3_tvm_ffi.so, called through apache-tvm-ffi with numpy arrays. FLASH3_TVM_FFI_LIBRARY names it."""
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import flash3
from flash3 import arrays

LIBRARY = os.environ.get("FLASH3_TVM_FFI_LIBRARY")
tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
if not LIBRARY:
    pytest.skip("FLASH3_TVM_FFI_LIBRARY does not say where libflash3_tvm_ffi.so is", allow_module_level=True)


@pytest.fixture(scope="module")
def module():
    return tvm_ffi.load_module(LIBRARY)


@pytest.fixture(scope="module")
def named(module):
    """The functions with their arguments by name."""
    from tvm_ffi.utils.kwargs_wrapper import make_kwargs_wrapper

    class Functions:
        def __getattr__(self, name):
            names = module.arguments(name).split(",")
            return make_kwargs_wrapper(module[name], names, (None,) * len(names))
    return Functions()


def make(seq=33, dtype=np.float32):
    g = np.random.default_rng(0)
    return [g.standard_normal((2, seq, heads, 32)).astype(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
def test_forward_and_backward(module, named, dtype):
    q, k, v = make(dtype=dtype)
    out, lse = np.empty_like(q), np.empty((2, 4, 33), np.float32)
    module.forward(q, k, v, out)
    np.testing.assert_array_equal(out, flash3.attention(q, k, v))
    sink = np.linspace(-1, 1, 4, dtype=np.float32)
    options = dict(causal=True, softcap=3.0, softmax_scale=0.25, sink=sink)
    named.forward(q, k, v, out, lse, **options, window_left=7)
    wanted, wanted_lse = flash3.attention(q, k, v, **options, window=(7, None), return_lse=True)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(lse, wanted_lse)
    made = [np.empty_like(x) for x in (q, k, v, sink)]
    named.backward(wanted, q, k, v, out, lse, *made[:3], dsink=made[3], **options, window_left=7, deterministic=True)
    for a, b in zip(made, flash3.attention_backward(wanted, q, k, v, out, lse, **options, window=(7, None), deterministic=True)):
        np.testing.assert_array_equal(a, b)


def test_strides_and_lengths(named):
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in make())
    used, out = np.array([5, 33], np.int32), np.zeros_like(q)
    named.forward(q, k, v, out, seqused_q=used, seqused_k=used, backend="cpu", num_threads=1)
    np.testing.assert_array_equal(out, flash3.attention(q, k, v, seqused_q=used, seqused_k=used))


def test_kv_cache(named):
    q, k, v = make(seq=1)
    pages = [np.zeros((6, 16, 2, 32), np.float32) for _ in range(4)]
    g = np.random.default_rng(1)
    for i in (0, 1):
        pages[i][:] = pages[i + 2][:] = g.standard_normal(pages[i].shape)
    table, used = np.array([[5, 1, 0], [2, 3, 4]], np.int32), np.array([17, 40], np.int32)
    out = np.empty_like(q)
    named.attention_with_kv_cache(q, *pages[:2], out, seqused_k=used, page_table=table, k_new=k, v_new=v, causal=True)
    wanted = flash3.attention_with_kv_cache(q, *pages[2:], seqused_k=used, page_table=table, k_new=k, v_new=v, causal=True)
    np.testing.assert_array_equal(out, wanted)
    assert (pages[0] == pages[2]).all() and (pages[0][1, 1] == k[0, 0]).all()
    call = dict(seqused_k=used + 1, page_table=table, causal=True, rotate=True, rotation_seed=5)
    named.attention_with_kv_cache(q, *pages[:2], out, **call)
    np.testing.assert_array_equal(out, flash3.attention_with_kv_cache(q, *pages[:2], **call))
    assert not (out == wanted).all()


def test_quantize_and_fp8(module, named):
    q, k, v = make(seq=150)
    made = flash3.quantize(q, k, v, rotate=True, rotation_seed=5)
    codes = [np.empty(x.shape, np.uint8) for x in (q, k, v)]
    scales = [np.ones(x.shape, np.float32) for x in made[3:]]
    module.quantize(q, k, v, *codes, *scales, True, 5)
    for a, b in zip((*codes, *scales), made, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b).view(a.dtype))
    out = np.empty(q.shape, np.float32)
    named.forward(*codes, out, **dict(zip(("q_scale", "k_scale", "v_scale"), scales)))
    np.testing.assert_array_equal(out, flash3.attention(**made._asdict(), out_dtype="float32"))
    named.forward(q, k, v, out, compute="fp8", rotation_seed=5)
    np.testing.assert_array_equal(out, flash3.attention(q, k, v, compute="fp8", rotation_seed=5))
    # A cache of those keys, and queries that are rotated as they are.
    wide, out = q.astype(np.float16), np.empty(q.shape, np.float16)
    call = dict(seqused_k=np.array([150, 7], np.int32), k_scale=scales[1], v_scale=scales[2], rotate=True, rotation_seed=5)
    named.attention_with_kv_cache(wide, *codes[1:], out, **call)
    np.testing.assert_array_equal(out, flash3.attention_with_kv_cache(wide, *(arrays.E4M3(x) for x in codes[1:]), **call))


def test_merge(module):
    g = np.random.default_rng(0)
    parts, lses = g.standard_normal((3, 5, 2, 8)).astype(np.float32), g.standard_normal((3, 2, 5)).astype(np.float32)
    out, lse = np.empty((5, 2, 8), np.float32), np.empty((2, 5), np.float32)
    module.merge(parts, lses, out, lse)
    for a, b in zip((out, lse), arrays.merge(parts, lses, like=np)):
        np.testing.assert_array_equal(a, b)


def test_workspace(named):
    q, k, v = make()
    out, lse = arrays.forward(q, k, v, like=np)
    made = [np.empty_like(x) for x in (q, k, v)]
    size = arrays.backward_workspace(out, q, k, v, out, lse, *made)
    room = np.empty(size + 256, np.uint8)
    room = room[-room.ctypes.data % 256:][:size]
    named.backward(out, q, k, v, out, lse, *made, workspace=room)
    np.testing.assert_array_equal(made[0], flash3.attention_backward(out, q, k, v, out, lse)[0])
    with pytest.raises(ValueError, match=f"workspace_size = 64 but this call needs {size} bytes"):
        named.backward(out, q, k, v, out, lse, *made, workspace=room[:64])


def test_errors(module, named):
    q, k, v = make()
    out = np.empty_like(q)
    for call, error, message in (
            (lambda: module.forward(q, k[..., :8], v, out), ValueError, "k.shape[3] = 8 but q.shape[3] = 32; q and k must"),
            (lambda: module.forward(q, k, v), ValueError, "out is all zero; it must be a tensor"),
            (lambda: module.forward(q, k.astype(np.float16), v, out), TypeError, "k.dtype = float16 but q.dtype = float32"),
            (lambda: module.forward(q.astype(np.float64), k, v, out), TypeError, "q.dtype = DLPack type (code 2, 64 bits, 1 lanes) but"),
            (lambda: module.forward(q[None], k, v, out), ValueError, "q.ndim = 5 but a tensor has at most 4 dimensions"),
            (lambda: module.forward(1, k, v, out), TypeError, "q must be a tensor or None"),
            (lambda: named.forward(q, k, v, out, chunk=0.5), TypeError, "chunk must be an integer or None"),
            (lambda: named.forward(q, k, v, out, softcap="1"), TypeError, "softcap must be a number or None"),
            (lambda: named.forward(q, k, v, out, softcap=1e-46), ValueError,
             "softcap = 1e-46 but it must be a number that float32 can hold, which makes 0 of it"),
            (lambda: named.forward(q, k, v, out, softmax_scale=1e39), ValueError,
             "softmax_scale = 1e+39 but it must be a number that float32 can hold, which makes inf of it"),
            (lambda: named.forward(q, k, v, out, softmax_scale=1e-40), ValueError,
             "softmax_scale = 1e-40 but it must be 0 (1/sqrt(head_dim)) or from 1e-18 to 1e+18"),
            (lambda: named.forward(q, k, v, out, num_threads=2**31), ValueError, "num_threads = 2147483648 but it must fit into 32 bits"),
            (lambda: named.forward(q, k, v, out, backend=1), TypeError, "backend must be a string or None"),
            (lambda: named.forward(q, k, v, out, backend="gpu"), ValueError, "backend = 'gpu' but it must be 'auto', 'hopper', 'cpu' or None"),
            (lambda: named.forward(q, k, v, out, compute="a long name of a dtype"), ValueError,
             "compute = 'a long name of a dtype' but it must be 'fp8' or None"),
            (lambda: named.forward(q, k, v, out, workspace=np.empty((4, 4))[:, ::2]), ValueError,
             "workspace.strides[1] = 2 but it must have no gaps: 1"),
            (lambda: module.forward(*[None] * 60), TypeError, "60 arguments are given but the function has "),
            (lambda: module.arguments("atention"), ValueError, "name = 'atention' but it must be one of 'forward', "),
            (lambda: module.arguments(), TypeError, "arguments has one argument, the name of a function")):
        with pytest.raises(error, match=re.escape(message)):
            call()
    # A kind that TVM-FFI is told of; it gives RuntimeError, its base, to others.
    tvm_ffi.register_error("NotImplementedError", NotImplementedError)
    if "not available" in flash3.backends()["hopper"]:
        with pytest.raises(NotImplementedError, match="hopper|CUDA"):
            named.forward(q, k, v, out, backend="hopper")


def test_without_torch():
    code = "import sys; sys.modules['torch'] = None\n" \
           "import numpy as np, tvm_ffi\n" \
           "x, out = np.ones((1, 3, 2, 8), np.float32), np.empty((1, 3, 2, 8), np.float32)\n" \
           f"tvm_ffi.load_module({LIBRARY!r}).forward(x, x, x, out)\n" \
           "assert np.allclose(out, x)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_gpu(named):
    """On the stream that is torch's, with workspace from torch's allocator, which TVM-FFI learns of by its tensors."""
    import torch
    q, k, v = (torch.from_numpy(x).cuda() for x in make(seq=300, dtype=np.float16))
    out, lse = flash3.attention(q, k, v, causal=True, return_lse=True)
    made, made_lse = torch.empty_like(out), torch.empty_like(lse)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    wanted = flash3.attention_backward(out, q, k, v, out, lse, causal=True, deterministic=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.zeros_like(q)
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        named.forward(late, k, v, made, made_lse, causal=True)
        named.backward(made, late, k, v, made, made_lse, *gradients, causal=True, deterministic=True)
    torch.cuda.synchronize()
    assert (made == out).all() and (made_lse == lse).all()
    assert all((a == b).all() for a, b in zip(gradients, wanted))
