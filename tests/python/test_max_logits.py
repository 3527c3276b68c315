# SPDX-License-Identifier: Apache-2.0
"""max_logits: the largest scaled and capped score that each row, or each head, saw."""
import math

import numpy as np
import pytest
import torch

import flash3

DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16, torch.float16)}


def logits_of(q, k, *, scale=None, softcap=0.0, causal=False, window=(None, None)):
    """[batch, heads_q, seq_q, seq_k] in float64, -inf where a query does not see a key."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    seq_q, seq_k = q.shape[1], k.shape[1]
    shift = torch.arange(seq_k, device=q.device)[None] - torch.arange(seq_q, device=q.device)[:, None] - (seq_k - seq_q)
    seen = torch.ones_like(shift, dtype=torch.bool)
    left, right = window
    if causal:
        seen &= shift <= 0
    if left is not None:
        seen &= shift >= -left
    if right is not None:
        seen &= shift <= right
    return s.masked_fill(~seen, -torch.inf)


def bound(q, k):
    """A bound on the error of a score in float32: the sums of products, in any order, and the tensor cores' truncation."""
    return 2**-22 * q.shape[-1] * (q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()).item() / math.sqrt(q.shape[-1]) + 1e-6


def check(got, wanted, tolerance):
    assert got.shape == wanted.shape
    assert torch.equal(got == -torch.inf, wanted == -torch.inf)
    seen = wanted != -torch.inf
    assert not torch.isnan(got).any()
    assert (got.double() - wanted)[seen].abs().max().item() <= tolerance if seen.any() else True


def poisoned(*shape, device):
    return torch.full(shape, torch.nan, device=device)


def make(device, dtype, batch, seq_q, seq_k, heads_q, heads_k, dim, dim_v=None):
    tensors = [torch.randn(batch, s, h, d, device=device) for s, h, d in
               ((seq_q, heads_q, dim), (seq_k, heads_k, dim), (seq_k, heads_k, dim_v or dim))]
    return [(2 * x).to(dtype) for x in tensors]


OPTIONS = [{}, {"causal": True}, {"window": (40, 3)}, {"softcap": 3.0, "causal": True}, {"softmax_scale": 0.7}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 100, 130, 4, 2, 64), (1, 257, 257, 3, 3, 128), (2, 5, 700, 8, 1, 128), (1, 64, 33, 2, 2, 40),
                                   (1, 130, 1000, 2, 1, 256)], ids=str)
def test_dense(device, sizes, options):
    for dtype in DTYPES[device]:
        q, k, v = make(device, dtype, *sizes)
        batch, seq_q, _, heads = sizes[:4]
        rows, heads_of = poisoned(batch, heads, seq_q, device=device), poisoned(heads, device=device)
        of_scores = {{"softmax_scale": "scale"}.get(name, name): x for name, x in options.items()}
        wanted = logits_of(q, k, **of_scores).amax(-1)
        tolerance = bound(q, k) * options.get("softmax_scale", 1) * math.sqrt(sizes[-1] if "softmax_scale" in options else 1)
        out, lse = flash3.attention(q, k, v, max_logits=rows, return_lse=True, **options)
        check(rows, wanted, tolerance)
        plain, plain_lse = flash3.attention(q, k, v, return_lse=True, **options)
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
        again = flash3.attention(q, k, v, max_logits=heads_of, **options)
        assert torch.equal(again, out)
        check(heads_of, wanted.amax((0, 2)), tolerance)
        assert torch.equal(heads_of, rows.amax((0, 2)))


@pytest.mark.parametrize("lengths", [[(70, 90), (1, 5), (0, 4), (200, 33), (3, 0)], [(9, 300), (1, 700)]], ids=str)
def test_ragged(device, lengths):
    dtype, heads, heads_k, dim = torch.bfloat16, 4, 2, 64
    total_q, total_k = (sum(pair[i] for pair in lengths) + 7 for i in range(2))
    q, k, v = (x[0] for x in make(device, dtype, 1, total_q, total_k, heads, heads_k, dim))
    k, v = (torch.randn(total_k, heads_k, dim, device=device).to(dtype) for _ in range(2))
    starts = [torch.tensor([3, *(3 + torch.tensor([pair[i] for pair in lengths]).cumsum(0)).tolist()], dtype=torch.int32, device=device)
              for i in range(2)]
    rows, heads_of = poisoned(heads, total_q, device=device), poisoned(heads, device=device)
    ragged = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "causal": True}
    flash3.attention(q, k, v, max_logits=rows, **ragged)
    flash3.attention(q, k, v, max_logits=heads_of, **ragged)
    wanted = torch.full((heads, total_q), -torch.inf, dtype=torch.float64, device=device)
    for b, (n, m) in enumerate(lengths):
        i, j = starts[0][b], starts[1][b]
        if n and m:
            wanted[:, i:i + n] = logits_of(q[None, i:i + n], k[None, j:j + m], causal=True)[0].amax(-1)
    check(rows, wanted, bound(q, k))  # rows of no token are filled
    check(heads_of, wanted.amax(-1), bound(q, k))


