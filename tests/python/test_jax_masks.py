# SPDX-License-Identifier: Apache-2.0
"""mask and segment ids of flash3.jax, against the definition in float64 and jax's own function, and under jax's transforms."""
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from test_jax import check, make, place, to_jax  # noqa: F401  a fixture among them; skips where jax or the library is not there

import jax
import jax.numpy as jnp

from flash3.jax import dot_product_attention

T, S = 139, 277  # more than a block of 128, and no other size here: what holds T x S or more is as large as the scores
SHAPES = [(2, T, 4, 16), (2, S, 2, 16), (2, S, 2, 16)]


def drawn(*shape, share=0.5):
    """[…] bool: random, where a query of the last two dimensions sees nothing."""
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share
    if len(shape) > 1 and shape[-1] > 1 and shape[-2] > 5:
        seen[..., 5, :] = False
    return seen


@pytest.mark.parametrize("shape", [(2, 4, T, S), (1, 1, T, S), (2, 1, T, S), (4, T, S), (T, S), (2, 1, 1, S), (S,), (2, 4, T, 1),
                                   (1, 1, 1, 1), (2, 1, 1, 1)])
def test_any_shape_that_broadcasts(place, shape):
    mask = drawn(*shape)
    options = {} if shape != (1, 1, T, S) else {"is_causal": True, "softcap": 2.0, "scale": 0.3}
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0]) if shape == (2, 1, T, S) else None
    for dtype in place if shape == (2, 4, T, S) else place[-1:]:
        check(dtype, SHAPES, {**options, "mask": jnp.asarray(mask.numpy())}, {**options, "mask": mask}, sink=sink)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (9, 30)}, {"is_causal": True, "window": (60, 60)}])
def test_with_a_band(place, options):
    mask = drawn(2, 1, T, S, share=0.9)
    given = {"local_window_size" if name == "window" else name: value for name, value in options.items()}
    check(place[0], SHAPES, {**given, "mask": mask.numpy()}, {**options, "mask": mask})


def like_jax(call, own, q, k, v, close):
    """Both functions' results and gradients are the same."""
    def of(function):
        def loss(q, k, v):
            out = function(q, k, v)
            return jnp.square(out.astype(jnp.float32)).sum(), out
        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=close, rtol=close),
                 of(call), of(own))


@pytest.mark.parametrize("shape", [(2, 4, 40, 50), (1, 1, 40, 50), (2, 1, 1, 50), (4, 40, 50)])
def test_is_jaxs_own(place, shape):
    mask = jnp.asarray(drawn(*shape, share=0.7).numpy()).at[..., 0].set(True)  # jax gives the mean where nothing is seen
    q, k, v = map(to_jax, make(place[0], (2, 40, 4, 16), (2, 50, 2, 16), (2, 50, 2, 16)))
    close = 1e-5 if place[0] == "float32" else 3e-2
    for band in ({}, {"is_causal": True}, {"local_window_size": (50, 3)}):
        options = {"mask": mask, **band}
        like_jax(lambda *x: dot_product_attention(*x, **options), lambda *x: jax.nn.dot_product_attention(*x, **options), q, k, v, close)
    if len(shape) == 3:
        like_jax(lambda *x: dot_product_attention(*x, None, mask), lambda *x: jax.nn.dot_product_attention(*x, None, mask),
                 q[0], k[0], v[0], close)


def test_rows_that_see_nothing(place):
    q, k, v = map(to_jax, make(place[0], *SHAPES))
    mask = jnp.ones((2, 1, T, S), bool).at[0, 0, 7].set(False).at[1].set(False)

    def call(q, k, v):
        return dot_product_attention(q, k, v, mask=mask, return_residual=True)
    (out, lse), pull = jax.vjp(call, q, k, v)
    dq, dk, dv = pull((jnp.ones_like(out), jnp.where(jnp.isfinite(lse), 1, 0).astype(lse.dtype)))
    hidden = ~np.asarray(mask[:, 0, :, 0])
    assert not np.any(out[hidden]) and np.all(lse[hidden] == -np.inf) and np.all(np.isfinite(lse[~hidden]))
    assert not np.any(dq[hidden]) and not np.any(dk[1]) and not np.any(dv[1]) and np.all(np.any(dk[0], axis=-1))


