# SPDX-License-Identifier: Apache-2.0
"""flash3.flex_attention against torch's: its mask_mods, BlockMasks, results and refusals."""
import functools
import gc
import re
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import (AuxOutput, AuxRequest, BlockMask, and_masks, create_block_mask, create_mask,
                                               flex_attention as torch_flex, noop_mask, or_masks)

import oracle
from flash3 import flex_attention, _flex, _mask_kept, _mask_kinds as kinds, _mask_mods as mods, _mask_shapes as shapes, _sdpa

torch_flex_module = _flex._torch_flex


@pytest.fixture
def counted(monkeypatch):
    """How often a BlockMask is brought into flash3's form."""
    made = []
    original = _flex.from_block_mask

    def counting(*arguments):
        made.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(_flex, "from_block_mask", counting)
    return made


def random(batch=2, heads=4, heads_k=2, seq_q=200, seq_k=200, dim=32, dim_v=None, requires_grad=False):
    g = torch.Generator().manual_seed(seq_q)
    return [torch.randn(batch, h, s, d, generator=g, requires_grad=requires_grad)
            for h, s, d in ((heads, seq_q, dim), (heads_k, seq_k, dim), (heads_k, seq_k, dim_v or dim))]


def check(q, k, v, seen, out, lse=None, scale=None):
    """Against the definition, on [batch, heads, seq, dim]; seen: [batch or 1, heads or 1, seq_q, seq_k] bool."""
    tensors = [x.detach().transpose(1, 2) for x in (q, k, v)]
    exact, exact_lse = oracle.exact(*tensors, seen=seen, softmax_scale=scale)
    naive, naive_lse = oracle.naive(*tensors, seen=seen, softmax_scale=scale)
    oracle.assert_close(out.detach().transpose(1, 2), exact, naive)
    if lse is not None:
        oracle.assert_close(lse.detach(), exact_lse, naive_lse, "lse")


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k <= 50)


def prefix(b, h, q, k):
    return or_masks(lambda b, h, q, k: k < 70, causal)(b, h, q, k)


DOCUMENT_IDS = torch.arange(200) // 45


def document(b, h, q, k):
    return and_masks(causal, lambda b, h, q, k: DOCUMENT_IDS[q] == DOCUMENT_IDS[k])(b, h, q, k)


def natten(b, h, q, k):  # 10 × 20
    return ((q // 20).clamp(2, 7) - k // 20).abs().le(2) & ((q % 20).clamp(3, 16) - k % 20).abs().le(3)


def by_head(b, h, q, k):
    return (q >= k) & (q - k < 20 * (h + 1)) & (k >= 10 * b)


def scattered(b, h, q, k):
    return (q * 7 + k * 13) % 5 < 2


def nothing_for_some(b, h, q, k):
    return (q >= k) & (q % 3 > 0)


@pytest.mark.parametrize("fn", (causal, window, prefix, document, natten, by_head, scattered, nothing_for_some), ids=lambda fn: fn.__name__)
def test_against_torch(fn):
    q, k, v = random(dim_v=16)
    batch, heads = (2, 4) if fn is by_head else (None, None)
    block_mask = create_block_mask(fn, batch, heads, 200, 200, "cpu", BLOCK_SIZE=64)
    out, lse = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_lse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = torch_flex(q, k, v, block_mask=block_mask, enable_gqa=True)
    assert out.shape == wanted.shape and out.dtype == wanted.dtype and lse.shape == (2, 4, 200) and lse.dtype == torch.float32
    torch.testing.assert_close(out, wanted)
    seen = create_mask(fn, 2, 4, 200, 200, "cpu")
    check(q, k, v, seen, out, lse)
    assert torch.equal(lse == -torch.inf, ~seen.any(-1)) and torch.equal(out.eq(0).all(-1), ~seen.any(-1))


def test_what_it_returns():
    q, k, v = random(heads_k=4, seq_k=130)
    out = flex_attention(q, k, v)
    check(q, k, v, None, out)
    again, lse = flex_attention(q, k, v, scale=0.3, return_lse=True)
    check(q, k, v, torch.ones((), dtype=torch.bool), again, lse, scale=0.3)
    of_aux, aux = flex_attention(q, k, v, scale=0.3, return_aux=AuxRequest(lse=True))
    assert isinstance(aux, AuxOutput) and torch.equal(of_aux, again) and torch.equal(aux.lse, lse) and aux.max_scores is None
    assert flex_attention(q, k, v, return_aux=AuxRequest())[1] == AuxOutput(None, None)
    assert torch.equal(flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, "BACKEND": "AUTO"}), out)


