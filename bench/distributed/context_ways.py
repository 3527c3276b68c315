# SPDX-License-Identifier: Apache-2.0
"""The ways that bench/distributed/context_parallel.py compares, as callables of a rank: everything that sends, and the yardstick that does not."""
import contextlib
import functools
import math
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import flash3
import flash3.distributed
from flash3.distributed import _methods
from flash3.distributed._layout import mask_of

CAUSAL = mask_of(True, None, 0)


class Own:
    """A rank's tensors of a point, [1, tokens, heads, dim] in bf16: parts of whole ones, or drawn."""

    def __init__(self, point, plan, device, whole=None, rows=None, sm_margin=0):
        """whole: q, k, v and dout of all tokens, of which this rank has the given rows."""
        self.point, self.plan, self.device, self.sm_margin = point, plan, device, sm_margin
        if whole is None:
            made = torch.Generator(device).manual_seed(dist.get_rank())
            heads = point.heads, point.heads_k, point.heads_k, point.heads
            tensors = [torch.randn((1, plan.tokens, n, point.dim), generator=made, device=device, dtype=torch.bfloat16) for n in heads]
        else:
            tensors = [x.index_select(1, rows) for x in whole]
        self.q, self.k, self.v = (x.requires_grad_() for x in tensors[:3])
        self.dout = tensors[3]

    @functools.cached_property
    def heads_first(self):
        """q, k, v and dout as torch's operators take them."""
        made = [x.detach().transpose(1, 2).contiguous() for x in (self.q, self.k, self.v, self.dout)]
        return *(x.requires_grad_() for x in made[:3]), made[3]


class Way:
    """A step of attention, and its gradients."""

    def __init__(self, forward, leaves=(), douts=(), backward=None, around=contextlib.nullcontext, heads_first=False):
        """around: a context for both; heads_first: results and gradients are [1, heads, tokens, dim]."""
        self.forward, self.around, self.heads_first = forward, around, heads_first
        self.backward = backward or (lambda outs: torch.autograd.grad(outs, leaves, douts))


def flash3_way(method):
    def make(own):
        def forward():
            return flash3.distributed.attention(own.q, own.k, own.v, own.plan, method=method, causal=True, sm_margin=own.sm_margin)
        return Way(forward, (own.q, own.k, own.v), own.dout)
    return make


def mesh_way(ring, heads):
    def make(own):
        plan = flash3.distributed.plan(mesh(own.device, (ring, heads)), cu_seqlens=own.point.cu_seqlens)
        if plan.tokens != own.plan.tokens:
            raise ValueError(f"a mesh of {ring} x {heads} deals {plan.tokens} tokens to the rank, not {own.plan.tokens}")

        def forward():
            return flash3.distributed.attention(own.q, own.k, own.v, plan, causal=True, sm_margin=own.sm_margin)
        return Way(forward, (own.q, own.k, own.v), own.dout)
    return make


def rectangles(plan):
    """[(rows of q, rows of k)] of this rank's queries, in their order, over all keys that they see: each is causal at its bottom right."""
    calls = plan.layout.gather(1, plan.rank, CAUSAL).calls
    members = sorted(member for call in calls for member in call.members)
    first = 0
    for member in members:
        if member.q != first or member.left is not None or member.right is None and member.rows_q > 1 or member.right:
            raise ValueError(f"rank {plan.rank} has the rectangle {member}, which is not one causal call")
        first += member.rows_q
    return [(member.rows_q, member.rows_k) for member in members]


def alone(own):
    """The same work in the fewest calls, with all keys there: a call for each of at most two rectangles, or one of packed sequences."""
    found, point = rectangles(own.plan), own.point
    packed = len(found) > 2
    rows = sum(k for _, k in found) if packed else max(k for _, k in found)
    keys = [torch.randn((1, rows, point.heads_k, point.dim), device=own.device, dtype=torch.bfloat16) for _ in "kv"]

    def leaf(x, first, count):
        return x.detach().narrow(1, first, count).requires_grad_()

    if packed:
        cu = [torch.tensor([0, *lengths], device=own.device).cumsum(0, dtype=torch.int32) for lengths in zip(*found)]
        options = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": max(q for q, _ in found), "max_seqlen_k": max(k for _, k in found)}
        leaves = [x.detach().squeeze(0).requires_grad_() for x in (own.q, *keys)]
        return Way(lambda: flash3.attention(*leaves, causal=True, sm_margin=own.sm_margin, **options), leaves, own.dout.squeeze(0))
    first, calls, douts = 0, [], []
    for rows_q, rows_k in found:
        calls.append([leaf(own.q, first, rows_q), *(leaf(x, 0, rows_k) for x in keys)])
        douts.append(own.dout.narrow(1, first, rows_q))
        first += rows_q
    return Way(lambda: [flash3.attention(*call, causal=True, sm_margin=own.sm_margin) for call in calls], [x for call in calls for x in call], douts)


