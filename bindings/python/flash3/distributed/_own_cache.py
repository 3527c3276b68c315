# SPDX-License-Identifier: Apache-2.0
"""A rank's rows of a KV cache whose tokens are distributed in turn: what is appended to them, and which of them a query sees."""
from typing import NamedTuple, Optional

import torch

from .._kv_cache import attention_with_kv_cache as attend
from .._library import FP8_BLOCK
from ._geometry import Mask


def local_seqlens(seqlens, rank, ranks, interleave=1):
    """How many of a sequence's first `seqlens` tokens a rank holds, where each in turn gets `interleave` tokens.

    seqlens: an integer, or a tensor of them; token i is rank (i // interleave) % ranks's.
    """
    whole, rest = seqlens // (ranks * interleave), seqlens % (ranks * interleave) - rank * interleave
    return whole * interleave + (rest.clamp(0, interleave) if torch.is_tensor(rest) else min(max(rest, 0), interleave))


def cache_rows(positions, ranks, interleave=1):
    """(rank, row): whose cache holds the tokens at these places of their sequences, and in which of its rows."""
    round_tokens = ranks * interleave
    return positions // interleave % ranks, positions // round_tokens * interleave + positions % interleave


class Deal(NamedTuple):
    """Which tokens are this rank's: token i of a sequence is rank (i // interleave) % ranks's."""
    rank: int
    ranks: int
    interleave: int

    def lengths(self, counts):
        """How many of so many first tokens are own, as a call takes them."""
        return local_seqlens(counts, *self).to(torch.int32).flatten().contiguous()

    def places(self, rows):
        """The places in their sequences of the tokens in these rows of the own cache; negative ones of negative rows."""
        inside = rows % self.interleave
        return rows // self.interleave * (self.ranks * self.interleave) + self.rank * self.interleave + inside


class OwnCache(NamedTuple):
    """This rank's cache, and what tells where in it a sequence's keys are."""
    k: torch.Tensor
    v: torch.Tensor
    page_table: Optional[torch.Tensor]
    batch_idx: Optional[torch.Tensor]
    k_scale: Optional[torch.Tensor]
    v_scale: Optional[torch.Tensor]

    def options(self, batch, count):
        """The options of a call with `count` sequences for each one of the batch, on the keys of that one."""
        batch_idx = self.batch_idx
        if batch_idx is None and self.page_table is None and count != 1:
            batch_idx = torch.arange(batch, dtype=torch.int32, device=self.k.device)
        scales = (of_each(x, count) if x is not None and x.dim() == 2 else x for x in (self.k_scale, self.v_scale))
        return {"page_table": of_each(self.page_table, count), "cache_batch_idx": of_each(batch_idx, count),
                **dict(zip(("k_scale", "v_scale"), scales))}


class New(NamedTuple):
    """The tokens that all ranks append together, each its own ones; tables: the rotary embedding's, and how they are read."""
    k: torch.Tensor
    v: Optional[torch.Tensor]
    tables: dict
    positions: torch.Tensor  # [batch], of the first of them

    @property
    def count(self):
        return self.k.shape[1]

    def rotary_of(self, positions):
        """The options by which a call embeds queries at these positions, which it does beside appending: here nothing."""
        if not self.tables:
            return {}
        none = {name: None if x is None else x.new_empty((positions.numel(), 0, *x.shape[2:]))
                for name, x in (("k_new", self.k), ("v_new", self.v))}
        return {**none, **self.tables, "rotary_offsets": positions.to(torch.int32).flatten().contiguous()}


def of_each(x, count):
    """For `count` sequences in the place of each one, what x has for that one."""
    return x if x is None or count == 1 else x.repeat_interleave(count, 0)


def steps(first, count):
    """[batch, count]: the places, or positions, from each of these on."""
    return first[:, None] + torch.arange(count, device=first.device)