def test_without_queries_or_keys(place):
    q, none = jnp.ones((2, 3, 4, 16), place[0]), jnp.ones((2, 0, 4, 16), place[0])
    ids = jnp.zeros((2, 3), jnp.int32)
    for k, options in ((none, {"mask": jnp.ones((2, 4, 3, 0), bool)}), (none, {"mask": jnp.ones((3, 1), bool)}),
                       (none, {"q_segment_ids": ids, "kv_segment_ids": ids[:, :0]})):
        assert not jnp.any(dot_product_attention(q, k, k, **options))
        assert not jnp.any(jax.grad(lambda q: dot_product_attention(q, k, k, **options).sum())(q))
    lengths = jnp.zeros(2, jnp.int32)
    for options in ({"q_segment_ids": ids[:, :0]}, {"q_segment_ids": ids[:, :0], "kv_segment_ids": ids[:, :0]}):
        assert dot_product_attention(none, none, none, key_value_seq_lengths=lengths, **options).shape == none.shape
    for options in ({"mask": jnp.ones((2, 4, 0, 3), bool)}, {"mask": jnp.ones((1, 3), bool)},
                    {"q_segment_ids": ids[:, :0], "kv_segment_ids": ids}):
        assert dot_product_attention(none, q, q, **options).shape == none.shape


# ---- segments ----

IDS = np.array([[4] * 100 + [9] * 60 + [1] * 117, [2] * 1 + [-7] * 200 + [3] * 76], np.int32)


def same(a, b):
    return torch.from_numpy(a[:, None, :, None] == b[:, None, None, :])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (20, 5)}])
def test_segments_of_one_array(place, options):
    given = {"local_window_size" if name == "window" else name: value for name, value in options.items()}
    shapes = [(2, S, 4, 16), (2, S, 2, 16), (2, S, 2, 16)]
    ids = jnp.asarray(IDS)
    for both in ({"kv_segment_ids": ids}, {}):
        check(place[0], shapes, {**given, "q_segment_ids": ids, **both}, {**options, "mask": same(IDS, IDS)})
    check(place[0], shapes, {**given, "q_segment_ids": IDS[0]}, {**options, "mask": same(IDS[:1], IDS[:1])})


def test_a_segment_of_one_array_is_a_run(place):
    """That an id comes again says nothing, as in flash3.masks.documents."""
    q, k, v = map(to_jax, make(place[0], (1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16)))
    again = np.array([1, 1, 1, 2, 2, 1, 1, 1, 1], np.int32)
    runs = np.array([1, 1, 1, 2, 2, 3, 3, 3, 3], np.int32)
    assert np.array_equal(*(dot_product_attention(q, k, v, q_segment_ids=ids) for ids in (again, runs)))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_segments_of_two_arrays(place, options):
    """In another order than the keys', some of no key, and some of keys that no query has."""
    of_queries = np.array([[9] * 30 + [4] * 40 + [9] * 9 + [77] * 60, [3] * 10 + [2] * 3 + [-7] * 126], np.int32)
    for q_ids, kv_ids in ((of_queries, IDS), (of_queries[:1], IDS), (of_queries, IDS[:1]), (of_queries[0], IDS[1])):
        wanted = same(np.atleast_2d(q_ids), np.atleast_2d(kv_ids))
        check(place[0], SHAPES, {**options, "q_segment_ids": q_ids, "kv_segment_ids": jnp.asarray(kv_ids)}, {**options, "mask": wanted})


def test_both_ways_agree(place):
    q, k, v = map(to_jax, make(place[0], (2, S, 4, 16), (2, S, 2, 16), (2, S, 2, 16)))
    one, two = jnp.asarray(IDS), jnp.asarray(IDS.copy())
    call = jax.jit(lambda *ids: dot_product_attention(q, k, v, q_segment_ids=ids[0], kv_segment_ids=ids[-1]))
    assert np.array_equal(call(one), call(one, two))


