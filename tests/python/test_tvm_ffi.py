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
from added_examples import examples
from flash3._fields import ADDED

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


@pytest.mark.parametrize("name", ADDED["forward"])
def test_tensors_that_the_headers_have_gained(named, name):
    """Each reaches the call, in each of its shapes that is not that of rows, forward and backward."""
    q, k, v = make()
    out, lse = np.empty_like(q), np.empty((2, 4, 33), np.float32)
    plain = flash3.attention(q, k, v, causal=True)
    states = [np.array([5, -6])] if name == "dropout_state" else []
    for x in [*examples(name, 2, 4, 33, 33).values(), *states]:
        given = {name: x, **({"dropout_p": 0.3} if states else {})}
        named.forward(q, k, v, out, lse, causal=True, **given)
        wanted, wanted_lse = flash3.attention(q, k, v, causal=True, return_lse=True, **given)
        np.testing.assert_array_equal(out, wanted)
        assert np.abs(out - plain).max() > 1e-3
        if name not in ADDED["backward"]:
            continue
        made = [np.empty_like(x) for x in (q, k, v)]
        named.backward(out, q, k, v, out, lse, *made, causal=True, deterministic=True, **given)
        for a, b in zip(made, flash3.attention_backward(wanted, q, k, v, wanted, wanted_lse, causal=True, deterministic=True, **given)):
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


FIELDS = 15  # of a mask


def made_mask(named, sizes, **source):
    """(memory, numbers) of a mask for sizes, (batch, heads_q, seq_q, seq_k)."""
    arguments = dict(zip(("batch", "heads_q", "seq_q", "seq_k"), sizes), **source)
    room, fields = np.empty(named.mask_size(**arguments) + 256, np.uint8), np.empty(FIELDS, np.int64)
    memory = room[-room.ctypes.data % 256:][:len(room) - 256]
    named.mask_make(memory, fields, **arguments)
    return memory, fields