def append(new, seqlens, deal, cache, q, qv, options):
    """Writes the new tokens that are this rank's after those of its cache. q, qv: of all heads, which say what the call is like.

    Each token is a sequence of its own for the call, with a place and a position of its own, and without a query. Packing puts
    the own ones before the others, which are no sequence's.
    """
    batch, count = new.k.shape[:2]
    places = steps(seqlens, count)
    own = (cache_rows(places, deal.ranks, deal.interleave)[0] == deal.rank).flatten()
    order = own.to(torch.uint8).argsort(descending=True, stable=True)
    ends = torch.nn.functional.pad(own.cumsum(0), (1, 0)).to(torch.int32)
    rows = {name: None if x is None else x.flatten(0, 1)[order] for name, x in (("k_new", new.k), ("v_new", new.v))}
    rotary = {**new.tables, "rotary_offsets": steps(new.positions, count).to(torch.int32).flatten()} if new.tables else {}
    no_q, no_qv = (None if x is None else x.new_empty((batch * count, 0, *x.shape[2:])) for x in (q, qv))
    attend(no_q, cache.k, cache.v, seqused_k=deal.lengths(places), cu_seqlens_k_new=ends, qv=no_qv, **rows, **rotary,
           **cache.options(batch, count), **options)


def visible(seqlens, seq_q, mask):
    """(low, high) [batch, seq_q]: from which key of its sequence a query sees up to before which."""
    place = steps(seqlens - seq_q, seq_q)
    low, high = torch.zeros_like(place), seqlens[:, None].expand_as(place)
    if mask.right is not None:
        high = torch.minimum(high, place + 1 + mask.right)
    if mask.left is not None:
        low = torch.maximum(low, place - mask.left)
    if mask.chunk:
        first = torch.div(place, mask.chunk, rounding_mode="floor") * mask.chunk
        low, high = torch.maximum(low, first), torch.minimum(high, first + mask.chunk)
    high = high.clamp(min=0)
    return torch.minimum(low, high), high


def own_drafts(words, seqlens, deal):
    """A tree mask's words for this rank's last keys, as many as there are queries: the own drafts, after keys that all see."""
    seq_q = words.shape[1]
    bits = torch.arange(seq_q, device=words.device)
    places = deal.places(deal.lengths(seqlens)[:, None] - seq_q + bits)
    drafts = (places - (seqlens[:, None] - seq_q))[:, None]  # which one each bit is for; negative: a key before them
    seen = torch.where(drafts < 0, 1, words[:, :, None] >> drafts.clamp(0, seq_q - 1) & 1)
    return (seen << bits).sum(-1)


def own_keys(q, qv, q_scale, seqlens, deal, cache, mask, tree_mask, new):
    """(q, options) of a call on this rank's cache: where a sequence's queries see different keys, each is one of its own."""
    batch, seq_q = q.shape[:2]
    if mask == Mask(None, None, 0):
        tree = {} if tree_mask is None else {"tree_mask": own_drafts(tree_mask, seqlens, deal)}
        rotary = {} if new is None else new.rotary_of(new.positions)
        return q, {"seqused_k": deal.lengths(seqlens), "qv": qv, "q_scale": q_scale, **tree, **rotary, **cache.options(batch, 1)}
    low, high = visible(seqlens, seq_q, mask)
    options = {"seqused_k": deal.lengths(high), **cache.options(batch, seq_q)}
    if mask.left is not None or mask.chunk:
        options["leftpad_k"] = deal.lengths(low)
    if new is not None:
        options.update(new.rotary_of(steps(new.positions, seq_q)))
    if q_scale is not None and q_scale.dim() == 3:
        blocks = torch.arange(seq_q, device=q.device) // FP8_BLOCK
        q_scale = q_scale[:, :, blocks].transpose(1, 2).reshape(batch * seq_q, -1, 1)
    elif q_scale is not None and q_scale.dim() == 2:
        q_scale = of_each(q_scale, seq_q)
    q, qv = (None if x is None else x.reshape(batch * seq_q, 1, *x.shape[2:]) for x in (q, qv))
    return q, {"qv": qv, "q_scale": q_scale, **options}
