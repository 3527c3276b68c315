# SPDX-License-Identifier: Apache-2.0
"""flash3 as an attention implementation of Hugging Face transformers::

    import flash3.integrations.transformers
    flash3.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="f3")

On the CPU as on a Hopper GPU; padded batches, packed ones, caches, sliding windows, soft caps and sinks. What flash3 cannot compute as
transformers' eager attention does raises NotImplementedError: attention dropout, position biases, paged caches, chunks, blocks that
see each other both ways, and masks that a model makes itself. docs/python.md has the rules.
"""
import torch

from .._attention import attention
from ._transformers_masks import INSTEAD, Mask, make_mask


def register(name="f3"):
    """Makes attn_implementation=name mean flash3. transformers takes names with "flash" in them for kernels of its own."""
    if "flash" in name:
        raise ValueError(f"name = {name!r} but it must not contain 'flash': transformers looks such names up itself")
    from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
                      is_causal=None, s_aux=None, cache=None, position_bias=None, cu_seq_lens_q=None, cu_seq_lens_k=None,
                      max_length_q=None, max_length_k=None, **kwargs):
    """An attention function as transformers calls it: query [batch, heads, seq, dim] in, [batch, seq, heads, dim] out."""
    if dropout:
        raise NotImplementedError(f"dropout = {dropout} but flash3 has no attention dropout; set the config's to 0")
    if cache is not None:
        raise NotImplementedError("cache is given but flash3 has no paged cache yet")
    if kwargs.get("output_attentions"):
        raise NotImplementedError("output_attentions = True but flash3 never stores the attention weights")
    if position_bias is not None:
        raise NotImplementedError(f"position_bias is given but flash3 adds nothing to the scores; {INSTEAD}")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = _mask_of_the_module(module, q, k, is_causal, sliding_window) if attention_mask is None else attention_mask
    if not isinstance(mask, Mask):
        raise NotImplementedError(f"attention_mask is a {type(mask).__name__} of shape {tuple(getattr(mask, 'shape', ()))} but flash3 "
                                  "takes masks that transformers makes, of a padding mask [batch, seq_k] or none, not the model's or "
                                  f"the caller's own; {INSTEAD}")
    for name, x, dim, length in zip(("query", "query", "key"), (query, query, key), (0, 2, 2), mask.shape):
        if length is not None and x.shape[dim] != length:
            raise NotImplementedError(f"{name}.shape[{dim}] = {x.shape[dim]} but attention_mask was made for {length}; {INSTEAD}")

    options = {"causal": mask.causal, "window": mask.window, "softmax_scale": scaling, "softcap": softcap or 0.0}
    if s_aux is not None:
        options["sink"] = s_aux if s_aux.dtype == torch.float32 else s_aux.to(q.dtype)
    if cu_seq_lens_q is not None:
        if mask.seqused_k is not None:
            raise NotImplementedError("cu_seq_lens_q is given and so is an attention_mask with padding, or a static cache; give one")
        return _packed(q, k, v, cu_seq_lens_q, cu_seq_lens_k, _known(max_length_q), _known(max_length_k), options), None
    if mask.cu_seqlens is not None:
        return _packed(q, k, v, mask.cu_seqlens, mask.cu_seqlens, q.shape[1], q.shape[1], options), None
    if mask.order_q is not None:
        q = _in_order(q, mask.order_q)
    if mask.order_k is not None:
        k, v = _in_order(k, mask.order_k), _in_order(v, mask.order_k)
    out = attention(q, k, v, seqused_q=mask.seqused_q, seqused_k=mask.seqused_k, **options)
    return out if mask.back_q is None else _in_order(out, mask.back_q), None


def _mask_of_the_module(module, q, k, is_causal, sliding_window):
    """The mask where the model made none, as vision models do: what the module says of itself."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seq_q, seq_k = q.shape[1], k.shape[1]
    if not is_causal or seq_q == 1:
        if sliding_window is not None and seq_k > sliding_window:
            raise NotImplementedError(f"sliding_window = {sliding_window} and no mask, which is not to say what a query sees of "
                                      f"{seq_k} keys; {INSTEAD}")
        return Mask()
    if seq_q != seq_k:
        raise NotImplementedError(f"query.shape[2] = {seq_q} but key.shape[2] = {seq_k} under a causal module without a mask, which "
                                  f"is not to say which keys a query sees; {INSTEAD}")
    # A causal model's window counts the query itself.
    window = None if sliding_window is None or seq_k <= sliding_window else (sliding_window - 1, None)
    return Mask(causal=True, window=window)


def _in_order(x, order):
    """x [batch, seq, heads, dim] with the tokens of each row in another order, [batch, seq]."""
    return x.gather(1, order[:, :, None, None].expand(-1, -1, *x.shape[2:]))


def _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options):
    out = attention(*(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q=cu_seqlens_q.int(), cu_seqlens_k=cu_seqlens_k.int(),
                    max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options)
    return out.unflatten(0, q.shape[:2])


def _known(length):
    """A longest length if it is at hand: one in a tensor on a GPU is not worth a synchronisation."""
    if torch.is_tensor(length):
        return int(length) if length.device.type == "cpu" and not torch.compiler.is_compiling() else None
    return length
