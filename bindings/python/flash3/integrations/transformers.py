# SPDX-License-Identifier: Apache-2.0
"""flash3 as an attention implementation of Hugging Face transformers::

    import flash3.integrations.transformers
    flash3.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="f3")

It runs on the CPU and on a Hopper GPU, with padded and packed batches, caches, continuous batching, sliding windows, soft caps, sinks,
position biases, and every other mask. What flash3 cannot compute as transformers' eager attention does raises NotImplementedError.
docs/python.md has the rules.
"""
import torch

from .. import _overrides
from .._attention import attention
from .._kv_cache import attention_with_kv_cache
from .._support import MOST
from ._transformers_masks import INSTEAD, Mask, bias_of, in_order, make_mask, of_tensor


def register(name="f3"):
    """Makes attn_implementation=name mean flash3, in continuous batching too, from transformers 5.23 on.

    There it is called name + "_paged" while a batch runs. transformers takes names with "flash" in them for kernels of its own.
    """
    if "flash" in name:
        raise ValueError(f"name = {name!r} but it must not contain 'flash': transformers looks such names up itself, and finds flash3 "
                         "as 'flash_attention_3' where the distributions in bindings/dropin and bindings/dropin/metadata are installed")
    from transformers import AttentionInterface, AttentionMaskInterface, __version__
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    if tuple(map(int, __version__.split(".")[:2])) < (5, 23):
        return  # its paged cache has another interface, and its continuous batching refuses names that it does not know
    from ._transformers_paged import accept
    AttentionInterface.register(f"{name}_paged", paged_attention_forward)
    accept(name, f"{name}_paged")


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
                      is_causal=None, s_aux=None, cache=None, position_bias=None, cu_seq_lens_q=None, cu_seq_lens_k=None,
                      max_length_q=None, max_length_k=None, **kwargs):
    """An attention function as transformers calls it: query [batch, heads, seq, dim] in, [batch, seq, heads, dim] out."""
    _refuse(query, value, None, **kwargs)
    if cache is not None:
        raise NotImplementedError("cache is given but this attention is not over a paged cache; continuous batching switches to "
                                  "the one that is, from transformers 5.23 on")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = _mask_of_the_module(module, q, k, is_causal, sliding_window) if attention_mask is None else attention_mask
    if torch.is_tensor(mask):
        mask = of_tensor(mask, query, key)
    if not isinstance(mask, Mask):
        raise NotImplementedError(f"attention_mask is a {type(mask).__name__} but flash3 takes tensors and masks that transformers makes; "
                                  f"{INSTEAD}")
    for name, x, dim, length in zip(("query", "query", "key"), (query, query, key), (0, 2, 2), mask.shape):
        if length is not None and x.shape[dim] != length:
            raise NotImplementedError(f"{name}.shape[{dim}] = {x.shape[dim]} but attention_mask was made for {length}; {INSTEAD}")

    options = {"causal": mask.causal, "window": mask.window, **_options(q, scaling, softcap, s_aux)}
    if dropout:  # in training alone
        options["dropout_p"] = dropout
    bias = mask.bias
    if position_bias is not None:
        bias = bias_of("position_bias", position_bias, query, key) + (0 if bias is None else bias)
    packed = cu_seq_lens_q is not None or mask.cu_seqlens is not None
    if packed and bias is not None:
        raise NotImplementedError(f"a bias is given and sequences are packed, for which flash3 takes no bias from transformers; {INSTEAD}")
    if packed and _overrides.users and _overrides.override("attention") is not None:
        # Positions of tokens that are dealt to ranks are not one run each: context_parallel knows the documents itself.
        return attention(q, k, v, **options), None
    if cu_seq_lens_q is not None:
        if mask.seqused_k is not None or mask.data is not None:
            raise NotImplementedError("cu_seq_lens_q is given and so is an attention_mask with padding or of other pairs, or a static cache; "
                                      "give one")
        return _packed(q, k, v, cu_seq_lens_q, cu_seq_lens_k, _known(max_length_q), _known(max_length_k), options), None
    if mask.cu_seqlens is not None:
        return _packed(q, k, v, mask.cu_seqlens, mask.cu_seqlens, q.shape[1], q.shape[1], options), None
    if mask.data is not None:
        return attention(q, k, v, mask=mask.data, bias=bias, **options), None
    if bias is not None:
        options["bias"] = in_order(bias, mask)
    if mask.order_q is not None:
        q = _in_order(q, mask.order_q)
    if mask.order_k is not None:
        k, v = _in_order(k, mask.order_k), _in_order(v, mask.order_k)
    out = attention(q, k, v, seqused_q=mask.seqused_q, seqused_k=mask.seqused_k, **options)
    return out if mask.back_q is None else _in_order(out, mask.back_q), None