def test_gradients():
    q, k, v = random(requires_grad=True)
    block_mask = create_block_mask(by_head, 2, 4, 200, 200, "cpu")
    out, lse = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    double = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact, exact_lse = oracle.naive(*(x.transpose(1, 2) for x in double), seen=create_mask(by_head, 2, 4, 200, 200, "cpu"))
    wanted = torch.autograd.grad((exact.transpose(1, 2), exact_lse), double, (dout.double(), dlse.double()))
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_masks_of_its_own():
    q, k, v = random()
    seen = create_mask(window, None, None, 200, 200, "cpu")
    for source in (kinds.band(causal=True, window=(50, None)), kinds.dense(seen)):
        check(q, k, v, seen, flex_attention(q, k, v, block_mask=source, enable_gqa=True))
        check(q, k, v, seen, flex_attention(q, k, v, block_mask=source.make(200, 200), enable_gqa=True))


@pytest.mark.parametrize("name", ("band", "documents", "prefix", "ranges", "dense", "blocks", "bits", "neighborhood", "tiles"))
def test_masks_that_are_made(name):
    """What the library makes of each kind of source is what the source means."""
    g = torch.Generator().manual_seed(7)
    source = {
        "band": lambda: kinds.band(causal=True, chunk=70),
        "documents": lambda: kinds.documents(lengths=[[50, 100, 50], [1, 0, 199]], causal=True),
        "prefix": lambda: kinds.prefix([30, 150], 200, 200),
        "ranges": lambda: kinds.ranges(torch.randint(-5, 230, (1, 4, 16, 200), generator=g), window=(120, 40)),
        "dense": lambda: kinds.dense(torch.rand(2, 4, 200, 200, generator=g) < 0.3),
        "blocks": lambda: kinds.blocks(torch.rand(2, 1, 5, 9, generator=g) < 0.5, None, 40, 24, causal=True),
        "bits": lambda: ~(mods.from_mask_mod(scattered, None, None, 200, 200, "cpu") & kinds.band(window=(60, 60))),
        "neighborhood": lambda: shapes.neighborhood((10, 20), (5, 4), (2, 1), (1, 2)),
        "tiles": lambda: shapes.tiles((8, 24), (4, 4), (1, 3), text=8)}[name]()
    q, k, v = random()
    out, lse = flex_attention(q, k, v, block_mask=source, enable_gqa=True, return_lse=True)
    check(q, k, v, source.sized(200, 200).to_dense(2, 4), out, lse)


def test_compiled():
    """A mask that is made is an argument of a whole graph; a BlockMask is brought over outside of it."""
    q, k, v = random()
    block_mask = create_block_mask(window, None, None, 200, 200, "cpu")
    wanted = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    compiled = torch.compile(lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), backend="eager")
    assert torch.equal(compiled(q, k, v, block_mask), wanted)
    whole = torch.compile(lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), backend="eager", fullgraph=True)
    assert torch.equal(whole(q, k, v, mods.from_block_mask(block_mask).make()), wanted)
    assert torch.equal(whole(q, k, v, None), flex_attention(q, k, v, enable_gqa=True))
    with_score_mod = torch.compile(lambda q, k, v: flex_attention(q, k, v, renamed, enable_gqa=True), backend="eager", fullgraph=True)
    assert torch.equal(with_score_mod(q, k, v), flex_attention(q, k, v, enable_gqa=True))


def test_one_batch_of_keys_for_all():
    q, k, v = random(batch=3)
    block_mask = create_block_mask(by_head, 3, 4, 200, 200, "cpu")
    out = flex_attention(q, k[:1], v[:1], block_mask=block_mask, enable_gqa=True)
    check(q, k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1), create_mask(by_head, 3, 4, 200, 200, "cpu"), out)


