# SPDX-License-Identifier: Apache-2.0
"""Masks as data with sequences of unequal lengths: packed ones and ones that are used in part, against plain attention of each sequence."""
import pytest
import torch

import flash3
from flash3 import _library, _mask_lengths, masks
from test_masks import plain

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [200, 0, 1, 130, 64]


def cu_of(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def packed_inputs(device, lengths_q, lengths_k, heads=(4, 2), dim=64, spare=7):
    torch.manual_seed(3)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    made = [torch.randn(sum(lengths) + spare, n, dim, device=device).to(dtype).requires_grad_()
            for lengths, n in ((lengths_q, heads[0]), (lengths_k, heads[1]), (lengths_k, heads[1]))]
    return made, {"cu_seqlens_q": cu_of(lengths_q, device), "cu_seqlens_k": cu_of(lengths_k, device),
                  "max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}


def parts_of(x, lengths):
    return x[:sum(lengths)].split(lengths)


def check_packed(qkv, lengths_q, lengths_k, out, seen_of):
    """out and the gradients of its sum against each sequence alone; seen_of(b, len_q, len_k): bool, broadcast to [heads, len_q, len_k]."""
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    expected = []
    for b, parts in enumerate(zip(*(parts_of(x, n) for x, n in zip(leaves, (lengths_q, lengths_k, lengths_k))))):
        seen = seen_of(b, lengths_q[b], lengths_k[b]).to(out.device)
        expected.append(plain(*(x[None] for x in parts), seen)[0][0])
    expected = torch.cat(expected)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if out.dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    torch.testing.assert_close(out[:len(expected)].double(), expected.detach(), **tolerance)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), qkv)
    wanted = torch.autograd.grad((expected * weights[:len(expected)].double()).sum(), leaves)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a.double(), b, **tolerance)


def causal(len_q, len_k):
    return torch.arange(len_k) <= torch.arange(len_q)[:, None] + len_k - len_q


@pytest.mark.parametrize("device", DEVICES)
def test_one_table_of_ranges_for_all_sequences(device):
    qkv, lengths = packed_inputs(device, LENGTHS, LENGTHS)
    source = masks.window_with_sinks(50, 4, max(LENGTHS), device=device)
    out = flash3.attention(*qkv, mask=source, **lengths)

    def seen(_, n, __):
        i, j = torch.arange(n)[:, None], torch.arange(n)
        return (j <= i) & ((i - j < 50) | (j < 4))
    check_packed(qkv, LENGTHS, LENGTHS, out, seen)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_ranges_with_a_band(device):
    lengths_k = [250, 3, 0, 130, 100]
    qkv, lengths = packed_inputs(device, LENGTHS, lengths_k)
    total = qkv[0].shape[0]
    bounds = torch.randint(0, 260, (1, 4, 4, total), dtype=torch.int32)
    out = flash3.attention(*qkv, mask=masks.ranges(bounds.to(device)), causal=True, **lengths)

    def seen(b, len_q, len_k):
        own = bounds[0, :, :, sum(LENGTHS[:b]):sum(LENGTHS[:b]) + len_q, None]
        keys = torch.arange(len_k)
        union = (own[:, 0] <= keys) & (keys < own[:, 1]) | (own[:, 2] <= keys) & (keys < own[:, 3])
        return union & causal(len_q, len_k)
    check_packed(qkv, LENGTHS, lengths_k, out, seen)


@pytest.mark.parametrize("device", DEVICES)
def test_documents_in_packed_sequences(device):
    qkv, lengths = packed_inputs(device, LENGTHS, LENGTHS)
    ids = torch.randint(0, 2, (qkv[1].shape[0],)).cumsum(0).int().div(40, rounding_mode="floor").int()
    out = flash3.attention(*qkv, mask=masks.documents(ids.to(device)), causal=True, **lengths)

    def seen(b, n, _):
        own = ids[sum(LENGTHS[:b]):sum(LENGTHS[:b]) + n]
        return (own[:, None] == own) & causal(n, n)
    check_packed(qkv, LENGTHS, LENGTHS, out, seen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["dense", "blocks", "bits"])
