# SPDX-License-Identifier: Apache-2.0
"""flash3.jax against jax's definition in float64, and under its transforms."""
import functools
import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

import oracle

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp

import flash3

if not (pathlib.Path(flash3.__file__).parent / "libflash3_jax.so").exists():
    pytest.skip("flash3 was built without jaxlib's headers", allow_module_level=True)

from flash3 import _jax
from added_examples import examples
from flash3._fields import ADDED, GRADIENTS
from flash3.jax import dot_product_attention

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture
def place(device):
    """Runs a test on this device; dtypes that it takes."""
    try:
        where = jax.devices("cpu" if device == "cpu" else "cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"jax has no {device}: {error}")
    with jax.default_device(where):
        yield ["float32", "float16", "bfloat16"] if device == "cpu" else ["float16", "bfloat16"]


def make(dtype, *shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g).to(DTYPES[dtype]) for s in shapes]


def to_jax(x):
    return jnp.asarray(x.float().cpu().numpy(), str(x.dtype).removeprefix("torch."))


def to_torch(x):
    return torch.from_numpy(np.array(x.astype(jnp.float32))).to(DTYPES[x.dtype.name])


def top_left(q, k, v, lengths_q=None, lengths_k=None, is_causal=False, window=None, scale=None, softcap=0.0, sink=None, mask=None):
    """jax's definition with torch, in the tensors' dtype: masks around j = i, and 0 where nothing is seen."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None]
    seen = torch.ones(q.shape[0], 1, q.shape[1], k.shape[1], dtype=torch.bool)
    if mask is not None:
        seen = seen & mask
    if is_causal:
        seen &= j <= i
    if window is not None:
        seen &= (j >= i - window[0]) & (j <= i + window[1])
    if lengths_q is not None:
        seen &= i < torch.tensor(lengths_q)[:, None, None, None]
    if lengths_k is not None:
        seen &= j < torch.tensor(lengths_k)[:, None, None, None]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1]**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = torch.logsumexp(scores.float() if scores.dtype != torch.float64 else scores, -1)
    p = torch.exp(scores - lse.to(scores.dtype).masked_fill(lse == -torch.inf, 0)[..., None])
    return torch.einsum("bhij,bjhd->bihd", p[..., :k.shape[1]], v), lse.transpose(1, 2)


def check(dtype, shapes, jax_options, options, sink=None):
    """out, lse and all gradients, of both results, against float64."""
    inputs = make(dtype, *shapes) + ([sink] if sink is not None else [])
    dout, dlse = make(dtype, (*shapes[0][:-1], shapes[2][-1]), seed=1) + make("float32", shapes[0][:-1], seed=2)

    def call(q, k, v, *sink):
        return dot_product_attention(q, k, v, return_residual=True, **jax_options, **({"sink": sink[0]} if sink else {}))

    @jax.jit
    def both(*inputs):
        (out, lse), pull = jax.vjp(call, *inputs)
        seen = jnp.isfinite(lse)
        return out, lse, pull((to_jax(dout), jnp.where(seen, to_jax(dlse), 0)))

    out, lse, gradients = both(*map(to_jax, inputs))
    wanted = []
    for exact in (True, False):
        leaves = [(x.double() if exact else x.clone()).requires_grad_() for x in inputs]
        o, l = top_left(*leaves[:3], **options, **({"sink": leaves[3]} if sink is not None else {}))
        finite = torch.isfinite(l)
        loss = (o * dout.to(o.dtype)).sum() + torch.where(finite, l, 0).mul(dlse).sum()
        wanted.append([o.detach(), l.detach(), *(g.nan_to_num() for g in torch.autograd.grad(loss, leaves))])
    for name, got, exact, naive in zip(("out", "lse", "dq", "dk", "dv", "dsink"), (out, lse, *gradients), *wanted):
        oracle.assert_close(to_torch(got), exact, naive, name)


MASKS = {"none": {}, "causal": {"is_causal": True}, "window": {"window": (3, 5)}, "both": {"is_causal": True, "window": (4, 4)}}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows,keys", [(40, 40), (33, 50), (50, 33)])
def test_masks(place, mask, rows, keys):
    options = MASKS[mask]
    given = {"local_window_size" if name == "window" else name: value for name, value in options.items()}
    for dtype in place if (mask, rows) == ("both", 33) else place[:1]:
        check(dtype, [(2, rows, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16)], given, options)


def test_lse_changes_nothing_of_out(place):
    q, k = map(to_jax, make(place[-1], (2, 20, 4, 16), (2, 30, 2, 16)))
    out, lse = dot_product_attention(q, k, k, return_residual=True, is_causal=True)
    assert lse.shape == (2, 20, 4) and lse.dtype == jnp.float32
    assert np.array_equal(out, dot_product_attention(q, k, k, is_causal=True))


def test_nothing_to_see(place):
    q, none = jnp.ones((2, 3, 4, 16), place[0]), jnp.ones((2, 0, 4, 16), place[0])
    for options in ({}, {"is_causal": True}, {"local_window_size": 2}):
        def loss(q, k, v):
            return dot_product_attention(q, k, v, **options).sum()
        assert dot_product_attention(none, q, q, **options).shape == none.shape
        assert not jnp.any(dot_product_attention(q, none, none, **options))
        gradients = jax.grad(loss, (0, 1, 2))(q, none, none)
        assert [g.shape for g in gradients] == [q.shape, none.shape, none.shape] and not jnp.any(gradients[0])


def test_scale_softcap_sink_and_another_head_dim(place):
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    shapes = [(2, 20, 4, 16), (2, 20, 1, 16), (2, 20, 1, 24)]
    for dtype in place[-2:]:
        check(dtype, shapes, {"scale": 0.3, "softcap": 2.0}, {"scale": 0.3, "softcap": 2.0}, sink=sink)


@pytest.mark.parametrize("lengths_q,lengths_k,options", [([5, 20], [11, 0], {}), (None, [11, 3], {}), ([5, 0], None, {}),
                                                         ([5, 20], None, {"is_causal": True}),
                                                         ([5, 20], [5, 20], {"is_causal": True, "window": (3, 1)}),
                                                         ([20, 7], [11, 3], {"is_causal": True}), (None, [11, 3], {"window": (20, 4)})])
def test_lengths(place, lengths_q, lengths_k, options):
    given = {"local_window_size" if name == "window" else name: value for name, value in options.items()}
    for name, lengths in (("query_seq_lengths", lengths_q), ("key_value_seq_lengths", lengths_k)):
        if lengths is not None:
            given[name] = jnp.asarray(lengths, jnp.int32)
    check(place[0], [(2, 20, 4, 16)] + [(2, 20, 2, 16)] * 2, given, dict(options, lengths_q=lengths_q, lengths_k=lengths_k))


@pytest.mark.parametrize("name", ADDED["forward"])
def test_tensors_that_the_headers_have_gained(place, device, name):
    """Each reaches the call and its gradients, in each of its shapes that is not that of rows, also under vmap."""
    close = {"atol": 1e-5} if device == "cpu" else {"atol": 2e-2, "rtol": 2e-2}
    q, k, v = (x.to(device) for x in make(place[0], (2, 20, 4, 16), (2, 30, 2, 16), (2, 30, 2, 16)))

    def assert_same(got, wanted):
        """Of the same call."""
        np.testing.assert_array_equal(np.asarray(got, np.float32), wanted.detach().float().cpu().numpy())

    def assert_close(got, wanted):
        np.testing.assert_allclose(np.asarray(got, np.float32), wanted.float().cpu().numpy(), **close)
    options = {"causal": True, "mask_alignment": "top_left"}
    plain = flash3.attention(q, k, v, **options)
    for x in (torch.from_numpy(x).to(device) for x in examples(name, 2, 4, 20, 30).values()):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        wanted = flash3.attention(*leaves, **options, deterministic=True, **{name: x})
        assert (wanted - plain).abs().max() > 1e-3

        def call(q, k, v, x):
            return dot_product_attention(q, k, v, is_causal=True, deterministic=True, **{name: x})
        arrays = [to_jax(x) for x in (q, k, v)]
        out, pull = jax.vjp(lambda *tensors: call(*tensors, to_jax(x)), *arrays)
        assert_same(out, wanted)
        for got, gradient in zip(pull(2 * out), torch.autograd.grad(wanted.square().sum(), leaves)):
            assert_close(got, gradient)
        if name in GRADIENTS:
            x.requires_grad_()
            _, pull = jax.vjp(lambda x: call(*arrays, x), to_jax(x.detach()))
            of_x, = torch.autograd.grad(flash3.attention(q, k, v, **options, **{name: x}).square().sum(), x)
            assert_close(pull(2 * out)[0], of_x)
            x = x.detach()
        mapped = jax.vmap(call)(*(jnp.stack([a, a]) for a in arrays), jnp.stack([to_jax(x), 2 * to_jax(x)]))
        assert_close(mapped[0], wanted.detach())
        assert_close(mapped[1], flash3.attention(q, k, v, **options, **{name: 2 * x}))
    assert f"{name} is " in dot_product_attention.__doc__ or f"{name}, " in dot_product_attention.__doc__


def test_unknown_arguments_are_refused(place):
    q, k, v = (to_jax(x) for x in make("float32", *[(1, 4, 2, 16)] * 3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'slopes'"):
        dot_product_attention(q, k, v, slopes=q)


def test_like_jaxs_own_and_without_batch(place):
    one = jnp.array([9], jnp.int32)
    q, k, v = map(to_jax, make(place[0], (12, 4, 16), (15, 2, 16), (15, 2, 16)))
    for options in ({"is_causal": True, "scale": 0.2}, {"local_window_size": 20}, {"key_value_seq_lengths": one},
                    {"query_seq_lengths": one, "is_causal": True},
                    {"query_seq_lengths": one, "key_value_seq_lengths": one, "local_window_size": np.int64(3)},
                    {"query_seq_lengths": one, "key_value_seq_lengths": jnp.array([9], jnp.int32), "is_causal": True}):
        got = dot_product_attention(q, k, v, implementation="flash3", **options)
        window = options.get("local_window_size")
        options = options if window is None else {**options, "local_window_size": int(window)}
        wanted = jax.nn.dot_product_attention(q, k, v, **options)
        close = 1e-5 if place[0] == "float32" else 1e-2
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(wanted, np.float32), atol=close)


def test_inside_scan_and_checkpoint(place):
    q, k = map(to_jax, make(place[0], (2, 9, 4, 16), (2, 9, 2, 16)))

    def plain(x):
        return dot_product_attention(x, k, k, is_causal=True)

    def three(call, q):
        return jax.lax.scan(lambda x, _: (x + call(x), None), q, None, length=3)[0].sum()
    scanned = jax.grad(lambda q: three(jax.checkpoint(plain), q))(q)
    wanted = jax.grad(lambda q: functools.reduce(lambda x, _: x + plain(x), range(3), q).sum())(q)
    np.testing.assert_allclose(np.asarray(scanned, np.float32), np.asarray(wanted, np.float32), rtol=1e-2, atol=1e-2)


def same_bits(a, b):
    return np.array_equal(np.asarray(a, np.float32), b.float().cpu().numpy())


@pytest.mark.parametrize("scales", ["tensor", "heads", "blocks"])
def test_fp8_has_the_bits_of_attention(place, device, scales):
    """What flash3.attention computes is compared with float64 elsewhere."""
    q, k, v = (x.to(device) for x in make("bfloat16", (2, 300, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64)))
    *tensors, q_scale, k_scale, v_scale = flash3.quantize(4 * q, k, v, scales=scales, heads_k=2 if scales == "heads" else None)
    scale = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    in_jax, jax_scale = [to_jax(x.cpu()) for x in tensors], {name: to_jax(x.cpu()) for name, x in scale.items()}
    out = jax.jit(dot_product_attention)(*in_jax, **jax_scale)
    assert out.dtype == jnp.bfloat16 and same_bits(out, flash3.attention(*tensors, **scale))
    # Queries from 153 on see nothing, and their blocks of scales are cut off with them.
    out = jax.jit(functools.partial(dot_product_attention, local_window_size=(3, 1)))(*in_jax, **jax_scale)
    scale["q_scale"] = q_scale[..., :2] if scales == "blocks" else q_scale
    wanted = flash3.attention(tensors[0][:, :153], *tensors[1:], window=(0, 4), **scale)
    assert same_bits(out[:, :153], wanted) and not jnp.any(out[:, 153:])
    with pytest.raises(NotImplementedError, match="FP8 has no gradients"):
        jax.grad(lambda s: dot_product_attention(*in_jax, **{**jax_scale, "q_scale": s}).astype(jnp.float32).sum())(jax_scale["q_scale"])
    stacked = [jnp.stack([x, x]) for x in (*in_jax, *jax_scale.values())]
    mapped = jax.vmap(lambda q, k, v, a, b, c: dot_product_attention(q, k, v, q_scale=a, k_scale=b, v_scale=c))(*stacked)
    assert same_bits(mapped[1], flash3.attention(*tensors, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale))


def test_computing_in_fp8(place, device):
    q, k, v = (x.to(device).requires_grad_() for x in make("bfloat16", (1, 90, 4, 64), (1, 90, 2, 64), (1, 90, 2, 64)))
    wanted = flash3.attention(q, k, v, causal=True, compute="fp8", rotation_seed=2**64 - 5, deterministic=True)
    wanted.float().sum().backward()

    def loss(q, k, v):
        out = dot_product_attention(q, k, v, is_causal=True, compute="fp8", rotation_seed=2**64 - 5, deterministic=True)
        return out.astype(jnp.float32).sum(), out
    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*(to_jax(x.detach().cpu()) for x in (q, k, v)))
    assert same_bits(out, wanted.detach())
    assert all(same_bits(got, x.grad) for got, x in zip(gradients, (q, k, v)))


@pytest.mark.parametrize("axes,with_sink", [((0, None, None), False), ((1, 0, 2), False), ((0, None, 0), True)])
def test_vmap(place, axes, with_sink):
    shapes = [(3, 2, 9, 4, 16), (3, 2, 9, 2, 16), (3, 2, 9, 2, 16)]
    inputs = [x if a is not None else x[0] for x, a in zip(map(to_jax, make(place[0], *shapes)), axes)]
    sink = jnp.ones(4) if with_sink else None

    def loss(q, k, v):
        return jnp.square(dot_product_attention(q, k, v, is_causal=True, sink=sink)).sum()

    both = jax.value_and_grad(loss, (0, 1, 2))
    mapped = [x if a is None else jnp.moveaxis(x, 0, a) for x, a in zip(inputs, axes)]
    got = jax.jit(jax.vmap(both, axes))(*mapped)
    wanted = [both(*(x if a is None else x[i] for x, a in zip(inputs, axes))) for i in range(3)]
    wanted = jax.tree.map(lambda *parts: jnp.stack(parts), *wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-2),
                 got, wanted)


SHARDED = """
import functools, sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from flash3.jax import dot_product_attention
dtype, close = (jnp.float32, 1e-4) if sys.argv[1] == "cpu" else (jnp.bfloat16, 3e-2)
devices = jax.devices()[:2]
mesh = jax.sharding.Mesh(np.array(devices), ("x",))
q, k, v = (jax.random.normal(jax.random.key(i), (2, 30, h, 16)).astype(dtype) for i, h in enumerate((4, 2, 2)))
sink = jnp.arange(4.0)
equal = lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=close, rtol=close)
call = lambda q, k, v, s: dot_product_attention(q, k, v, sink=s, is_causal=True)
over = lambda spec, sink: jax.shard_map(call, mesh=mesh, in_specs=(spec, spec, spec, sink), out_specs=spec)
loss = lambda f, *x: jnp.square(f(*x).astype(jnp.float32)).sum()
all_of = lambda f: jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1, 2, 3)))(q, k, v, sink)
jax.tree.map(equal, all_of(over(P("x"), P())), all_of(call))
out = call(q, k, v, sink)
equal(jax.jit(over(P(None, None, "x"), P("x")))(q, k, v, sink), out)
placed = jax.device_put((q, k, v), jax.NamedSharding(mesh, P("x")))
equal(jax.jit(lambda *x: call(*x, sink))(*placed), out)
print(len(devices), "devices, equal")
"""


def test_shard_map_over_two_devices(device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": device}
    done = subprocess.run([sys.executable, "-c", SHARDED, device], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "2 devices, equal\n", done.stdout + done.stderr


def test_what_is_refused():
    q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 9, 2, 16))
    two = jnp.array([3, 4], jnp.int32)
    for error, message, args, options in (
            (ValueError, r"bias.shape\[1\] = 3 but q.shape\[2\] = 4", (q, k, k, jnp.zeros((1, 3, 8, 9))), {}),
            (ValueError, "bias.ndim = 5 but it must be at most 4", (q, k, k, jnp.zeros((1, 1, 1, 8, 9))), {}),
            (ValueError, "implementation = 'cudnn'", (q, k, k), {"implementation": "cudnn"}),
            (ValueError, "q.shape.2. = 3 but k.shape.2. = 2", (q[:, :, :3], k, k), {}),
            (TypeError, "value.dtype = int32", (q, k, k.astype(jnp.int32)), {}),
            (TypeError, "k.dtype = float16 but q.dtype = float32", (q, k.astype(jnp.float16), k), {}),
            (ValueError, "query.ndim = 2", (q[0, 0], k, k), {}),
            (ValueError, "query_seq_lengths is int32.1. but it must be int32.2.", (q, k, k), {"query_seq_lengths": two[:1]}),
            (ValueError, "local_window_size = -1", (q, k, k), {"local_window_size": -1}),
            (ValueError, r"local_window_size = \(1, 2, 3\)", (q, k, k), {"local_window_size": (1, 2, 3)}),
            (ValueError, "local_window_size = 'wide'", (q, k, k), {"local_window_size": "wide"}),
            (TypeError, r"local_window_size\[1\] is a float", (q, k, k), {"local_window_size": (1, 2.5)}),
            (ValueError, "v.shape.1. = 8 but k.shape.1. = 9", (q, k, k[:, :8]), {"is_causal": True}),
            (TypeError, "scale is a list", (q, k, k), {"scale": [1]}),
            (ValueError, "compute = 'int8'", (q, k, k), {"compute": "int8"}),
            (ValueError, "q_scale", (q, k, k), {"q_scale": jnp.ones(1)}),
            (ValueError, "^scale = 0", (q, k, k), {"scale": 0.0}),
            (ValueError, "^scale = 1e-46 but it must be a number that float32 can hold", (q, k, k), {"scale": 1e-46}),
            (ValueError, "^softcap = 1e-46 but it must be a number that float32 can hold", (q, k, k), {"softcap": 1e-46}),
            (ValueError, "softcap = 1e-40 but it must be 0", (q, k, k), {"softcap": 1e-40})):
        with pytest.raises(error, match=message):
            dot_product_attention(*args, **options)


def test_what_only_the_run_can_tell_is_xlas_error():
    q = jax.device_put(jnp.ones((2, 8, 4, 16)), jax.devices("cpu")[0])  # a GPU clamps lengths
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT: flash3: seqused_k\[1\] = 9"):
        jax.block_until_ready(dot_product_attention(q, q, q, key_value_seq_lengths=jnp.array([3, 9], jnp.int32)))


def test_handlers_know_their_attributes():
    _jax.register()
    with jax.default_device(jax.devices("cpu")[0]):
        q = jnp.ones((1, 4, 2, 8))
        call = jax.ffi.ffi_call("flash3_forward", [jax.ShapeDtypeStruct(q.shape, q.dtype)])
        assert np.allclose(call(q, q, q, tensors="q k v out", softcap=np.float32(2))[0], 1)
        for attributes, message in (({"softcaps": np.float32(2), "chunk": np.int64(0)}, "1 of the attributes are no options"),
                                    ({"stream": np.int64(2)}, "1 of the attributes are no options")):
            with pytest.raises(Exception, match=f"INTERNAL: flash3: {message}"):
                jax.block_until_ready(call(q, q, q, tensors="q k v out", **attributes))
        for names, message in (("q k v output", "no tensor is named 'output'"), ("q k seq_k out", "no tensor is named 'seq_k'")):
            with pytest.raises(Exception, match=f"INTERNAL: flash3: {message}"):
                jax.block_until_ready(call(q, q, q, tensors=names))


def test_derivatives_that_there_are_not():
    q = jnp.ones((1, 4, 2, 8))
    first = jax.grad(lambda q: dot_product_attention(q, q, q).sum())
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: dot_product_attention(q, q, q), (q,), (q,))
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda q: first(q).sum())(q)


def test_without_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(_jax._c, "FOLDER", tmp_path)
    with pytest.raises(ImportError, match="libflash3_jax.so is not there: .* FLASH3_JAX=ON pip install"):
        _jax._load()
    monkeypatch.setattr(jax, "__version_info__", (0, 4, 30))
    with pytest.raises(ImportError, match="flash3.jax needs jax >= "):
        _jax._load()
    monkeypatch.setitem(sys.modules, "jax", None)
    spec = importlib.util.spec_from_file_location("flash3.another_jax", pathlib.Path(flash3.__file__).parent / "jax.py")
    with pytest.raises(ImportError, match="flash3.jax needs jax, which is not installed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_another_version_of_the_interface(monkeypatch):
    """What XLA does when the handlers were built with headers newer than itself."""
    def refuse(*_, **__):
        raise RuntimeError("API version (9.0) is incompatible with the framework's")
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    with pytest.raises(ImportError, match="does not take the handlers of .*API version .9.0. is incompatible"):
        _jax.register.__wrapped__()


def test_dropout_is_that_of_torch(place, device):
    q, k, v = (x.to(device) for x in make(place[0], (2, 40, 4, 16), (2, 50, 2, 16), (2, 50, 2, 16)))
    dout = torch.randn(2, 40, 4, 16, generator=torch.Generator().manual_seed(3)).to(q)
    options = {"dropout_p": 0.3, "seed": 2**64 - 9, "offset": 5}
    call = functools.partial(dot_product_attention, is_causal=True, **options)
    out, gradients = jax.vjp(jax.jit(call), *(to_jax(x.cpu()) for x in (q, k, v)))
    gradients = gradients(to_jax(dout.cpu()))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    wanted = flash3.attention(*inputs, causal=True, mask_alignment="top_left", **options)
    close = {"atol": 1e-5, "rtol": 1e-5} if device == "cpu" else {"atol": 2e-2, "rtol": 2e-2}
    for got, x in zip((out, *gradients), (wanted.detach(), *torch.autograd.grad(wanted, inputs, dout))):
        np.testing.assert_allclose(np.asarray(got), x.cpu().numpy(), **close)
    q, k, v = (to_jax(x.detach().cpu()) for x in (q, k, v))
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():  # a state has 64 bits
        state = jnp.array([-9, 5])
        of_state = jax.jit(lambda *x: dot_product_attention(*x, is_causal=True, dropout_p=0.3, dropout_state=state))(q, k, v)
    np.testing.assert_array_equal(np.asarray(of_state), np.asarray(out))
    with pytest.raises(ValueError, match="dropout_p = 0.3 but neither seed nor dropout_state is given"):
        dot_product_attention(q, k, v, dropout_p=0.3)
    with pytest.raises(ValueError, match="dropout_p = 1 but it must be from 0"):
        dot_product_attention(q, k, v, dropout_p=1.0, seed=1)
