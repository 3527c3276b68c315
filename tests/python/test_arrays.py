# SPDX-License-Identifier: Apache-2.0
"""The package without torch: numpy, ml_dtypes, and anything with __dlpack__ or __array_interface__."""
import re
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest

import flash3
from flash3 import arrays
from conftest import DLPackOnly, assert_hopper_refuses


def make(dtype=np.float32, batch=2, seq_q=33, seq_k=50, heads_q=4, heads_k=2, dim=32, dim_v=24):
    g = np.random.default_rng(0)
    return [g.standard_normal(s).astype(dtype) for s in
            ((batch, seq_q, heads_q, dim), (batch, seq_k, heads_k, dim), (batch, seq_k, heads_k, dim_v))]


def exact(q, k, v, causal=False):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    if causal:
        i, j = np.ogrid[:q.shape[1], :k.shape[1]]
        s = np.where(j <= i + k.shape[1] - q.shape[1], s, -np.inf)
    lse = np.log(np.exp(s).sum(-1))
    return np.einsum("bhij,bjhd->bihd", np.exp(s - lse[..., None]), v), lse


@pytest.mark.parametrize("dtype,tolerance", [(np.float32, 2e-6), (np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)], ids=str)
def test_numpy(dtype, tolerance):
    q, k, v = make(dtype)
    out, lse = flash3.attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == dtype and lse.dtype == np.float32 and out.shape == (2, 33, 4, 24) and lse.shape == (2, 4, 33)
    wanted, wanted_lse = exact(q, k, v, causal=True)
    np.testing.assert_allclose(out.astype(np.float64), wanted, atol=tolerance)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-6 if dtype == np.float32 else 2e-2)


