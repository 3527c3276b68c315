# SPDX-License-Identifier: Apache-2.0
"""What processes do together in test_distributed.py: every case is made by all ranks, and each compares the whole result."""
import functools
import itertools

import torch
import torch.distributed as dist

import distributed_cache
import distributed_features
import flash3.distributed as fd
import oracle
from flash3 import attention
from flash3.distributed import _operators, _peer_gather

METHODS = ("ring", "all_gather", "ulysses")
GROUP_ROWS = _peer_gather.GROUP_ROWS
DOCUMENTS = (0, 1, 1, 24, 60, 61)  # one of a token, one of none, some longer than a rank's part


def oracle_attention(function, q, k, v, cu, **options):
    """(out, lse) of [1, tokens, heads, dim] packed by cu; dense ones are of one document."""
    if cu is None:
        return function(q, k, v, **options)
    made = [function(q[:, a:b], k[:, a:b], v[:, a:b], **options) for a, b in itertools.pairwise(cu)]
    return torch.cat([out for out, _ in made], 1), torch.cat([lse for _, lse in made], 2)


def one_process(q, k, v, cu, **options):
    """(out, lse) of flash3.attention, for the same arguments as oracle_attention."""
    if cu is None:
        return attention(q, k, v, return_lse=True, **options)
    cu = torch.tensor(cu, dtype=torch.int32)
    out, lse = attention(q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True, **options)
    return out[None], lse[None]


def farther(exact, a, b):
    """Each element of a or of b, whichever is farther from the exact one: what a single call may be off by."""
    return torch.where((a.double() - exact).abs() > (b.double() - exact).abs(), a.double(), b.double())


def with_gradients(function, tensors, dout, dlse, **options):
    """[out, lse, dq, dk, dv, dsink] of a function of q, k, v and a sink."""
    q, k, v, sink = (None if x is None else x.detach().clone().requires_grad_() for x in tensors)
    out, lse = function(q, k, v, sink=sink, **options)
    finite = torch.isfinite(lse)
    ((out * dout.to(out.dtype)).sum() + (lse.masked_fill(~finite, 0) * dlse).sum()).backward()
    return [out.detach(), lse.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v)),
            None if sink is None else sink.grad]


def inputs(tokens, heads, dims, dtype, batch, sink, seq_k=None):
    """[q, k, v, sink], dout and dlse, the same on all ranks."""
    (heads_q, heads_k), (dim, dim_v) = heads, dims
    seq_k = tokens if seq_k is None else seq_k
    tensors = [torch.randn(batch, tokens, heads_q, dim).to(dtype), torch.randn(batch, seq_k, heads_k, dim).to(dtype),
               torch.randn(batch, seq_k, heads_k, dim_v).to(dtype), torch.randn(heads_q) if sink else None]
    return tensors, torch.randn(batch, tokens, heads_q, dim_v).to(dtype), 0.1 * torch.randn(batch, heads_q, tokens)


def compared(*, method, tokens=61, heads=(4, 4), dims=(16, 16), dtype=torch.float32, batch=2, sink=False, cu=None, seq_k=None,
             group=None, balance=None, deterministic=False, **options):
    """Attention and its gradients over all ranks, against the definition, by the rule of oracle.py."""
    tokens, batch = (cu[-1], 1) if cu else (tokens, batch)
    tensors, dout, dlse = inputs(tokens, heads, dims, dtype, batch, sink, seq_k)
    exact, naive = (with_gradients(functools.partial(oracle_attention, function, cu=cu), given, dout, dlse, **options)
                    for function, given in ((oracle.exact, [None if x is None else x.double() for x in tensors]),
                                            (oracle.naive, tensors)))
    alone = with_gradients(functools.partial(one_process, cu=cu), tensors, dout, dlse, **options)
    plan = fd.plan(group, cu_seqlens=cu, seqlen=None if cu else tokens, seqlen_k=seq_k, **(balance or {}))
    q, k, v, own_sink = tensors
    own = [plan.shard(q), plan.shard(k, keys=True), plan.shard(v, keys=True), own_sink]
    call = functools.partial(fd.attention, group=plan, method=method, return_lse=True, deterministic=deterministic, **options)

    def run():
        return with_gradients(lambda q, k, v, sink: call(q, k, v, sink=sink), own, plan.shard(dout), plan.shard(dlse, 2))
    out, lse, dq, dk, dv, dsink = run()
    if deterministic:
        for x, y in zip((out, lse, dq, dk, dv), run()):
            assert torch.equal(x, y), "other bits the second time"
    got = [plan.unshard(out), plan.unshard(lse, 2), plan.unshard(dq), plan.unshard(dk, keys=True), plan.unshard(dv, keys=True)]
    if sink:
        for group_of in plan.groups.all:
            dist.all_reduce(dsink, group=group_of)
        got.append(dsink)
    # Gradients take P = exp(s - lse) of an lse that merging has rounded to float32: P is off by 2**-24 · |lse| of itself.
    of_lse = 2.0**-24 * max(exact[1][torch.isfinite(exact[1])].abs().tolist(), default=0.0)
    for what, x, want, *others in zip(("out", "lse", "dq", "dk", "dv", "dsink"), got, exact, naive, alone):
        oracle.assert_close(x, want, farther(want, *others).to(x.dtype), what, of_lse if what.startswith("d") else 0.0)


