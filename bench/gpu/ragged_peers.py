# SPDX-License-Identifier: Apache-2.0
"""The libraries that `bench/gpu/peers.py --ragged` compares, as callables on one point of ragged_points: everything that needs torch
and a GPU.

A maker takes (point, inputs) and returns (call, result): call() runs the library once, result() gives what it has computed, packed:
[out] or [dq, dk, dv], each [tokens, heads, dim]. It raises where the library cannot do that.
"""
import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.gpu import gpu_peers


@dataclass
class Inputs:
    """N(0, 1) tensors of a point, [tokens, heads, dim], and its lengths: cu [sequences + 1] int32."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    sink: torch.Tensor  # [heads] float32
    cu: torch.Tensor


def make_inputs(point):
    def normal(heads):
        return torch.randn(point.tokens, heads, point.dim, device="cuda").bfloat16()

    return Inputs(normal(point.heads), normal(point.heads_k), normal(point.heads_k), normal(point.heads),
                  torch.randn(point.heads, device="cuda"), torch.tensor(point.cu_seqlens, dtype=torch.int32, device="cuda"))


def shaped(point, x):
    """A packed tensor as the call takes it: packed too, or [batch, seq, heads, dim]."""
    return x if point.packed else x.view(len(point.lengths), point.longest, *x.shape[1:])


def packed(point, x):
    return x if point.packed else x.flatten(0, 1)


def flash3(lib, point, x):
    """As a maker, for this library; call.workspace_bytes tells its workspace."""
    q, k, v, dout = [shaped(point, tensor) for tensor in (x.q, x.k, x.v, x.dout)]
    lse_shape = (point.heads, point.tokens) if point.packed else (len(point.lengths), point.heads, point.longest)
    tensors = {"q": q, "k": k, "v": v, "out": torch.full_like(q, float("nan")),
               "lse": torch.empty(lse_shape, device=q.device, dtype=torch.float32)}
    options = {"causal": int(point.causal), "softcap": point.softcap}
    if point.packed:
        tensors |= {"cu_seqlens_q": x.cu, "cu_seqlens_k": x.cu}
        options |= {"max_seqlen_q": point.longest, "max_seqlen_k": point.longest}
    if point.sink:
        tensors["sink"] = x.sink
    if point.window >= 0:
        options |= {"window": 1, "window_left": point.window, "window_right": -1}
    forward = lib.ragged_forward(tensors, **options)
    if not point.backward:
        return forward, lambda: [packed(point, tensors["out"])]
    forward()
    gradients = {"dq": torch.full_like(q, float("nan")), "dk": torch.full_like(k, float("nan")),
                 "dv": torch.full_like(v, float("nan"))}
    tensors |= {"dout": dout, **gradients}
    if point.sink:
        tensors["dsink"] = torch.empty_like(x.sink)
    return lib.ragged_backward(tensors, **options), lambda: [packed(point, g) for g in gradients.values()]


def fa4(point, x):
    """Its backward leaves out the gradient of the sink."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    q, k, v, dout = [shaped(point, tensor) for tensor in (x.q, x.k, x.v, x.dout)]
    options = {"causal": point.causal, "softcap": point.softcap}
    if point.packed:
        options |= {"cu_seqlens_q": x.cu, "cu_seqlens_k": x.cu, "max_seqlen_q": point.longest, "max_seqlen_k": point.longest}
    if point.window >= 0:
        options |= {"window_size_left": point.window, "window_size_right": 0}
    sink = {"learnable_sink": x.sink.bfloat16()} if point.sink else {}
    out, lse = _flash_attn_fwd(q, k, v, return_lse=True, **options, **sink)[:2]
    if not point.backward:
        return lambda: _flash_attn_fwd(q, k, v, out=out, lse=lse, **options, **sink), lambda: [packed(point, out)]

    def call():
        return _flash_attn_bwd(q, k, v, out, dout, lse, **options)[:3]

    return call, lambda: [packed(point, gradient) for gradient in call()]


