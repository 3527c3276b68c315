# SPDX-License-Identifier: Apache-2.0
"""flash3: exact attention for NVIDIA Hopper GPUs, and for CPUs.

It holds::

    attention            softmax(q k^T) v with its masks and options; differentiable for torch tensors
    sdpa, sdpa_override  torch's scaled_dot_product_attention
    flex_attention       torch's flex_attention, with its BlockMasks
    attention_backward   the gradients without autograd
    attention_with_kv_cache
                         keys in a cache, in pages or not, to which the newest are appended: decoding
    kv_cache_schedule    a list that such calls with the same lengths can share
    dropout_mask         which weights the dropout of attention keeps
    tree_mask            which drafts of a tree see which, for attention_with_kv_cache
    merge                one result of parts of the keys, each with its out and lse
    quantize             16-bit tensors converted to FP8 with scales, for attention
    masks                masks as data, for mask= of attention: documents, neighborhoods, blocks of keys, booleans
    t5_table             the bias_table of T5's relative positions, for attention
    supported, explain   whether a call would run here, and by which kernel
    backends, version    what this machine has, and which library this is
    arrays               the C calls, with memory for results from the caller
    distributed          attention over tokens that are distributed to many processes; a package to be imported by name
    jax                  jax.nn.dot_product_attention; a module to be imported by name

torch.ops.flash3 holds the operators forward, backward, quantize, merge, attention_with_kv_cache and kv_cache_schedule, each with a
form for results in given memory (forward_out …); mask_make and mask_used; attention_with_kv_cache_append, a call that writes its
cache; and inference, a plain forward without lse and gradients.
"""
from . import arrays
from ._attention import Gradients, attention, attention_backward, explain, supported
from ._attention import _torch as _torch_operators
from ._dropout import dropout_mask
from ._kv_cache import attention_with_kv_cache, kv_cache_schedule, merge, tree_mask
from ._library import backends, version
from ._mask import Mask
from ._quantize import Quantized, quantize
from .arrays import Schedule, Support

__version__ = version()
__all__ = ["attention", "attention_backward", "attention_with_kv_cache", "kv_cache_schedule", "merge", "quantize", "tree_mask", "dropout_mask",
           "supported", "explain", "backends", "version", "arrays", "Gradients", "Mask", "Quantized", "Schedule", "Support"]

if _torch_operators is not None:
    from . import masks
    from ._flex import flex_attention
    from ._sdpa import sdpa, sdpa_override
    from ._tables import t5_table

    __all__ += ["sdpa", "sdpa_override", "flex_attention", "masks", "t5_table"]