@pytest.mark.parametrize("seq_q", [1, 4, 40])
@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("dim", [64, 128])
def test_cache(device, seq_q, softcap, dim):
    dtype, batch, heads, heads_k = torch.bfloat16, 3, 8, 2
    q, k, v = make(device, dtype, batch, seq_q, 5000, heads, heads_k, dim)
    used = torch.tensor([5000, 77, 0], dtype=torch.int32, device=device)
    options = {"seqused_k": used, "causal": True, "softcap": softcap}
    rows, heads_of = poisoned(batch, heads, seq_q, device=device), poisoned(heads, device=device)
    out = flash3.attention_with_kv_cache(q, k, v, max_logits=rows, **options)
    assert torch.equal(out, flash3.attention_with_kv_cache(q, k, v, **options))
    flash3.attention_with_kv_cache(q, k, v, max_logits=heads_of, **options)
    wanted = torch.full((batch, heads, seq_q), -torch.inf, dtype=torch.float64, device=device)
    for b, n in enumerate(used.tolist()):
        if n:
            wanted[b] = logits_of(q[b:b + 1], k[b:b + 1, :n], causal=True, softcap=softcap)[0].amax(-1)
    check(rows, wanted, bound(q, k))
    check(heads_of, wanted.amax((0, 2)), bound(q, k))