def paged_attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
                            is_causal=True, s_aux=None, cache=None, position_bias=None, cu_seq_lens_q=None, **kwargs):
    """The same in continuous batching: sequences packed into one row, with their keys in pages.

    Where each sequence has one new token and all layers have pages, the new keys are written by the call for the attention, which
    reads the others where they lie. Otherwise the cache gathers the keys.
    """
    if dropout:
        raise NotImplementedError(f"dropout = {dropout} but continuous batching drops no weights; set the config's to 0")
    _refuse(query, value, position_bias, **kwargs)
    if cache is None and "read_index" not in kwargs:
        raise ValueError("neither cache nor read_index is given but this attention is that of continuous batching; take the one that "
                         "is registered without '_paged' for other calls")
    if attention_mask is not None or not is_causal:
        raise NotImplementedError(f"attention_mask is {'not ' if attention_mask is None else ''}given and is_causal = {is_causal} "
                                  f"but flash3 does continuous batching of causal models, which gives no mask; {INSTEAD}")
    if cache is not None:
        # It puts the lengths of this layer's keys into kwargs, and the pages if they are used; else it returns the keys. From
        # transformers 5.24 on the model's layers have called it.
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options = {"causal": True, "window": None if sliding_window is None else (sliding_window - 1, None),
               "cu_seqlens_q": cu_seq_lens_q.int(), "max_seqlen_q": _known(kwargs["max_length_q"]),
               **_options(q, scaling, softcap, s_aux)}
    cu_seqlens_k, table = _of_its_layers(module, kwargs["cu_seq_lens_k"]).int(), kwargs.get("block_table")
    if table is None:
        max_seqlen_k = _known(_of_its_layers(module, kwargs["max_length_k"]))
        out = attention(q, k, v, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k, **options)
    else:
        out = _append_and_attend(q, kwargs["k_cache"], kwargs["v_cache"], k, v, cu_seqlens_k, table, options)
    return out[None], None


def _of_its_layers(module, lengths):
    """The lengths of the keys of layers like this one. A layer that takes the keys of another is told those of all types of layers."""
    if not isinstance(lengths, dict):
        return lengths
    if len(lengths) == 1:
        return next(iter(lengths.values()))
    layer_type = getattr(module, "layer_type", None)
    if layer_type not in lengths:
        raise NotImplementedError(f"module.layer_type = {layer_type!r} but the cache has layers of the types {', '.join(lengths)}, and "
                                  f"this layer, which takes the keys of another, must say which of them it is; {INSTEAD}")
    return lengths[layer_type]


@torch.compiler.disable  # it writes into views of the cache
def _append_and_attend(q, k_cache, v_cache, k, v, cu_seqlens_k, table, options):
    """cu_seqlens_k: of the keys with those that are new, of which each sequence has as many as queries; none if it is padding."""
    starts = options["cu_seqlens_q"]
    return attention_with_kv_cache(q, k_cache, v_cache, k_new=k, v_new=v, cu_seqlens_k_new=starts, page_table=table,
                                   seqused_k=cu_seqlens_k.diff() - starts.diff(), **options)


def _refuse(query, value, position_bias, output_attentions=False, **kwargs):
    device, differentiated = query.device.type, torch.is_grad_enabled() and (query.requires_grad or value.requires_grad)
    limits = MOST.get(device, MOST["cpu"])["backward" if differentiated else "forward"]
    for name, x, most in zip(("query", "value"), (query, value), limits or ()):
        if x.shape[-1] > most:
            raise NotImplementedError(f"{name}.shape[-1] = {x.shape[-1]} but flash3's head dims are up to {most} on {device}"
                                      f"{' with gradients' if differentiated else ''}; {INSTEAD}")
    if output_attentions:
        raise NotImplementedError("output_attentions = True but flash3 never stores the attention weights")
    if position_bias is not None:
        raise NotImplementedError(f"position_bias is given but flash3 adds no such bias to the scores; {INSTEAD}")


def _options(q, scaling, softcap, s_aux):
    sink = s_aux if s_aux is None or s_aux.dtype == torch.float32 else s_aux.to(q.dtype)
    return {"softmax_scale": scaling, "softcap": softcap or 0.0, "sink": sink}


def _mask_of_the_module(module, q, k, is_causal, sliding_window):
    """The mask where the model made none, as vision models do: what the module says of itself."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seq_q, seq_k = q.shape[1], k.shape[1]
    if not is_causal or seq_q == 1:
        if sliding_window is not None and seq_k > sliding_window:
            raise NotImplementedError(f"sliding_window = {sliding_window} and no mask, so that it is not known what a query sees of "
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