def test_a_block_mask_of_nothing():
    """What torch makes in place of None."""
    q, k, v = random()
    block_mask = torch_flex_module._create_empty_block_mask(q, k)
    assert torch.equal(flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True), flex_attention(q, k, v, enable_gqa=True))


# ---- what torch does ----

def renamed(s, batch, head, i, j):
    return s


def test_identity_is_recognised():
    for fn in (None, lambda score, b, h, q, k: score, renamed, torch_flex_module._identity):
        assert _flex.is_identity(fn)
    slope = torch.ones(4)
    for fn in (lambda score, b, h, q, k: score * 2, lambda score, b, h, q, k: q, lambda score, b, h, q, k: score + slope[h],
               lambda *arguments: arguments, functools.partial(renamed), type("Mod", (), {"__call__": renamed})(), Mod().itself):
        assert not _flex.is_identity(fn)


@pytest.mark.parametrize("named, reason", (
    ({"score_mod": lambda score, b, h, q, k: score * (q - k)}, "score_mod multiplies the score by what is no number"),
    ({"kernel_options": {"BACKEND": "TRITON"}}, "kernel_options['BACKEND'] = 'TRITON'")), ids=("score_mod", "backend"))
def test_calls_left_to_torch(monkeypatch, named, reason):
    q, k, v = random(heads_k=4)
    asked = []

    def recorded(*arguments, **others):
        asked.append((arguments, others))
        return "torch's"

    monkeypatch.setattr(torch_flex_module, "flex_attention", recorded)
    monkeypatch.setattr(_sdpa, "_said", set())
    block_mask = create_block_mask(causal, None, None, 200, 200, "cpu")
    with pytest.warns(UserWarning, match=re.escape("flash3.flex_attention leaves this call to torch: ") + ".*" + re.escape(reason)):
        assert flex_attention(q, k, v, block_mask=block_mask, scale=0.5, **named) == "torch's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert flex_attention(q, k, v, block_mask=block_mask, scale=0.5, **named) == "torch's"
    arguments, others = asked[-1]
    assert arguments == (q, k, v, named.get("score_mod"), block_mask, 0.5, False, False, named.get("kernel_options")) and others == {}
    with pytest.raises(NotImplementedError, match=re.escape("block_mask is a MaskSource, which torch does not take")):
        flex_attention(q, k, v, block_mask=kinds.band(causal=True), **named)


def test_max_scores_are_torchs(monkeypatch):
    q, k, v = random(heads_k=4)
    monkeypatch.setattr(torch_flex_module, "flex_attention", lambda *arguments, return_aux: return_aux)
    monkeypatch.setattr(_sdpa, "_said", set())
    with pytest.warns(UserWarning, match="max_scores"):
        assert flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True)) == AuxRequest(max_scores=True)


def test_a_score_mod_is_computed_by_torch():
    q, k, v = random(heads_k=4)
    factors = torch.tensor([0.5, 0.25, 0.1, 0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = flex_attention(q, k, v, lambda score, b, h, i, j: score * factors[h])
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q * factors[:, None, None], k, v))


# ---- masks that are kept ----

def test_a_block_mask_is_brought_over_once(counted):
    q, k, v = random()
    block_mask = create_block_mask(document, None, None, 200, 200, "cpu")
    outs = [flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True) for _ in range(3)]
    assert len(counted) == 1 and torch.equal(outs[0], outs[2])
    flex_attention(q[:1], k[:1], v[:1], block_mask=block_mask, enable_gqa=True)
    assert len(counted) == 2
    gc.collect()
    before = len(_mask_kept._made)
    del block_mask
    counted.clear()
    gc.collect()
    assert len(_mask_kept._made) == before - 1