def sources(g):
    """{name: (the source's arguments, [2, 4, 200, 300] bool of what they let a query see)}"""
    b, h, i, j = np.ogrid[:2, :4, :200, :300]
    seen = g.random((2, 1, 200, 300)) < 0.5
    numbers = np.sort(g.integers(0, 5, (2, 300)), -1).astype(np.int32)
    bounds = np.sort(g.integers(0, 300, (1, 4, 4, 200)), 2).astype(np.int32)
    blocks = g.random((2, 4, 4, 5)) < 0.4
    indices = np.argsort(~blocks, -1, kind="stable").astype(np.int32)
    return {"dense": ({"dense": seen}, seen), "bytes": ({"dense": 3 * seen.view(np.uint8)}, seen),
            "documents": ({"documents": numbers}, numbers[b, i + 100] == numbers[b, j]),
            "ranges": ({"ranges": bounds}, sum(((bounds[0, h, 2 * r, i] <= j) & (j < bounds[0, h, 2 * r + 1, i]) for r in (0, 1))) > 0),
            "blocks": ({"block_counts": blocks.sum(-1).astype(np.int32), "block_indices": indices, "block_rows": 56, "block_keys": 64},
                       blocks[b, h, i // 56, j // 64]),
            "band": ({"window_left": 20, "window_right": 3}, (j >= i + 80) & (j <= i + 103))}


@pytest.mark.parametrize("kind", sources(np.random.default_rng(0)))
def test_masks(named, kind):
    g = np.random.default_rng(0)
    source, seen = sources(g)[kind]
    q, k, v = (g.standard_normal((2, seq, heads, 32)).astype(np.float32) for seq, heads in ((200, 4), (300, 2), (300, 2)))
    for causal in (False, True):
        memory, fields = made_mask(named, (2, 4, 200, 300), causal=causal, **source)
        out, lse = np.empty_like(q), np.empty((2, 4, 200), np.float32)
        named.forward(q, k, v, out, lse, mask=memory, mask_fields=fields, softcap=3.0)
        made = [np.empty_like(x) for x in (q, k, v)]
        named.backward(out, q, k, v, out, lse, *made, mask=memory, mask_fields=fields, softcap=3.0, deterministic=True)
        visible = seen & (np.arange(300) <= np.arange(200)[:, None] + 100) if causal else seen
        wanted = by_definition(q, k, v, np.broadcast_to(visible, (2, 4, 200, 300)), softcap=3.0)
        for got, exact in zip((out, lse, *made), wanted):
            np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)


def by_definition(q, k, v, seen, softcap):
    """out, lse and the gradients of (out · out / 2).sum() in float64; 0 where nothing is seen."""
    import torch
    q, k, v = (torch.from_numpy(x).double().requires_grad_() for x in (q, k, v))
    wide_k, wide_v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = softcap * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, wide_k) / 32**0.5 / softcap)
    scores = scores.masked_fill(~torch.from_numpy(seen.copy()), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    out = torch.einsum("bhij,bjhd->bihd", p, wide_v)
    gradients = torch.autograd.grad((out * out).sum() / 2, (q, k, v))
    return [x.detach().numpy() for x in (out, lse, *(x.nan_to_num() for x in gradients))]


def test_a_mask_of_flash3_and_the_room_of_one(named):
    """What flash3.masks makes is the same memory and the same numbers; mask_used tells the room that one needs."""
    import torch
    g = np.random.default_rng(0)
    q, k, v = (g.standard_normal((1, 400, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
    seen = g.random((400, 400)) < 0.1
    wanted = flash3.attention(*map(torch.from_numpy, (q, k, v)), mask=flash3.masks.dense(torch.from_numpy(seen))).numpy()
    made = flash3.masks.dense(torch.from_numpy(seen)).make()
    out, used = np.empty_like(q), np.zeros(3, np.int64)
    named.forward(q, k, v, out, mask=made.data, mask_fields=np.array(made.fields, np.int64))
    np.testing.assert_array_equal(out, wanted)
    little = made_mask(named, (1, 4, 400, 400), dense=seen[None, None], max_blocks=5)
    named.mask_used(*little, used)
    assert tuple(used) == flash3.masks.needs(made) == (16, 16, 0)
    named.forward(q, k, v, out, mask=little[0], mask_fields=little[1])
    assert not out.any()  # it has too little room, and so it is empty
    named.forward(q, k, v, out, **dict(zip(("mask", "mask_fields"), made_mask(named, (1, 4, 400, 400), dense=seen[None, None],
                                                                             max_blocks=int(used[0]), max_partial_blocks=int(used[1])))))
    np.testing.assert_array_equal(out, wanted)


def test_errors_of_masks(module, named):
    q, k, v = make()
    out, sizes = np.empty_like(q), dict(batch=2, heads_q=4, seq_q=33, seq_k=33)
    memory, fields = made_mask(named, (2, 4, 33, 33), causal=True)
    other = fields.copy()
    other[4] = 40
    wide = fields.copy()
    wide[8] = 2**40
    used = np.zeros(3, np.int64)
    for call, error, message in (
            (lambda: named.forward(q, k, v, out, mask=memory), ValueError, "mask is given but mask_fields is None; mask_make makes them"),
            (lambda: named.forward(q, k, v, out, mask_fields=fields), ValueError, "mask_fields is given but mask is None; mask_make"),
            (lambda: named.forward(q, k, v, out, mask=memory, mask_fields=fields[:11]), ValueError,
             "mask_fields.shape[0] = 11 but it must be an int64 tensor of 15 in host memory"),
            (lambda: named.forward(q, k, v, out, mask=memory, mask_fields=fields.astype(np.int32)), TypeError,
             "mask_fields.dtype = DLPack type (code 0, 32 bits, 1 lanes) but it must be int64"),
            (lambda: named.forward(q, k, v, out, mask=memory, mask_fields=fields[None]), ValueError, "mask_fields.ndim = 2 but it must be"),
            (lambda: named.forward(q, k, v, out, mask=memory, mask_fields=np.repeat(fields, 2)[::2]), ValueError,
             "mask_fields.strides[0] = 2 but it must have no gaps: 1"),
            (lambda: named.forward(q, k, v, out, mask=memory, mask_fields=wide), ValueError, f"mask_fields holds {2**40} but it must be as"),
            (lambda: named.forward(q, k, v, out, mask=memory, mask_fields=other), ValueError, "mask->seq_k = 40 but k.shape[1] = 33"),
            (lambda: named.forward(q, k, v, out, mask=memory[:64], mask_fields=fields), ValueError, "mask->size = 64 but this call needs"),
            (lambda: named.forward(q, k, v, out, mask=1, mask_fields=fields), TypeError, "mask must be a tensor or None"),
            (lambda: named.forward(q, k, v, out, mask=memory, mask_fields=fields, seqused_k=np.array([3, 3], np.int32)), ValueError,
             "mask is given and seqused_k is given, but mask->lengths = 0 lacks 8"),
            (lambda: named.mask_make(None, fields, **sizes), TypeError, "mask is None but it must be a tensor"),
            (lambda: named.mask_make(memory, None, **sizes), TypeError, "mask_fields is None but it must be an int64 tensor of 15"),
            (lambda: named.mask_make(memory, fields, **sizes, dense=q), TypeError,
             "dense.dtype = DLPack type (code 2, 32 bits, 1 lanes) but it must be uint8 or bool"),
            (lambda: named.mask_size(**sizes, documents=used.astype(np.int32)[None]), ValueError, "documents.shape[1] = 3 but seq_k = 33"),
            (lambda: named.mask_used(memory, fields), TypeError, "used is None but it must be an int64 tensor of 3 in host memory"),
            (lambda: named.mask_used(memory, other, used), ValueError, "but no backend makes that of its fields")):
        with pytest.raises(error, match=re.escape(message)):
            call()
    assert not used.any() and "mask_fields" in module.arguments("backward").split(",")


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


@pytest.mark.gpu
def test_masks_on_a_gpu(named):
    """Made on torch's stream, which the numbers on the host do not wait for."""
    import torch
    q, k, v = (torch.from_numpy(x).cuda() for x in make(seq=300, dtype=np.float16))
    seen = torch.rand(1, 1, 300, 300, device="cuda") < 0.5
    wanted = flash3.attention(q, k, v, mask=flash3.masks.dense(seen))
    sizes = dict(batch=2, heads_q=4, seq_q=300, seq_k=300)
    memory = torch.empty(named.mask_size(**sizes, dense=seen), dtype=torch.uint8, device="cuda")
    fields, used, out = np.empty(FIELDS, np.int64), np.empty(3, np.int64), torch.empty_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.zeros_like(seen)
        torch.cuda._sleep(200_000_000)
        late.copy_(seen)
        named.mask_make(memory, fields, **sizes, dense=late)
        named.forward(q, k, v, out, mask=memory, mask_fields=fields)
        named.mask_used(memory, fields, used)
    torch.cuda.synchronize()
    assert (out == wanted).all() and tuple(used) == (9, 9, 0)
