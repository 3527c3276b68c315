# SPDX-License-Identifier: Apache-2.0
"""attention_with_kv_cache(mask=): masks as data over keys in pages and in elements of a larger cache."""
import pytest
import torch

import flash3
from flash3 import masks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
USED = (50, 64, 0)


def make(device, *, paged, seq_q=40):
    """(q, caches and where a sequence's keys lie, the keys of each sequence and its values)."""
    g = torch.Generator().manual_seed(4)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(3, seq_q, 4, 64, generator=g).to(dtype).to(device)
    shape = (13, 16, 2, 64) if paged else (5, 64, 2, 64)
    caches = [torch.randn(*shape, generator=g).to(dtype).to(device) for _ in range(2)]
    table = torch.randperm(13, generator=g)[:12].view(3, 4).int() if paged else torch.tensor([4, 0, 2], dtype=torch.int32)
    keys = [x[table.long()].flatten(1, 2) if paged else x[table.long()] for x in caches]
    where = {"page_table" if paged else "cache_batch_idx": table.to(device), "seqused_k": torch.tensor(USED, dtype=torch.int32, device=device)}
    return q, caches, where, keys


def expected(q, keys, seen):
    """In float64; seen: [batch, heads or 1, seq_q, 64]."""
    seen = seen.cpu() & (torch.arange(64) < torch.tensor(USED)[:, None])[:, None, None]
    q, k, v = (x.cpu().double().transpose(1, 2) for x in (q, *keys))
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) / 8).masked_fill(~seen, -torch.inf)
    return (scores.softmax(3).nan_to_num() @ v.repeat_interleave(2, 1)).transpose(1, 2), scores.logsumexp(3)


def check(found, wanted):
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if found.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found.cpu().double(), wanted, **tolerance)


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "elements"])
@pytest.mark.parametrize("device", DEVICES)
def test_of_pairs(device, paged):
    for seq_q in (40, 1):
        q, caches, where, keys = make(device, paged=paged, seq_q=seq_q)
        seen = torch.rand(3, 4, seq_q, 64, generator=torch.Generator().manual_seed(1)) < 0.4
        out, lse = flash3.attention_with_kv_cache(q, *caches, mask=masks.dense(seen.to(device)), return_lse=True, **where)
        wanted, wanted_lse = expected(q, keys, seen)
        check(out, wanted)
        torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=1e-2, atol=1e-2)
        unrounded = flash3.attention_with_kv_cache(q, *caches, mask=masks.dense(seen.to(device)), out_dtype=torch.float32, **where)
        check(unrounded.to(q.dtype), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_with_the_band_of_the_call(device):
    q, caches, where, keys = make(device, paged=True)
    source = masks.window_with_sinks(9, 3, 40, 64, device=device)
    where["seqused_k"] = torch.full_like(where["seqused_k"], 64)
    out = flash3.attention_with_kv_cache(q, *caches, mask=source, window=(5, -1), **where)
    own = torch.arange(40)[:, None] + 24
    seen = ((torch.arange(64) > own - 9) | (torch.arange(64) < 3)) & (torch.arange(64) <= own) & (torch.arange(64) >= own - 5)
    scale = q.cpu().double().transpose(1, 2), *(x.cpu().double().transpose(1, 2).repeat_interleave(2, 1) for x in keys)
    check(out, torch.nn.functional.scaled_dot_product_attention(*scale, attn_mask=seen).transpose(1, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_made_by_the_caller(device):
    q, caches, where, keys = make(device, paged=True)
    seen = torch.rand(40, 50, generator=torch.Generator().manual_seed(2)) < 0.5
    where["seqused_k"] = where["seqused_k"].clamp(max=50)
    mask = masks.dense(seen.to(device)).make(seqused_k=where["seqused_k"])
    wanted = flash3.attention_with_kv_cache(q, *caches, mask=masks.dense(seen.to(device)), max_seqlen_k=50, **where)
    assert (flash3.attention_with_kv_cache(q, *caches, mask=mask, max_seqlen_k=50, **where) == wanted).all()
    with pytest.raises(ValueError, match="mask.seq_k = 50 but max_pages \\* page_size = 64"):
        flash3.attention_with_kv_cache(q, *caches, mask=mask, **where)


def test_of_arrays():
    q, caches, where, _ = make("cpu", paged=True)
    source = masks.documents(lengths=[20, 30, 14], seq_q=40)
    wanted = flash3.attention_with_kv_cache(q, *caches, mask=source, **where)
    mask = source.make(seqused_k=where["seqused_k"])
    arrays = [x.numpy() for x in (q, *caches)]
    out = flash3.attention_with_kv_cache(*arrays, mask=mask, **{name: x.numpy() for name, x in where.items()})
    torch.testing.assert_close(torch.from_numpy(out), wanted)


def test_errors():
    q, caches, where, _ = make("cpu", paged=True)
    source = masks.documents(lengths=[20, 30, 14], seq_q=40)
    new = {"k_new": q[:, :1, :2], "v_new": q[:, :1, :2]}
    with pytest.raises(NotImplementedError, match="mask is given and k_new is given"):
        flash3.attention_with_kv_cache(q, *caches, mask=source, **where, **new)
    with pytest.raises(NotImplementedError, match="mask is given and leftpad_k is given"):
        flash3.attention_with_kv_cache(q, *caches, mask=source, leftpad_k=where["seqused_k"], **where)
    with pytest.raises(TypeError, match="mask is a Tensor but it must be a flash3.Mask"):
        flash3.attention_with_kv_cache(q, *caches, mask=q, **where)
    with pytest.raises(ValueError, match="seq_k = 64 but the mask's seq_k = 63"):
        flash3.attention_with_kv_cache(q, *caches, mask=masks.documents(lengths=[63], seq_q=40), **where)
    with pytest.raises(TypeError, match="unexpected argument 'mask'"):
        flash3.kv_cache_schedule(q, *caches, mask=source, **where)
