# SPDX-License-Identifier: Apache-2.0
"""Decoding over a cache that is dealt to ranks, against the definition on the whole one."""
import functools

import torch
import torch.distributed as dist

import flash3.distributed as fd
import oracle


def dealt_cache(whole, lengths, interleave, page_size):
    """This rank's rows of [batch, rows, heads, dim] as (cache, page table or None); what holds no key is NaN."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch, rows = whole.shape[:2]
    most = -(-rows // (ranks * interleave)) * interleave + 5
    cache = torch.full((batch, -(-most // (page_size or 1)) * (page_size or 1), *whole.shape[2:]), torch.nan).to(whole.dtype)
    for b, length in enumerate(lengths):
        positions = torch.arange(length)
        owner, row = fd.cache_rows(positions, ranks, interleave)
        cache[b, row[owner == rank]] = whole[b, positions[owner == rank]]
        assert (owner == rank).sum() == fd.local_seqlens(length, rank, ranks, interleave)
    if not page_size:
        return cache, None
    pages = cache.unflatten(1, (-1, page_size))
    table = torch.randperm(pages.shape[0] * pages.shape[1]).int()
    shuffled = torch.empty_like(pages.flatten(0, 1))
    shuffled[table.long()] = pages.flatten(0, 1)
    return shuffled, table.view(batch, -1)


def decoded(*, heads="all", seq_q=1, lengths=(37, 1, 0, 64), interleave=1, page_size=None, dtype=torch.bfloat16, sink=False,
            group=4, **options):
    """group: query heads of a KV head."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    heads_k, heads_q = ranks, ranks * group
    q = torch.randn(len(lengths), seq_q, heads_q, 32).to(dtype)
    k, v = torch.randn(len(lengths), 64, heads_k, 32).to(dtype), torch.randn(len(lengths), 64, heads_k, 16).to(dtype)
    own_sink = torch.randn(heads_q) if sink else None
    state = torch.random.get_rng_state()
    k_cache, table = dealt_cache(k, lengths, interleave, page_size)
    torch.random.set_rng_state(state)  # the same pages
    v_cache, table_v = dealt_cache(v, lengths, interleave, page_size)
    assert table is None or torch.equal(table, table_v)
    dealt = slice(rank * group, (rank + 1) * group) if heads == "dealt" else slice(None)
    out, lse = fd.attention_with_kv_cache(q[:, :, dealt], k_cache, v_cache, torch.tensor(lengths), interleave=interleave,
                                          heads=heads, page_table=table, sink=own_sink[dealt] if sink else None, return_lse=True,
                                          **options)
    for b, length in enumerate(lengths):
        given = q[b:b + 1], k[b:b + 1, :length], v[b:b + 1, :length]
        (exact, exact_lse), (naive, naive_lse) = (f(*given, sink=own_sink, **options) for f in (oracle.exact, oracle.naive))
        oracle.assert_close(out[b:b + 1], exact[:, :, dealt], naive[:, :, dealt], f"out of sequence {b}")
        oracle.assert_close(lse[b:b + 1], exact_lse[:, dealt], naive_lse[:, dealt], f"lse of sequence {b}")


def other_heads():
    """Ranks that give other heads are told, all of them."""
    q = torch.randn(1, 1, 2 if dist.get_rank() else 4, 16)
    cache = torch.randn(1, 8, 2, 16)
    try:
        fd.attention_with_kv_cache(q, cache, cache, torch.tensor([3]))
    except ValueError as error:
        assert "q.shape[2] is 2 on rank 1 but 4 on rank 0" in str(error), error
    else:
        raise AssertionError("no error")


def cases(ranks):
    made = {"one_query": {}, "paged": {"page_size": 8, "heads": "dealt"}, "interleave": {"interleave": 4, "causal": True},
            "several_queries": {"seq_q": 3, "causal": True, "heads": "dealt", "sink": True}, "float32": {"dtype": torch.float32},
            "window": {"seq_q": 2, "causal": True, "window": (9, None), "page_size": 4, "sink": True},
            "chunks": {"seq_q": 4, "causal": True, "chunk": 16, "dtype": torch.float16},
            "all_see_all": {"seq_q": 5, "heads": "dealt", "softcap": 3.0, "softmax_scale": 0.3},
            "band": {"seq_q": 6, "window": (4, 2), "dtype": torch.float32, "interleave": 3}}
    found = {f"decode_{name}": functools.partial(decoded, **options) for name, options in made.items()}
    return {**found, "decode_other_heads": other_heads}
