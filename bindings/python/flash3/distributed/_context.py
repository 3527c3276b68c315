# SPDX-License-Identifier: Apache-2.0
"""context_parallel: a model as it is, on the tokens that its rank has."""
import torch

from .._options import NO_MASK
from .._sdpa import sdpa_override
from ._attention import attention
from ._plan import Plan, plan as make_plan


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
