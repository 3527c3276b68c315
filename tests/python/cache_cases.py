# SPDX-License-Identifier: Apache-2.0
"""Calls of flash_attn_with_kvcache on random data, and what they must give: the definition in float64 on each sequence's own keys; and
trees of drafts."""
import math

import torch

import oracle


def rotate(x, positions, cos, sin, interleaved):
    """x [seq, heads, dim] with a rotary embedding: in float32 with each product and each sum rounded, then in x's dtype."""
    pairs = cos.shape[1]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    c, s, made, x32 = cos[positions].float()[:, None], sin[positions].float()[:, None], x.clone(), x.float()
    a, b = x32[..., first], x32[..., second]
    made[..., first], made[..., second] = (a * c - b * s).to(x.dtype), (a * s + b * c).to(x.dtype)
    return made


def random_parents(g, count):
    return [int(torch.randint(-1, i, (), generator=g)) if i > 0 else -1 for i in range(count)]


def descends(parents):
    """seen[i, j]: whether draft j is draft i or one of its ancestors."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for i in range(len(parents)):
        j = i
        while j >= 0:
            seen[i, j], j = True, parents[j]
    return seen


class Case:
    """A call: `arguments` of flash_attn_with_kvcache, which are changed by it, and `wanted()`, which is asked before."""

    def __init__(self, device="cpu", dtype=torch.float32, *, lengths=(37, 0, 1, 16), seq_q=2, heads=(4, 2), dim=32, dim_v=24, rows=64,
                 page_size=None, shares_pages=False, new=None, rotary=None, elements=False, leftpad=False, packed_q=False,
                 rotary_offsets=False, table_dtype=None, seed=0, **options):
        """new: None, "dense" or "packed"; rotary: None, "interleaved" or "halves"."""
        self.g, self.device, self.dtype = torch.Generator().manual_seed(seed), device, dtype
        self.lengths, self.options, self.batch = lengths, options, len(lengths)
        heads_q, heads_k = heads
        self.seqs_q = [(b * 3 + seq_q) % 5 for b in range(self.batch)] if packed_q else [seq_q] * self.batch
        self.counts = {None: [0] * self.batch, "dense": [2] * self.batch, "packed": [(b + 1) % 3 for b in range(self.batch)]}[new]
        self.at = [[(b, j) for j in range(length + count)] for b, (length, count) in enumerate(zip(lengths, self.counts))]
        a = self.arguments = dict(options)
        cache = (self.batch, rows)
        if elements:
            order = torch.randperm(self.batch + 2, generator=self.g)[:self.batch]
            a["cache_batch_idx"] = self.int32(order)
            if not page_size:
                cache, self.at = (self.batch + 2, rows), [[(int(order[b]), j) for _, j in at] for b, at in enumerate(self.at)]
        if page_size:
            cache = (self._make_pages(page_size, shares_pages), page_size)
            if elements:  # of the table: rows that no sequence has name no page
                table = torch.full((self.batch + 2, a["page_table"].shape[1]), 10**9, dtype=torch.int32, device=device)
                table[order.to(device)] = a["page_table"]
                a["page_table"] = table
        self.padding = [min(length, b + 1) if leftpad else 0 for b, length in enumerate(lengths)]
        if leftpad:
            a["cache_leftpad"] = self.int32(self.padding)
        self.q = [self.random(n, heads_q, dim) for n in self.seqs_q]
        a["q"] = torch.cat(self.q) if packed_q else torch.stack(self.q)
        if packed_q:
            a.update(cu_seqlens_q=self.ends(self.seqs_q), max_seqlen_q=max(self.seqs_q))
        a["k_cache"], a["v_cache"] = self.random(*cache, heads_k, dim), self.random(*cache, heads_k, dim_v)
        a["cache_seqlens"] = self.int32(lengths)
        self.new = [(self.random(n, heads_k, dim), self.random(n, heads_k, dim_v)) for n in self.counts]
        if new:
            join = torch.cat if new == "packed" else torch.stack
            a["k"], a["v"] = (join([pair[i] for pair in self.new]) for i in range(2))
        if new == "packed":
            a["cu_seqlens_k_new"] = self.ends(self.counts)
        self.positions = list(lengths)
        if rotary:
            angles = torch.arange(128)[:, None] / 10 ** (torch.arange(8) / 4)[None]
            for name, table in (("rotary_cos", angles.cos()), ("rotary_sin", angles.sin())):
                a[name] = table.to(table_dtype or dtype).to(device)
            a["rotary_interleaved"] = rotary == "interleaved"
            if rotary_offsets:
                self.positions = [7 * b for b in range(self.batch)]
                a["rotary_seqlens"] = self.int32(self.positions)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.g).to(self.dtype).to(self.device)

    def int32(self, values):
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)

    def ends(self, counts):
        return self.int32([sum(counts[:b]) for b in range(len(counts) + 1)])

    def _make_pages(self, size, shares):
        """A page table, with entries after the last key that no page has; returns how many pages there are."""
        needed = [math.ceil((length + count) / size) for length, count in zip(self.lengths, self.counts)]
        pages = sum(needed) + 3
        order = iter(torch.randperm(pages, generator=self.g).tolist())
        table = [[next(order) if i < n else 10**9 for i in range(max(needed) + 1)] for n in needed]
        if shares:  # whole pages that are not written
            for b in range(1, self.batch):
                for i in range(min(self.lengths[b], self.lengths[0]) // size):
                    table[b][i] = table[0][i]
        self.at = [[(table[b][j // size], j % size) for _, j in at] for b, at in enumerate(self.at)]
        self.arguments["page_table"] = self.int32(table)
        return pages

    def _masks(self):
        o = self.options
        window = o.get("window_size", (-1, -1))
        return {"causal": o.get("causal", False), "window": None if window == (-1, -1) else window,
                "chunk": o.get("attention_chunk", 0)}

    def wanted(self):
        """[(q, k, v) of each sequence, as attention sees them], and both caches as they are afterwards."""
        a, masks = self.arguments, self._masks()
        k_cache, v_cache = a["k_cache"].clone(), a["v_cache"].clone()
        is_masked = masks["causal"] or masks["window"] is not None or masks["chunk"] > 0
        sequences = []
        for b, (length, at, (k, v)) in enumerate(zip(self.lengths, self.at, self.new)):
            q = self.q[b]
            if "rotary_cos" in a:
                tables, first = (a["rotary_cos"], a["rotary_sin"], a["rotary_interleaved"]), self.positions[b]
                steps = torch.arange(len(q)) if is_masked else torch.zeros(len(q), dtype=torch.long)
                q, k = rotate(q, first + steps, *tables), rotate(k, first + torch.arange(len(k)), *tables)
            for n in range(len(k)):
                k_cache[at[length + n]], v_cache[at[length + n]] = k[n], v[n]
            own = at[self.padding[b]:]
            keys, values = (torch.stack([x[place] for place in own]) if own else x[0, :0] for x in (k_cache, v_cache))
            sequences.append((q, keys, values))
        return sequences, k_cache, v_cache

    def check(self, call, what=""):
        """Makes the call, and compares its results and what it leaves in the cache. Returns out and lse."""
        sequences, k_cache, v_cache = self.wanted()
        out, lse = call(**self.arguments)[:2]
        o = self.options
        options = {**self._masks(), "softcap": max(o.get("softcap", 0.0), 0.0), "sink": o.get("s_aux"),
                   "softmax_scale": o.get("softmax_scale")}
        begin = 0
        for b, (q, k, v) in enumerate(sequences):
            rows = slice(begin, begin + len(q))
            got, got_lse = (out[rows], lse[:, rows]) if out.dim() == 3 else (out[b], lse[b])
            begin += len(q)
            tensors = [x[None] for x in (q, k, v)]
            (exact, exact_lse), (naive, naive_lse) = oracle.exact(*tensors, **options), oracle.naive(*tensors, **options)
            oracle.assert_close(got[None], exact, naive, f"{what} out of sequence {b}")
            oracle.assert_close(got_lse[None, ..., None], exact_lse[..., None], naive_lse[..., None], f"{what} lse of sequence {b}")
        assert out.dtype == self.dtype and lse.dtype == torch.float32
        assert torch.equal(self.arguments["k_cache"], k_cache), f"{what} k_cache"
        assert torch.equal(self.arguments["v_cache"], v_cache), f"{what} v_cache"
        return out, lse