def test_keys_of_an_id_that_do_not_lie_together_are_not_seen(place):
    q, k, v = map(to_jax, make(place[0], (1, 4, 2, 16), (1, 6, 2, 16), (1, 6, 2, 16)))
    q_ids, kv_ids = np.array([1, 2, 3, 1], np.int32), np.array([1, 2, 2, 1, 3, 3], np.int32)
    out, lse = dot_product_attention(q, k, v, q_segment_ids=q_ids, kv_segment_ids=kv_ids, return_residual=True)
    wanted = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(same(q_ids[None], kv_ids[None]).numpy()))
    np.testing.assert_allclose(out[:, 1:3], wanted[:, 1:3], atol=1e-5 if place[0] == "float32" else 1e-2)
    assert not np.any(out[:, ::3]) and np.all(lse[:, ::3] == -np.inf)


# ---- transforms ----

def sizes_in(jaxpr):
    """(elements, primitive) of all that a jaxpr makes."""
    for equation in jaxpr.eqns:
        for x in equation.outvars:
            yield x.aval.size, equation.primitive.name
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)  # of a closed one
            if hasattr(inner, "eqns"):
                yield from sizes_in(inner)


@pytest.mark.parametrize("options", [{"mask": (2, 1, T, S)}, {"mask": (1, 4, T, S)}, {"mask": (T, S)}, {"mask": (2, 4, T, 1)},
                                     {"q_segment_ids": (2, T), "kv_segment_ids": (2, S)}], ids=str)
def test_nothing_is_as_large_as_the_scores(options):
    q, k = jnp.ones(SHAPES[0]), jnp.ones(SHAPES[1])
    given = {name: jnp.ones(shape, bool if name == "mask" else np.int32) for name, shape in options.items()}

    def loss(q, k, given):
        return dot_product_attention(q, k, k, **given).sum()
    for call in (jax.grad(loss, (0, 1)), lambda *x: jax.vmap(jax.grad(loss, (0, 1)), (0, 0, None))(*(y[None] for y in x[:2]), x[2])):
        made = [(size, name) for size, name in sizes_in(jax.make_jaxpr(call)(q, k, given).jaxpr) if name not in ("pjit", "jit", "reshape")]
        assert max(made)[0] < T * S, max(made)


# Shapes and mapped axes of q and the mask.
VMAPS = [((3, 2, T, 4, 16), 0, (2, 1, T, S), None), ((3, 2, T, 4, 16), 0, (1, 4, T, S), None), ((3, 2, T, 4, 16), 0, (3, 2, 1, T, S), 0),
         ((2, T, 4, 16), None, (3, 2, 1, T, S), 0), ((2, T, 4, 16), None, (1, 1, T, 3, S), 3), ((1, T, 4, 16), None, (1, 3, 4, T, S), 1),
         ((2, 3, T, 4, 16), 1, (2, 1, T, 1), None), ((T, 3, 4, 16), 1, (3, 1, T, S), 0)]


@pytest.mark.parametrize("q_shape,q_axis,mask_shape,mask_axis", VMAPS)
def test_vmap_of_masks(place, q_shape, q_axis, mask_shape, mask_axis):
    of_keys = (*(S if size == T else size for size in q_shape[:-2]), 2, 16)
    inputs = list(map(to_jax, make(place[0], q_shape, of_keys, of_keys)))
    mask = jnp.asarray(drawn(*mask_shape).numpy())

    def loss(q, k, v, mask):
        return jnp.square(dot_product_attention(q, k, v, mask=mask).astype(jnp.float32)).sum()
    axes = (q_axis, q_axis, q_axis, mask_axis)
    both = jax.value_and_grad(loss, (0, 1, 2))
    got = jax.jit(jax.vmap(both, axes))(*inputs, mask)
    part = lambda x, axis, i: x if axis is None else jnp.take(x, i, axis)
    wanted = [both(*(part(x, axis, i) for x, axis in zip((*inputs, mask), axes))) for i in range(3)]
    wanted = jax.tree.map(lambda *parts: jnp.stack(parts), *wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-2),
                 got, wanted)


