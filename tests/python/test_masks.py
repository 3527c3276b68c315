# SPDX-License-Identifier: Apache-2.0
"""flash3.masks: masks as data, their calls and gradients, against plain attention in torch."""
import pytest
import torch

import flash3
from flash3 import masks


def plain(q, k, v, seen):
    """out and lse of [batch, seq, heads, dim] in float64; seen: bool, broadcast to [batch, heads, seq_q, seq_k]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(seen, (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp(), 0.0)
    return (weights @ v).transpose(1, 2), lse


def inputs(seq_q=150, seq_k=270, batch=2, heads=(4, 2), dim=32, **options):
    torch.manual_seed(1)
    return tuple(torch.randn(batch, seq, n, dim, **options) for seq, n in ((seq_q, heads[0]), (seq_k, heads[1]), (seq_k, heads[1])))


def causal(seq_q, seq_k):
    return torch.arange(seq_k) <= torch.arange(seq_q)[:, None] + seq_k - seq_q


def of_dense(dense, **options):
    return masks.dense(dense, **options), dense != 0


def of_ranges():
    bounds = torch.randint(-20, 300, (2, 4, 4, 150), dtype=torch.int32)
    keys = torch.arange(270)
    begins, ends = bounds[:, :, 0::2, :, None], bounds[:, :, 1::2, :, None]
    return masks.ranges(bounds, 270), ((begins <= keys) & (keys < ends)).any(2)


def of_documents():
    numbers = torch.tensor([0] * 100 + [1] * 90 + [0] * 80, dtype=torch.int32)
    runs = torch.tensor([0] * 100 + [1] * 90 + [2] * 80)
    return masks.documents(numbers, 150, causal=True), (runs[270 - 150:, None] == runs) & causal(150, 270)


def of_blocks():
    counts = torch.tensor([2, 1, 0], dtype=torch.int32)
    indices = torch.tensor([[0, 3], [2, 9], [1, 1]], dtype=torch.int32)
    seen = torch.zeros(192, 320, dtype=torch.bool)
    seen[:64, :64] = seen[:64, 192:256] = seen[64:128, 128:192] = True
    return masks.blocks(counts, indices, 150, 270, 64, 64), seen[:150, :270]


MASKS = {"dense": lambda: of_dense(torch.rand(2, 4, 150, 270) < 0.3), "shared": lambda: of_dense(torch.rand(150, 270) < 0.3),
         "bytes": lambda: of_dense(torch.randint(0, 3, (1, 4, 150, 270), dtype=torch.uint8)), "ranges": of_ranges,
         "documents": of_documents, "blocks": of_blocks}


@pytest.mark.parametrize("source", MASKS)
def test_attention_and_its_gradients(source):
    torch.manual_seed(2)
    mask, seen = MASKS[source]()
    q, k, v = (x.requires_grad_() for x in inputs())
    out, lse = flash3.attention(q, k, v, mask=mask, return_lse=True)
    expected, expected_lse = plain(q, k, v, seen)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    for gradient, wanted in zip(got, torch.autograd.grad(expected, (q, k, v), dout.double())):
        torch.testing.assert_close(gradient, wanted.float(), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(flash3.attention(q, k, v, mask=mask), out)
        gradients = flash3.attention_backward(dout, q, k, v, out, lse, mask=mask)
    for gradient, wanted in zip(gradients, got):
        torch.testing.assert_close(gradient, wanted)


def test_rows_that_see_nothing():
    seen = torch.zeros(150, 270, dtype=torch.bool)
    seen[:70] = True
    q, k, v = (x.requires_grad_() for x in inputs())
    out, lse = flash3.attention(q, k, v, mask=masks.dense(seen), return_lse=True)
    assert (out[:, 70:] == 0).all() and (lse[:, :, 70:] == -torch.inf).all()
    out.sum().backward()
    assert (q.grad[:, 70:] == 0).all() and q.grad[:, :70].abs().sum() > 0


def test_memory_is_exact():
    seen = torch.zeros(1000, 1000, dtype=torch.bool)
    seen[:128, :128] = True
    seen[200:300, 500:600] = torch.rand(100, 100) < 0.5
    mask = masks.dense(seen)
    blocks, partial = masks.needs(mask)
    assert (mask.blocks, mask.partial_blocks) == (blocks, partial) and partial == blocks - 1
    assert mask.data.numel() < 40_000 + 2048 * partial
    assert masks.needs(masks.dense(seen, max_blocks=2, max_partial_blocks=1)) == (blocks, partial)
    q, k, v = inputs(1000, 1000)
    assert (flash3.attention(q, k, v, mask=masks.dense(seen, max_blocks=2)) == 0).all()
    with pytest.raises(ValueError, match="max_partial_blocks = 3 but max_blocks = None"):
        masks.dense(seen, max_partial_blocks=3)


def test_band_of_the_call_is_none_or_the_masks():
    q, k, v = inputs()
    mask = masks.documents(torch.zeros(270, dtype=torch.int32), 150, causal=True)
    expected = flash3.attention(q, k, v, causal=True)
    torch.testing.assert_close(flash3.attention(q, k, v, mask=mask), expected)
    torch.testing.assert_close(flash3.attention(q, k, v, mask=mask, causal=True), expected)
    with pytest.raises(ValueError, match="window_left = 3 but the mask was made with -1"):
        flash3.attention(q, k, v, mask=mask, window=(3, 0))


@pytest.mark.parametrize("change, message", [
    (lambda m: m._replace(seq_q=151), "mask.seq_q = 151 but q.shape[1] = 150"),
    (lambda m: m._replace(key=m.key + 1), "but its fields make"),
    (lambda m: m._replace(data=m.data[:-1]), "mask.data.numel() = "),
    (lambda m: m._replace(data=m.data.float()), "mask.data is no contiguous uint8 tensor of 1 dimension"),
    (lambda m: m._replace(ranges=2**40), "mask_fields holds 1099511627776"),
])
def test_what_is_no_mask_of_the_call(change, message):
    q, k, v = inputs()
    mask = change(masks.dense(torch.rand(150, 270) < 0.5))
    with pytest.raises(ValueError) as error:
        flash3.attention(q, k, v, mask=mask)
    assert message in str(error.value)


def test_errors():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="mask is a Tensor but it must be a flash3.Mask"):
        flash3.attention(q, k, v, mask=torch.ones(150, 270))
    with pytest.raises(NotImplementedError, match="mask is given and seqused_k is given"):
        flash3.attention(q, k, v, mask=masks.dense(torch.ones(150, 270)[None].bool()), seqused_k=torch.tensor([3, 4], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="masks and calls with them are for torch tensors"):
        flash3.attention(*(x.numpy() for x in (q, k, v)), mask=masks.dense(torch.ones(150, 270).bool()))
    with pytest.raises(TypeError, match="ranges.dtype = int64 but it must be int32"):
        masks.ranges(torch.zeros(2, 150, dtype=torch.int64), 270)
    with pytest.raises(ValueError, match=r"ranges.shape\[2\] = 3 but it must be 2 \* n, with n from 1 to 8"):
        masks.ranges(torch.zeros(3, 150, dtype=torch.int32), 270)
    with pytest.raises(ValueError, match="block_rows = 12 but it must be a positive multiple of 8"):
        masks.blocks(torch.zeros(13, dtype=torch.int32), torch.zeros(13, 1, dtype=torch.int32), 150, 270, 12)
    with pytest.raises(TypeError, match="dense is a list but it must be a torch tensor"):
        masks.dense([[True]])


def test_sharded_tensors_take_none():
    class DTensor:  # the check goes by the name of torch's class, which takes processes to make
        __module__, __qualname__ = "torch.distributed.tensor", "DTensor"
        device, dtype, requires_grad = torch.device("cpu"), torch.float32, False
    from flash3 import _torch
    mask = masks.dense(torch.ones(150, 270).bool())
    with pytest.raises(NotImplementedError, match="mask is given and q is a DTensor"):
        _torch.run_forward(DTensor(), None, None, {"mask": mask.data, "mask_fields": mask.fields})
    _torch.run_forward(*inputs(), {"mask": mask.data, "mask_fields": mask.fields})


def test_questions():
    q, k, v = inputs()
    mask = masks.documents(torch.zeros(270, dtype=torch.int32), 150)
    assert flash3.supported(q, k, v, mask=mask) and flash3.supported(q, k, v, mask=mask, backward=True)
    assert not flash3.supported(q[:, :-1], k, v, mask=mask)
    assert "what its mask lists" in flash3.explain(q, k, v, mask=mask)


def test_compiled():
    q, k, v = (x.requires_grad_() for x in inputs())
    mask, seen = of_dense(torch.rand(2, 4, 150, 270) < 0.3)
    compiled = torch.compile(lambda q, k, v: flash3.attention(q, k, v, mask=mask), backend="aot_eager", fullgraph=True)
    out = compiled(q, k, v)
    torch.testing.assert_close(out, flash3.attention(q, k, v, mask=mask))
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_operators():
    q, k, v = inputs()
    mask, _ = of_dense(torch.rand(150, 270) < 0.3)
    out, lse = flash3.attention(q, k, v, mask=mask, return_lse=True)
    given_out, given_lse = torch.empty_like(out), torch.empty_like(lse)
    torch.ops.flash3.forward_out(q, k, v, given_out, given_lse, mask=mask.data, mask_fields=mask.fields)
    torch.testing.assert_close((given_out, given_lse), (out, lse))
    largest = torch.empty(4)
    flash3.attention(q, k, v, mask=mask, max_logits=largest)
    assert (largest <= lse.amax((0, 2)) + 1e-6).all() and largest.isfinite().all()
    with pytest.raises(RuntimeError, match="mask_fields has 2 numbers but it must have the 12 that mask_make gives"):
        torch.ops.flash3.forward(q, k, v, mask=mask.data, mask_fields=[1, 2])
