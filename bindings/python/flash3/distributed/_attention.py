# SPDX-License-Identifier: Apache-2.0
"""attention() over tokens that are distributed to ranks, and explain()."""
import inspect

import torch

from . import _cost
from .._arguments import signed
from .._options import (NO_MASK, computes_fp8, lacks_options, number_of, options_lacking, refuse_unknown, seed_of, scale_or_default,
    window_sides, without_lacking)
from .._sdpa import sdpa_override
from .._torch import autocast
from ._layout import make_spec, mask_of
from ._operators import METHODS, forward, is_recorded
from ._peers import Peers, known
from ._plan import Groups, Plan, plan as make_plan


@lacks_options("attention")
def attention(q, k, v, group=None, *, method="auto", causal=False, window=None, softmax_scale=None, softcap=0.0, chunk=0, sink=None,
              deterministic=False, compute=None, rotation_seed=0, out_dtype=None, sm_margin=0, return_lse=False):
    """flash3.attention over sequences whose tokens are distributed to the ranks of a group. Each rank passes its own tokens and gets
    their results.

    Results and gradients are those of one process: parts are merged in float32 and rounded once, and gradients of k and v are
    summed in float32. All ranks must make the call with the same options; the loss is the sum of all ranks' losses. Arguments that
    are not listed are those of flash3.attention.

    Args:
        q: [batch, own tokens, heads_q, head_dim], or [own tokens, heads_q, head_dim]; float16, bfloat16, on the CPU float32.
        k, v: likewise, the own tokens of keys and values.
        group: a Plan, which says which rank has which tokens; or a ProcessGroup or a DeviceMesh, (ring, heads) if it has two
            dimensions, whose ranks have equally many tokens of each sequence, in zigzag order as shard() distributes them. None: all
            ranks.
        method: "ring": the keys of one other rank after the other, while the kernels run; "all_gather": the keys of all ranks for some
            heads at a time, copied from the other ranks' memory where that is accessible; "ulysses": all tokens of some heads, if
            heads_q and heads_k permit; "ulysses_ring", on a mesh of two dimensions: Ulysses among the ranks of the second dimension,
            a ring over the first. "auto": the method that explain() estimates to be fastest. For one sequence without a window or
            chunks the estimate includes the backward if autograd records the call, which it must do on all ranks or on none.
        sink: [heads_q], the same on all ranks. Its gradient is that of the rank's part of the loss, or of its own heads; the sum over
            the ranks is the whole gradient, as for a model's other weights.
        deterministic: gradients have the same bits each time.
        compute: "fp8", as in flash3.attention; keys travel in their own dtype.
        sm_margin: on a GPU, the multiprocessors that forward kernels leave to others, such as NCCL's.

    Returns:
        out, or with return_lse (out, lse), of the own tokens, as flash3.attention.

    Raises:
        ValueError: ranks make different calls, or a rule is broken; on all ranks if it is a rule of shapes, dtypes or options.
        NotImplementedError: the backend cannot run the call, or the function does not take an option of flash3.attention, such as mask.
        RuntimeError: an exchange failed because another rank has ended or is late.
    """
    packed = q.dim() == 3
    _check_form(q, k, v)
    if packed:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    q, k, v = autocast(q, k, v)
    groups, spec, rows = _where(group, q, k, packed)
    method = _chosen(method, groups.sizes, group, q, k, v, sink, causal, window, chunk)
    rows_q, rows_k = rows(method)
    ring, heads = _names(groups.names, method)
    left, right = window_sides(window) or (-1, -1)
    out, lse, *_ = forward(q, k, v, sink, spec, ring, heads, method, rows_q, rows_k, out_dtype or q.dtype, bool(causal), left,
                           right, chunk or 0, scale_or_default(softmax_scale), number_of("softcap", softcap), bool(deterministic),
                           computes_fp8(compute), signed(seed_of("rotation_seed", rotation_seed)), sm_margin)
    if packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


def _check_form(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__} but it must be a torch tensor")
        if x.dim() not in (3, 4) or x.dim() != q.dim():
            raise ValueError(f"{name}.ndim = {x.dim()} and q.ndim = {q.dim()} but all must be 4, [batch, tokens, heads, dim], or "
                             "3, [tokens, heads, dim]")
        if x.dtype == torch.float8_e4m3fn:
            raise NotImplementedError(f"{name}.dtype = float8_e4m3fn but scales of FP8 tensors do not travel; give 16-bit tensors, "
                                      "and compute=\"fp8\"")