def test_what_vmap_makes_one_call_of():
    """A mask for all, or one for each sequence, is not copied; of one for some sequences there are calls one after the other."""
    q, k = jnp.ones((3, 2, T, 4, 16)), jnp.ones((3, 2, S, 4, 16))

    def is_loop(mask, axis):
        call = jax.vmap(lambda q, k, mask: dot_product_attention(q, k, k, mask=mask), (0, 0, axis))
        text = str(jax.make_jaxpr(call)(q, k, mask))
        assert text.count("ffi_call[") == 1
        return "scan[" in text
    assert not is_loop(jnp.ones((1, 4, T, S), bool), None) and not is_loop(jnp.ones((3, 2, 1, T, S), bool), 0)
    assert not is_loop(jnp.ones((2, 1, T, 1), bool), None) and not is_loop(jnp.ones((3, 1, 1, T, 1), bool), 0)
    assert is_loop(jnp.ones((2, 1, T, S), bool), None) and is_loop(jnp.ones((3, 1, 1, T, S), bool), 0)


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None), (None, None)])
@pytest.mark.parametrize("ids", [1, 2])
def test_vmap_of_segments(place, ids, axes):
    q, k, v = (x.reshape(3, 2, *x.shape[1:]) for x in map(to_jax, make(place[0], (6, S, 4, 16), (6, S, 2, 16), (6, S, 2, 16))))
    numbers = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 5, (3, 2, S)), -1), jnp.int32)
    given = [numbers, numbers + 0][:ids]
    axes = axes[:ids]

    def call(q, k, v, *given):
        return dot_product_attention(q, k, v, q_segment_ids=given[0], kv_segment_ids=given[1] if ids == 2 else None, is_causal=True)
    given = [x if axis == 0 else x[1] for x, axis in zip(given, axes)]
    got = jax.jit(jax.vmap(call, (0, 0, 0, *axes)))(q, k, v, *given)
    for i in range(3):
        wanted = call(q[i], k[i], v[i], *(x if axis is None else x[i] for x, axis in zip(given, axes)))
        np.testing.assert_allclose(got[i], wanted, atol=1e-5 if place[0] == "float32" else 1e-2)


def test_a_mask_that_changes_inside_scan_and_checkpoint(place):
    """jit knows no value of the mask: one program runs with others."""
    q, k, v = map(to_jax, make(place[0], *SHAPES))
    masks = jnp.asarray(drawn(3, 2, 1, T, S).numpy())

    def step(x, mask):
        return x + dot_product_attention(x, k, v, mask=mask), None
    scanned = jax.jit(jax.grad(lambda q: jax.lax.scan(jax.checkpoint(step), q, masks)[0].astype(jnp.float32).sum()))(q)
    wanted = jax.grad(lambda q: step(step(step(q, masks[0])[0], masks[1])[0], masks[2])[0].astype(jnp.float32).sum())(q)
    np.testing.assert_allclose(np.asarray(scanned, np.float32), np.asarray(wanted, np.float32), rtol=1e-2, atol=1e-2)


SHARDED = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from flash3.jax import dot_product_attention
dtype, close = (jnp.float32, 1e-4) if sys.argv[1] == "cpu" else (jnp.bfloat16, 3e-2)
mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
q, k, v = (jax.random.normal(jax.random.key(i), (2, 150, h, 16)).astype(dtype) for i, h in enumerate((4, 2, 2)))
mask = jax.random.bernoulli(jax.random.key(9), 0.5, (2, 4, 150, 150))
ids = jnp.asarray(np.repeat([[1, 2, 3], [5, 5, 4]], 50, 1), jnp.int32)
masked = lambda q, k, v, mask: dot_product_attention(q, k, v, mask=mask)
packed = lambda q, k, v, ids: dot_product_attention(q, k, v, q_segment_ids=ids)
def compare(call, spec, more, of_more):
    over = jax.shard_map(call, mesh=mesh, in_specs=(spec, spec, spec, of_more), out_specs=spec)
    loss = lambda f: jax.jit(jax.value_and_grad(lambda *x: jnp.square(f(*x, more).astype(jnp.float32)).sum(), (0, 1, 2)))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=close, rtol=close),
                 loss(over), loss(call))
compare(masked, P("x"), mask, P("x"))
compare(masked, P("x"), mask[:1], P())
compare(masked, P(None, None, "x"), mask, P(None, "x"))
compare(packed, P("x"), ids, P("x"))
compare(packed, P(None, None, "x"), ids, P())
print("equal")
"""


def test_shard_map_of_masks(device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": device}
    done = subprocess.run([sys.executable, "-c", SHARDED, device], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "equal\n", done.stdout + done.stderr


# ---- with lengths ----

LENGTHS = {"query_seq_lengths": [T, 77], "key_value_seq_lengths": [130, S]}


def given_lengths(*names):
    """The lengths as jax's function takes them, and as top_left() does."""
    return ({name: jnp.array(LENGTHS[name], jnp.int32) for name in names},
            {"lengths_q" if name[0] == "q" else "lengths_k": LENGTHS[name] for name in names})