def test_gradients_are_the_slopes():
    q, k, v = make(seq_q=5, seq_k=6, dim=8, dim_v=8)
    sink = np.linspace(-1, 1, 4, dtype=np.float32)
    g = np.random.default_rng(1)
    out, lse = flash3.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    dout, dlse = g.standard_normal(out.shape).astype(np.float32), g.standard_normal(lse.shape).astype(np.float32)
    gradients = flash3.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True, sink=sink)

    def loss(*inputs):
        o, l = flash3.attention(*inputs[:3], causal=True, sink=inputs[3], return_lse=True)
        return (o.astype(np.float64) * dout).sum() + (l.astype(np.float64) * dlse).sum()

    for index, gradient in enumerate(gradients):
        step = g.standard_normal(gradient.shape).astype(np.float32) * 1e-2
        ends = [loss(*(x + sign * step if i == index else x for i, x in enumerate((q, k, v, sink)))) for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / 2
        assert abs(slope - (gradient * step).sum()) < 1e-3 * max(1, abs(slope)), gradients._fields[index]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_unrounded(dtype):
    """Results of 16-bit tensors in float32 are those that would be rounded; gradients either all or none."""
    q, k, v = make(dtype)
    out, lse = flash3.attention(q, k, v, causal=True, return_lse=True)
    wide = np.empty(out.shape, np.float32)
    arrays.forward(q, k, v, wide, causal=True)
    assert (wide.astype(dtype) == out).all() and (wide != out.astype(np.float32)).any()
    rounded = [np.empty(x.shape, dtype) for x in (q, k, v)]
    unrounded = [np.empty(x.shape, np.float32) for x in (q, k, v)]
    arrays.backward(out, q, k, v, out, lse, *rounded, causal=True)
    arrays.backward(out, q, k, v, out, lse, *unrounded, causal=True)
    for a, b in zip(rounded, unrounded):
        assert (b.astype(dtype) == a).all() and (b != a.astype(np.float32)).any()
    with pytest.raises(TypeError, match="dq, dk and dv must have the same dtype"):
        arrays.backward(out, q, k, v, out, lse, unrounded[0], *rounded[1:], causal=True)


def test_packed_and_used():
    q, k, v = (x[0] for x in make(batch=1, seq_q=12, seq_k=12))
    cu = np.array([1, 4, 9], np.int32)
    out, lse = flash3.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    for a, b in ((1, 4), (4, 9)):
        wanted, wanted_lse = exact(*(x[None, a:b] for x in (q, k, v)))
        np.testing.assert_allclose(out[a:b], wanted[0], atol=2e-6)
        np.testing.assert_allclose(lse[:, a:b], wanted_lse[0], atol=2e-6)
    assert not out[[0, 9, 10, 11]].any() and np.all(lse[:, [0, 9, 10, 11]] == -np.inf)


def test_layouts():
    q, k, v = make()
    wanted = flash3.attention(q, k, v)
    for change in (lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
                   lambda x: np.asfortranarray(x),
                   lambda x: np.stack([x, x], -1)[..., 0],
                   lambda x: x[:, ::-1].copy()[:, ::-1],
                   lambda x: np.concatenate([x, x], -1)[..., :x.shape[-1]]):
        np.testing.assert_array_equal(flash3.attention(*(change(x) for x in (q, k, v))), wanted)
    np.testing.assert_array_equal(flash3.attention(q, *(np.broadcast_to(x[:1], x.shape) for x in (k, v)))[0], wanted[0])
    read_only = q.copy()
    read_only.flags.writeable = False
    np.testing.assert_array_equal(flash3.attention(read_only, k, v), wanted)


def test_dlpack():
    q, k, v = make()
    np.testing.assert_array_equal(flash3.attention(*map(DLPackOnly, (q, k, v)), causal=True),
                                  flash3.attention(q, k, v, causal=True))
    out = np.empty((2, 33, 4, 24), np.float32)
    arrays.forward(*map(DLPackOnly, (q, k, v)), DLPackOnly(out))
    np.testing.assert_array_equal(out, flash3.attention(q, k, v))
    with pytest.raises(TypeError, match=re.escape("q.dtype = DLPack type (code 2, 64 bits) but it must be one of float16")):
        flash3.attention(DLPackOnly(q.astype(np.float64)), k, v)


def test_dlpack_memory_is_given_back():
    import gc
    import weakref
    q, k, v = make()
    held = DLPackOnly(q)
    gone = weakref.ref(held)
    before = sys.getrefcount(q)
    for _ in range(10):
        flash3.attention(held, k, v)
    del held
    gc.collect()
    assert gone() is None and sys.getrefcount(q) == before - 1


def test_given_memory_and_workspace():
    q, k, v = make(dtype=np.float16)
    out, lse = np.empty((2, 4, 33, 24), np.float16).swapaxes(1, 2), np.empty((2, 4, 33), np.float32)
    size = arrays.forward_workspace(q, k, v, out, lse, causal=True)
    arrays.forward(q, k, v, out, lse, causal=True, num_threads=2)
    wanted = flash3.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(out, wanted)
    dout = np.ones_like(out)
    gradients = [np.empty_like(x) for x in (q, k, v)]
    size = arrays.backward_workspace(dout, q, k, v, out, lse, *gradients, causal=True)
    assert size > 0
    memory = np.empty(size + 256, np.uint8)
    start = memory.ctypes.data
    arrays.backward(dout, q, k, v, out, lse, *gradients, causal=True, workspace=(-(-start // 256) * 256, size))
    for a, b in zip(gradients, flash3.attention_backward(dout, q, k, v, out, lse, causal=True)):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=f"workspace_size = {size - 1} but this call needs {size} bytes"):
        arrays.backward(dout, q, k, v, out, lse, *gradients, causal=True, workspace=(-(-start // 256) * 256, size - 1))
    frozen = np.empty_like(out)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only memory"):
        arrays.forward(q, k, v, frozen)


def test_a_plan_runs_with_other_tensors():
    q, k, v = make()
    out, lse = np.zeros((*q.shape[:3], v.shape[-1]), np.float32), np.zeros((2, 4, 33), np.float32)
    plan = arrays.forward_plan(q, k, v, out, lse, causal=True)
    assert plan.explain() == arrays.forward_explain(q, k, v, out, lse, causal=True)
    assert plan.workspace_size() == arrays.forward_workspace(q, k, v, out, lse, causal=True)
    for scale in (1, 2, 3):
        plan.run(q * np.float32(scale), k.copy(), v, out, lse)
        wanted, wanted_lse = exact(q * scale, k, v, causal=True)
        assert abs(out - wanted).max() < 3e-6 and abs(lse - wanted_lse).max() < 1e-5
    with pytest.raises(ValueError, match=r"causal = 0 but the plan was made for 1; only addresses"):
        plan.run(q, k, v, out, lse, causal=False)
    with pytest.raises(ValueError, match=r"q\.shape\[0\] = 1 but the plan was made for 2"):
        plan.run(q[:1], k[:1], v[:1], out[:1], lse[:1])
    with pytest.raises(TypeError, match="lse.dtype = none but the plan was made for float32"):
        plan.run(q, k, v, out)
    with pytest.raises(TypeError, match="6 tensors are given but the plan's call has 5"):
        plan.run(q, k, v, out, lse, lse)


def test_plans_of_the_other_calls():
    q, k, v = make(dim_v=32)
    out, lse = flash3.attention(q, k, v, return_lse=True)
    dout = np.ones_like(out)
    made, direct = [np.zeros_like(x) for x in (q, k, v)], [np.zeros_like(x) for x in (q, k, v)]
    plan = arrays.backward_plan(dout, q, k, v, out, lse, *made)
    plan.run(dout, q, k, v, out, lse, *made)
    arrays.backward(dout, q, k, v, out, lse, *direct)
    assert all((a == b).all() and a.any() for a, b in zip(made, direct))

    codes, scale = np.zeros(k.shape, np.uint8), np.zeros(1, np.float32)
    plan = arrays.quantize_plan(None, k, None, None, arrays.E4M3(codes), None, None, scale, None)
    plan.run(None, k, None, None, arrays.E4M3(codes), None, None, scale, None)
    assert scale[0] > 0 and codes.any()


def test_questions():
    q, k, v = make()
    text = flash3.explain(q, k, v, causal=True, num_threads=1)
    assert "cpu_fwd_fp32" in text and "j <= i + 17" in text
    assert flash3.supported(q, k, v) and flash3.supported(q, k, v, backward=True, deterministic=True)
    assert "cpu_bwd_fp32" in flash3.explain(q, k, v, backward=True, causal=True, return_lse=True)
    assert_hopper_refuses(lambda: flash3.supported(q, k, v, backend="hopper"))
    assert set(flash3.backends()) == {"hopper", "cpu"} and "thread" in flash3.backends()["cpu"]
    assert flash3.__version__ == flash3.version() and re.fullmatch(r"\d+\.\d+\.\d+", flash3.version())
    out, lse = flash3.attention(q, k, v, return_lse=True)
    backward = (out, q, k, v, out, lse, q.copy(), k.copy(), v.copy())
    assert "cpu_bwd" in arrays.backward_explain(*backward) and arrays.backward_supported(*backward)
    assert_hopper_refuses(lambda: arrays.forward_supported(q, k, v, out, lse, backend="hopper"))


def test_errors():
    q, k, v = make()
    for change, error, message in (
            (dict(q=q.astype(np.float64)), TypeError, "q.dtype = float64 but it must be one of float16"),
            (dict(k=k.astype(">f4")), TypeError, "k.dtype = >f4 but"),
            (dict(q=q.tolist()), TypeError, "q is a list but it must be a torch tensor, a numpy array"),
            (dict(v=v[0]), ValueError, "v.ndim = 3 but it must be 4"),
            (dict(q=q[None]), ValueError, "q.ndim = 5 but a tensor has at most 4 dimensions"),
            (dict(k=k[:, :, :, :8]), ValueError, "k.shape[3] = 8 but q.shape[3] = 32; q and k must have the same head_dim"),
            (dict(v=None), TypeError, "v is a NoneType"),
            (dict(causal=True, window=(1,)), ValueError, "window = (1,) but it must be a pair"),
            (dict(sink=np.zeros(5, np.float32)), ValueError, "sink.shape[0] = 5 but q.shape[2] = 4"),
            (dict(cu_seqlens_k=np.array([0, 3])), TypeError, "cu_seqlens_k.dtype = int64 but it must be int32"),
            (dict(chunk=1.5), TypeError, "chunk is a float but it must be an integer"),
            (dict(max_seqlen_q=2**70), ValueError, "must fit into 64 bits")):
        with pytest.raises(error, match=re.escape(message)):
            flash3.attention(**{**dict(q=q, k=k, v=v), **change})
    with pytest.raises(TypeError, match="unexpected argument 'casual'"):
        flash3.explain(q, k, v, casual=True)
    with pytest.raises(TypeError, match="unexpected argument 'deterministic'"):
        arrays.forward(q, k, v, np.empty((2, 33, 4, 24), np.float32), deterministic=True)
    with pytest.raises(ValueError, match="backend = 'gpu' but it must be 'auto', 'hopper' or 'cpu'"):
        flash3.explain(q, k, v, backend="gpu")
    with pytest.raises((NotImplementedError, ValueError), match="hopper|CUDA"):
        arrays.forward(q, k, v, np.empty((2, 33, 4, 24), np.float32), backend="hopper")


def run_without(*modules, code):
    """Runs code in a process in which these modules cannot be imported."""
    hide = f"import sys, importlib.util, importlib.abc\n" \
           f"hidden = {modules!r}\n" \
           "class Hide(importlib.abc.MetaPathFinder):\n" \
           "    def find_spec(self, name, path=None, target=None):\n" \
           "        if name.partition('.')[0] in hidden: raise ModuleNotFoundError(name)\n" \
           "sys.meta_path.insert(0, Hide())\n" \
           "find = importlib.util.find_spec\n" \
           "importlib.util.find_spec = lambda name, package=None: None if name in hidden else find(name, package)\n"
    done = subprocess.run([sys.executable, "-c", hide + textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_torch():
    run_without("torch", code="""
        import flash3, numpy as np
        x = np.ones((1, 3, 2, 8), np.float32)
        assert np.allclose(flash3.attention(x, x, x), x)
        assert 'torch' not in sys.modules and not hasattr(flash3, 'sdpa')
    """)


def test_without_torch_and_numpy():
    run_without("torch", "numpy", code="""
        import ctypes, flash3
        class Array:
            def __init__(self, shape):
                self.memory = (ctypes.c_float * 48)(*[1.0] * 48)
                self.__array_interface__ = dict(version=3, shape=shape, typestr="<f4",
                                                data=(ctypes.addressof(self.memory), False))
        q, out = Array((1, 3, 2, 8)), Array((1, 3, 2, 8))
        out.memory[0] = 5.0
        flash3.arrays.forward(q, q, q, out)
        assert all(abs(x - 1) < 1e-6 for x in out.memory)
        assert flash3.explain(q, q, q)
        try:
            flash3.attention(q, q, q)
        except RuntimeError as error:
            assert "numpy" in str(error)
        else:
            raise AssertionError
    """)


def test_without_ml_dtypes():
    run_without("ml_dtypes", "torch", code="""
        import flash3
        class BFloat16:
            def __init__(self):
                import ctypes
                self.memory, self.dtype = (ctypes.c_uint16 * 48)(), 'bfloat16'
                self.__array_interface__ = dict(version=3, shape=(1, 3, 2, 8), typestr="<V2",
                                                data=(ctypes.addressof(self.memory), False))
        x, out = BFloat16(), BFloat16()
        flash3.arrays.forward(x, x, x, out)
        try:
            flash3.attention(x, x, x)
        except RuntimeError as error:
            assert "ml_dtypes" in str(error)
        else:
            raise AssertionError
    """)


def test_many_threads():
    import concurrent.futures
    inputs = [make(seq_q=20 + i, seq_k=30 + i) for i in range(8)]
    alone = [flash3.attention(*x, causal=True) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            for got, wanted in zip(pool.map(lambda x: flash3.attention(*x, causal=True), inputs), alone):
                np.testing.assert_array_equal(got, wanted)


def test_errors_of_threads_do_not_mix():
    import concurrent.futures
    q, k, v = make()

    def wrong(n):
        with pytest.raises(ValueError, match=re.escape(f"chunk = {-n} but")):
            flash3.attention(q, k, v, chunk=-n)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(wrong, range(1, 200)))
