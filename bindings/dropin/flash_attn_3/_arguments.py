# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's arguments: what flash3 refuses of them, and its options and exceptions under their names."""
import re
from typing import NamedTuple

import torch
from flash3._arguments import given
from flash3._torch import FP8, translated

# flash3's names of what upstream's private functions and operators call otherwise.
NAMES = {"q_scale": "q_descale", "k_scale": "k_descale", "v_scale": "v_descale", "cache_batch_idx": "kv_batch_idx",
         "rotary_offsets": "seqlens_rotary", "k_cache": "k", "v_cache": "v", "chunk": "attention_chunk", "sink": "s_aux"}


def refuse(**arguments):
    """What no kernel of flash3 does; name=value, where None, False and 0 ask for nothing."""
    for name, value in arguments.items():
        if value is not None and (torch.is_tensor(value) or value):
            shown = "is given" if torch.is_tensor(value) else f"= {value}"
            raise NotImplementedError(f"{name} {shown} but flash3's kernels do not do this yet")


def check_tensors(**arguments):
    """torch lets None through where an operator's schema says Tensor."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__} but it must be a torch tensor")


def upstreams(error, names=NAMES):
    """An exception of flash3's, or of its operators, as one with upstream's names."""
    error = translated(error) if type(error) is RuntimeError else error
    text = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], str(error))
    return type(error)(text)


def flash3_call(operator, *arguments, names=NAMES, **named):
    try:
        return operator(*arguments, **named)
    except (ValueError, TypeError, RuntimeError) as error:
        raise upstreams(error, names) from None


def checked_scale(softmax_scale):
    if softmax_scale is not None and softmax_scale == 0:
        raise NotImplementedError("softmax_scale = 0 but flash3 takes a scale greater than 0")
    return softmax_scale or 0.0


def checked_softcap(softcap):
    """0 or less is none."""
    return 0.0 if softcap <= 0 else softcap


def check_margin(sm_margin):
    """It, num_splits and pack_gqa are hints, on which no result depends; flash3's forwards take it."""
    if sm_margin < 0:
        raise ValueError(f"sm_margin = {sm_margin} but it must be at least 0")


def options_of(s_aux, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
               window_size_left, window_size_right, softcap, attention_chunk, deterministic):
    """What is given of the options of torch.ops.flash3's forward and backward. Without cu_seqlens lengths need no bound."""
    options = {"causal": True} if causal is True else given(causal=causal)
    if softmax_scale is not None:
        options["softmax_scale"] = checked_scale(softmax_scale)
    if window_size_left != -1 or window_size_right != -1:
        options["window_left"], options["window_right"] = window_size_left, window_size_right
    if (softcap := checked_softcap(softcap)) != 0:
        options["softcap"] = softcap
    if not (s_aux is cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None) or attention_chunk or deterministic:
        options.update(given(chunk=attention_chunk, sink=s_aux, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                             seqused_q=seqused_q, seqused_k=seqused_k, max_seqlen_q=None if cu_seqlens_q is None else max_seqlen_q,
                             max_seqlen_k=None if cu_seqlens_k is None else max_seqlen_k, deterministic=deterministic))
    return options


def forward_options(q, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q_descale, k_descale,
                    v_descale, softmax_scale, causal, window_size_left, window_size_right, attention_chunk, softcap, sm_margin,
                    s_aux, deterministic, qv=None):
    """The same of a forward."""
    check_margin(sm_margin)
    options = options_of(s_aux, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                         causal, window_size_left, window_size_right, softcap, attention_chunk, deterministic)
    if q.dtype == FP8:  # upstream ignores the scales of 16-bit tensors, and callers count on it
        options.update(given(q_scale=q_descale, k_scale=k_descale, v_scale=v_descale))
    if qv is not None:
        options["qv"] = qv
    if sm_margin:
        options["sm_margin"] = sm_margin
    return options


class Forward(NamedTuple):
    """The arguments of a forward, in upstream's order, and then flash3's."""
    q: object
    k: object
    v: object
    k_new: object = None
    v_new: object = None
    qv: object = None
    out: object = None
    cu_seqlens_q: object = None
    cu_seqlens_k: object = None
    cu_seqlens_k_new: object = None
    seqused_q: object = None
    seqused_k: object = None
    max_seqlen_q: object = None
    max_seqlen_k: object = None
    page_table: object = None
    kv_batch_idx: object = None
    leftpad_k: object = None
    rotary_cos: object = None
    rotary_sin: object = None
    seqlens_rotary: object = None
    q_descale: object = None
    k_descale: object = None
    v_descale: object = None
    softmax_scale: object = None
    causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    attention_chunk: int = 0
    softcap: float = 0.0
    rotary_interleaved: bool = True
    scheduler_metadata: object = None
    num_splits: int = 1
    pack_gqa: object = None
    sm_margin: int = 0
    s_aux: object = None
    deterministic: bool = False

    def is_on_cache(self):
        """Whether k and v are a cache: a call of its own in flash3. Lengths alone make none, and those have gradients."""
        return not (self.k_new is self.v_new is self.page_table is self.kv_batch_idx is self.leftpad_k is self.rotary_cos is
                    self.rotary_sin is None)

    def appends(self):
        return not (self.k_new is self.v_new is self.rotary_cos is self.rotary_sin is None)

    def batch(self):
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    def options(self):
        """flash3's options, of a forward without a cache."""
        return forward_options(self.q, self.v, self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k,
                               self.max_seqlen_q, self.max_seqlen_k, self.q_descale, self.k_descale, self.v_descale,
                               self.softmax_scale, self.causal, self.window_size_left, self.window_size_right,
                               self.attention_chunk, self.softcap, self.sm_margin, self.s_aux, self.deterministic, self.qv)
