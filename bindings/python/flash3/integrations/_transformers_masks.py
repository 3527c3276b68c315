# SPDX-License-Identifier: Apache-2.0
"""The masks of transformers in flash3's terms.

transformers describes a mask by a function of indices, a padding mask, and where queries and keys lie in the sequence. make_mask
takes them and gives a Mask, which the model hands to its attention layers unseen. It is all that they know: the mask that eager
attention would add is not guessed from anything else. What the options of flash3.attention say becomes options; any other mask becomes
one as data (flash3.masks), from the same function of indices. So does a tensor of four dimensions, of_tensor(), which a model or its
caller has made, or it becomes a bias.
"""
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from transformers import masking_utils

from .. import _mask_rows
from .._mask import Mask as MaskAsData
from .._mask_kept import kept
from .._mask_sources import MaskSource, of_rows
from .._sdpa import _bias as as_bias, mask_of, why_not_shape

# What transformers makes of several masks; here, since torch.compile does not trace the import of a lazy module.
_OR_MASKS = masking_utils.or_masks().__code__

INSTEAD = "take attn_implementation='sdpa' for this model"


class Mask(NamedTuple):
    """Which keys each query sees, as flash3.attention takes it."""
    causal: bool = False
    window: Optional[tuple] = None
    shape: tuple = (None, None, None)  # the batch, seq_q and seq_k that it was made for; None: any
    seqused_q: Optional[torch.Tensor] = None
    seqused_k: Optional[torch.Tensor] = None
    # Where padding is not after the tokens: the order that brings the tokens to the front, of queries and keys, and the way back.
    order_q: Optional[torch.Tensor] = None
    back_q: Optional[torch.Tensor] = None
    order_k: Optional[torch.Tensor] = None
    cu_seqlens: Optional[torch.Tensor] = None  # of packed sequences, one row of the batch after the other
    data: Optional[MaskAsData] = None  # all of it, where the others cannot say it
    bias: Optional[torch.Tensor] = None  # what else is added to the scores, as flash3.attention takes it

    # generate() makes masks before it calls a compiled model, and treats them as the tensors of four dimensions that others are.
    ndim = 4

    def contiguous(self):
        return self


class _Band(NamedTuple):
    """query - left <= key <= query + right; None: unbounded."""
    left: Optional[int] = None
    right: Optional[int] = None
    packed: bool = False  # and both are of one sequence, of those that lie in one row
    looked_up: bool = False  # the indices are those within the sequence

    device = None

    def to(self, device):
        return self

    def __bool__(self):
        raise TypeError("the truth of a mask of many pairs")

    def __and__(self, other):
        return _Band(_least(self.left, other.left), _least(self.right, other.right), self.packed or other.packed,
                     self.looked_up or other.looked_up)


def _least(a, b):
    return b if a is None else a if b is None else min(a, b)


class _Index:
    """The index of a query or of a key: a mask function that is called with these tells its band, whatever the sizes.

    What it does beyond that is a TypeError or an AttributeError.
    """

    def __init__(self, is_key, offset=0, table=None):
        self.is_key, self.offset, self.table = is_key, offset, table

    def new_ones(self, size, dtype):  # what and_masks begins with
        return _Band()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.__getitem__:
            raise TypeError(f"{function} of an index")
        table, (_, index) = args
        return _Index(index.is_key, index.offset, table)

    def __sub__(self, other):
        if isinstance(other, _Index):
            return _Difference(self, other)
        return _Index(self.is_key, self.offset - other, self.table)

    def __le__(self, other, strict=0):
        if not isinstance(other, _Index) or self.is_key == other.is_key or self.table is not other.table:
            raise TypeError("a comparison of other things than a query and a key")
        difference = other.offset - self.offset - strict
        looked_up = self.table is not None
        return _Band(None, difference, False, looked_up) if self.is_key else _Band(difference, None, False, looked_up)

    def __lt__(self, other):
        return self.__le__(other, 1)

    def __gt__(self, other):
        return other.__le__(self, 1)

    def __ge__(self, other):
        if isinstance(other, _Index):
            return other.__le__(self)
        if other != 0:
            raise TypeError("a comparison with a number")
        return _Band()  # what bidirectional_mask_function is

    def __eq__(self, other):
        if self.table is None or self.table is not other.table or self.is_key == other.is_key:
            raise TypeError("an equality of other things than the sequences of a query and a key")
        return _Band(packed=True)

    __hash__ = None

    def __bool__(self):
        raise TypeError("the truth of an index that stands for all")