def rounded_once(method, ranks):
    """float16 is computed in float32 on the CPU: out and dv are as far from the definition as rounding moves them, and no more."""
    tensors, dout, dlse = inputs(64, (4, 4), (32, 32), torch.float16, 1, False)
    exact = with_gradients(oracle.exact, [None if x is None else x.double() for x in tensors], dout, 0 * dlse, causal=True)
    plan = fd.plan(seqlen=64)
    out, _, _, _, dv, _ = with_gradients(
        lambda q, k, v, sink: fd.attention(q, k, v, plan, method=method, causal=True, return_lse=True),
        [None if x is None else plan.shard(x) for x in tensors], plan.shard(dout), 0 * plan.shard(dlse, 2))
    for what, got, want in (("out", plan.unshard(out), exact[0]), ("dv", plan.unshard(dv), exact[4])):
        half = torch.maximum(want.abs(), torch.tensor(2.0**-14)) * 2.0**-11  # at least half a unit in the last place
        assert ((got.double() - want).abs() <= half * 1.001 + 1e-6).all(), f"{what} was rounded more than once"


def packed_three_dims(method, ranks):
    """[tokens, heads, dim] goes the same way as with a batch of one."""
    plan = fd.plan(cu_seqlens=torch.tensor(DOCUMENTS))
    q, k, v = (plan.shard(x) for x in inputs(DOCUMENTS[-1], (4, 4), (16, 16), torch.float32, 1, False)[0][:3])
    one, lse = fd.attention(q[0], k[0], v[0], plan, method=method, causal=True, return_lse=True)
    two, same = fd.attention(q, k, v, plan, method=method, causal=True, return_lse=True)
    assert torch.equal(one, two[0]) and torch.equal(lse, same[0])


def fp8(method, ranks):
    """As far from the definition as flash3.attention in FP8 is, in one process; gradients are those of the 16-bit tensors."""
    tensors, dout, dlse = inputs(200, (4, 4), (64, 64), torch.bfloat16, 1, False)
    q, k, v, _ = tensors
    exact, _ = oracle.exact(q, k, v, causal=True)
    alone = attention(q, k, v, causal=True, compute="fp8", rotation_seed=2**64 - 5, out_dtype=torch.float32)
    plan = fd.plan(seqlen=200)
    own = [plan.shard(x).requires_grad_() for x in (q, k, v)]
    out = fd.attention(*own, plan, method=method, causal=True, compute="fp8", rotation_seed=2**64 - 5, out_dtype=torch.float32)
    oracle.assert_close(plan.unshard(out), exact, alone, "out")
    (out * plan.shard(dout)).sum().backward()
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    (attention(*whole, causal=True, compute="fp8", rotation_seed=2**64 - 5, out_dtype=torch.float32) * dout).sum().backward()
    for what, x, want in zip(("dq", "dk", "dv"), own, whole):
        error = (plan.unshard(x.grad).float() - want.grad.float()).norm() / want.grad.float().norm()
        assert error < 0.05, f"{what}: {error}"  # both are off by what e4m3 is, each by its own scales


