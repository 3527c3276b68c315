# SPDX-License-Identifier: Apache-2.0
"""Calls with masks as data and their gradients, against plain attention in torch; masks that are made, and those that calls make and keep."""
import gc
import re

import pytest
import torch

import flash3
from flash3 import _mask_kept, _mask_make, masks


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
    return masks.ranges(bounds), ((begins <= keys) & (keys < ends)).any(2)


def of_documents():
    numbers = torch.tensor([0] * 100 + [1] * 90 + [0] * 80, dtype=torch.int32)
    runs = torch.tensor([0] * 100 + [1] * 90 + [2] * 80)
    return masks.documents(numbers, seq_q=150, causal=True), (runs[270 - 150:, None] == runs) & causal(150, 270)


def of_blocks():
    counts = torch.tensor([2, 1, 0], dtype=torch.int32)
    indices = torch.tensor([[0, 3], [2, 9], [1, 1]], dtype=torch.int32)
    seen = torch.zeros(192, 320, dtype=torch.bool)
    seen[:64, :64] = seen[:64, 192:256] = seen[64:128, 128:192] = True
    return masks.blocks(counts, indices, 64, 64), seen[:150, :270]


def of_blocks_with_sizes():
    seen, sizes = torch.rand(2, 4, 3, 5) < 0.6, torch.tensor([64, 20, 64, 0, 14])
    source = masks.blocks(seen, None, 64, 64, block_sizes=sizes, seq_q=150, seq_k=270)
    keys = torch.arange(270)
    return source, seen[:, :, torch.arange(150) // 64][..., keys // 64] & (keys % 64 < sizes[keys // 64])


def of_bits():
    bits = torch.randint(0, 256, (2, 1, 150, 34), dtype=torch.uint8)
    seen = (bits[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(-2)[..., :270]
    return masks.bits(bits, 270), seen


def of_mask_mod():
    fn = lambda b, h, i, j: (i * 7 + j * (h + 3)) % 9 < 2
    heads, queries, keys = torch.arange(4)[:, None, None], torch.arange(150)[:, None], torch.arange(270)
    source = masks.from_mask_mod(fn, None, 4, 150, 270)
    assert source.kind == "bits"
    return source, fn(0, heads, queries, keys)[None]


MASKS = {"dense": lambda: of_dense(torch.rand(2, 4, 150, 270) < 0.3), "shared": lambda: of_dense(torch.rand(150, 270) < 0.3),
         "bytes": lambda: of_dense(torch.randint(0, 3, (1, 4, 150, 270), dtype=torch.uint8)), "ranges": of_ranges,
         "documents": of_documents, "blocks": of_blocks, "block sizes": of_blocks_with_sizes, "bits": of_bits, "bit blocks": of_mask_mod}


@pytest.mark.parametrize("is_made", (False, True))
@pytest.mark.parametrize("source", MASKS)
def test_attention_and_its_gradients(source, is_made):
    torch.manual_seed(2)
    mask, seen = MASKS[source]()
    mask = mask.make(150, 270) if is_made else mask
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


def test_documents_are_noted():
    """How many there are is counted where the mask is made for what it needs, and known of lengths otherwise."""
    lengths = [100, 50, 150]
    ids = torch.repeat_interleave(torch.tensor([4, 4, 1, 4]), torch.tensor([60, 40, 50, 150]))
    for source in (masks.documents(ids), masks.documents(lengths=lengths, causal=True)):
        mask = source.make()
        assert mask.documents == masks.needs(mask)[2] == 3
    assert masks.documents(lengths=lengths).make(max_blocks=0).documents == 4  # one of keys that are left
    assert masks.documents(lengths=torch.tensor(lengths)).make(max_blocks=0).documents == 4
    assert masks.documents(ids).make(max_blocks=0).documents == 0
    few = masks.documents(ids).make(max_blocks=0, max_documents=2)
    assert few.documents == 2 and masks.needs(few)[2] == 3
    q, k, v = inputs(300, 300)
    assert (flash3.attention(q, k, v, mask=few) == 0).all()
    for source in (masks.documents(ids, chunk=64), masks.documents(torch.stack((ids, ids))), masks.documents(ids, seq_q=299),
                   masks.documents(ids) & masks.window_with_sinks(40, 3, 300)):
        assert source.make().documents == 0
    with pytest.raises(ValueError, match="max_documents = 3 but max_blocks = None"):
        masks.documents(ids).make(max_documents=3)


def test_memory_is_exact():
    seen = torch.zeros(1000, 1000, dtype=torch.bool)
    seen[:128, :128] = True
    seen[200:300, 500:600] = torch.rand(100, 100) < 0.5
    source = masks.dense(seen)
    mask = source.make()
    blocks, partial, documents = masks.needs(mask)
    assert (mask.blocks, mask.partial_blocks) == (blocks, partial) and partial == blocks - 1 and documents == mask.documents == 0
    assert mask.data.numel() < 40_000 + 2048 * partial
    assert masks.needs(source.make(max_blocks=2, max_partial_blocks=1)) == (blocks, partial, 0)
    q, k, v = inputs(1000, 1000)
    assert (flash3.attention(q, k, v, mask=source.make(max_blocks=2)) == 0).all()
    most = source.make(max_blocks=0)
    assert most.blocks == 64
    torch.testing.assert_close(flash3.attention(q, k, v, mask=most), flash3.attention(q, k, v, mask=mask))
    with pytest.raises(ValueError, match="max_partial_blocks = 3 but max_blocks = None"):
        source.make(max_partial_blocks=3)


def test_band_of_the_call_is_none_or_that_of_a_made_mask():
    q, k, v = inputs()
    mask = masks.documents(torch.zeros(270, dtype=torch.int32), seq_q=150, causal=True).make()
    expected = flash3.attention(q, k, v, causal=True)
    torch.testing.assert_close(flash3.attention(q, k, v, mask=mask), expected)
    torch.testing.assert_close(flash3.attention(q, k, v, mask=mask, causal=True), expected)
    with pytest.raises(ValueError, match="window_left = 3 but the mask was made with -1"):
        flash3.attention(q, k, v, mask=mask, window=(3, 0))


@pytest.mark.parametrize("options", ({"causal": True}, {"window": (40, 7)}, {"chunk": 60}, {"window": (90, None), "mask_alignment": "top_left"},
                                     {"causal": True, "chunk": 50, "mask_alignment": "top_left"}), ids=str)
@pytest.mark.parametrize("source", ("documents", "ranges", "dense", "blocks", "band"))
def test_band_of_the_call_and_the_source_mean_both(source, options):
    torch.manual_seed(3)
    described, seen = {**MASKS, "band": lambda: (masks.band(window=(99, 3)), masks.band(window=(99, 3)).sized(150, 270).to_dense())}[source]()
    seen = seen & masks.band(**options).sized(150, 270).to_dense()
    q, k, v = (x.requires_grad_() for x in inputs())
    out, lse = flash3.attention(q, k, v, mask=described, return_lse=True, **options)
    expected, _ = plain(q, k, v, seen)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (q, k, v), dout.double())
    with torch.no_grad():
        gradients = flash3.attention_backward(dout, q, k, v, out, lse, mask=described, **options)
    for got, by_hand, gradient in zip(torch.autograd.grad(out, (q, k, v), dout), gradients, wanted):
        torch.testing.assert_close(got, gradient.float(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(by_hand, got)


# ---- masks that calls make and keep ----

@pytest.fixture
def made(monkeypatch):
    """The sizes of masks that are made, one after the other."""
    asked, make = [], _mask_make.make

    def counting(source, seq_q, seq_k, *others, **named):
        asked.append((seq_q, seq_k))
        return make(source, seq_q, seq_k, *others, **named)

    monkeypatch.setattr(_mask_make, "make", counting)
    return asked


def test_a_source_is_made_once_for_each_size_and_band(made):
    source = masks.band(window=(60, 60))
    for seq_q, seq_k in ((150, 270), (150, 270), (100, 270), (150, 270)):
        q, k, v = (x.requires_grad_() for x in inputs(seq_q, seq_k))
        flash3.attention(q, k, v, mask=source).sum().backward()
    assert made == [(150, 270), (100, 270)]
    q, k, v = inputs()
    out, lse = flash3.attention(q, k, v, mask=source, causal=True, return_lse=True)
    flash3.attention_backward(out, q, k, v, out, lse, mask=source, causal=True)
    assert flash3.supported(q, k, v, mask=source, causal=True) and len(made) == 3
    assert len(_mask_kept._made[source][1]) == 3
    for seq_q in range(1, 20):
        flash3.attention(q[:, :seq_q], k, v, mask=source)
    assert len(_mask_kept._made[source][1]) == _mask_kept._MOST
    gc.collect()
    before = len(_mask_kept._made)
    del source
    gc.collect()
    assert len(_mask_kept._made) == before - 1


@pytest.mark.parametrize("change", (lambda source, x: x.logical_not_(), lambda source, x: setattr(source.dense, "data", source.dense.flip(2))),
                         ids=("in place", "data"))
def test_a_changed_tensor_makes_another_mask(made, change):
    q, k, v = inputs(270, 270)
    seen = torch.rand(270, 270) < 0.4
    source = masks.dense(seen)
    for changes in range(3):
        before = source.to_dense()
        for _ in range(2):
            torch.testing.assert_close(flash3.attention(q, k, v, mask=source).double(), plain(q, k, v, before)[0], atol=1e-5, rtol=1e-5)
        assert len(made) == changes + 1
        change(source, seen)
        assert not torch.equal(source.to_dense(), before)


def test_what_torch_does_not_count_is_made_at_each_call(made):
    with torch.inference_mode():
        q, k, v = inputs(270, 270)
        source = masks.dense(torch.rand(270, 270) < 0.4)
        outs = [flash3.attention(q, k, v, mask=source) for _ in range(2)]
    assert len(made) == 2 and torch.equal(*outs)


def test_a_source_changes_its_device():
    """All that it holds goes to the device of the calls."""
    for source in (*(MASKS[name]()[0] for name in MASKS), masks.from_mask_mod(lambda b, h, i, j: (i * 7 + j) % 9 < 2, None, None, 150, 270, "cpu")):
        moved = source.to("meta")
        assert moved.device.type == "meta" and moved.shape == source.shape and source.device.type == "cpu"
        assert all(x is None or x.device.type == "meta" for x in moved.tensors()) and source.to("cpu") is source
    assert masks.band(causal=True).to("meta").device is None


def test_a_captured_source_lies_where_its_mask_does(monkeypatch):
    """A graph would copy it from memory of the host that may be gone."""
    monkeypatch.setattr(_mask_make, "is_capturing", lambda device: True)
    source, _ = MASKS["documents"]()
    with pytest.raises(NotImplementedError, match="the source lies on cpu and a CUDA graph is being captured; bring it to meta before"):
        source.make(device="meta", max_blocks=0)


@pytest.mark.gpu
def test_on_a_gpu():
    """Made there of what lies on the CPU; on another stream another one, as the first one's memory is the first stream's."""
    q, k, v = (x.requires_grad_() for x in inputs(device="cuda", dtype=torch.bfloat16))
    source, seen = MASKS["documents"]()
    seen = seen.cuda()
    expected, _ = plain(q, k, v, seen)
    dout = torch.randn_like(q)
    wanted = torch.autograd.grad(expected, (q, k, v), dout.double())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for of in (torch.cuda.current_stream(), stream):
        with torch.cuda.stream(of):
            for _ in range(2):
                out = flash3.attention(q, k, v, mask=source)
                got = torch.autograd.grad(out, (q, k, v), dout)
        torch.cuda.synchronize()
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
        for gradient, exact in zip(got, wanted):
            torch.testing.assert_close(gradient.double(), exact.double(), atol=4e-2, rtol=4e-2)
    assert len(_mask_kept._made[source][1]) == 2
    graph, there = torch.cuda.CUDAGraph(), source.to("cuda")
    with torch.no_grad(), torch.cuda.graph(graph):
        with pytest.raises(NotImplementedError, match="mask is a MaskSource and a CUDA graph is being captured"):
            flash3.attention(q, k, v, mask=source)
        with pytest.raises(NotImplementedError, match="max_blocks = None and a CUDA graph is being captured"):
            there.make()
        captured = flash3.attention(q, k, v, mask=there.make(max_blocks=0))
    graph.replay()
    torch.testing.assert_close(captured, out)


@pytest.mark.parametrize("change, message", [
    (lambda m: m._replace(seq_q=151), "mask.seq_q = 151 but q.shape[1] = 150"),
    (lambda m: m._replace(key=m.key + 1), "but its fields make"),
    (lambda m: m._replace(data=m.data[:-1]), "mask.data.numel() = "),
    (lambda m: m._replace(data=m.data.float()), "mask.data is no contiguous uint8 tensor of 1 dimension"),
    (lambda m: m._replace(ranges=2**40), "mask_fields holds 1099511627776"),
])
def test_what_is_no_mask_of_the_call(change, message):
    q, k, v = inputs()
    mask = change(masks.dense(torch.rand(150, 270) < 0.5).make())
    with pytest.raises(ValueError) as error:
        flash3.attention(q, k, v, mask=mask)
    assert message in str(error.value)


def test_errors():
    q, k, v = inputs()
    source = masks.dense(torch.ones(150, 270).bool())
    cu_seqlens = torch.tensor([0, 150], dtype=torch.int32)
    for error, message, call in (
            (TypeError, "mask is a Tensor but it must be a flash3.Mask, or what flash3.masks returns",
             lambda: flash3.attention(q, k, v, mask=torch.ones(150, 270))),
            (ValueError, "mask is given and seqused_k is given, but mask.lengths = 0 lacks 8; make the mask with seqused_k",
             lambda: flash3.attention(q, k, v, mask=source.make(), seqused_k=torch.tensor([3, 4], dtype=torch.int32))),
            (ValueError, "seq_k = 150 but the mask's seq_k = 270; a mask is for calls of one size",
             lambda: flash3.attention(q[0], k[0, :150], v[0, :150], mask=source, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)),
            *((TypeError, "mask is a MaskSource but it must be a flash3.Mask, as make() of what flash3.masks returns gives it",
               lambda call=call: call(*(x.numpy() for x in (q, k, v)), mask=source)) for call in (flash3.attention, flash3.explain)),
            (ValueError, "mask.ranges = 4294967297 but it must be as make() gives it",
             lambda: flash3.attention(*(x.numpy() for x in (q, k, v)), mask=source.make()._replace(ranges=2**32 + 1))),
            (ValueError, "q.ndim = 3 but it must be 4, [batch, seq, heads, dim]", lambda: flash3.attention(q[0], k, v, mask=source)),
            (TypeError, "k is a ndarray but it must be a torch tensor", lambda: flash3.attention(q, k.numpy(), v, mask=source)),
            (ValueError, "seq_q = 150 but the mask's seq_q = 149", lambda: flash3.attention(q, k, v, mask=masks.dense(torch.ones(149, 270).bool()))),
            (ValueError, "mask.batch = 3 but q.shape[0] = 2",
             lambda: flash3.attention(q, k, v, mask=masks.dense(torch.ones(3, 1, 150, 270).bool()))),
            (ValueError, "chunk = -3 but it must be at least 0", lambda: flash3.attention(q, k, v, mask=source, chunk=-3)),
            (ValueError, "seq_q of the mask is not known", lambda: masks.band(causal=True).make()),
            (ValueError, "seq_k of the mask is not known", lambda: masks.band(causal=True).make(150))):
        with pytest.raises(error, match=re.escape(message)):
            call()


def test_arrays_take_one_that_is_made():
    q, k, v = inputs()
    mask = masks.dense(torch.rand(150, 270) < 0.5).make()
    out, lse = flash3.attention(q, k, v, mask=mask, return_lse=True)
    wanted = flash3.attention_backward(out, q, k, v, out, lse, mask=mask, deterministic=True)
    q, k, v = (x.detach().numpy() for x in (q, k, v))
    got = flash3.attention(q, k, v, mask=mask, return_lse=True)
    assert all((a == b.detach().numpy()).all() for a, b in zip(got, (out, lse)))
    gradients = flash3.attention_backward(got[0], q, k, v, *got, mask=mask, deterministic=True)
    assert all((a == b.numpy()).all() for a, b in zip(gradients[:3], wanted))
    assert flash3.supported(q, k, v, mask=mask) and not flash3.supported(q, k, v[:, :9], mask=mask)


def test_sharded_tensors_take_none():
    class DTensor:  # the check goes by the name of torch's class, which takes processes to make
        __module__, __qualname__ = "torch.distributed.tensor", "DTensor"
        device, dtype, requires_grad = torch.device("cpu"), torch.float32, False
    from flash3 import _torch
    mask = masks.dense(torch.ones(150, 270).bool()).make()
    with pytest.raises(NotImplementedError, match="mask is given and q is a DTensor"):
        _torch.run_forward(DTensor(), None, None, {"mask": mask.data, "mask_fields": mask.fields})
    _torch.run_forward(*inputs(), {"mask": mask.data, "mask_fields": mask.fields})


def test_several_devices_take_none():
    """And say why, and what to give instead."""
    distributed = pytest.importorskip("flash3.distributed")
    q = torch.ones(1, 8, 2, 16)
    source = masks.documents(lengths=[3, 5])
    rule = "mask is given but attention over several devices does not take it: .*documents go by cu_seqlens of flash3.distributed.plan"
    for mask in (source, source.make()):
        for call in (distributed.attention, distributed.explain):
            with pytest.raises(NotImplementedError, match=rule):
                call(q, q, q, mask=mask)
    with distributed.context_parallel():
        x = q.transpose(1, 2)
        for call in (lambda: flash3.attention(q, q, q, mask=source), lambda: flash3.attention(q, q, q, mask=source.make()),
                     lambda: flash3.flex_attention(x, x, x, block_mask=source)):
            with pytest.raises(NotImplementedError, match=rule):
                call()
        with pytest.raises(NotImplementedError, match="attn_mask is not None but context_parallel does not take it: .*cu_seqlens of"):
            torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"explain\(\) got an unexpected keyword argument 'masks'"):
        distributed.explain(q, q, q, masks=source)
    with pytest.raises(NotImplementedError, match="mask is given but attention_with_kv_cache over several devices does not take it"):
        distributed.attention_with_kv_cache(q, q, q, torch.ones(1, dtype=torch.int32), mask=source)


def test_questions():
    q, k, v = inputs()
    source = masks.documents(torch.zeros(270, dtype=torch.int32), seq_q=150)
    for mask in (source, source.make()):
        assert flash3.supported(q, k, v, mask=mask) and flash3.supported(q, k, v, mask=mask, backward=True)
        assert not flash3.supported(q[:, :-1], k, v, mask=mask)
        assert "what its mask lists" in flash3.explain(q, k, v, mask=mask)


def test_a_capture_is_refused(monkeypatch):
    """What the GPU's test sees, without one."""
    q, k, v = inputs()
    source = masks.dense(torch.rand(150, 270) < 0.3)
    monkeypatch.setattr(_mask_make, "is_capturing", lambda device: True)
    with pytest.raises(NotImplementedError, match="mask is a MaskSource and a CUDA graph is being captured"):
        flash3.attention(q, k, v, mask=source)
    with pytest.raises(NotImplementedError, match="max_blocks = None and a CUDA graph is being captured"):
        source.make()
    flash3.attention(q, k, v, mask=source.make(max_blocks=0))


def test_compiled():
    q, k, v = (x.requires_grad_() for x in inputs())
    source = masks.dense(torch.rand(2, 4, 150, 270) < 0.3)
    for mask in (source.make(), source):
        compiled = torch.compile(lambda q, k, v: flash3.attention(q, k, v, mask=mask), backend="aot_eager", fullgraph=True)
        out = compiled(q, k, v)
        torch.testing.assert_close(out, flash3.attention(q, k, v, mask=mask))
        got = torch.autograd.grad(out.sum(), (q, k, v))
        torch.testing.assert_close(got, torch.autograd.grad(flash3.attention(q, k, v, mask=mask).sum(), (q, k, v)))


def test_operators():
    q, k, v = inputs()
    mask = masks.dense(torch.rand(150, 270) < 0.3).make()
    out, lse = flash3.attention(q, k, v, mask=mask, return_lse=True)
    given_out, given_lse = torch.empty_like(out), torch.empty_like(lse)
    torch.ops.flash3.forward_out(q, k, v, given_out, given_lse, mask=mask.data, mask_fields=mask.fields)
    torch.testing.assert_close((given_out, given_lse), (out, lse))
    largest = torch.empty(4)
    flash3.attention(q, k, v, mask=mask, max_logits=largest)
    assert (largest <= lse.amax((0, 2)) + 1e-6).all() and largest.isfinite().all()
    with pytest.raises(RuntimeError, match="mask_fields has 2 numbers but it must have the 15 that mask_make gives"):
        torch.ops.flash3.forward(q, k, v, mask=mask.data, mask_fields=[1, 2])
