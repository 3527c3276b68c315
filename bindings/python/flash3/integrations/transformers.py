"""flash3 as an attention implementation of Hugging Face transformers:

    import flash3.integrations.transformers
    flash3.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="f3")

On the CPU as on a Hopper GPU; padded batches, packed ones, sliding windows, soft caps and sinks. Attention dropout, paged caches
and masks that a model makes itself raise NotImplementedError.
"""
import torch
import torch.nn.functional as F

from .._attention import attention


def register(name="f3"):
    """Makes attn_implementation=name mean flash3. transformers takes names with "flash" in them for kernels of its own."""
    if "flash" in name:
        raise ValueError(f"name = {name!r} but it must not contain 'flash': transformers looks such names up itself")
    from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, padding_mask)


def padding_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
                 use_vmap=False, **_):
    """What attention_forward gets as attention_mask: [batch, kv_length] bool, or None where no key is padding."""
    if use_vmap:  # a function of the model's own
        raise NotImplementedError("mask_function is the model's own but flash3 does causal masks, windows and padding; take "
                                  "attn_implementation='sdpa' for this model")
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:].bool()
    return None if attention_mask.shape[1] == kv_length and attention_mask.all() else attention_mask


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
                      is_causal=None, s_aux=None, cache=None, position_ids=None, cu_seq_lens_q=None, cu_seq_lens_k=None,
                      max_length_q=None, max_length_k=None, **kwargs):
    """An attention function as transformers calls it: query [batch, heads, seq, dim] in, [batch, seq, heads, dim] out."""
    if dropout:
        raise NotImplementedError(f"dropout = {dropout} but flash3 has no attention dropout; set the config's to 0")
    if cache is not None:
        raise NotImplementedError("cache is given but flash3 has no paged cache yet")
    if kwargs.get("output_attentions"):
        raise NotImplementedError("output_attentions = True but flash3 never stores the attention weights")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(f"attention_mask.ndim = {attention_mask.dim()} but flash3 takes padding masks, [batch, seq_k]")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if chunk and k.shape[1] > chunk:
        raise NotImplementedError(f"attention_chunk_size = {chunk} but flash3.integrations.transformers does no chunks")

    options = {"causal": getattr(module, "is_causal", True) if is_causal is None else is_causal, "softmax_scale": scaling,
               "softcap": softcap or 0.0}
    if sliding_window is not None and k.shape[1] > sliding_window:
        # Of a causal model it counts the query itself; both sides are given, and causal cuts the right one.
        options["window"] = (sliding_window - 1, sliding_window - 1)
    if s_aux is not None:
        options["sink"] = s_aux if s_aux.dtype == torch.float32 else s_aux.to(q.dtype)
    if attention_mask is not None:
        return _padded(q, k, v, attention_mask.bool(), options), None
    if cu_seq_lens_q is None and _is_packed(position_ids, q.shape[0]):
        cu_seq_lens_q = cu_seq_lens_k = _starts(position_ids)
        max_length_q = max_length_k = None
    if cu_seq_lens_q is not None:
        out = attention(*(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q=cu_seq_lens_q.int(),
                        cu_seqlens_k=cu_seq_lens_k.int(), max_seqlen_q=_known(max_length_q),
                        max_seqlen_k=_known(max_length_k), **options)
        return out.unflatten(0, q.shape[:2]), None
    return attention(q, k, v, **options), None


def _known(length):
    """A longest length if it is at hand: one in a tensor on a GPU is not worth a synchronisation."""
    if torch.is_tensor(length):
        return int(length) if length.device.type == "cpu" and not torch.compiler.is_compiling() else None
    return length


def _padded(q, k, v, mask, options):
    """Attention among the tokens that are no padding; the others' rows are 0. mask: [batch, seq_k] bool."""
    seq_q, seq_k = q.shape[1], min(k.shape[1], mask.shape[1])  # a static cache is longer than what it holds
    k, v, mask = k[:, :seq_k], v[:, :seq_k], mask[:, :seq_k]
    # The queries are the last tokens; a single one is always a token.
    mask_q = mask[:, -seq_q:] if seq_q > 1 else torch.ones_like(mask[:, :1])
    if mask_q.shape[1] != seq_q:
        raise NotImplementedError(f"attention_mask.shape[1] = {mask.shape[1]} but there are {seq_q} queries; it must hold a key "
                                  "for each")
    tokens_q, tokens_k = mask_q.flatten().nonzero()[:, 0], mask.flatten().nonzero()[:, 0]
    packed = attention(q.flatten(0, 1)[tokens_q], k.flatten(0, 1)[tokens_k], v.flatten(0, 1)[tokens_k],
                       cu_seqlens_q=_ends(mask_q), cu_seqlens_k=_ends(mask), max_seqlen_q=seq_q, max_seqlen_k=seq_k, **options)
    out = packed.new_zeros((q.shape[0] * seq_q, *packed.shape[1:])).index_copy(0, tokens_q, packed)
    return out.unflatten(0, q.shape[:2])


def _ends(mask):
    """cu_seqlens of the true elements of each row."""
    return F.pad(mask.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


def _is_packed(position_ids, batch):
    """Whether one row holds several sequences: positions that start again."""
    if position_ids is None or batch != 1 or position_ids.dim() != 2 or position_ids.shape[-1] < 2:
        return False
    return bool((position_ids.diff() != 1).any())


def _starts(position_ids):
    """cu_seqlens of sequences whose positions each begin anew."""
    row = position_ids[0]
    new = F.pad(row.diff() != 1, (1, 0), value=True).nonzero()[:, 0]
    return F.pad(new, (0, 1), value=row.numel()).int()