@pytest.mark.parametrize("seq_q, heads", [(1, 8), (1, 16), (1, 32), (2, 32), (8, 64)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_late_scores_within_the_slack(device, dim, seq_q, heads):
    """A lazy maximum stays at the first keys' scores, and later ones are larger, by less than what raises it. The largest of a row lies in any
    part of any block, whose keys end anywhere, and in any warp's."""
    g = torch.Generator().manual_seed(dim + heads + seq_q)
    batch, seq_k, scale = 2, 3333, 1 / math.sqrt(dim)
    q, k = torch.zeros(batch, seq_q, heads, dim), torch.zeros(batch, seq_k, 1, dim)
    v = torch.randn(batch, seq_k, 1, dim, generator=g)
    q[..., 0], k[..., 0] = math.sqrt(dim), 1 + torch.rand(batch, seq_k, 1, generator=g)
    q[..., 1:9] = torch.nn.functional.one_hot(torch.randint(0, 8, (batch, seq_q, heads), generator=g), 8) * math.sqrt(dim)
    for b in range(batch):
        k[b, torch.randperm(seq_k, generator=g)[:8], 0, 1:9] = 2 * torch.eye(8)  # rows differ in where their largest is
    q, k, v = (x.to(device=device, dtype=torch.bfloat16) for x in (q, k, v))
    rows = poisoned(batch, heads, seq_q, device=device)
    out, lse = flash3.attention_with_kv_cache(q, k, v, softmax_scale=scale, max_logits=rows, return_lse=True)
    check(rows, logits_of(q, k, scale=scale).amax(-1), bound(q, k))
    plain, plain_lse = flash3.attention_with_kv_cache(q, k, v, softmax_scale=scale, return_lse=True)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)


@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("batch, rows, seq_q", [(3, 70, 2), (1, 3000, 1), (2, 1500, 4), (40, 900, 1)])
def test_latent(device, batch, rows, seq_q, softcap):
    """Whole items, and such that blocks share."""
    heads, rope, latent = 16, 64, 512
    q, qv, cache = (torch.randn(batch, *shape, device=device).bfloat16() for shape in
                    ((seq_q, heads, rope), (seq_q, heads, latent), (rows, 1, rope + latent)))
    call = q, cache[..., latent:], cache[..., :latent]
    used = torch.randint(0, rows + 1, (batch,), dtype=torch.int32, device=device)
    used[0] = rows
    options = {"qv": qv, "causal": True, "seqused_k": used, "softcap": softcap}
    got, heads_of = poisoned(batch, heads, seq_q, device=device), poisoned(heads, device=device)
    out, lse = flash3.attention_with_kv_cache(*call, max_logits=got, return_lse=True, **options)
    plain, plain_lse = flash3.attention_with_kv_cache(*call, return_lse=True, **options)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    flash3.attention_with_kv_cache(*call, max_logits=heads_of, **options)
    wide = torch.cat([qv, q], -1)
    wanted = torch.full(got.shape, -torch.inf, dtype=torch.float64, device=device)
    for b, n in enumerate(used.tolist()):
        if n:
            wanted[b] = logits_of(wide[b:b + 1], cache[b:b + 1, :n], causal=True, softcap=softcap)[0].amax(-1)
    check(got, wanted, bound(wide, cache))
    check(heads_of, wanted.amax((0, 2)), bound(wide, cache))


def test_pages_with_mixed_lengths(device):
    """Prompts and sequences that decode beside them, each by its own kernels."""
    heads, heads_k, dim, page = 4, 1, 128, 64
    lengths_q, used = [100, 1, 3, 0], [300, 1000, 64, 5]
    pages = torch.randn(60, page, heads_k, dim, device=device).bfloat16()
    table = torch.randperm(60).reshape(4, 15).int()
    table = torch.cat([table, table[:, :1]], 1).to(device)  # 16 pages, the last never used
    q = torch.randn(sum(lengths_q), heads, dim, device=device).bfloat16()
    starts = torch.tensor([0, *torch.tensor(lengths_q).cumsum(0).tolist()], dtype=torch.int32, device=device)
    used_k = torch.tensor([min(n, 15 * page) for n in used], dtype=torch.int32, device=device)
    rows = poisoned(heads, len(q), device=device)
    flash3.attention_with_kv_cache(q, pages, pages, page_table=table, seqused_k=used_k, cu_seqlens_q=starts, max_seqlen_q=max(lengths_q),
                                   causal=True, max_logits=rows)
    for b, n in enumerate(used_k.tolist()):
        i, j = starts[b], starts[b + 1]
        keys = pages[table[b].long()].flatten(0, 1)[None, :n]
        if j > i:
            check(rows[:, i:j], logits_of(q[None, i:j], keys, causal=True)[0].amax(-1), bound(q, pages))


def test_a_sink_is_no_score(device):
    q, k, v = make(device, torch.bfloat16, 1, 20, 30, 2, 2, 64)
    rows = poisoned(1, 2, 20, device=device)
    flash3.attention(q, k, v, sink=torch.full((2,), 1e4, device=device), max_logits=rows)
    check(rows, logits_of(q, k).amax(-1), bound(q, k))


def test_gradients_are_those_of_the_call_without(device):
    q, k, v = (x.requires_grad_() for x in make(device, torch.bfloat16, 1, 50, 60, 2, 2, 64))
    heads_of = poisoned(2, device=device)
    out = flash3.attention(q, k, v, causal=True, max_logits=heads_of)
    got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    wanted = torch.autograd.grad(flash3.attention(q, k, v, causal=True).float().square().sum(), (q, k, v))
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)
    check(heads_of, logits_of(q.detach(), k.detach(), causal=True).amax((0, 2, 3)), bound(q.detach(), k.detach()))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled(device, fullgraph):
    """No gradient is lost: a graph has none, and what can leave it does."""
    q, k, v = make(device, torch.bfloat16, 1, 50, 60, 2, 2, 64)
    heads_of = poisoned(2, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: flash3.attention(q, k, v, causal=True, max_logits=heads_of), backend="aot_eager", fullgraph=fullgraph)
    torch.testing.assert_close(compiled(q), flash3.attention(q, k, v, causal=True), atol=2e-2, rtol=2e-2)
    check(heads_of, logits_of(q, k, causal=True).amax((0, 2, 3)), bound(q, k))
    q.requires_grad_()
    if fullgraph:
        with pytest.raises(Exception, match="max_logits is given but a graph of torch.compile has no gradients"):
            compiled(q)
        return
    got, = torch.autograd.grad(compiled(q).float().square().sum(), q)
    wanted, = torch.autograd.grad(flash3.attention(q, k, v, causal=True).float().square().sum(), q)
    torch.testing.assert_close(got, wanted, atol=5e-2, rtol=5e-2)


def test_transforms(device):
    q, k, v = make(device, torch.bfloat16, 1, 5, 6, 2, 2, 64)
    with pytest.raises(NotImplementedError, match="max_logits is given but torch.func's transforms have no gradients"):
        torch.func.grad(lambda q: flash3.attention(q, k, v, max_logits=poisoned(2, device=device)).float().sum())(q)
    with pytest.raises(NotImplementedError, match="max_logits is given but torch.vmap cannot batch"):
        torch.vmap(lambda q: flash3.attention(q, k, v, max_logits=poisoned(2, device=device)))(q[None])


