# SPDX-License-Identifier: Apache-2.0
"""torch.ops.flash_attn_3 on a KV cache: opcheck, compilers, and scheduler metadata."""
import pytest
import torch

import flash_attn_interface as fa
from cache_cases import Case

OPS = torch.ops.flash_attn_3
CHECKS = ("test_schema", "test_faketensor")


def of_fwd(case):
    """A case's tensors and options, as fwd and _flash_attn_forward name them."""
    names = {"cache_seqlens": "seqused_k", "cache_batch_idx": "kv_batch_idx", "cache_leftpad": "leftpad_k"}
    a = {names.get(name, name): x for name, x in case.arguments.items()}
    return tuple(a.pop(name) for name in ("q", "k_cache", "v_cache")), a


@pytest.mark.parametrize("sizes", [{"page_size": 16}, {"elements": True, "leftpad": True}, {"page_size": 3, "packed_q": True}], ids=str)
def test_opcheck_of_forwards(device, sizes):
    tensors, options = of_fwd(Case(device, torch.bfloat16, **sizes))
    torch.library.opcheck(OPS.fwd.default, tensors, options, test_utils=CHECKS)
    torch.library.opcheck(OPS._flash_attn_forward.default, tensors, options)


def test_opcheck_of_the_others(device):
    lengths = torch.tensor([5, 9], dtype=torch.int32, device=device)
    torch.library.opcheck(OPS.get_scheduler_metadata.default, (2, 1, 64, 4, 2, 64, 64, torch.bfloat16, lengths), test_utils=CHECKS)
    parts = torch.randn(3, 2, 5, 4, 16, device=device), torch.randn(3, 2, 5, 4, device=device)
    torch.library.opcheck(OPS.fwd_combine.default, parts, test_utils=CHECKS)
    torch.library.opcheck(OPS.fwd_combine.default, (*parts, torch.empty(2, 5, 4, 16, device=device)), test_utils=CHECKS)


def test_compile_of_a_forward_on_pages(device):
    tensors, options = of_fwd(Case(device, torch.bfloat16, page_size=16))
    compiled = torch.compile(lambda *a: OPS._flash_attn_forward(*a, **options)[:2], fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(*tensors), OPS._flash_attn_forward(*tensors, **options)))


def test_a_compiler_must_not_miss_an_append():
    """fwd's schema, which is upstream's, does not say that the cache is written."""
    case = Case(dtype=torch.bfloat16, new="dense").arguments
    for operator in (OPS.fwd, OPS._flash_attn_forward):
        call = torch.compile(lambda: operator(case["q"], case["k_cache"], case["v_cache"], case["k"], case["v"],
                                              seqused_k=case["cache_seqlens"])[1], backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="k_new is given but the schema of this operator"):
            call()
        torch._dynamo.reset()


def metadata(lengths, batch, seq_q=1, seq_k=64, **options):
    return fa.get_scheduler_metadata(batch, seq_q, seq_k, 4, 2, options.pop("headdim", 32), lengths, **options)


@pytest.mark.parametrize("options,vectors", [
    ({}, 3), ({"seq_q": 2}, 3), ({"causal": True}, 3), ({"causal": True, "seq_q": 2}, 4), ({"window_size": (5, 0)}, 3),
    ({"causal": True, "seq_q": 2, "window_size": (5, 3)}, 3), ({"window_size": (-1, 0), "seq_q": 2}, 4),
    ({"window_size": (63, -1), "seq_q": 2}, 3), ({"attention_chunk": 16, "seq_q": 2, "causal": True}, 3),
    ({"causal": True, "headdim": 128, "page_size": 16}, 4), ({"causal": True, "headdim": 64, "page_size": 16}, 3),
    ({"causal": True, "headdim": 128}, 3), ({"window_size": (70, 1), "seq_q": 3}, 3), ({"window_size": (70, 2), "seq_q": 3}, 3),
    ({"causal": True, "seq_q": 2, "max_seqlen_k_new": 2}, 4), ({"num_splits": 7, "has_softcap": True, "sm_margin": 2}, 3),
], ids=str)
def test_metadata_has_upstreams_size(device, options, vectors):
    """vectors of the batch size, rounded up to fours, and one number; a fourth vector for causal masks."""
    for batch in (1, 4, 5, 300):
        lengths = torch.full((batch,), 7, dtype=torch.int32, device=device)
        made = metadata(lengths, batch, **options)
        assert made.shape == (vectors * ((batch + 3) // 4 * 4) + 1,) and made.dtype == torch.int32 and made.device == lengths.device


def test_metadata_as_servers_use_it(device):
    """A buffer for the largest batch, of which each step takes a slice; with and without new keys."""
    largest = 12
    buffer = torch.full((1 + (largest + 3) // 4 * 4 * 4,), -7, dtype=torch.int32, device=device)
    for batch in (12, 5, 1):
        for new in (None, "dense"):
            sizes = {"lengths": tuple(range(3, 3 + batch)), "page_size": 16, "new": new, "causal": True}
            case, other = Case(device, torch.bfloat16, **sizes), Case(device, torch.bfloat16, **sizes)
            made = metadata(case.arguments["cache_seqlens"], batch, 2, page_size=16, causal=True, max_seqlen_k_new=2)
            n = made.shape[0]
            buffer[:n] = made
            wanted = fa.flash_attn_with_kvcache(**other.arguments)
            assert torch.equal(fa.flash_attn_with_kvcache(**case.arguments, scheduler_metadata=buffer[:n]), wanted)
            tensors, options = of_fwd(Case(device, torch.bfloat16, **{**sizes, "new": None}))
            options["is_causal"] = options.pop("causal")
            for again in range(2):  # it may be used again
                OPS.fwd(*tensors, **options, scheduler_metadata=buffer[:n])


def test_wrong_metadata():
    a = Case(dtype=torch.bfloat16).arguments
    right = metadata(a["cache_seqlens"], 4)
    for wrong, error, message in (
            (right.long(), TypeError, "scheduler_metadata.dtype = torch.int64 but it must be torch.int32"),
            (right[1:], ValueError, r"scheduler_metadata.shape = \(12,\) but the batch size is 4"),
            (metadata(a["cache_seqlens"], 8), ValueError, r"contiguous and \[13\] or \[17\]"),
            (right.repeat(2)[::2], ValueError, "contiguous"), (right[None], ValueError, "scheduler_metadata.shape"),
            (right.to("meta"), ValueError, "scheduler_metadata.device = meta but q.device = cpu"), ([], TypeError, "is a list")):
        with pytest.raises(error, match=message):
            fa.flash_attn_with_kvcache(**a, scheduler_metadata=wrong)
        if isinstance(wrong, torch.Tensor) and not wrong.is_meta:
            with pytest.raises(error, match=message):
                OPS.fwd(a["q"], a["k_cache"], a["v_cache"], seqused_k=a["cache_seqlens"], scheduler_metadata=wrong)
    for named, error in (({"cache_seqlens": a["cache_seqlens"].long()}, TypeError), ({"num_heads_kv": 3}, ValueError),
                         ({"batch_size": -1}, ValueError), ({"cache_seqlens": None}, TypeError)):
        with pytest.raises(error):
            fa.get_scheduler_metadata(**{**dict(batch_size=4, max_seqlen_q=1, max_seqlen_k=64, num_heads_q=4, num_heads_kv=2, headdim=32,
                                                cache_seqlens=a["cache_seqlens"]), **named})