def through_autograd(function, x):
    """(call, result) of the gradients of function(q, k, v), which gives out [tokens, heads, dim]. What autograd does around the
    kernels counts as well; samples of many calls hide most of it."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
    out = function(*leaves)

    def call():
        return torch.autograd.grad(out, leaves, x.dout, retain_graph=True)

    return call, lambda: list(call())


def fa2(point, x):
    """FlashAttention-2 of torch: through nested tensors where the point is packed."""
    for has, name in ((point.sink, "sink"), (point.softcap, "softcap"), (point.window >= 0, "window")):
        if has:
            raise NotImplementedError(f"torch's scaled_dot_product_attention has no {name}")
    if not point.packed:
        qkv, dout = [shaped(point, tensor) for tensor in (x.q, x.k, x.v)], shaped(point, x.dout)
        if point.backward:
            call = gpu_peers.fa2_backward(qkv, dout, point.causal)
            return call, lambda: [packed(point, gradient) for gradient in call()]
        call = gpu_peers.fa2(qkv, point.causal)
        return call, lambda: [packed(point, call().transpose(1, 2))]
    offsets, bounds = x.cu.long(), {"min_seqlen": min(point.lengths), "max_seqlen": point.longest}

    def attention(q, k, v):
        """[sequences, heads, ragged, dim], nested."""
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=point.causal)

    def nested(*tensors):
        return [torch.nested.nested_tensor_from_jagged(tensor, offsets, **bounds).transpose(1, 2) for tensor in tensors]

    if point.backward:
        return through_autograd(lambda *qkv: attention(*nested(*qkv)).transpose(1, 2).values(), x)
    qkv = nested(x.q, x.k, x.v)
    return lambda: attention(*qkv), lambda: [attention(*qkv).transpose(1, 2).values()]


# FlexAttention sees one sequence of all tokens under a mask of documents. What torch.compile makes is kept from draw to draw, or
# each would be compiled again: so the documents of all points of one size share a tensor, and a point's calls are good until the
# next point's are made. A point of another kind begins afresh: what dynamo remembers would make sizes and the softcap dynamic,
# and beyond its limit of recompilations they run uncompiled.

@functools.cache
def documents(tokens):
    return torch.zeros(tokens, dtype=torch.int32, device="cuda")


@functools.cache
def document_mask(tokens, causal, window):
    document = documents(tokens)

    def mask(_batch, _head, query, key):
        seen = document[query] == document[key]
        if causal:
            seen = seen & (key <= query)
        if window >= 0:
            seen = seen & (query - key <= window)
        return seen

    return mask


@functools.lru_cache(maxsize=1)
def compiled_flex(kind):
    """(create_block_mask, attention) for points like this one, whatever their lengths."""
    softcap, has_sink, gqa = kind.softcap, kind.sink, kind.heads != kind.heads_k
    torch._dynamo.reset()
    # A graph that runs more than once may not give its buffers away.
    torch._functorch.config.donated_buffer = False

    def cap(score, _batch, _head, _query, _key):
        return softcap * torch.tanh(score / softcap)

    def attention(q, k, v, block_mask, sink):
        options = {"score_mod": cap if softcap else None, "block_mask": block_mask, "enable_gqa": gqa}
        if not has_sink:
            return flex_attention(q, k, v, **options)
        out, lse = flex_attention(q, k, v, return_lse=True, **options)
        return (out * torch.sigmoid(lse - sink[:, None])[..., None]).to(out.dtype)

    return torch.compile(create_block_mask, dynamic=False), torch.compile(attention, dynamic=False)


def flex(point, x):
    lengths = torch.tensor(point.lengths, device="cuda")
    documents(point.tokens).copy_(torch.repeat_interleave(torch.arange(len(point.lengths), device="cuda"), lengths))
    make_block_mask, attention = compiled_flex(replace(point, lengths=(point.tokens,), draw=0))
    mask = document_mask(point.tokens, point.causal, point.window)
    block_mask = make_block_mask(mask, None, None, point.tokens, point.tokens, device="cuda")

    def run(q, k, v):
        qkv = [tensor.unsqueeze(0).transpose(1, 2) for tensor in (q, k, v)]
        return attention(*qkv, block_mask, x.sink).transpose(1, 2).squeeze(0)

    if point.backward:
        return through_autograd(run, x)
    return lambda: run(x.q, x.k, x.v), lambda: [run(x.q, x.k, x.v)]


PEERS = {"fa2": fa2, "fa4": fa4, "flex": flex}


def make_calls(point, libs, peers):
    """(calls, results, why the others refuse this point), each by name."""
    x = make_inputs(point)
    makers = {name: functools.partial(flash3, lib) for name, lib in libs.items()} | {name: PEERS[name] for name in peers}
    calls, results, refused = {}, {}, {}
    for name, make in makers.items():
        try:
            call, result = make(point, x)
            call()
            torch.cuda.synchronize()
            calls[name], results[name] = call, result
        except Exception as error:  # every library has its own kinds, and what it says is the result
            refused[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
    return calls, results, refused
