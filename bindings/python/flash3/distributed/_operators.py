# SPDX-License-Identifier: Apache-2.0
"""The exchanges and calls of one attention, and torch.ops.flash3_distributed: the same as operators, which torch.compile need not look
into. Where nothing watches operators the functions are called as they are, since torch's wrapper of an operator with gradients costs
the host about as much as all that is in it."""
from typing import Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import arrays
from .._attention import _Shape
from .._build import NAME
from ._calls import sink_gradient
from ._exchange import Field, HeadExchange, compare, dtype_field, heads_of, number_field, why_not
from ._layout import layout_of, mask_of
from ._methods import CORES
from ._peer_gather import PeerGather
from ._peers import Peers, peers_of

METHODS = ("ring", "all_gather", "ulysses", "ulysses_ring")


def group_of(name):
    return dist.distributed_c10d._resolve_process_group(name) if name else None


class _Attention:
    """One call: where it runs, and how."""

    def __init__(self, spec, ring, heads, method, causal, left, right, chunk):
        self.ring, self.heads = group_of(ring), group_of(heads)
        self.groups = [group for group in (self.ring, self.heads) if group is not None]
        self.ring_ranks, self.head_ranks = (1 if g is None else g.size() for g in (self.ring, self.heads))
        self.ring_rank, self.head_rank = (0 if g is None else g.rank() for g in (self.ring, self.heads))
        self.rank = self.ring_rank * self.head_ranks + self.head_rank
        self.layout = layout_of(spec, self.ring_ranks * self.head_ranks)
        self.method, self.mask = method, mask_of(causal, (left, right), chunk)

    def core(self, device):
        if self.method == "all_gather" and isinstance(peers := peers_of(self.ring, device), Peers):
            return PeerGather(self.layout, peers, self.ring_rank, self.mask)
        kind = CORES["all_gather" if self.method == "all_gather" else "ring"]
        return kind(self.layout, self.ring, self.ring_rank, self.head_ranks, self.mask)

    def exchange(self):
        return HeadExchange(self.layout, self.heads, self.head_rank, self.head_ranks, self.ring_rank * self.head_ranks)

    def own_heads(self, heads):
        return heads_of(heads, self.head_ranks, self.head_rank)

    def merges(self):
        """Whether a query's keys come in several parts. A query sees a rectangle of keys that have been gathered."""
        return self.ring_ranks > 1 and self.method != "all_gather"

    def check(self, q, k, v, sink, options, out_dtype):
        """Raises on all ranks what is wrong on one, or differs between them. A call that has been checked is not compared again."""
        shapes = tuple((x.shape, x.dtype) for x in (q, k, v, *(() if sink is None else (sink,))))
        key = self.layout.key, shapes, self.method, self.mask, tuple(options.items()), out_dtype
        compare(self.groups, key, lambda: _fields(q, k, v, sink, self, options, out_dtype), q.device,
                lambda: self._check_alone(q, k, v, sink, options, out_dtype))

    def _check_alone(self, q, k, v, sink, options, out_dtype):
        """What every rank finds by itself, with the same end: the call's shapes are those of all."""
        if self.head_ranks > 1 and (reason := why_not(q.shape[2], k.shape[2], self.head_ranks)):
            raise ValueError(f"method = {self.method!r}: {reason}")
        name = str(out_dtype).removeprefix("torch.")
        one = [_Shape((*x.shape[:1], 1, *x.shape[2:]), str(x.dtype).removeprefix("torch.")) for x in (q, k, v)]
        question = {**options, "backend": "cpu" if q.device.type == "cpu" else "hopper"}
        question.pop("deterministic")
        shape = (q.shape[0], 1, q.shape[2], v.shape[3])
        lse = _Shape((q.shape[0], q.shape[2], 1), "float32")
        own_sink = None if sink is None else _Shape(sink.shape, str(sink.dtype).removeprefix("torch."))
        arrays._forward(*one, _Shape(shape, name), lse, {**question, "sink": own_sink}).check_supported()
        if self.merges():
            arrays._forward(*one, _Shape(shape, "float32"), lse, question).check_supported()


