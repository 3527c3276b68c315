# SPDX-License-Identifier: Apache-2.0
"""attention_with_kv_cache(tree_mask=) against the definition on each sequence's own keys, and flash3.tree_mask()."""
import math
import re

import numpy as np
import pytest
import torch

import flash3
import oracle
from cache_cases import descends, random_parents
from flash3 import _torch_kv_cache

PAGE = 16
LENGTHS = (70, 0, 3, 15)  # in the cache, before the drafts


def words_of(seen):
    return [sum(1 << j for j, sees in enumerate(row) if sees) for row in seen.tolist()]


def signed(words):
    return [w - 2**64 if w >= 2**63 else w for w in words]


class Drafts:
    """A call whose new keys are the drafts."""

    def __init__(self, device="cpu", dtype=torch.bfloat16, count=7, heads=(4, 2), dim=32, packed=False):
        g = torch.Generator().manual_seed(count)
        batch, pages = len(LENGTHS), 40

        def random(*shape):
            return torch.randn(*shape, generator=g).to(dtype).to(device)

        self.counts = [max(1, count - 2 * b) for b in range(batch)] if packed else [count] * batch
        self.seen = [descends(random_parents(g, n)) for n in self.counts]
        self.q = [random(n, heads[0], dim) for n in self.counts]
        self.new = [(random(n, heads[1], dim), random(n, heads[1], dim)) for n in self.counts]
        k, v = random(pages, PAGE, heads[1], dim), random(pages, PAGE, heads[1], dim)
        table = torch.randperm(pages, generator=g)[:batch * 9].reshape(batch, 9).to(torch.int32).to(device)
        self.old = [[x[table[b].long()].flatten(0, 1)[:n] for x in (k, v)] for b, n in enumerate(LENGTHS)]
        join = torch.cat if packed else torch.stack
        mask = [torch.tensor(signed(words_of(seen)), dtype=torch.int64) for seen in self.seen]
        self.arguments = dict(q=join(self.q), k_cache=k, v_cache=v, page_table=table, tree_mask=join(mask).to(device),
                              seqused_k=torch.tensor(LENGTHS, dtype=torch.int32, device=device),
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
            bias = torch.cat([torch.ones(n, LENGTHS[b], dtype=torch.bool), self.seen[b]], -1).to(got.device)
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
    chain = flash3.tree_mask(torch.arange(-1, 8, device=device)).expand(len(LENGTHS), -1)
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