def computing(own):
    """The ring with its messages left out: what would come is there already, of the same size."""
    there = {}

    class Kept:
        def __init__(self, group, tensors, destination, shapes, source):
            self._come = [self._like(x, shape) for x, shape in zip(tensors, shapes)]

        @staticmethod
        def _like(x, shape):
            count = math.prod(shape)
            key = count, x.dtype
            if key not in there:
                pattern = x.reshape(-1) if x.numel() else x.new_ones(1)
                there[key] = pattern.repeat(-(-count // pattern.numel()))[:count].clone()
            return there[key].view(shape)

        def wait(self):
            return self._come

    @contextlib.contextmanager
    def around():
        swap, _methods.Swap = _methods.Swap, Kept
        try:
            yield
        finally:
            _methods.Swap = swap
    ring = flash3_way("ring")(own)
    return Way(ring.forward, backward=ring.backward, around=around)


def exchange(message, come, destination, source):
    """Sends a message to one rank while one comes from another; empty ones stay."""
    swaps = [dist.P2POp(dist.isend, message, destination)] * bool(message.numel()) + [dist.P2POp(dist.irecv, come, source)] * bool(come.numel())
    for work in dist.batch_isend_irecv(swaps) if swaps else ():
        work.wait()
    return come


def copies(own):
    """The ring's messages alone: K and V of each step; backward, their gradients in float32 back, too."""
    row = 2 * own.point.heads_k * own.point.dim

    def message(rows, dtype):
        return torch.ones(rows * row, dtype=dtype, device=own.device)
    made = [(step, message(step.sent.count, torch.bfloat16), message(step.received, torch.bfloat16), message(step.received, torch.float32),
             message(step.sent.count, torch.float32)) for step in own.plan.layout.ring(1, own.plan.rank, CAUSAL)[1]]

    def forward():
        for step, sent, come, _, _ in made:
            exchange(sent, come, step.destination, step.source)

    def backward(_):
        for step, sent, come, gradients, back in made:
            exchange(sent, come, step.destination, step.source)
            exchange(gradients, back, step.source, step.destination)
    return Way(forward, backward=backward)


def ring_rows(plan):
    """The most rows of k that come to this rank or leave it in the ring."""
    steps = plan.layout.ring(1, plan.rank, CAUSAL)[1]
    return max(sum(step.received for step in steps), sum(step.sent.count for step in steps))


def expanded(own, x, gqa):
    """A KV head for each query head, unless the library takes fewer."""
    return x if gqa or own.point.heads == own.point.heads_k else x.repeat_interleave(own.point.heads // own.point.heads_k, 1)


@functools.lru_cache(maxsize=None)
def mesh(device, sizes=None):
    return dist.init_device_mesh(device, sizes or (dist.get_world_size(),))


def one_sequence(own):
    if own.point.kind != "causal":
        raise NotImplementedError("takes one sequence, not packed documents")


def torch_way(rotate):
    """torch's context_parallel over scaled_dot_product_attention; its balanced tokens are those of flash3's plan for one sequence."""
    def make(own, backend=None, gqa=False):
        one_sequence(own)
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental import _attention
        from torch.nn.attention import SDPBackend, sdpa_kernel
        q, k, v, dout = own.heads_first
        backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}

        @contextlib.contextmanager
        def around():
            _attention.set_rotate_method(rotate)
            original = F.scaled_dot_product_attention
            # It must shard something; the tensors themselves are dealt already.
            nothing = torch.zeros((1, 2 * dist.get_world_size()), device=own.device)
            try:
                with sdpa_kernel(backends[backend]) if backend else contextlib.nullcontext():
                    with context_parallel(mesh(own.device), buffers=[nothing], buffer_seq_dims=[1]):
                        yield
            finally:
                if F.scaled_dot_product_attention is not original:  # torch 2.11 leaves it so after an error
                    from torch.distributed.tensor.experimental._context_parallel import _attention as inside
                    inside._disable_context_parallel_dispatcher_impl()
                    F.scaled_dot_product_attention = original

        def forward():
            options = {"enable_gqa": True} if gqa else {}
            return F.scaled_dot_product_attention(q, expanded(own, k, gqa), expanded(own, v, gqa), is_causal=True, **options)
        return Way(forward, (q, k, v), dout, around=around, heads_first=True)
    return make


class Kernel(NamedTuple):
    """One of torch's operators on [1, heads, tokens, dim]."""
    forward: Callable  # of q, k, v, causal: out, lse [1, heads, tokens], and what the gradients need
    backward: Callable  # of dout, q, k, v, out, lse, causal, and that


def cudnn_forward(q, k, v, causal):
    out, lse, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    return out, lse.reshape(lse.shape[:3]), (lse.shape, *rest[:6])  # it has one more dimension, of 1


def cudnn_backward(dout, q, k, v, out, lse, causal, rest):
    shape, cum_q, cum_k, max_q, max_k, seed, offset = rest
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(dout, q, k, v, out, lse.reshape(shape), seed, offset, None, cum_q, cum_k,
                                                                       max_q, max_k, 0.0, causal)


def fa2_forward(q, k, v, causal):
    out, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse, rest[:6]


def fa2_backward(dout, q, k, v, out, lse, causal, rest):
    cum_q, cum_k, max_q, max_k, seed, offset = rest
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)


def cpu_forward(q, k, v, causal):
    return *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal), None