def nan_reaches_who_sees_it(method, ranks):
    """A NaN in v of one key: in the results of its readers, and in no other's."""
    q, k, v, _ = inputs(48, (4, 4), (16, 16), torch.float32, 1, False)[0]
    plan = fd.plan(seqlen=48)
    for place in (0, 17, 40):
        bad = v.clone()
        bad[:, place] = torch.nan
        clean, got = (plan.unshard(fd.attention(*(plan.shard(x) for x in (q, k, values)), plan, method=method, causal=True,
                                                window=(9, None))) for values in (v, bad))
        readers = torch.zeros(48, dtype=torch.bool)
        readers[place:place + 10] = True
        assert got[:, readers].isnan().all()
        torch.testing.assert_close(got[:, ~readers], clean[:, ~readers], rtol=1e-5, atol=1e-6)  # added up in another order


def sends_what_is_seen(method, ranks):
    """A window leaves out keys of other ranks, and documents do."""
    layout = fd.plan(seqlen=64 * ranks, causal=False).layout
    whole = layout.sent_rows(method, 1, dist.get_rank(), fd._layout.mask_of(False, None, 0))
    some = layout.sent_rows(method, 1, dist.get_rank(), fd._layout.mask_of(False, (3, 0), 0))
    assert whole == 64 * (ranks - 1) and some == (3 if dist.get_rank() < ranks - 1 else 0)
    alone = fd.plan(cu_seqlens=[64 * i for i in range(ranks + 1)], causal=False).layout
    assert alone.sent_rows(method, 1, dist.get_rank(), fd._layout.mask_of(True, None, 0)) == 0


def options_of_methods(ranks):
    """{name: arguments of compared()} for every method."""
    masks = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (13, None)}, "band": {"window": (5, 9)},
             "chunks": {"causal": True, "chunk": 16}}
    found = dict(masks)
    found["gqa"] = {"causal": True, "heads": (8, 4)}
    found["mqa"] = {"causal": True, "heads": (4 * ranks, 1), "dims": (8, 24)}
    found["softcap"] = {"causal": True, "softcap": 2.0, "softmax_scale": 0.7}
    found["sink"] = {"causal": True, "sink": True}
    found["sink_unseen"] = {"window": (0, 0), "seq_k": 30, "sink": True}  # some queries see nothing
    found["documents"] = {"causal": True, "cu": DOCUMENTS, "sink": True}
    found["documents_window"] = {"window": (6, 2), "cu": DOCUMENTS, "balance": {"causal": False, "window": (6, 2)}}
    found["documents_chunks"] = {"causal": True, "chunk": 7, "cu": DOCUMENTS}
    found["ragged"] = {"causal": True, "tokens": 2 * ranks * 5 + 3}
    found["without_tokens"] = {"causal": True, "tokens": ranks - 1}
    found["nothing"] = {"tokens": 0}
    found["other_keys"] = {"causal": True, "seq_k": 45}
    found["contiguous"] = {"causal": True, "balance": {"causal": False}}
    found["bfloat16"] = {"causal": True, "dtype": torch.bfloat16, "dims": (40, 40)}
    found["float16"] = {"dtype": torch.float16, "dims": (24, 8), "deterministic": True}
    return found


def by_messages(case):
    """The case with ranks that do not reach each other's memory."""
    kept, _operators.peers_of = _operators.peers_of, lambda group, device: "for a test"
    try:
        case()
    finally:
        _operators.peers_of = kept


def in_groups(case, rows=1):
    """The case where a group of heads that goes together has at least so many rows: one, as many groups as there are heads of k."""
    _peer_gather.GROUP_ROWS = rows
    try:
        case()
    finally:
        _peer_gather.GROUP_ROWS = GROUP_ROWS


