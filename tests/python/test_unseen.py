# SPDX-License-Identifier: Apache-2.0
"""Keys that no query sees reach no result, not even as 0 * NaN inside a tile that also holds keys that are seen."""
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import flash3

# seq_q, seq_k, options: the first keys lie before the first query's window or chunk, in the middle of a tile.
HIDDEN = {
    "window": (70, 333, {"window": (40, -1)}),
    "causal_window": (200, 500, {"window": (100, 0)}),
    "one_query": (1, 301, {"window": (20, 0)}),
    "chunk": (33, 290, {"causal": True, "chunk": 200}),
    "chunk_window": (20, 290, {"window": (15, 3), "chunk": 200}),
    "softcap": (90, 410, {"window": (77, 0), "softcap": 20.0}),
    "wide": (300, 1100, {"window": (129, 64)}),
}
TENSORS = ("out", "lse", "dq", "dk", "dv")
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


def first_seen_key(seq_q, seq_k, options):
    """The first key that query 0 sees, which is the first of all."""
    at = seq_k - seq_q
    first = max(0, at - options["window"][0]) if "window" in options else 0
    return max(first, at // options["chunk"] * options["chunk"]) if "chunk" in options else first


def make(device, dtype, seq_q, seq_k, dim, dim_v):
    generator = torch.Generator().manual_seed(seq_q * 1000 + dim)
    shapes = ((2, seq_q, 4, dim), (2, seq_k, 2, dim), (2, seq_k, 2, dim_v), (2, seq_q, 4, dim_v))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def spoil(x, rows):
    x = x.clone()
    for i, value in enumerate(NOT_FINITE):
        x[:, :rows, i % x.shape[2], i::3] = value
    return x


def assert_same(device, tensors, got, wanted):
    """The same bits on a GPU; the CPU adds up what is not finite, and what lies beside it, in another order."""
    for name, a, b in zip(tensors, got, wanted):
        assert bool(torch.isfinite(a).all()), name
        same = torch.equal(a, b) if device == "cuda" else torch.allclose(a.float(), b.float(), atol=2e-2, rtol=2e-2)
        assert same, name


def gradients(q, k, v, dout, options):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = flash3.attention(*leaves, deterministic=True, return_lse=True, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_hidden_keys_reach_nobody(device, name, dims, ragged):
    if device == "cpu" and dims not in DIMS[::3]:
        pytest.skip("the CPU has no tile of its own for each head dim")
    seq_q, seq_k, options = HIDDEN[name]
    hidden = first_seen_key(seq_q, seq_k, options)
    assert hidden > 0
    q, k, v, dout = make(device, torch.bfloat16, seq_q, seq_k, *dims)
    if ragged:
        options = {**options, "seqused_k": torch.full((2,), seq_k, dtype=torch.int32, device=device)}
    clean = [x.clone() for x in (k, v)]
    for x in clean:
        x[:, :hidden] = 0
    wanted = gradients(q, *clean, dout, options)
    got = gradients(q, spoil(k, hidden), spoil(v, hidden), dout, options)
    assert_same(device, TENSORS, got, wanted)
    for tensor in got[3:]:
        assert not bool(tensor[:, :hidden].any())


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_fp8_keys_reach_nobody(device, name, dim):
    seq_q, seq_k, options = HIDDEN[name]
    hidden = first_seen_key(seq_q, seq_k, options)
    q, k, v, _ = make(device, torch.float32, seq_q, seq_k, dim, dim)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    for x in (k, v):
        x[:, :hidden] = 0
    wanted = flash3.attention(q, k, v, return_lse=True, **options)
    for x in (k, v):
        x[:, :hidden] = float("nan")
    got = flash3.attention(q, k, v, return_lse=True, **options)
    assert_same(device, TENSORS, got, wanted)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_unused_tokens_reach_nobody(device, dim):
    """After seqused, also of short sequences that share tiles, and in gradients."""
    for seq in (48, 300):
        q, k, v, dout = make(device, torch.bfloat16, seq, seq, dim, dim)
        used = torch.tensor([seq - 19, seq // 3], dtype=torch.int32, device=device)
        spoilt = [x.clone() for x in (q, k, v, dout)]
        for x in spoilt:
            for b in range(2):
                x[b, used[b]:] = float("nan")
        for x in (q, k, v, dout):
            for b in range(2):
                x[b, used[b]:] = 0
        options = {"causal": True, "seqused_q": used, "seqused_k": used}
        wanted, got = (gradients(*each, options) for each in ((q, k, v, dout), spoilt))
        for b in range(2):
            n = int(used[b])
            cut = [[x[b, :, :n] if name == "lse" else x[b, :n] for name, x in zip(TENSORS, each)] for each in (got, wanted)]
            assert_same(device, TENSORS, *cut)


# Rows that belong to no token are 0, and their lse -inf, whichever call allocates them: a NaN in one spreads through the next layer's
# weight gradients.

HERE = pathlib.Path(__file__).parent


def check(device, expected, **environment):
    ran = subprocess.run([sys.executable, HERE / "rows_of_no_token.py", device], capture_output=True, text=True,
                         env={**os.environ, **environment})
    assert ran.returncode == 0, ran.stderr
    verdicts = [line.split() for line in ran.stdout.splitlines()]
    assert {name for name, verdict in verdicts if verdict != "right"} == set()
    asked = {name for name, _ in verdicts}
    for call in expected:
        assert {f"{call}.out", f"{call}.lse"} <= asked


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MALLOC_PERTURB_ is glibc's")
def test_no_result_shows_what_memory_held():
    check("cpu", ("attention", "kv_cache", "kv_cache.paged", "dropin", "dropin.fwd", "numpy", "arrays.numpy", "arrays.torch"),
          MALLOC_PERTURB_="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_nor_on_a_gpu():
    check("cuda", ("attention", "kv_cache", "kv_cache.paged", "dropin", "dropin.fwd"))
