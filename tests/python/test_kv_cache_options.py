# SPDX-License-Identifier: Apache-2.0
"""attention_with_kv_cache on FP8 caches, for torch tensors and for arrays, against a 16-bit cache of the same numbers; and with trees of drafts."""
import math
import re

import numpy as np
import pytest
import torch

import flash3
import oracle
from cache_cases import descends, random_parents
from flash3 import _torch_kv_cache

FP8 = torch.float8_e4m3fn
BATCH, ROWS, HEADS_Q, HEADS_K, DIM, PAGE = 3, 300, 4, 2, 64, 160
LENGTHS = (280, 0, 129)


def blocks(rows):
    return math.ceil(rows / 128)


def make(device, dtype=torch.bfloat16, *, paged=False, scales="block", seq_q=1, seed=0):
    """(q, FP8 caches, the numbers that they hold, scales and the other arguments)."""
    g = torch.Generator().manual_seed(seed)
    elements, rows = (7, PAGE) if paged else (BATCH, ROWS)
    shapes = {"tensor": (1,), "head": (BATCH, HEADS_K), "block": (elements, HEADS_K, blocks(rows))}
    q = torch.randn(BATCH, seq_q, HEADS_Q, DIM, generator=g).to(dtype)
    caches, numbers, of = {}, {}, {}
    for name in "kv":
        codes = torch.randn(elements, rows, HEADS_K, DIM, generator=g).to(FP8)
        scale = torch.rand(shapes[scales], generator=g) + 0.5
        each = scale[:, :, torch.arange(rows) // 128].transpose(1, 2)[..., None] if scales == "block" else torch.ones(1)
        x = codes.float() * each
        caches[f"{name}_cache"], numbers[f"{name}_cache"], of[f"{name}_scale"] = codes, x, scale
    arguments = dict(seqused_k=torch.tensor(LENGTHS, dtype=torch.int32))
    if paged:
        arguments["page_table"] = torch.randperm(elements, generator=g)[:2 * BATCH].reshape(BATCH, 2).int()
    moved = [{name: x.to(device) for name, x in one.items()} for one in (caches, numbers, of, arguments)]
    return q.to(device), *moved


def as_numbers(numbers, of, scales):
    """What a cache holds, with scales that are not by block too."""
    if scales == "block":
        return numbers
    return {name: x * (of[f"{name[0]}_scale"] if scales == "tensor" else of[f"{name[0]}_scale"][:, None, :, None])
            for name, x in numbers.items()}


@pytest.mark.parametrize("scales", ("tensor", "head", "block"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, FP8), ids=str)
def test_against_a_wide_cache(device, dtype, scales):
    q, caches, numbers, of, arguments = make(device, dtype, scales=scales)
    out, lse = flash3.attention_with_kv_cache(q, **caches, **of, **arguments, return_lse=True)
    assert out.dtype == (torch.bfloat16 if dtype == FP8 else dtype)
    wide = {name: x.cpu() for name, x in as_numbers(numbers, of, scales).items()}
    wanted = flash3.attention_with_kv_cache(q.cpu().float(), **wide, **{n: x.cpu() for n, x in arguments.items()}, return_lse=True)
    rounding = 2**-3 if dtype == FP8 else 2**-8  # of weights to e4m3, as where there is no cache, and of out
    torch.testing.assert_close(out.cpu().float(), wanted[0], atol=2 * rounding, rtol=0)
    torch.testing.assert_close(lse.cpu(), wanted[1], atol=1e-4, rtol=1e-5)


def test_pages_with_scales_of_their_own(device):
    q, caches, numbers, of, arguments = make(device, paged=True, seq_q=3)
    out = flash3.attention_with_kv_cache(q, **caches, **of, **arguments, causal=True)
    wanted = flash3.attention_with_kv_cache(q.cpu().float(), **{n: x.cpu() for n, x in numbers.items()},
                                            **{n: x.cpu() for n, x in arguments.items()}, causal=True)
    torch.testing.assert_close(out.cpu().float(), wanted, atol=2**-7, rtol=0)


@pytest.mark.parametrize("paged", (False, True))
def test_append_quantizes(device, paged):
    """Keys with their embedding, divided by the scale of where they go and rounded once; values without."""
    q, caches, _, of, arguments = make(device, paged=paged, seq_q=2)
    g = torch.Generator().manual_seed(9)
    new = {name: torch.randn(BATCH, 2, HEADS_K, DIM, generator=g).bfloat16().to(device) for name in ("k_new", "v_new")}
    angles = torch.arange(400)[:, None] / 10 ** torch.arange(DIM // 2)[None, :]
    rotary = dict(rotary_cos=angles.cos().float().to(device), rotary_sin=angles.sin().float().to(device))
    before = {name: x.clone() for name, x in caches.items()}
    out = flash3.attention_with_kv_cache(q, **caches, **of, **arguments, **new, **rotary, causal=True)
    assert out.isfinite().all()
    for b, length in enumerate(LENGTHS):
        for n in range(2):
            place = length + n
            at = (int(arguments["page_table"][b, place // PAGE]), place % PAGE) if paged else (b, place)
            cos, sin = angles[place].cos().float(), angles[place].sin().float()
            k = new["k_new"][b, n].cpu().float()
            first, second = k[:, :DIM // 2], k[:, DIM // 2:]
            turned = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
            for name, x in (("k", turned), ("v", new["v_new"][b, n].cpu().float())):
                scale = of[f"{name}_scale"].cpu()[at[0], :, at[1] // 128, None]
                assert torch.equal(caches[f"{name}_cache"][at].cpu().float(), (x / scale).to(FP8).float())
                before[f"{name}_cache"][at] = caches[f"{name}_cache"][at]
    assert all(torch.equal(before[name].view(torch.uint8), caches[name].view(torch.uint8)) for name in caches)  # nothing else


def rotated_call(device, dtype=torch.bfloat16, *, paged, cache_dtype=FP8, seq=130, dim=DIM):
    """(an empty cache and its scales, the other arguments of a call that fills it, what flash3.quantize makes of the keys on a CPU)."""
    g = torch.Generator().manual_seed(2)
    q = torch.randn(BATCH, 3, HEADS_Q, dim, generator=g).to(dtype)
    k, v = (torch.randn(2, BATCH, seq, HEADS_K, dim, generator=g) * 10 ** (torch.rand(2, 1, 1, 1, dim, generator=g))).to(dtype)
    made = flash3.quantize(k=k, v=v, scales="heads", heads_k=HEADS_K, rotate=True, rotation_seed=2**64 - 3)
    shape = (7, PAGE, HEADS_K, dim) if paged else (BATCH, ROWS, HEADS_K, dim)
    caches = {name: torch.zeros(shape, dtype=cache_dtype, device=device) for name in ("k_cache", "v_cache")}
    call = dict(seqused_k=torch.zeros(BATCH, dtype=torch.int32), k_new=k, v_new=v, q=q)
    if cache_dtype == FP8:
        call |= dict(k_scale=made.k_scale, v_scale=made.v_scale)
    if paged:
        call["page_table"] = torch.randperm(7, generator=g)[:2 * BATCH].reshape(BATCH, 2).int()
    return caches, {name: x.to(device) for name, x in call.items()}, made


@pytest.mark.parametrize("dim", (DIM, 80, 256))
@pytest.mark.parametrize("paged", (False, True))
def test_rotation(device, paged, dim):
    """The append writes what quantize() makes, bit for bit; scores are those without, in that call and in one that appends nothing."""
    caches, call, made = rotated_call(device, paged=paged, dim=dim)
    rotation = dict(rotate=True, rotation_seed=2**64 - 3)
    out = flash3.attention_with_kv_cache(**caches, **call, **rotation, causal=True)
    for b in range(BATCH):
        rows = caches["k_cache"][call["page_table"][b].long()].flatten(0, 1) if paged else caches["k_cache"][b]
        assert torch.equal(rows[:130].cpu().view(torch.uint8), made.k[b].view(torch.uint8))
    plain = flash3.attention(*(call[name].cpu().float() for name in ("q", "k_new", "v_new")), causal=True)
    assert (out.cpu().float() - plain).norm() < 0.1 * plain.norm()
    later = {name: x for name, x in call.items() if name not in ("k_new", "v_new", "seqused_k")}
    later["seqused_k"] = call["seqused_k"] + 130
    assert torch.equal(flash3.attention_with_kv_cache(**caches, **later, **rotation, causal=True), out)
    schedule = flash3.kv_cache_schedule(**caches, **later, **rotation, causal=True)
    assert torch.equal(flash3.attention_with_kv_cache(**caches, **later, **rotation, causal=True, schedule=schedule), out)
    wrong = flash3.attention_with_kv_cache(**caches, **later, rotate=True, rotation_seed=4, causal=True)
    for other in (flash3.attention_with_kv_cache(**caches, **later, causal=True), wrong):  # q as it comes, or by another matrix
        assert (other.cpu().float() - plain).norm() > 0.5 * plain.norm()


def test_rotation_of_a_wide_cache_and_of_arrays(device):
    caches, call, _ = rotated_call(device, paged=False, cache_dtype=torch.bfloat16)
    plain_caches = {name: x.clone() for name, x in caches.items()}
    out, lse = flash3.attention_with_kv_cache(**caches, **call, rotate=True, return_lse=True)
    plain, plain_lse = flash3.attention_with_kv_cache(**plain_caches, **call, return_lse=True)
    assert torch.equal(caches["v_cache"], plain_caches["v_cache"]) and not torch.equal(caches["k_cache"], plain_caches["k_cache"])
    assert (out - plain).float().norm() < 0.05 * plain.float().norm()
    assert (lse - plain_lse).abs().max() < 0.05 * plain_lse.abs().max()
    if device == "cpu":
        host = {name: (x.float() if x.is_floating_point() else x).numpy() for name, x in {**caches, **call}.items()}
        wide = flash3.attention_with_kv_cache(**host, rotate=True)
        np.testing.assert_allclose(wide, plain.float(), atol=0.05 * plain.float().abs().max())


def test_rotation_compiles(device):
    caches, call, _ = rotated_call(device, paged=True)
    q = call.pop("q")
    wanted = flash3.attention_with_kv_cache(q, **caches, **call, rotate=True, rotation_seed=3)
    attend = torch.compile(lambda q: flash3.attention_with_kv_cache(q, **caches, **call, rotate=True, rotation_seed=3), backend="eager",
                           fullgraph=True)
    assert torch.equal(attend(q), wanted)


@pytest.mark.parametrize("q_dtype", (torch.float16, FP8))
def test_a_schedule_and_arrays(device, q_dtype):
    q, caches, _, of, arguments = make(device, q_dtype)
    wanted = flash3.attention_with_kv_cache(q, **caches, **of, **arguments)
    schedule = flash3.kv_cache_schedule(q, **caches, **of, **arguments)
    assert torch.equal(flash3.attention_with_kv_cache(q, **caches, **of, **arguments, schedule=schedule), wanted)
    if device == "cpu" and q_dtype == torch.float16:
        host = {name: flash3.arrays.E4M3(x.view(torch.uint8).numpy()) if x.dtype == FP8 else x.numpy()
                for name, x in {**caches, **of, **arguments}.items()}
        out = flash3.attention_with_kv_cache(q.half().numpy(), **host)
        np.testing.assert_allclose(out.astype(np.float32), wanted.float(), atol=2e-2)


def test_compile(device):
    q, caches, _, of, arguments = make(device, FP8)
    attend = torch.compile(lambda q: flash3.attention_with_kv_cache(q, **caches, **of, **arguments), backend="eager", fullgraph=True)
    assert torch.equal(attend(q), flash3.attention_with_kv_cache(q, **caches, **of, **arguments))


@pytest.mark.parametrize("change,error,message", (
    (dict(k_scale=torch.ones(BATCH, HEADS_K, 2)), ValueError, "k_scale.shape[2] = 2 but k_cache.shape[1] = 300"),
    (dict(k_scale=torch.ones(1, dtype=torch.float16)), TypeError, "k_scale.dtype = float16 but it must be float32"),
    (dict(q_scale=torch.ones(1)), ValueError, "q_scale is given but q.dtype = bfloat16"),
    (dict(k_new=torch.zeros(BATCH, 1, HEADS_K, DIM), v_new=torch.zeros(BATCH, 1, HEADS_K, DIM)), TypeError,
     "k_new.dtype = float32 but k_cache.dtype = float8_e4m3fn and q.dtype = bfloat16"),
    (dict(v_cache=torch.zeros(BATCH, ROWS, HEADS_K, DIM).bfloat16()), TypeError, "v_cache.dtype = bfloat16"),
    (dict(q=torch.zeros(BATCH, 1, HEADS_Q, DIM).to(FP8), rotate=True), NotImplementedError, "rotate = True but q.dtype = float8_e4m3fn"),
    (dict(k_new=torch.zeros(BATCH, 1, HEADS_K, DIM).to(FP8), v_new=torch.zeros(BATCH, 1, HEADS_K, DIM).to(FP8), rotate=True),
     NotImplementedError, "rotate = True but k_new.dtype = float8_e4m3fn; a rotated tensor must have more than 8 bits"),
    (dict(rotate=True, rotation_seed=-1), ValueError, "rotation_seed = -1 but it must be from 0 to 2**64 - 1"),
), ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_errors(change, error, message):
    q, caches, _, of, arguments = make("cpu")
    with pytest.raises(error, match=re.escape(message)):
        flash3.attention_with_kv_cache(**{**dict(q=q), **caches, **of, **arguments, **change})


# attention_with_kv_cache(tree_mask=) against the definition on each sequence's own keys, and flash3.tree_mask().

TREE_PAGE = 16
TREE_LENGTHS = (70, 0, 3, 15)  # in the cache, before the drafts


def words_of(seen):
    return [sum(1 << j for j, sees in enumerate(row) if sees) for row in seen.tolist()]


def signed(words):
    return [w - 2**64 if w >= 2**63 else w for w in words]


class Drafts:
    """A call whose new keys are the drafts."""

    def __init__(self, device="cpu", dtype=torch.bfloat16, count=7, heads=(4, 2), dim=32, packed=False):
        g = torch.Generator().manual_seed(count)
        batch, pages = len(TREE_LENGTHS), 40

        def random(*shape):
            return torch.randn(*shape, generator=g).to(dtype).to(device)

        self.counts = [max(1, count - 2 * b) for b in range(batch)] if packed else [count] * batch
        self.seen = [descends(random_parents(g, n)) for n in self.counts]
        self.q = [random(n, heads[0], dim) for n in self.counts]
        self.new = [(random(n, heads[1], dim), random(n, heads[1], dim)) for n in self.counts]
        k, v = random(pages, TREE_PAGE, heads[1], dim), random(pages, TREE_PAGE, heads[1], dim)
        table = torch.randperm(pages, generator=g)[:batch * 9].reshape(batch, 9).to(torch.int32).to(device)
        self.old = [[x[table[b].long()].flatten(0, 1)[:n] for x in (k, v)] for b, n in enumerate(TREE_LENGTHS)]
        join = torch.cat if packed else torch.stack
        mask = [torch.tensor(signed(words_of(seen)), dtype=torch.int64) for seen in self.seen]
        self.arguments = dict(q=join(self.q), k_cache=k, v_cache=v, page_table=table, tree_mask=join(mask).to(device),
                              seqused_k=torch.tensor(TREE_LENGTHS, dtype=torch.int32, device=device),
                              k_new=join([k for k, _ in self.new]), v_new=join([v for _, v in self.new]))
        if packed:
            ends = torch.tensor([0, *np.cumsum(self.counts)], dtype=torch.int32, device=device)
            self.arguments.update(cu_seqlens_q=ends, cu_seqlens_k_new=ends, max_seqlen_q=max(self.counts))

    def check(self, out, lse):
        end = 0
        for b, n in enumerate(self.counts):
            rows = slice(end, end := end + n)
            got, got_lse = (out[rows], lse[:, rows]) if out.ndim == 3 else (out[b], lse[b])
            k, v = (torch.cat([old, new]) for old, new in zip(self.old[b], self.new[b]))
            bias = torch.cat([torch.ones(n, TREE_LENGTHS[b], dtype=torch.bool), self.seen[b]], -1).to(got.device)
            exact, exact_lse = self.attend(self.q[b].double(), k.double(), v.double(), bias)
            naive, naive_lse = self.attend(self.q[b], k, v, bias)
            oracle.assert_close(got, exact, naive)
            oracle.assert_close(got_lse.T, exact_lse.T, naive_lse.T, "lse")

    @staticmethod
    def attend(q, k, v, seen):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~seen, -math.inf)
        lse = torch.logsumexp(scores.double(), -1)
        return torch.einsum("hij,jhd->ihd", torch.softmax(scores, -1), v), lse


@pytest.mark.parametrize("packed", (False, True), ids=("padded", "packed"))
@pytest.mark.parametrize("count", (1, 2, 7, 16, 40, 64))
def test_drafts_are_appended_and_verified(device, count, packed):
    call = Drafts(device, count=count, packed=packed)
    call.check(*flash3.attention_with_kv_cache(**call.arguments, return_lse=True))


def test_operators_and_the_way_around_them_agree(device, monkeypatch):
    call = Drafts(device)
    schedule = flash3.kv_cache_schedule(**call.arguments)
    wanted = flash3.attention_with_kv_cache(**call.arguments)
    assert torch.equal(flash3.attention_with_kv_cache(**call.arguments, schedule=schedule), wanted)
    monkeypatch.setattr(_torch_kv_cache, "eager", None)
    assert torch.equal(flash3.attention_with_kv_cache(**call.arguments), wanted)
    compiled = torch.compile(lambda a: flash3.attention_with_kv_cache(**a), backend="eager", fullgraph=True)
    assert torch.equal(compiled(call.arguments), wanted)
    with pytest.raises(ValueError, match="schedule.key = "):
        flash3.attention_with_kv_cache(**{**call.arguments, "tree_mask": None}, schedule=schedule)


def test_opcheck(device):
    a = Drafts(device).arguments
    tensors = [a.pop(name) for name in ("q", "k_cache", "v_cache", "k_new", "v_new")]
    torch.library.opcheck(torch.ops.flash3.attention_with_kv_cache_append.default, tensors, a)


def test_arrays():
    call = Drafts(dtype=torch.float32)
    out, lse = flash3.attention_with_kv_cache(**{name: x.numpy() for name, x in call.arguments.items()}, return_lse=True)
    call.check(torch.from_numpy(out), torch.from_numpy(lse))


def test_a_chain_is_causal(device):
    call = Drafts(device, count=9)
    chain = flash3.tree_mask(torch.arange(-1, 8, device=device)).expand(len(TREE_LENGTHS), -1)
    out = flash3.attention_with_kv_cache(**{**call.arguments, "tree_mask": chain})
    call.arguments.pop("tree_mask")
    torch.testing.assert_close(out, flash3.attention_with_kv_cache(**call.arguments, causal=True))


def test_plain_tensors(device):
    """Drafts that are the last keys of tensors without a cache."""
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, n, 2, 32, generator=g).bfloat16().to(device) for n in (5, 300, 300))
    parents = random_parents(g, 5)
    mask = flash3.tree_mask(torch.tensor([parents], device=device))
    out = flash3.attention_with_kv_cache(q, k, v, tree_mask=mask)
    seen = torch.cat([torch.ones(5, 295, dtype=torch.bool), descends(parents)], -1).to(device)
    exact, naive = (Drafts.attend(*(x[0].to(dtype) for x in (q, k, v)), seen)[0] for dtype in (torch.float64, torch.bfloat16))
    oracle.assert_close(out[0], exact, naive)


@pytest.mark.parametrize("changes, error, message", (
    ({"causal": True}, ValueError, "tree_mask is given and causal = 1; tree_mask is the mask of the call"),
    ({"window": (3, 0)}, ValueError, "tree_mask is given and window = 1"),
    ({"tree_mask": torch.zeros(4, 6, dtype=torch.int64)}, ValueError, "tree_mask.shape[1] = 6 but q.shape[1] = 7"),
    ({"tree_mask": torch.zeros(4, 7, dtype=torch.int32)}, TypeError, "tree_mask.dtype = int32 but it must be int64; tree_mask that is not given is None")),
    ids=("causal", "window", "shape", "dtype"))
def test_what_breaks_a_rule(device, changes, error, message):
    arguments = {**Drafts(device, torch.bfloat16 if device == "cuda" else torch.float32).arguments, **changes}
    arguments["tree_mask"] = arguments["tree_mask"].to(device)
    with pytest.raises(error, match=re.escape(message)):
        flash3.attention_with_kv_cache(**arguments)
    if device == "cpu":
        with pytest.raises(error, match=re.escape(message)):
            flash3.attention_with_kv_cache(**{name: x.numpy() if torch.is_tensor(x) else x for name, x in arguments.items()})


@pytest.mark.parametrize("count", (1, 2, 5, 33, 64))
def test_words_of_a_tree(count):
    g = torch.Generator().manual_seed(count)
    parents = [random_parents(g, count) for _ in range(3)]
    # A parent may come after its children too.
    order = torch.randperm(count, generator=g).tolist()
    parents.append([0] * count)
    for i, parent in enumerate(parents[0]):
        parents[-1][order[i]] = -1 if parent < 0 else order[parent]
    seen = torch.stack([descends(one) for one in parents])
    wanted = [signed(words_of(one)) for one in seen]
    made = [flash3.tree_mask(torch.tensor(parents)), flash3.tree_mask(torch.tensor(parents, dtype=torch.int32)),
            flash3.tree_mask(parents), flash3.tree_mask(np.array(parents, np.int8)), flash3.tree_mask(seen=seen),
            flash3.tree_mask(seen=seen.float().numpy())]
    for words in made:
        assert str(words.dtype).endswith("int64") and words.tolist() == wanted
    assert [torch.is_tensor(words) for words in made] == [True, True, False, False, True, False]
    assert flash3.tree_mask(parents[0]).tolist() == wanted[0]


def test_words_of_nothing():
    assert flash3.tree_mask([]).shape == (0,) and flash3.tree_mask(torch.zeros(3, 0, dtype=torch.int64)).shape == (3, 0)
    assert flash3.tree_mask(seen=np.zeros((2, 0, 0), bool)).shape == (2, 0)


@pytest.mark.parametrize("arguments, error, message", (
    ({}, TypeError, "takes parents or seen"), ({"parents": [-1], "seen": [[1]]}, TypeError, "takes parents or seen"),
    ({"parents": 3}, ValueError, "parents.ndim = 0 but it must be at least 1"),
    ({"parents": np.zeros(65, int)}, ValueError, "parents.shape[-1] = 65 but it must be at most 64"),
    ({"seen": [1]}, ValueError, "seen.ndim = 1 but it must be at least 2"),
    ({"seen": [[1, 1]]}, ValueError, "seen.shape[-2] = 1 but seen.shape[-1] = 2")), ids=lambda x: None)
def test_what_is_no_tree(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        flash3.tree_mask(**arguments)