class _Difference:
    def __init__(self, a, b):
        self.a, self.b = a, b

    def __abs__(self):
        return _Distance(self.a, self.b)


class _Distance(_Difference):
    def __le__(self, limit):
        return (self.a - limit <= self.b) & (self.b - limit <= self.a)

    def __lt__(self, limit):
        return self <= limit - 1


def _band(mask_function):
    """The band of a mask function of transformers; None: it has none."""
    try:
        band = mask_function(_Index(False), _Index(False), _Index(False), _Index(True))
    except (TypeError, AttributeError):
        return None
    return band if isinstance(band, _Band) and (band.packed or not band.looked_up) else None


def _is_traced_as_data(mask_function, local_size, config, use_vmap):
    """Whether torch.compile traces a mask function that has blocks, chunks, or parts of the model's own, which an _Index cannot look into
    there."""
    chunk = getattr(config, "attention_chunk_size", None)
    return torch.compiler.is_compiling() and \
        (use_vmap or mask_function.__code__ is _OR_MASKS or local_size is not None and local_size == chunk)


def _is_captured(device):
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_readable(x):
    """Whether values can be read on the host: not where torch.compile traces, or a CUDA graph is captured."""
    return not torch.compiler.is_compiling() and not _is_captured(x.device)


def _is_computed_with(q_length, allow_is_causal_skip, config, allow_is_bidirectional_skip=None, **_):
    """Whether the model asks for a mask to compute with, as to join it with that of another attention; what comes of it is for of_tensor()."""
    if allow_is_bidirectional_skip is not None:
        return not allow_is_bidirectional_skip
    # With one query transformers asks for it in the name of each model whose cache torch.compile takes.
    return not allow_is_causal_skip and (q_length > 1 or getattr(config, "model_type", None) == "t5gemma2_decoder")


def make_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, use_vmap=False,
              allow_is_causal_skip=True, local_size=None, config=None, device="cpu", **more):
    """A mask interface of transformers: what attention_forward gets as attention_mask; a tensor if the model asks for one.

    On a GPU it waits for the device once if there is a padding mask, twice if that has padding, and once if sequences are packed:
    for all layers together, and never where torch.compile traces or a CUDA graph is captured. A mask as data of up to 32 Mi pairs is made
    without waiting; a larger one waits for each part. torch.compile makes it outside of its graph.
    """
    if isinstance(attention_mask, Mask):  # generate() has made it
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(f"attention_mask.ndim = {attention_mask.dim()} but it must be 2, padding [batch, seq_k], or 4, a mask "
                                  f"[batch, heads, seq_q, seq_k]; {INSTEAD}")
    mask = None
    if not _is_traced_as_data(mask_function, local_size, config, use_vmap):
        # Where tracing transformers cannot look whether sequences are packed, and says so by the mask that it does not let skip.
        if torch.compiler.is_compiling() and attention_mask is None and not allow_is_causal_skip and \
                "allow_is_bidirectional_skip" not in more and q_length == kv_length:
            band = _Band(None if local_size is None else local_size - 1, 0, packed=True)
        else:
            band = _band(mask_function)
        if band is not None and not (band.packed or use_vmap) and _is_computed_with(q_length, allow_is_causal_skip, config, **more):
            return masking_utils.sdpa_mask(
                batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
                mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False, device=device)
        # Sequences that a model's own function tells apart need not be runs of tokens, nor those without padding.
        if band is not None and not (band.packed and (use_vmap or attention_mask is not None)):
            mask = _of_band(band, mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, device)
    if mask is None:
        mask = _as_data(mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, use_vmap, device)
    return mask


def _of_band(band, mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, device):
    """The mask in options of flash3.attention; None: they cannot say it."""
    # A side that reaches beyond all keys bounds nothing.
    left, right = (None if side is None or 0 < side >= kv_length - 1 else side for side in (band.left, band.right))
    causal = right == 0
    right = None if causal else right
    mask = Mask(causal, None if left is right is None else (left, right))
    if band.packed:
        return mask._replace(cu_seqlens=_starts(mask_function, batch_size, q_length, device), shape=(batch_size, q_length, kv_length))
    if not causal and mask.window is None:
        return mask if attention_mask is None else _without_padding_keys(mask, _padding(attention_mask, kv_length, kv_offset))
    place = _Place(batch_size, q_length, kv_length, q_offset - kv_offset, device)
    if not place.is_known and not causal or place.is_known and (place.end > kv_length or place.end < kv_length and not causal):
        return None  # the last query has not the place of the last key
    mask = mask._replace(shape=(None, q_length, kv_length))
    if attention_mask is None:
        return _without_padding(mask, place)
    return _with_padding(mask, place, _padding(attention_mask, kv_length, kv_offset), attention_mask.shape[1] - kv_offset)


