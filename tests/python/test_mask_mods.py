# SPDX-License-Identifier: Apache-2.0
"""Masks made from torch's mask_mods and BlockMasks, against what torch makes of them."""
import itertools
import re

import pytest
import torch
from oracle import check, pairs, scattered, small_parts  # noqa: F401  a fixture
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, or_masks
from torch.utils._python_dispatch import TorchDispatchMode

from flash3 import _mask_mods as mods
from flash3 import masks


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= 20


def prefix(b, h, q, k):
    return or_masks(lambda b, h, q, k: k < 30, causal)(b, h, q, k)


DOCUMENT_IDS = torch.tensor([0] * 50 + [1] * 100 + [2] * 3 + [3] * 147)


def document(b, h, q, k):
    return and_masks(causal, lambda b, h, q, k: DOCUMENT_IDS[q] == DOCUMENT_IDS[k])(b, h, q, k)


def natten_2d(b, h, q, k):  # 15 × 20
    (q_y, q_x), (k_y, k_x) = (q // 20, q % 20), (k // 20, k % 20)
    return ((q_y.clamp(2, 12) - k_y).abs() <= 2) & ((q_x.clamp(3, 16) - k_x).abs() <= 3)


def self_attention_tiles(b, h, q, k):  # stand-alone self-attention: blocks of 5 × 5 of a picture of 15 × 20, and a margin of 2
    (q_y, q_x), (k_y, k_x) = (q // 20, q % 20), (k // 20, k % 20)
    top, left = q_y // 5 * 5, q_x // 5 * 5
    return (k_y >= top - 2) & (k_y < top + 7) & (k_x >= left - 2) & (k_x < left + 7)


SPANS = torch.tensor([[20, 60], [130, 200]])


def transfusion(b, h, q, k):
    seen = q >= k
    for begin, end in SPANS:
        seen = seen | (q >= begin) & (q < end) & (k >= begin) & (k < end)
    return seen


def by_batch_and_head(b, h, q, k):
    return (q + b * 7 >= k) & (h + 1 > (q - k) // 40)


MODS = (causal, window, prefix, document, natten_2d, self_attention_tiles, transfusion, by_batch_and_head, scattered)


@pytest.mark.parametrize("fn", MODS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("batch, heads", ((None, None), (2, 3)), ids=str)
def test_from_mask_mod(fn, batch, heads):
    wanted = create_mask(fn, batch, heads, 300, 300, "cpu")
    source = mods.from_mask_mod(fn, batch, heads, 300, 300, "cpu")
    assert (source.kind == "bits") == (fn in (self_attention_tiles, scattered))
    check(source, wanted)


def test_parts(small_parts):
    """A block of 128 queries of one head at a time gives what all give at once."""
    asked = []

    def watched(b, h, q, k):
        asked.append(1)
        return by_batch_and_head(b, h, q, k) ^ ((k % 64 == 0) & (q > 250))

    source = mods.from_mask_mod(watched, 2, 3, 300, 290, "cpu")
    assert len(asked) == 2 * 3 * 3 + 1  # and first those in the middle
    check(source, create_mask(watched, 2, 3, 300, 290, "cpu"))
    source = mods.from_mask_mod(scattered, 2, 1, 300, 1000, "cpu")
    check(source, create_mask(scattered, 2, 1, 300, 1000, "cpu"))
    # a pair past the end is no reason to keep bits
    corner = mods.from_mask_mod(lambda b, h, q, k: ((q >= 128) & (k >= 128)) | (scattered(b, h, q, k) & (q < 64)), 1, 1, 200, 200, "cpu")
    assert corner.bit_blocks.tolist() == [[[[0, 1], [-2, -1]]]] and len(corner.bits) == 3


class Made(TorchDispatchMode):
    """The bytes of the largest memory that an operator returns, and how many elements those of this name give in all."""

    def __init__(self, name=""):
        super().__init__()
        self.name, self.largest, self.elements = name, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
                self.elements += x.numel() * (function.overloadpacket.__name__ == self.name)
        return made


def test_nothing_of_a_byte_a_pair_is_in_memory(small_parts):
    """seq x seq bytes would be 16 MiB here; the rows of a block in the integers that the mask_mod computes with are 4."""
    seq = 4096
    with Made() as made:
        source = mods.from_mask_mod(scattered, None, None, seq, seq, "cpu")
        mask = source.make()
    assert source.kind == "bits" and masks.needs(mask) == (1024, 1024, 0)
    assert seq * seq / 8 <= made.largest <= 8 * 128 * seq
    # Few blocks of many need bits: no memory is in proportion to the pairs at all.
    few = lambda b, h, q, k: (q - k).abs() <= 100 + 60 * ((q ^ k) % 11 < 3)
    with Made() as made:
        source = mods.from_mask_mod(few, None, None, 2 * seq, 2 * seq, "cpu")
        mask = source.make()
    assert source.kind == "bits" and len(source.bits) < 64 * 6
    assert made.largest <= 8 * 128 * 2 * seq
    assert mask.data.nbytes < 4 * seq * seq / 8 / 4


def listed(seq, block_size, fn, sees):
    """A BlockMask of the blocks [row, column] that sees() says, with this mask_mod."""
    rows, columns = (-(-seq // size) for size in block_size)
    lists = [[column for column in range(columns) if sees(row, column)] for row in range(rows)]
    counts = torch.tensor([len(x) for x in lists], dtype=torch.int32)[None, None]
    indices = torch.tensor([x + [0] * (columns - len(x)) for x in lists], dtype=torch.int32)[None, None]
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=block_size, mask_mod=fn, seq_lengths=(seq, seq))


@pytest.mark.parametrize("block_size", ((128, 128), (64, 256), (8, 136), (2048, 1024), (1 << 30, 1 << 30)), ids=str)
def test_a_mask_mod_is_evaluated_in_partial_blocks_alone(small_parts, block_size):
    """Blocks that are larger than a part of the rows are not evaluated for each part."""
    seq, sees = 1100, lambda row, column: (row + 2 * column) % 5 == 0
    block_mask = listed(seq, block_size, lambda b, h, q, k: torch.gcd(q + 1, k + 1) == 1, sees)
    with Made("gcd") as made:
        source = mods.from_block_mask(block_mask)
    check(source, meaning(block_mask, 1, 1))
    pairs = int(meaning(listed(seq, block_size, lambda b, h, q, k: q >= 0, sees), 1, 1).sum())
    # Once for the ranges of the rows in the middle, which are too many, and once for bits; units of blocks reach past the ends.
    assert pairs <= made.elements <= 1.5 * pairs
    assert made.largest <= 8 * 128 * 1152


@pytest.mark.parametrize("sizes", ((0, 5), (5, 0), (1, 1), (129, 1)), ids=str)
def test_from_mask_mod_of_odd_sizes(sizes):
    check(mods.from_mask_mod(causal, None, None, *sizes, "cpu"), pairs(1, 1, *sizes, lambda b, h, i, j: i >= j))


def meaning(block_mask, batch, heads):
    """What a BlockMask means, read from its tensors."""
    seq_q, seq_k = block_mask.seq_lengths
    rows, keys = block_mask.BLOCK_SIZE
    seen = torch.zeros(batch, heads, seq_q, seq_k, dtype=torch.bool)
    fn = create_mask(block_mask.mask_mod, batch, heads, seq_q, seq_k, "cpu")
    for counts, indices, is_full in ((block_mask.kv_num_blocks, block_mask.kv_indices, False),
                                     (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True)):
        if counts is None:
            continue
        for b, h, row in itertools.product(range(batch), range(heads), range(counts.shape[2])):
            own = b % counts.shape[0], h % counts.shape[1], row
            for column in indices[own][:counts[own]].tolist():
                block = b, h, slice(row * rows, (row + 1) * rows), slice(column * keys, (column + 1) * keys)
                seen[block] |= True if is_full else fn[block]
    return seen


@pytest.mark.parametrize("block_size", (128, 64, (32, 128), (256, 8)), ids=str)
@pytest.mark.parametrize("fn", MODS, ids=lambda fn: fn.__name__)
def test_from_block_mask(fn, block_size):
    for batch, heads in ((None, None), (2, 3)) if fn is by_batch_and_head else ((None, None),):
        block_mask = create_block_mask(fn, batch, heads, 300, 300, "cpu", block_size)
        check(mods.from_block_mask(block_mask), meaning(block_mask, batch or 1, heads or 1))
        assert torch.equal(meaning(block_mask, batch or 1, heads or 1), create_mask(fn, batch or 1, heads or 1, 300, 300, "cpu"))


def test_a_block_mask_counts_and_not_its_mask_mod():
    """Blocks that are not listed are hidden, whatever the mask_mod says, and full ones are seen."""
    counts, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    full_counts, full_indices = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    for fn in (causal, scattered):
        block_mask = BlockMask.from_kv_blocks(counts, indices, full_counts, full_indices, (64, 32), fn, seq_lengths=(100, 60))
        check(mods.from_block_mask(block_mask), meaning(block_mask, 1, 1))


@pytest.mark.parametrize("with_full", (False, True))
def test_block_lists_alone(with_full):
    """Without a mask_mod a BlockMask stays block lists."""
    g = torch.Generator().manual_seed(3)
    lists = []
    for _ in range(1 + with_full):
        counts = torch.randint(0, 4, (2, 1, 4), generator=g, dtype=torch.int32)
        lists += [counts, torch.stack([torch.randperm(5, generator=g) for _ in range(8)]).view(2, 1, 4, 5).int()]
    block_mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(64, 32), seq_lengths=(250, 150))
    source = mods.from_block_mask(block_mask)
    assert source.kind == "blocks"
    check(source, meaning(block_mask, 2, 1))


def test_a_shared_block_mask_whose_mask_mod_tells_heads_apart():
    block_mask = BlockMask.from_kv_blocks(torch.full((1, 1, 3), 3, dtype=torch.int32), torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3),
                                          mask_mod=by_batch_and_head, seq_lengths=(300, 300))
    check(mods.from_block_mask(block_mask, 2, 3), create_mask(by_batch_and_head, 2, 3, 300, 300, "cpu"))
    offsets = torch.tensor([0, 30, 60])
    block_mask.mask_mod = lambda b, h, q, k: q + offsets[h] >= k
    source = mods.from_block_mask(block_mask, 2, 3)
    assert source.shape == (1, 3)
    check(source, create_mask(block_mask.mask_mod, 2, 3, 300, 300, "cpu"))
    block_mask.mask_mod = causal
    assert mods.from_block_mask(block_mask, 2, 3).shape == (1, 1)


def test_slices_of_a_block_mask():
    block_mask = create_block_mask(by_batch_and_head, 2, 3, 300, 300, "cpu")
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        mods.from_block_mask(block_mask[:1])
    last = block_mask[:, :, 2:]
    last.mask_mod = lambda b, h, q, k: by_batch_and_head(b, h, q + 256, k)
    with pytest.raises(ValueError, match=re.escape("kv_num_blocks.shape[-1] = 1 but ceil(seq_lengths[0] / BLOCK_SIZE[0]) = 3")):
        mods.from_block_mask(last)
    last.seq_lengths = (44, 300)
    check(mods.from_block_mask(last), create_mask(by_batch_and_head, 2, 3, 300, 300, "cpu")[:, :, 256:])