def _fields(q, k, v, sink, call, options, out_dtype):
    """What must be the same on all ranks."""
    layout, of_k = call.layout, call.layout.tokens("k", call.rank)
    fields = [Field(f"{name}.shape[{i}]", x.shape[i]) for name, x in (("q", q), ("k", k), ("v", v)) for i in (0, 2, 3)]
    fields += [Field(f"{name}.shape[1] less the tokens of {name} that the plan has for the rank", x.shape[1] - tokens)
               for name, x, tokens in (("q", q, layout.tokens("q", call.rank)), ("k", k, of_k), ("v", v, of_k))]
    fields += [dtype_field(name, dtype) for name, dtype in (("q.dtype", q.dtype), ("k.dtype", k.dtype), ("v.dtype", v.dtype), (
        "out_dtype", out_dtype), ("sink.dtype", None if sink is None else sink.dtype))]
    fields += [Field("the number of sinks", 0 if sink is None else sink.numel()), Field("method", METHODS.index(call.method),
                                                                                       METHODS.__getitem__)]
    fields += [Field(f"the mask's {name}", -1 if value is None else value, lambda x: None if x < 0 else x)
               for name, value in call.mask._asdict().items()]
    fields += [number_field(name, value) for name, value in options.items()]
    return [*fields, Field("the plan's hash", int.from_bytes(layout.key[:7], "little"), hex)]


def _options(scale, softcap, compute_fp8, seed, sm_margin):
    """What a question of arrays has of a forward's options."""
    return {"softmax_scale": scale or None, "softcap": softcap, "compute": "fp8" if compute_fp8 else None,
            "rotation_seed": seed % 2**64, "sm_margin": sm_margin}


def _attend(q, k, v, sink, spec, ring, heads, method, rows_q, rows_k, out_dtype, causal, left, right, chunk, scale, softcap,
            deterministic, compute_fp8, seed, sm_margin):
    """out and lse of the own tokens, and where heads are shared what the gradients need instead of the arguments and these: q, k, v,
    out and lse of the own heads, which have rows_q and rows_k rows."""
    call = _Attention(spec, ring, heads, method, causal, left, right, chunk)
    call.check(q, k, v, sink, {**_options(scale, softcap, compute_fp8, seed, sm_margin), "deterministic": deterministic}, out_dtype)
    options = {"softmax_scale": scale, "softcap": softcap, "compute_fp8": compute_fp8, "rotation_seed": seed, "sm_margin": sm_margin}
    if call.heads is None:
        return call.core(q.device).forward(q, k, v, sink, out_dtype, options)
    exchange = call.exchange()
    own_sink = None if sink is None else sink[call.own_heads(q.shape[2])]
    own = exchange.to_heads(q=q, k=k, v=v)
    own_out, own_lse = call.core(q.device).forward(*own, own_sink, out_dtype, options)
    out, = exchange.to_tokens(q.shape[2], q=own_out)
    lse, = exchange.to_tokens(q.shape[2], q=own_lse.transpose(1, 2).unsqueeze(-1))
    return out, lse.squeeze(-1).transpose(1, 2).contiguous(), *own, own_out, own_lse


@torch.library.custom_op(f"{NAME}_distributed::forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Optional[Tensor], spec: Tensor, ring: str, heads: str, method: str, rows_q: int,
             rows_k: int, out_dtype: torch.dtype, causal: bool, left: int, right: int, chunk: int, scale: float, softcap: float,
             deterministic: bool, compute_fp8: bool, seed: int,
             sm_margin: int) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """_attend() with seven results, of which those that it does not have are empty."""
    made = _attend(q, k, v, sink, spec, ring, heads, method, rows_q, rows_k, out_dtype, causal, left, right, chunk, scale, softcap,
                   deterministic, compute_fp8, seed, sm_margin)
    return made if heads else (*made, *(q.new_empty(0) for _ in range(4)), q.new_empty(0, dtype=torch.float32))


@_forward.register_fake
def _(q, k, v, sink, spec, ring, heads, method, rows_q, rows_k, out_dtype, *options):
    batch, tokens, heads_q, _ = q.shape
    made = q.new_empty((batch, tokens, heads_q, v.shape[3]), dtype=out_dtype), q.new_empty((batch, heads_q, tokens),
                                                                                        dtype=torch.float32)
    if not heads:
        return *made, *(q.new_empty(0) for _ in range(4)), q.new_empty(0, dtype=torch.float32)
    ranks = dist.get_world_size(group_of(heads))
    own_q, own_k = heads_q // ranks, max(1, k.shape[2] // ranks)
    return (*made, q.new_empty((batch, rows_q, own_q, q.shape[3])), q.new_empty((batch, rows_k, own_k, q.shape[3])),
            q.new_empty((batch, rows_k, own_k, v.shape[3])), q.new_empty((batch, rows_q, own_q, v.shape[3]), dtype=out_dtype),
            q.new_empty((batch, own_q, rows_q), dtype=torch.float32))