def test_what_has_changed_is_seen(counted):
    q, k, v = random(heads_k=4)
    ids = DOCUMENT_IDS.clone()
    bound = 30

    def near(b, h, i, j):
        return (i - j).abs() < bound

    def here(b, h, i, j):
        return (ids[i] == ids[j]) & near(b, h, i, j)

    lists = torch.full((1, 1, 2), 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32).expand(1, 1, 2, 2).contiguous()
    block_mask = BlockMask.from_kv_blocks(*lists, mask_mod=here, seq_lengths=(200, 200))

    def again():
        out = flex_attention(q, k, v, block_mask=block_mask)
        seen = create_mask(block_mask.mask_mod, 1, 1, 200, 200, "cpu")
        seen[..., 128:] &= bool(block_mask.kv_num_blocks[0, 0, 0] > 1)
        check(q, k, v, seen, out)
        return len(counted)

    assert again() == again() == 1
    ids[50:] += 3  # a tensor that the mask_mod has
    ids[100:120] = 0
    assert again() == again() == 2
    ids.data = ids.clone().fill_(1)  # which torch does not count as a change
    counted.pop()
    assert again() == again() == 2
    bound = 12  # a number in a cell of a function in a cell
    assert again() == again() == 3
    block_mask.kv_num_blocks -= 1  # the lists
    assert again() == again() == 4
    block_mask.kv_indices = old = block_mask.kv_indices.clone()  # another tensor of the same numbers
    assert again() == again() == 5 and old is block_mask.kv_indices
    block_mask.mask_mod = causal
    assert again() == again() == 6
    block_mask.mask_mod = (lambda n: lambda b, h, i, j: functools.reduce(torch.maximum, (i, j)) >= j + n)(torch.zeros(()))
    assert again() == again() == 7


class Mod:
    """A mask_mod with a state of its own."""

    def __init__(self):
        self.bound = 9

    def __call__(self, b, h, i, j):
        return (i - j).abs() < self.bound

    def itself(self, score, b, h, i, j):
        return self


def test_what_cannot_be_seen_is_not_kept(counted):
    q, k, v = random(heads_k=4)
    mod = Mod()
    for fn in (mod, lambda b, h, i, j: (i - j).abs() < mod.bound, lambda b, h, i, j: (i - j).abs() < vars(mod).get("bound")):
        counted.clear()
        mod.bound = 9
        block_mask = BlockMask.from_kv_blocks(torch.full((1, 1, 2), 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32).expand(1, 1, 2, 2),
                                              mask_mod=fn, seq_lengths=(200, 200))
        for bound in (9, 40):
            mod.bound = bound
            check(q, k, v, create_mask(lambda b, h, i, j: fn(b, h, i, j), 1, 1, 200, 200, "cpu"), flex_attention(q, k, v, block_mask=block_mask))
        assert len(counted) == 2


# ---- errors ----

def block_mask_of(seq_q=200, seq_k=200, batch=None):
    return create_block_mask(noop_mask, batch, None, seq_q, seq_k, "cpu")


@pytest.mark.parametrize("change, error, message", (
    (lambda q, k, v: flex_attention(q.numpy(), k, v), TypeError, "query is a ndarray but it must be a torch tensor"),
    (lambda q, k, v: flex_attention(q[0], k, v), ValueError, "query.ndim = 3 but it must be 4, [batch, heads, seq, dim]"),
    (lambda q, k, v: flex_attention(q, k, v), ValueError, "query.shape[1] = 4 but key.shape[1] = 2; without enable_gqa they must be the same"),
    (lambda q, k, v: flex_attention(q, k, v[:, :1], enable_gqa=True), ValueError, "key.shape = (2, 2, 200, 32) but value.shape = (2, 1, 200, 32)"),
    (lambda q, k, v: flex_attention(q, k[:1], v[:1], enable_gqa=True), ValueError, "query.shape[0] = 2 but key.shape[0] = 1"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask_of(100), enable_gqa=True), ValueError,
     "query.shape[2] = 200 but block_mask.seq_lengths[0] = 100"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask_of(200, 300), enable_gqa=True), ValueError,
     "key.shape[2] = 200 but block_mask.seq_lengths[1] = 300"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask_of(batch=3), enable_gqa=True), ValueError,
     "query.shape[0] = 2 but block_mask.kv_num_blocks.shape[0] = 3"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask_of().to("meta"), enable_gqa=True), ValueError,
     "block_mask's device = meta but query.device = cpu"),
    (lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, return_lse=True, return_aux=AuxRequest()), ValueError,
     "return_lse = True and return_aux is given")), ids=lambda x: None)
def test_errors(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        change(*random())