def test_sequences_that_are_used_in_part(device, kind):
    torch.manual_seed(4)
    batch, seq_q, seq_k = 3, 150, 270
    used = {"seqused_q": torch.tensor([150, 0, 77], dtype=torch.int32), "seqused_k": torch.tensor([129, 270, 60], dtype=torch.int32)}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    qkv = [torch.randn(batch, seq, n, 64, device=device).to(dtype).requires_grad_() for seq, n in ((seq_q, 4), (seq_k, 2), (seq_k, 2))]
    if kind == "blocks":
        blocks = torch.rand(batch, 1, 3, 5) < 0.6
        dense = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :seq_q, :seq_k]
        source = masks.blocks(blocks.to(device), block_rows=64, block_keys=64)
    else:
        dense = torch.rand(batch, 4, seq_q, seq_k) < 0.5
        source = masks.dense(dense.to(device)) if kind == "dense" else masks.dense(dense.to(device)) & masks.dense(dense.to(device))
    out = flash3.attention(*qkv, mask=source, window=(100, 20), **{name: x.to(device) for name, x in used.items()})
    with torch.no_grad():
        for b in range(batch):
            n, m = int(used["seqused_q"][b]), int(used["seqused_k"][b])
            i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
            seen = (dense[b, :, :n, :m] & (j >= i - 100) & (j <= i + 20)).to(device)
            expected = plain(qkv[0][b:b + 1, :n], qkv[1][b:b + 1, :m], qkv[2][b:b + 1, :m], seen)[0]
            tolerance = {"rtol": 1e-4, "atol": 1e-4} if device == "cpu" else {"rtol": 2e-2, "atol": 3e-2}
            torch.testing.assert_close(out[b:b + 1, :n].double(), expected, **tolerance)
    for b in range(batch):
        assert (out[b, int(used["seqused_q"][b]):] == 0).all()
    for x, name in zip(torch.autograd.grad(out.float().sum(), qkv), ("q", "k", "k")):
        assert x.isfinite().all()
        for b in range(batch):
            assert (x[b, int(used[f"seqused_{name}"][b]):] == 0).all()


def test_sequences_without_a_token():
    qkv, lengths = packed_inputs("cpu", [0, 0], [0, 0])
    lengths |= {"max_seqlen_q": None, "max_seqlen_k": None}
    out = flash3.attention(*qkv, mask=masks.ranges(torch.zeros(1, 1, 2, qkv[0].shape[0], dtype=torch.int32)), **lengths)
    assert (out == 0).all()
    made = _mask_lengths._packed("ranges", torch.zeros(1, 1, 2, 0, dtype=torch.int32), 3, lengths["cu_seqlens_q"], 0, 7, "q")
    assert made.shape == (1, 1, 2, 7)


def test_a_mask_is_made_again_for_other_lengths():
    qkv, lengths = packed_inputs("cpu", LENGTHS, LENGTHS)
    source = masks.window_with_sinks(30, 2, max(LENGTHS))
    first = flash3.attention(*qkv, mask=source, **lengths)
    lengths["cu_seqlens_q"].copy_(cu_of([100, 50, 100, 81, 64], "cpu"))  # in place: torch counts it
    lengths["cu_seqlens_k"].copy_(lengths["cu_seqlens_q"])
    again = flash3.attention(*qkv, mask=source, **lengths)
    fresh = flash3.attention(*qkv, mask=masks.window_with_sinks(30, 2, max(LENGTHS)), **lengths)
    assert torch.equal(again, fresh) and not torch.equal(first, again)


def test_a_mask_that_the_caller_keeps():
    qkv, lengths = packed_inputs("cpu", LENGTHS, LENGTHS)
    source = masks.band(causal=True)
    mask = source.make(qkv[0].shape[0], qkv[1].shape[0], **lengths)
    assert mask.lengths == _library.MASK_LENGTHS["cu_seqlens_q"] + _library.MASK_LENGTHS["cu_seqlens_k"] and mask.batch == len(LENGTHS) and mask.seq_q == max(LENGTHS)
    out = flash3.attention(*qkv, mask=mask, **lengths)
    torch.testing.assert_close(out, flash3.attention(*qkv, causal=True, **lengths), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="mask.lengths = 3 has 1 but cu_seqlens_q is None; the mask was made with cu_seqlens_q"):
        flash3.attention(*(x[None, :200] for x in qkv), mask=mask)
    dense = torch.randn(5, 200, 4, 64)
    with pytest.raises(ValueError, match="seqused_k is given, but mask.lengths = 0 lacks 8; make the mask with seqused_k"):
        flash3.attention(dense, dense, dense, mask=source.make(200, 200), seqused_k=torch.full((5,), 3, dtype=torch.int32))


def test_lengths_and_sources_that_do_not_fit():
    qkv, lengths = packed_inputs("cpu", LENGTHS, LENGTHS)
    table = torch.zeros(1, 1, 2, 99, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"ranges.shape\[3\] = 99 but it must be total_q = 402 or the most tokens of a sequence, 200"):
        flash3.attention(*qkv, mask=masks.ranges(table), **lengths)
    with pytest.raises(ValueError, match=r"ranges.shape\[0\] = 5 but cu_seqlens_q is given; of packed sequences it must be 1"):
        flash3.attention(*qkv, mask=masks.ranges(table.expand(5, 1, 2, 99).contiguous()), **lengths)
    with pytest.raises(NotImplementedError, match="no band together"):
        flash3.attention(*qkv, mask=masks.ranges(torch.zeros(1, 1, 2, 402, dtype=torch.int32), chunk=3), chunk=5, **lengths)
    with pytest.raises(ValueError, match="q.ndim = 4 but it must be 3"):
        flash3.attention(*(x[None] for x in qkv), mask=masks.band(causal=True), **lengths)