def test_several_devices_say_what_they_lack():
    """Each option of one device's functions that those of several lack, in a message that names it."""
    distributed = pytest.importorskip("flash3.distributed")
    q, k, v = make("cpu", torch.float32, 1, 5, 5, 2, 2, 16)
    lengths = torch.ones(1, dtype=torch.int32)
    for options in ({"max_logits": torch.empty(2)}, {"max_logits": torch.empty(2), "compute": "fp8"}, {"mask_alignment": "top_left"},
                    {"seqused_k": lengths}, {"qv": q}, {"fp8_sums": "one"}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(options))} is given but attention over several devices does not take it"):
            distributed.attention(q, k, v, **options)
    for options in ({"max_logits": torch.empty(2)}, {"mask_alignment": "top_left"}, {"seqused_k": lengths}, {"leftpad_k": lengths}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(options))} is given but attention_with_kv_cache over several devices"):
            distributed.attention_with_kv_cache(q, k, v, lengths, **options)
    with distributed.context_parallel():
        for options in ({"max_logits": torch.empty(2)}, {"max_logits": torch.empty(2), "compute": "fp8"}, {"mask_alignment": "top_left"}):
            with pytest.raises(NotImplementedError, match=f"{next(iter(options))} is given but attention over several devices does not take it"):
                flash3.attention(q, k, v, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_logit'"):
        distributed.attention(q, k, v, max_logit=None)


def test_schedules_are_the_same_with_it(device):
    q, k, v = make(device, torch.bfloat16, 1, 2, 90, 2, 2, 64)
    heads_of = poisoned(2, device=device)
    arguments = {"seqused_k": torch.tensor([77], dtype=torch.int32, device=device), "causal": True}
    schedule = flash3.kv_cache_schedule(q, k, v, max_logits=heads_of, **arguments)
    assert schedule.key == flash3.kv_cache_schedule(q, k, v, **arguments).key
    flash3.attention_with_kv_cache(q, k, v, schedule=schedule, max_logits=heads_of, **arguments)
    check(heads_of, logits_of(q, k[:, :77], causal=True).amax((0, 2, 3)), bound(q, k))


def test_no_rows_at_all(device):
    q, k, v = make(device, torch.bfloat16, 2, 0, 9, 3, 3, 64)
    heads_of = poisoned(3, device=device)
    flash3.attention(q, k, v, max_logits=heads_of)
    assert torch.equal(heads_of, torch.full_like(heads_of, -torch.inf))
    q, k, v = make(device, torch.bfloat16, 2, 4, 0, 3, 3, 64)
    rows = poisoned(2, 3, 4, device=device)
    flash3.attention(q, k, v, max_logits=rows), flash3.attention(q, k, v, max_logits=heads_of)
    assert (rows == -torch.inf).all() and (heads_of == -torch.inf).all()


def test_arrays():
    q, k, v = (x.float().numpy() for x in make("cpu", torch.float32, 1, 9, 12, 2, 1, 16))
    rows = np.full((1, 2, 9), np.nan, np.float32)
    flash3.attention(q, k, v, max_logits=rows)
    check(torch.from_numpy(rows), logits_of(torch.from_numpy(q), torch.from_numpy(k)).amax(-1), 1e-4)


def test_wrong_tensors_are_refused():
    q, k, v = make("cpu", torch.float32, 1, 9, 12, 2, 1, 16)
    for wrong, message in ((torch.empty(3), r"max_logits.shape\[0\] = 3 but q.shape\[2\] = 2"),
                           (torch.empty(1, 2, 8), r"max_logits.shape\[2\] = 8 but q.shape\[1\] = 9"),
                           (torch.empty(2, dtype=torch.float64), "max_logits.dtype"), (torch.empty(2).half(), "max_logits.dtype"),
                           (torch.empty(1).expand(2), "max_logits.stride")):
        with pytest.raises((ValueError, TypeError), match=message):
            flash3.attention(q, k, v, max_logits=wrong)
    assert flash3.supported(q, k, v, max_logits=torch.empty(2))
    assert not flash3.supported(q, k, v, max_logits=torch.empty(3))
    assert "max_logits" in flash3.explain(q, k, v, max_logits=torch.empty(2))


def test_fp8(device):
    q, k, v = make(device, torch.bfloat16, 1, 40, 50, 2, 2, 64)
    heads_of = poisoned(2, device=device)
    if device == "cuda":
        with pytest.raises(NotImplementedError, match="max_logits is given but k and v are FP8"):
            flash3.attention(q, k, v, compute="fp8", max_logits=heads_of)
        return
    flash3.attention(q, k, v, compute="fp8", max_logits=heads_of)
    torch.testing.assert_close(heads_of.double(), logits_of(q, k).amax((0, 2, 3)), atol=2.0, rtol=0.1)