def _where(group, q, k, packed):
    """(the groups, the plan's spec, a function of a method: the rows of own heads) of attention()'s argument."""
    if isinstance(group, Plan):
        return group.groups, group.spec, group.rows
    if packed:
        raise ValueError("q.ndim = 3 but group is no Plan; packed tokens need flash3.distributed.plan(group, cu_seqlens=…)")
    groups = Groups(group)
    seq_q, seq_k = q.shape[1] * groups.ranks, k.shape[1] * groups.ranks
    spec = make_spec((0, seq_q), (0, seq_k), True, None, 0)

    def rows(method):
        sharing = {"ulysses": groups.ranks, "ulysses_ring": groups.sizes[-1]}.get(method, 0)
        return q.shape[1] * sharing, k.shape[1] * sharing
    return groups, spec, rows


def _names(names, method):
    """The names of the ring's group and of that which shares heads; "": none."""
    if len(names) == 2:
        return names
    return ("", names[0]) if method == "ulysses" else (names[0], "")


def _times(sizes, group, q, k, v, sink, causal, window, chunk):
    """What the model says of each method; the same on all ranks, as tokens are those of a rank on average. The backward counts where
    autograd records the call, but not under masks that leave few pairs, of which the model knows nothing."""
    is_plan = isinstance(group, Plan)
    shape = _cost.Shape(q.shape[0], group.mean_tokens if is_plan else q.shape[1], q.shape[2], k.shape[2], q.shape[3] + v.shape[3],
                        q.element_size(), 0.5 if causal else 1.0)
    leaves_few = chunk or window_sides(window) not in (None, (-1, -1)) or is_plan and not group.is_one_sequence
    return _cost.times(shape, sizes, q.device.type, not leaves_few and is_recorded(q, k, v, sink))


def _chosen(method, sizes, *call):
    """The method, the same on all ranks."""
    if method not in (*METHODS, "auto"):
        raise ValueError(f"method = {method!r} but it must be one of {', '.join(METHODS)}, or auto")
    if len(sizes) == 2 and method not in ("ulysses_ring", "auto") or len(sizes) == 1 and method == "ulysses_ring":
        raise ValueError(f"method = {method!r} but group has {len(sizes)} dimension{'s'[:len(sizes) - 1]}; ulysses_ring takes a "
                         "DeviceMesh of 2, (ring, heads), and the others a group or a DeviceMesh of 1")
    if method != "auto":
        return method
    return "ulysses_ring" if len(sizes) == 2 else _cost.cheapest(_times(sizes, *call))


def _copies(group, device):
    """Whether all_gather copies what it would otherwise send."""
    found = known(group, device)
    if found is None:
        return "not known before the first call of the group"
    return "of the other ranks' memory" if isinstance(found, Peers) else f"none, but messages: {found}"


_OPTIONS, _LACKING = frozenset(inspect.signature(attention).parameters), options_lacking("attention", attention)