def cases(ranks):
    """{name: a function that all ranks call}, for a world of so many."""
    made = {}
    for method in METHODS:
        for name, options in options_of_methods(ranks).items():
            options = dict(options)
            if method == "ulysses":  # heads that so many ranks can share
                options["heads"] = {"gqa": (2 * ranks, ranks), "mqa": (ranks, 1)}.get(name, (ranks, ranks))
            case = functools.partial(compared, method=method, **options)
            made[f"{method}_{name}"] = case
            if method == "all_gather" and ranks == 3:
                made[f"messages_{name}"] = functools.partial(by_messages, case)
            elif method == "all_gather":
                made[f"heads_{name}"] = functools.partial(in_groups, case)
        for function in (rounded_once, packed_three_dims, fp8, nan_reaches_who_sees_it):
            if method != "ulysses" or ranks != 3:
                made[f"{method}_{function.__name__}"] = functools.partial(function, method, ranks)
    for method in METHODS[:2]:
        made[f"{method}_one_head"] = functools.partial(compared, method=method, causal=True, heads=(1, 1))
        made[f"{method}_sends_what_is_seen"] = functools.partial(sends_what_is_seen, method, ranks)
    if ranks == 4:
        for name, options in options_of_methods(2).items():
            made[f"mesh_{name}"] = functools.partial(on_a_mesh, **options)
    made.update(distributed_cache.serving_cases(ranks))
    made.update(distributed_cache.cases(ranks))
    made.update(distributed_features.cases(ranks))  # the last of them ends a process
    return made


def gpu_cases(ranks):
    """The cases for GPUs: every mask by every method, in 16 bits, of so few tokens that a tile is cut, and of several tiles."""
    made = {}
    for method in METHODS:
        for name, options in options_of_methods(ranks).items():
            if method == "ulysses":
                options["heads"] = {"gqa": (2 * ranks, ranks), "mqa": (ranks, 1)}.get(name, (ranks, ranks))
            options = {"dtype": torch.bfloat16} | options | {"method": method}
            many = options | ({"cu": tuple(17 * x for x in DOCUMENTS)} if "cu" in options else {"tokens": 23 * options.get("tokens", 61)})
            made[f"{method}_{name}"] = functools.partial(compared, **options)
            made[f"{method}_{name}_tiles"] = functools.partial(in_groups, functools.partial(compared, **many))
        made[f"{method}_again"] = functools.partial(again, method)
    made["all_gather_captured"] = captured
    if ranks == 4:
        for name, options in options_of_methods(2).items():
            made[f"mesh_{name}"] = functools.partial(on_a_mesh, **options | {"dtype": torch.bfloat16})
    return made


def again(method):
    """Calls one after the other, without a wait between them, of other sizes and tensors: each has its own result."""
    plans = [fd.plan(seqlen=tokens) for tokens in (4096, 1000, 8192, 4096)]
    wanted, got = [], []
    for plan in plans:
        whole = [torch.randn(1, plan.layout.total("q"), 4, 128, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        out = attention(*whole, causal=True)
        wanted.append([out.detach(), *torch.autograd.grad(out, whole, out.detach())])
        own = [plan.shard(x.detach()).requires_grad_() for x in whole]
        whole_out = plan.shard(out.detach())
        for _ in range(3):  # while other ranks may still be at the call before
            out = fd.attention(*own, plan, method=method, causal=True)
            got.append((plan, wanted[-1], [out.detach(), *torch.autograd.grad(out, own, whole_out)]))
    for plan, want, found in got:
        for what, x, y in zip(("out", "dq", "dk", "dv"), found, want):
            error = (x.float() - plan.shard(y).float()).norm() / y.float().norm().clamp_min(1e-6)
            assert error < 0.02, f"{what} is off by {error} of its norm"


def captured():
    """A forward and its backward as a CUDA graph: replayed, they have the same bits, also after calls that need less and more memory."""
    def made(tokens):
        plan = fd.plan(seqlen=tokens)
        return plan, [torch.randn(1, plan.tokens, 8, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def step(plan, own):
        out = fd.attention(*own, plan, method="all_gather", causal=True, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, own, out.detach())]
    calls = [made(tokens) for tokens in (4096, 2000, 60_000)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        want = step(*calls[0])
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph, stream=stream):
        got = step(*calls[0])
    for between in (*calls[1:], calls[0]):
        for x in got:
            x.fill_(torch.nan)
        graph.replay()
        for x, y in zip(got, want):
            assert torch.equal(x, y)
        step(*between)


@functools.cache
def mesh():
    return dist.init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("ring", "heads"))


def on_a_mesh(**options):
    compared(method="ulysses_ring", group=mesh(), **options)