@torch.compiler.disable
def _as_data(mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, use_vmap, device):
    """The mask of any mask function: the booleans that transformers makes for torch's attention, in parts if they are many."""
    device = torch.device(device)

    def rows(b, h, i):
        return masking_utils.sdpa_mask(
            batch_size=b.stop - b.start, q_length=i.stop - i.start, kv_length=kv_length, q_offset=q_offset + i.start, kv_offset=kv_offset,
            mask_function=lambda batch, *indices: mask_function(batch + b.start, *indices),
            attention_mask=None if attention_mask is None else attention_mask[b], allow_is_causal_skip=False, use_vmap=use_vmap, device=device)

    everything = slice(0, batch_size), slice(0, 1), slice(0, q_length)
    if q_length == 1:  # then it is padding among the keys
        return _without_padding_keys(Mask(), rows(*everything)[:, 0, 0])
    if batch_size * q_length * kv_length > _mask_rows.AT_ONCE and not _is_captured(device):
        data = of_rows(rows, batch_size, 1, q_length, kv_length, device).make()
    else:
        seen = rows(*everything)
        seen = (seen[:1] if seen.stride(0) == 0 else seen).contiguous()  # of one for all sequences transformers makes a view
        # With room for all blocks, so that nothing is waited for.
        data = MaskSource("dense", dense=seen.view(torch.uint8), seq_q=q_length, seq_k=kv_length).make(max_blocks=0)
    return Mask(shape=(None if data.batch == 1 else batch_size, q_length, kv_length), data=data)


# What hides a key in a mask that is added to scores: this and less, of every dtype the lowest that transformers takes.
_HIDDEN = torch.finfo(torch.float16).min


def _seen(added):
    """Which pairs are seen, of a mask of floats that is added to scores."""
    return added == 0


def _is_bias(added):
    """Whether a tensor of floats is more than a mask. That is read once, and kept with the tensor until it is changed."""
    if added.requires_grad or _is_captured(added.device):  # whose values cannot be read
        return True
    owner = added if added._base is None else added._base
    view = "is bias", added.storage_offset(), added.shape, added.stride()
    return kept(owner, (owner,), view, lambda: not (_seen(added) | (added <= _HIDDEN)).all().item())


def bias_of(name, added, query, key):
    """A tensor of floats that is added to scores, [1 or batch, 1 or heads, 1 or seq_q, seq_k], of any that broadcasts to it."""
    if (reason := why_not_shape(query, key, added)) is not None:
        raise NotImplementedError(f"{reason}: {name}.shape = {tuple(added.shape)} on {added.device}, query.shape = {tuple(query.shape)} on "
                                  f"{query.device}, key.shape = {tuple(key.shape)}; {INSTEAD}")
    return as_bias(added, query.shape[:1], key.shape[2])


def in_order(bias, mask):
    """A bias of queries and keys in the order of a mask."""
    if mask.order_q is not None and bias.shape[2] > 1:
        bias = bias.take_along_dim(mask.order_q[:, None, :, None], 2)
    return bias if mask.order_k is None else bias.take_along_dim(mask.order_k[:, None, None], 3)


@torch.compiler.disable
def of_tensor(attention_mask, query, key):
    """The mask as data of a tensor [1 or batch, 1 or heads, seq_q, seq_k], which a model or its caller has made: of bool, true where a key
    is seen, or of floats, 0 there and the lowest number elsewhere. It is kept with the tensor until that is changed, for all layers. Other
    floats, and those with a gradient, are a bias."""
    kind = attention_mask.dtype
    if attention_mask.dim() != 4 or not (kind == torch.bool or kind.is_floating_point):
        raise NotImplementedError(f"attention_mask is a tensor of shape {tuple(attention_mask.shape)} and dtype {kind} but it must be one of "
                                  f"bool or floats, [batch, heads, seq_q, seq_k]; {INSTEAD}")
    bias = bias_of("attention_mask", attention_mask, query, key)
    if kind.is_floating_point and _is_bias(attention_mask):
        return Mask(bias=bias)
    return Mask(data=mask_of(attention_mask, query, key, _seen if kind.is_floating_point else lambda x: x))