def explain(q, k, v, group=None, *, method="auto", causal=False, window=None, chunk=0, **options):
    """What attention() with these arguments does on this rank, as lines of "name: value": the method, what it sends, and what the
    cost model says of each method, with its backward where auto considers both. Sends nothing. Other options of attention() are taken
    and have no effect here. What attention() does not take is refused as there."""
    for name in without_lacking("attention", _LACKING, options).keys() - _OPTIONS:
        refuse_unknown("explain", name)
    _check_form(q, k, v)
    packed = q.dim() == 3
    if packed:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    groups, spec, _ = _where(group, q, k, packed)
    plan = group if isinstance(group, Plan) else Plan(groups, spec)
    layout, mask = plan.layout, mask_of(causal, window, chunk)
    call = plan, q, k, v, options.get("sink"), causal, window, chunk
    chosen = _chosen(method, groups.sizes, *call)
    lines = [("method", chosen), ("ranks", " x ".join(map(str, groups.sizes))),
             ("tokens", f"{plan.tokens} of {layout.cu_q[-1]}, {len(layout.documents)} documents"),
             ("work", f"{max(layout.work) * groups.ranks / max(1, sum(layout.work)):.3f} of the mean at most")]
    if chosen != "ulysses":
        heads = groups.sizes[1] if len(groups.sizes) == 2 else 1
        rows = layout.sent_rows("all_gather" if chosen == "all_gather" else "ring", heads, plan.rank // heads, mask)
        held = layout.rows_of_group("k", range(plan.rank // heads * heads, (plan.rank // heads + 1) * heads))
        if chosen == "all_gather":
            lines.append(("copies", _copies(groups.all[0], q.device)))
        lines.append(("keys sent", f"{rows} rows, of {held * (groups.ranks // heads - 1)} if all were seen"))
    for name, (seconds, sent) in _times(groups.sizes, *call).items():
        why = seconds if isinstance(seconds, str) else f"{1e6 * seconds:.0f} us, {sent / 1e6:.2f} MB sent, by the model"
        lines.append((name, why))
    return "".join(f"{name}: {value}\n" for name, value in lines)


# ---- context_parallel: a model as it is, on the tokens that its rank has ----


class context_parallel(sdpa_override):
    """A context manager in which the attention of a model that was written for one process is computed over the tokens of all ranks.

    In it torch's scaled_dot_product_attention, flash3.attention and transformers' "f3" call flash3.distributed.attention, however
    they were imported. It applies as sdpa_override does: to the thread that enters it, to what torch.compile traces in it, and to
    the threads in which autograd runs a backward() that is called in it, so that torch.utils.checkpoint repeats the same computation.

    Calls in it must pass this rank's tokens as q, k and v, without an attention mask, dropout or seqused, which raise
    NotImplementedError. cu_seqlens of calls are ignored: the plan says which documents there are.

    Args:
        group: a Plan, a ProcessGroup or a DeviceMesh, as attention() takes it.
        buffers: tensors of the whole batch, such as inputs, labels and position ids. Inside the context they hold this rank's tokens, in
            place; afterwards they hold what they held before. They must not need gradients.
        buffer_seq_dims: the dimension of tokens of each buffer. None: 1 for all.
        method, sm_margin: as in attention(); a call's own sm_margin takes precedence.
    """

    def __init__(self, group=None, *, buffers=(), buffer_seq_dims=None, method="auto", sm_margin=0):
        super().__init__()
        self._buffers = tuple(buffers)
        self._dims = (1,) * len(self._buffers) if buffer_seq_dims is None else tuple(buffer_seq_dims)
        if len(self._dims) != len(self._buffers):
            raise ValueError(f"buffer_seq_dims has {len(self._dims)} elements but buffers has {len(self._buffers)}; "
                             "each buffer needs one")
        for i, buffer in enumerate(self._buffers):
            if buffer.requires_grad:
                raise ValueError(f"buffers[{i}].requires_grad = True but a buffer is changed in place; give "
                                 "plan.shard() of it instead")
        if not isinstance(group, Plan) and self._buffers:
            group = make_plan(group, seqlen=self._buffers[0].shape[self._dims[0]])
        self._group, self._options, self._whole = group, {"method": method, "sm_margin": sm_margin}, None
        self._functions = {"sdpa": self._sdpa, "attention": self._attention}

    def __enter__(self):
        parts = [self._group.shard(buffer, dim) for buffer, dim in zip(self._buffers, self._dims)]
        self._whole = [buffer.clone() for buffer in self._buffers]
        for buffer, part in zip(self._buffers, parts):
            buffer.resize_(part.shape).copy_(part)
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for buffer, whole in zip(self._buffers, self._whole):
            buffer.resize_(whole.shape).copy_(whole)
        self._whole = None

    def _sdpa(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if attn_mask is not None:
            raise NotImplementedError(f"attn_mask is not None but context_parallel does not take it: {NO_MASK}")
        if dropout_p:
            raise NotImplementedError(f"dropout_p = {dropout_p} but context_parallel takes no dropout; it must be 0")
        if query.dim() != 4:
            raise NotImplementedError(f"query.ndim = {query.dim()} but context_parallel takes [batch, heads, tokens, dim]")
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise ValueError(f"query.shape[1] = {query.shape[1]} but key.shape[1] = {key.shape[1]} without enable_gqa")
        if is_causal and query.shape[2] != key.shape[2]:
            raise NotImplementedError(f"query.shape[2] = {query.shape[2]} but key.shape[2] = {key.shape[2]} and is_causal = True, "
                                      "which context_parallel takes for queries and keys of the same tokens")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attention(q, k, v, self._group, causal=is_causal, softmax_scale=scale, **self._options).transpose(1, 2)

    def _attention(self, q, k, v, **options):
        """options: those of flash3.attention that are not their defaults."""
        for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
            options.pop(name, None)
        for name in ("seqused_q", "seqused_k", "q_scale", "k_scale", "v_scale"):
            if name in options:
                raise NotImplementedError(f"{name} is given but context_parallel does not take it; padding is left out by a plan "
                                          "of documents, and FP8 is compute=\"fp8\"")
        if "fp8_sums" in options:
            raise NotImplementedError(f"fp8_sums = {options['fp8_sums']!r} but context_parallel takes 'auto' alone, for each part of the keys")
        if not isinstance(q, torch.Tensor):
            raise TypeError(f"q is a {type(q).__name__} but context_parallel takes torch tensors")
        return attention(q, k, v, self._group, **{**self._options, **options})