def cpu_backward(dout, q, k, v, out, lse, causal, rest):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, causal)


KERNELS = {"cudnn": Kernel(cudnn_forward, cudnn_backward), "fa2": Kernel(fa2_forward, fa2_backward), "cpu": Kernel(cpu_forward, cpu_backward)}


def passed_on(x):
    """Sends it to the next rank, and waits for that of the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return exchange(x, torch.empty_like(x), (rank + 1) % ranks, (rank - 1) % ranks)


class PlainRing(torch.autograd.Function):
    """A ring as one writes it first: neighbouring tokens, K and V go round and are waited for after each step."""

    @staticmethod
    def forward(ctx, q, k, v, kernel):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        keys, out, lse, rests = torch.stack([k, v]), None, None, []
        for step in range(ranks):
            source = (rank - step) % ranks
            if source <= rank:  # no query sees later keys
                part, part_lse, rest = kernel.forward(q, keys[0], keys[1], source == rank)
                part, both = part.float(), part_lse if lse is None else torch.logaddexp(lse, part_lse)
                out = part if lse is None else out * (lse - both).exp().unsqueeze(-1) + part * (part_lse - both).exp().unsqueeze(-1)
                lse = both
                rests.append(rest)
            if step + 1 < ranks:
                keys = passed_on(keys)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse.contiguous())
        ctx.kernel, ctx.rests = kernel, rests
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, rests = dist.get_rank(), dist.get_world_size(), iter(ctx.rests)
        keys, dq = torch.stack([k, v]), torch.zeros_like(q, dtype=torch.float32)
        gradients = torch.zeros_like(keys, dtype=torch.float32)
        for step in range(ranks):
            source = (rank - step) % ranks
            if source <= rank:
                part, *parts = ctx.kernel.backward(dout.contiguous(), q, keys[0], keys[1], out, lse, source == rank, next(rests))
                dq += part
                for total, of_k_or_v in zip(gradients, parts):
                    total += of_k_or_v
            if step + 1 < ranks:
                keys = passed_on(keys)
            if ranks > 1:
                gradients = passed_on(gradients)  # the last time to whose keys they are
        return dq.to(q.dtype), *gradients.to(k.dtype), None


def plain_ring(own, backend="cpu", gqa=False):
    one_sequence(own)
    q, k, v, dout = own.heads_first
    return Way(lambda: PlainRing.apply(q, expanded(own, k, gqa), expanded(own, v, gqa), KERNELS[backend]), (q, k, v), dout, heads_first=True)


MAKERS = {"alone": alone, **{method: flash3_way(method) for method in ("ring", "all_gather", "ulysses")}, "computing": computing, "copies": copies,
          "torch_allgather": torch_way("allgather"), "torch_alltoall": torch_way("alltoall"), "plain_ring": plain_ring}


def maker(name):
    """A function of an Own, and of what variants() says, that makes a Way."""
    if name.startswith("mesh_"):
        return mesh_way(*map(int, name.removeprefix("mesh_").split("x")))
    return MAKERS[name]


UNCHECKED = ("alone", "computing", "copies")  # one call of the library, and parts whose results mean nothing
NEIGHBOURS = ("plain_ring",)  # where a rank has consecutive tokens


def variants(name, point, device, backends=("cudnn", "fa2")):
    """[(what a JSON says of it, options of the maker)], the fastest that a library may take first."""
    if not name.startswith("torch_") and name != "plain_ring":
        return [(None, {})]
    if device == "cpu":
        return [("K and V expanded to all heads" if point.heads != point.heads_k else "torch on the CPU", {})]
    gqa = (True, False) if point.heads != point.heads_k else (False,)
    said = {True: ", KV heads as they are", False: ", K and V expanded to all heads" if len(gqa) > 1 else ""}
    return [(f"{backend}{said[own]}", {"backend": backend, "gqa": own}) for backend in backends for own in gqa]