@pytest.mark.parametrize("names", [("query_seq_lengths",), ("key_value_seq_lengths",), tuple(LENGTHS)], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, T, S), (1, 1, T, S), (2, 1, 1, S), (2, 4, T, 1)], ids=str)
def test_masks_with_lengths(place, names, shape):
    mask = drawn(*shape)
    lengths, wanted = given_lengths(*names)
    check(place[0], SHAPES, {"mask": mask.numpy(), **lengths}, {"mask": mask, **wanted})
    check(place[-1], SHAPES, {"mask": mask.numpy(), "local_window_size": (60, 9), **lengths}, {"mask": mask, "window": (60, 9), **wanted})


@pytest.mark.parametrize("lengths", [([S, 190], None), (None, [S, 190]), ([S, 190], [120, 201]), ([0, 201], [120, 0]), "shared"], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_segments_of_one_array_with_lengths(place, lengths, options):
    """Query i is of segment q_segment_ids[i], whatever the lengths; and one array of both lengths counts as two equal ones."""
    of_q, of_k = ([S, 190],) * 2 if lengths == "shared" else lengths
    array = lambda x: None if x is None else jnp.array(x, jnp.int32)
    arrays = [array(of_q)] * 2 if lengths == "shared" else [array(of_q), array(of_k)]
    shapes = [(2, S, 4, 16), (2, S, 2, 16), (2, S, 2, 16)]
    for ids in (IDS, IDS[:1]):
        check(place[0], shapes, {**options, "q_segment_ids": ids, **dict(zip(LENGTHS, arrays))},
              {**options, "mask": same(ids, ids), "lengths_q": of_q, "lengths_k": of_k})


@pytest.mark.parametrize("ids", [IDS, IDS[:1]], ids=len)
def test_padding_has_no_segment(place, ids):
    """Ids after a length are not read, though they are those of keys that do not lie beside them."""
    of_queries = np.array([[9] * 30 + [4] * 40 + [9] * 9 + [77] * 60, [3] * 10 + [2] * 3 + [-7] * 126], np.int32)
    lengths, wanted = given_lengths("key_value_seq_lengths")
    padded = np.broadcast_to(ids, IDS.shape).copy()
    padded[0, 130:] = np.resize([4, 9, 77], S - 130)
    check(place[0], SHAPES, {"q_segment_ids": of_queries, "kv_segment_ids": padded, **lengths}, {"mask": same(of_queries, padded), **wanted})


def test_vmap_of_masks_with_lengths(place):
    q, k, v = (x.reshape(3, 2, *x.shape[1:]) for x in map(to_jax, make(place[0], (6, T, 4, 16), (6, S, 2, 16), (6, S, 2, 16))))
    lengths = jnp.array([[S, 3], [130, 0], [1, 200]], jnp.int32)
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 5, (2, 2, T)), -1), jnp.int32)
    mask = jnp.asarray(drawn(T, S).numpy())

    def loss(q, k, v, lengths, given):
        return jnp.square(dot_product_attention(q, k, v, key_value_seq_lengths=lengths, **given).astype(jnp.float32)).sum()
    for given in ({"mask": mask}, {"mask": mask[None, :, :1]}, {"q_segment_ids": ids[0], "kv_segment_ids": jnp.pad(ids[1], ((0, 0), (0, S - T)))}):
        call = jax.value_and_grad(lambda *x: loss(*x, given), (0, 1, 2))
        got = jax.jit(jax.vmap(call))(q, k, v, lengths)
        wanted = jax.tree.map(lambda *parts: jnp.stack(parts), *(call(q[i], k[i], v[i], lengths[i]) for i in range(3)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-2),
                     got, wanted)


# ---- with other options ----