class _Place:
    """Where queries lie among the keys: query i has the place of key i + distance, an int, or a tensor where a static cache counts."""

    def __init__(self, batch, q_length, kv_length, distance, device):
        self.batch, self.q_length, self.kv_length, self.distance, self.device = batch, q_length, kv_length, distance, device
        self.end = distance + q_length  # no key at or after it is written, nor seen by a causal mask
        self.is_known = not torch.is_tensor(distance)


def _starts(mask_function, batch, length, device):
    """cu_seqlens of packed sequences: one begins where a token does not see the one before it."""
    rows, tokens = torch.arange(batch, device=device)[:, None], torch.arange(1, length, device=device)[None]
    together = mask_function(rows, tokens.new_zeros(()), tokens, tokens - 1).expand(batch, -1)
    begins = F.pad(~together, (1, 0), value=True).flatten()
    if _is_readable(begins):
        return F.pad(begins.nonzero()[:, 0], (0, 1), value=batch * length).int()
    # As many as there could be: those after the last one are empty.
    return torch.searchsorted(begins.cumsum(0) - 1, torch.arange(batch * length + 1, device=device), out_int32=True)


def _padding(attention_mask, kv_length, kv_offset):
    """Which key slots hold tokens, [batch, kv_length]. Slots that attention_mask does not reach hold none."""
    missing = kv_offset + kv_length - attention_mask.shape[1]
    if missing > 0:
        attention_mask = F.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset:kv_offset + kv_length].bool()


def _tokens_first(real):
    """The order of each row that brings its tokens to the front and keeps them in order."""
    return real.byte().argsort(dim=1, descending=True, stable=True)


def _without_padding_keys(mask, real):
    """All queries see all keys that are tokens. Whose tokens the queries are is not known, so none of them is padding."""
    readable = _is_readable(real)
    if readable and real.all():
        return mask
    count = real.sum(1, dtype=torch.int32)
    in_front = torch.arange(real.shape[1], device=real.device) < count[:, None]
    order = None if readable and torch.equal(real, in_front) else _tokens_first(real)
    return mask._replace(seqused_k=count, order_k=order, shape=(real.shape[0], None, real.shape[1]))


def _without_padding(mask, place):
    if not place.is_known:
        return mask._replace(seqused_k=place.end.int().expand(place.batch).contiguous())
    if place.end == place.kv_length:
        return mask
    return mask._replace(seqused_k=torch.full((place.batch,), place.end, dtype=torch.int32, device=place.device))


def _with_padding(mask, place, real, covered):
    """A causal mask or a window among the tokens; None: options cannot say it. real: which keys are tokens; covered: how many of them
    attention_mask says it of."""
    slots = torch.arange(place.kv_length, device=real.device)
    real = real & (slots < place.end)
    readable = _is_readable(real)
    count = real.sum(1, dtype=torch.int32)
    if readable and (count == place.end).all():
        return _without_padding(mask, place)

    first = real.byte().argmax(1)
    stop = first + count
    is_run = (real == ((slots >= first[:, None]) & (slots < stop[:, None]))).all()
    in_front = is_run & (first == 0).all()
    to_the_end = ((stop == place.end) | (count == 0)).all()
    is_covered = covered >= place.end
    if place.is_known:
        is_covered = is_run.new_full((), is_covered)
    single = place.q_length == 1  # a single query is always a token
    good = torch.stack((is_run | (mask.window is None), to_the_end | (mask.window is None or not single), is_covered | single)).all()
    if readable:
        good, in_front = torch.stack((good, in_front)).tolist()
        if not good:
            return None
    else:
        torch._assert_async(good, f"attention_mask has holes within a window, or is shorter than the {place.q_length} queries reach, which "
                                  "flash3 does not do where torch.compile traces or a CUDA graph is captured")

    as_they_are = readable and in_front
    mask = mask._replace(shape=(place.batch, *mask.shape[1:]), seqused_k=count, order_k=None if as_they_are else _tokens_first(real))
    if single:
        return mask
    distance = place.distance
    real_q = real[:, distance:] if place.is_known and place.end == place.kv_length else real.index_select(
        1, torch.arange(place.q_length, device=real.device) + distance)
    mask = mask._replace(seqused_q=real_q.sum(1, dtype=torch.int32))
    if as_they_are:
        return mask
    order = mask.order_k if place.q_length == place.kv_length else _tokens_first(real_q)
    return mask._replace(order_q=order, back_q=order.argsort(1))