def _differentiate(dout, dlse, q, k, v, out, lse, sink, spec, ring, heads, method, heads_q, heads_k, tokens_k, causal, left, right,
                   chunk, scale, softcap, deterministic):
    """dq, dk, dv of the own tokens, and dsink. q, k, v, out and lse: of the own heads where heads are shared; dout and dlse: of the
    own tokens."""
    call = _Attention(spec, ring, heads, method, causal, left, right, chunk)
    options = {"softmax_scale": scale, "softcap": softcap, "deterministic": deterministic}
    dout, out = dout.to(q.dtype), out.to(q.dtype)  # of another dtype after a forward in FP8
    exchange = None
    if call.heads is not None:
        exchange = call.exchange()
        dout, = exchange.to_heads(q=dout)
        if dlse is not None:
            dlse = exchange.to_heads(q=dlse.transpose(1, 2).unsqueeze(-1))[0].squeeze(-1).transpose(1, 2)
    dsink = q.new_empty(0, dtype=torch.float32) if sink is None else torch.zeros_like(sink)
    if sink is not None:
        mine = call.own_heads(heads_q)
        dsink[mine] = sink_gradient(sink[mine], dout, dlse, out, lse)
    dq, dk, dv = call.core(q.device).backward(dout, dlse, q, k, v, out, lse, options)
    if exchange is not None:
        dq, = exchange.to_tokens(heads_q, q=dq.to(q.dtype))
        whole = heads_k % call.head_ranks == 0  # each KV head belongs to one rank alone: these are the sums
        dk, dv = exchange.to_tokens(heads_k, k=dk.to(k.dtype) if whole else dk, v=dv.to(v.dtype) if whole else dv)
    return dq.to(q.dtype), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), dsink


@torch.library.custom_op(f"{NAME}_distributed::backward", mutates_args=())
def _backward(dout: Tensor, dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
              sink: Optional[Tensor], spec: Tensor, ring: str, heads: str, method: str, heads_q: int, heads_k: int, tokens_k: int,
              causal: bool, left: int, right: int, chunk: int, scale: float, softcap: float,
              deterministic: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    return _differentiate(dout, dlse, q, k, v, out, lse, sink, spec, ring, heads, method, heads_q, heads_k, tokens_k, causal, left,
                          right, chunk, scale, softcap, deterministic)


@_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, sink, spec, ring, heads, method, heads_q, heads_k, tokens_k, *options):
    batch, tokens = dout.shape[:2]
    dsink = q.new_empty(0, dtype=torch.float32) if sink is None else torch.empty_like(sink)
    return (q.new_empty((batch, tokens, heads_q, q.shape[3])), q.new_empty((batch, tokens_k, heads_k, q.shape[3])),
            q.new_empty((batch, tokens_k, heads_k, v.shape[3])), dsink)


def _save(ctx, inputs, output):
    q, k, v, sink, spec, ring, heads, method, _, _, _, *options = inputs
    out, lse, *own = output
    ctx.save_for_backward(*(own if heads else (q, k, v, out, lse)), sink, spec)
    ctx.options = ring, heads, method, q.shape[2], k.shape[2], k.shape[1], *options[:7]
    ctx.shape, ctx.dtype = out.shape, out.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse, *others):
    q, k, v, out, lse, sink, spec = ctx.saved_tensors
    if dout is None:
        dout = q.new_zeros(ctx.shape)
    # Gradients of gradients are the operator's to refuse.
    run = _differentiate if not torch.is_grad_enabled() and _is_plain(dout, dlse, q, k, v, out, lse, sink) else _backward
    dq, dk, dv, dsink = run(dout.contiguous(), dlse, q, k, v, out, lse, sink, spec, *ctx.options)
    return dq, dk, dv, None if sink is None else dsink, *(None,) * 17


_forward.register_autograd(_gradients, setup_context=_save)


def _no_second_gradient(ctx, *gradients):
    raise NotImplementedError("flash3.distributed has no second derivatives: the gradients of its backward are not implemented")


_backward.register_autograd(_no_second_gradient)


class DistributedAttention(torch.autograd.Function):
    """_attend() with its gradients, without an operator. A profile shows its name."""

    @staticmethod
    def forward(ctx, *arguments):
        made = _attend(*arguments)
        _save(ctx, arguments, made)
        return made[:2]

    backward = staticmethod(_gradients)


def _is_plain(*tensors):
    """Whether these are tensors of torch's own, and nothing traces, transforms or watches their operators."""
    return not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or
                torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state()) and \
        all(x is None or type(x) in _PLAIN for x in tensors)


_PLAIN = (Tensor, torch.nn.Parameter)


def is_recorded(q, k, v, sink):
    """Whether autograd will ask for gradients of a call."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or
                                        sink is not None and sink.requires_grad)


def forward(q, k, v, sink, *arguments):
    """(out, lse, …) of torch.ops.flash3_distributed.forward, by the shortest way."""
    if not _is_plain(q, k, v, sink):
        return _forward(q, k, v, sink, *arguments)
    return (DistributedAttention.apply if is_recorded(q, k, v, sink) else _attend)(q, k, v, sink, *arguments)