def test_fp8_has_masks_on_a_cpu():
    import flash3
    q, k, v = make("float32", (2, 40, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64))
    made = flash3.quantize(q, k, v)
    mask = drawn(40, 40)
    wanted = flash3.attention(**made._asdict(), mask=flash3.masks.dense(mask))
    names = ("q", "k", "v", "q_scale", "k_scale", "v_scale")
    with jax.default_device(jax.devices("cpu")[0]):
        tensors = [to_jax(getattr(made, name)) for name in names]
        got = dot_product_attention(*tensors[:3], mask=mask.numpy(), **dict(zip(names[3:], tensors[3:])))
    assert np.array_equal(np.asarray(got, np.float32), wanted.float().numpy())


def test_what_is_refused_of_masks():
    q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 9, 2, 16))
    mask, lengths = jnp.ones((1, 1, 8, 9), bool), jnp.array([3, 4], jnp.int32)
    q_ids, kv_ids = jnp.ones((2, 8), jnp.int32), jnp.ones((2, 9), jnp.int32)
    both = {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids}
    for error, message, options in (
            (TypeError, "^mask.dtype = float32 but it must be bool", {"mask": mask.astype(jnp.float32)}),
            (TypeError, "^mask.dtype = int32 but it must be bool", {"mask": mask.astype(jnp.int32)}),
            (ValueError, "^mask.ndim = 5 but it must be at most 4", {"mask": mask[None]}),
            (ValueError, r"^mask.shape\[-1\] = 8 but seq_k = 9; it must be 1, for all, or seq_k", {"mask": mask[..., 1:]}),
            (ValueError, r"^mask.shape\[-2\] = 7 but seq_q = 8", {"mask": mask[..., 1:, :]}),
            (ValueError, r"^mask.shape\[-3\] = 2 but heads_q = 4", {"mask": jnp.ones((2, 8, 9), bool)}),
            (ValueError, r"^mask.shape\[-4\] = 3 but batch = 2", {"mask": jnp.ones((3, 1, 8, 9), bool)}),
            (ValueError, r"^key_value_seq_lengths is int32\[1\] but it must be int32\[2\]", {"mask": mask, "key_value_seq_lengths": lengths[1:]}),
            (NotImplementedError, "^mask is given and q_segment_ids is given; a call has one mask", {"mask": mask, **both}),
            (NotImplementedError, "^mask is given and compute = 'fp8' is given", {"mask": mask, "compute": "fp8"}),
            (NotImplementedError, "^mask is given and compute = 'fp8' is given", {**both, "compute": "fp8"}),
            (ValueError, "^kv_segment_ids is given but q_segment_ids is None; they belong together", {"kv_segment_ids": kv_ids}),
            (ValueError, "^kv_segment_ids is None, which stands for q_segment_ids, but seq_q = 8 and seq_k = 9", {"q_segment_ids": q_ids}),
            (ValueError, "^kv_segment_ids is q_segment_ids but seq_q = 8 and seq_k = 9", {"q_segment_ids": q_ids, "kv_segment_ids": q_ids}),
            (TypeError, "^q_segment_ids.dtype = float32 but it must be int32", {**both, "q_segment_ids": q_ids.astype(jnp.float32)}),
            (TypeError, "^kv_segment_ids.dtype = int8 but it must be int32", {**both, "kv_segment_ids": kv_ids.astype(jnp.int8)}),
            (ValueError, r"^q_segment_ids.shape\[-1\] = 7 but seq_q = 8; they must be the same", {**both, "q_segment_ids": q_ids[:, 1:]}),
            (ValueError, r"^kv_segment_ids.shape\[-2\] = 3 but batch = 2", {**both, "kv_segment_ids": jnp.ones((3, 9), jnp.int32)}),
            (ValueError, r"^kv_segment_ids.ndim = 3 but it must be 2, \[batch, seq_k\], or 1", {**both, "kv_segment_ids": kv_ids[None]})):
        with pytest.raises(error, match=message):
            dot_product_attention(q, k, k, **options)
        with pytest.raises(error, match=message):
            jax.eval_shape(lambda q, k: dot_product_attention(q, k, k, **options), q, k)


def test_a_mask_that_is_too_large_is_refused_when_it_is_traced():
    q = jax.ShapeDtypeStruct((1, 2**30, 1, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, 2**30), jnp.int32)
    with pytest.raises(ValueError, match="max_blocks = 0 but the mask can have more than 2147483647 blocks"):
        jax.eval_shape(lambda q, ids: dot_product_attention(q, q, q, q_segment_ids=ids), q, ids)
