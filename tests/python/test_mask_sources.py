# SPDX-License-Identifier: Apache-2.0
"""What masks are made from: each constructor against its definition, pair by pair, and operators against those of booleans."""
import itertools
import pathlib
import re
import xml.etree.ElementTree

import numpy as np
import pytest
import torch
from oracle import check, pairs, scattered, small_parts  # noqa: F401  a fixture
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from flash3 import _mask_kinds as kinds
from flash3 import _mask_mods as mods
from flash3 import _mask_ranges, _mask_rows
from flash3 import _mask_shapes as shapes
from flash3._mask_sources import Band, MaskSource


# ---- the band ----

@pytest.mark.parametrize("top_left", (False, True))
@pytest.mark.parametrize("sizes", ((7, 7), (5, 12), (12, 5), (1, 9), (0, 4), (4, 0)), ids=str)
@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window": (2, 1)}, {"window": (None, 0)}, {"window": (-1, 3)}, {"chunk": 4},
                                     {"causal": True, "chunk": 3}, {"window": (2**62, 2)}, {"causal": True, "window": (3, 5)}), ids=str)
def test_band(options, sizes, top_left):
    seq_q, seq_k = sizes
    left, right = options.get("window", (None, None))
    chunk = options.get("chunk", 0)

    def sees(b, h, i, j):
        own = i + (0 if top_left else seq_k - seq_q)
        return not (options.get("causal") and j > own or left is not None and left >= 0 and j < own - left or
                    right is not None and right >= 0 and j > own + right or chunk and j // chunk != own // chunk)

    source = kinds.band(**options, mask_alignment="top_left" if top_left else "bottom_right")
    check(source.sized(seq_q, seq_k), pairs(1, 1, seq_q, seq_k, sees))
    everything = kinds.dense(torch.ones(seq_q, seq_k, dtype=torch.bool))
    check(everything & source, pairs(1, 1, seq_q, seq_k, sees))


# ---- documents and prefixes ----

def run_of(ids, place):
    """The places of the run of equal numbers that a place is in."""
    begin = end = place
    while begin > 0 and ids[begin - 1] == ids[place]:
        begin -= 1
    while end + 1 < len(ids) and ids[end + 1] == ids[place]:
        end += 1
    return range(begin, end + 1)


IDS = [[0, 0, 0, 4, 4, 2, 2, 2, 0, 0, 7], [3] * 11, [1, 2, 3, 4, 5, 6, 6, 8, 9, 1, 1]]


@pytest.mark.parametrize("seq_q", (11, 4, 15, 0))
@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window": (1, 2)}, {"chunk": 4}), ids=str)
def test_documents(options, seq_q):
    def sees(b, h, i, j):
        own = i + 11 - seq_q
        left, right = options.get("window", (99, 99))
        return 0 <= own < 11 and j in run_of(IDS[b], own) and not (options.get("causal") and j > own) and own - left <= j <= own + right and \
            (not options.get("chunk") or j // 4 == own // 4)

    source = kinds.documents(torch.tensor(IDS), seq_q=seq_q, **options)
    assert source.kind == "documents" and source.documents.dtype == torch.int32
    check(source, pairs(3, 1, seq_q, 11, sees))
    check(kinds.documents(IDS[0], seq_q=seq_q, **options), pairs(1, 1, seq_q, 11, sees))
    small = kinds.documents(torch.tensor(IDS, dtype=torch.int32), seq_q=seq_q, **options)
    assert small.documents.tolist() == IDS
    check(small, pairs(3, 1, seq_q, 11, sees))


def test_documents_of_large_numbers():
    ids = torch.tensor([2**40, 2**40, 2**40 + 1, 2**62, -2**62, -2**62])
    check(kinds.documents(ids), ids[:, None].eq(ids)[None, None])


def test_documents_of_lengths():
    lengths = [[3, 0, 4], [1, 1, 1]]
    ids = [[0, 0, 0, 2, 2, 2, 2, 9, 9], [0, 1, 2] + [9] * 6]
    wanted = pairs(2, 1, 9, 9, lambda b, h, i, j: ids[b][i] == ids[b][j])
    check(kinds.documents(lengths=lengths, seq_k=9), wanted)
    check(kinds.documents(lengths=torch.tensor(lengths)), wanted[:, :, :7, :7])
    assert kinds.documents(lengths=[]).seq_k == 0 and kinds.documents([]).to_dense().shape == (1, 1, 0, 0)


@pytest.mark.parametrize("seq_q", (9, 4, 13, 0))
def test_prefix(seq_q):
    lengths = [0, 4, 30, -2]
    wanted = pairs(4, 1, seq_q, 9, lambda b, h, i, j: j < lengths[b] or j <= i + 9 - seq_q)
    check(kinds.prefix(lengths, seq_q, 9), wanted)
    check(kinds.prefix(torch.tensor(lengths, dtype=torch.int32), seq_q, 9), wanted)
    check(kinds.prefix(4, seq_q, 9), wanted[1:2])


@pytest.mark.parametrize("seq_q", (11, 6, 13))
def test_prefix_of_documents(seq_q):
    lengths = [[2, 1, 0], [5, 5, 5], [0, 1, 1]]

    def sees(b, h, i, j):
        own = i + 11 - seq_q
        if not 0 <= own < 11:
            return False
        run = run_of(IDS[b], own)
        which = len({run_of(IDS[b], place)[0] for place in range(run[0])})
        length = lengths[b][which] if which < 3 else 0
        return j in run and (j < run[0] + length or j <= own)

    check(kinds.prefix(lengths, seq_q, ids=IDS), pairs(3, 1, seq_q, 11, sees))
    check(kinds.prefix(lengths[1:2], seq_q, ids=IDS[1]), pairs(3, 1, seq_q, 11, sees)[1:2])


# ---- ranges, blocks, booleans, sinks ----

def test_ranges():
    g = torch.Generator().manual_seed(1)
    for n, (batch, heads) in itertools.product((1, 2, 8), ((1, 1), (2, 3))):
        bounds = torch.randint(-5, 25, (batch, heads, 2 * n, 13), generator=g)
        wanted = pairs(batch, heads, 13, 20, lambda b, h, i, j: any(bounds[b, h, 2 * r, i] <= j < bounds[b, h, 2 * r + 1, i] for r in range(n)))
        check(kinds.ranges(bounds), wanted)
        check(kinds.ranges(bounds, seq_k=20, causal=True), wanted & torch.ones(13, 20, dtype=torch.bool).tril(7))
    assert kinds.ranges(torch.tensor([2**40, -2**40]).view(1, 1, 2, 1)).ranges.flatten().tolist() == [2**31 - 1, -2**31]


@pytest.mark.parametrize("sizes", ((64, 64), (61, 70), (8, 100)), ids=str)
def test_blocks(sizes):
    seq_q, seq_k = sizes
    g = torch.Generator().manual_seed(2)
    rows, keys, most = 16, 24, 4
    counts = torch.randint(-1, most + 3, (2, 3, -(-seq_q // rows)), generator=g)
    indices = torch.randint(-1, 5, (*counts.shape, most), generator=g)
    wanted = pairs(2, 3, seq_q, seq_k, lambda b, h, i, j: j // keys in indices[b, h, i // rows, :max(counts[b, h, i // rows], 0)].tolist())
    source = kinds.blocks(counts, indices, rows, keys)
    check(source, wanted)
    assert source.block_counts.dtype == source.block_indices.dtype == torch.int32
    seen = torch.rand(1, 2, -(-seq_q // rows), -(-seq_k // keys), generator=g) < 0.4
    check(kinds.blocks(seen, None, rows, keys, seq_k=seq_k), pairs(1, 2, seq_q, seq_k, lambda b, h, i, j: seen[b, h, i // rows, j // keys]))


@pytest.mark.parametrize("shape", ((), (1,), (2,), (2, 3), (1, 3), (2, 1)), ids=str)
@pytest.mark.parametrize("rows,keys,seq_q,seq_k", ((64, 64, 192, 320), (64, 64, None, None), (128, 64, 130, 250), (64, 128, 100, 257),
                                                   (192, 128, 300, 200), (16, 24, 61, 70), (64, 40, 100, 170), (128, 64, 0, 64)), ids=str)
def test_blocks_of_which_not_all_keys_are_tokens(rows, keys, seq_q, seq_k, shape):
    """shape: of the sizes before the last dimension. Their values are clamped; the last block may end before its size."""
    g = torch.Generator().manual_seed(rows + keys)
    blocks_q, blocks_k = (-(-seq_q // rows), -(-seq_k // keys)) if seq_q is not None else (3, 5)
    seen = torch.rand(2, 3, blocks_q, blocks_k, generator=g) < 0.6
    sizes = torch.randint(-2, keys + 3, (*shape, blocks_k), generator=g)
    sizes[..., ::3] = keys
    lists = seen.sum(-1), (~seen).to(torch.uint8).argsort(dim=-1, stable=True)
    full_q, full_k = (blocks_q * rows, blocks_k * keys) if seq_q is None else (seq_q, seq_k)
    i, j = torch.arange(full_q), torch.arange(full_k)
    tokens = (j % keys < sizes[..., j // keys]).view((*shape, 1, 1, full_k) if len(shape) < 2 else (*shape, 1, full_k))
    wanted = seen[:, :, i // rows][..., j // keys] & tokens
    for counts, indices in (lists, (seen, None)):
        source = kinds.blocks(counts, indices, rows, keys, block_sizes=sizes, seq_q=seq_q, seq_k=seq_k)
        assert (source.seq_q, source.seq_k) == (full_q, full_k)
        check(source, wanted)
    banded = kinds.blocks(seen, None, rows, keys, block_sizes=sizes, seq_q=seq_q, seq_k=seq_k, causal=True)
    check(banded, wanted & torch.ones(full_q, full_k, dtype=torch.bool).tril(full_k - full_q))
    check(kinds.blocks(seen[:1, :1], None, rows, keys, block_sizes=sizes, seq_q=seq_q, seq_k=seq_k),
          seen[:1, :1, i // rows][..., j // keys] & tokens)


@pytest.mark.parametrize("shape", ((), (2,), (2, 3), (1, 3)), ids=str)
def test_block_sizes_in_parts(small_parts, shape):
    """Blocks that are no multiples of 64 are evaluated, here a block of rows of one head at a time."""
    seen, sizes, j = torch.rand(2, 3, 12, 5) < 0.6, torch.randint(0, 25, (*shape, 5)), torch.arange(120)
    tokens = (j % 24 < sizes[..., j // 24]).view((*shape, 1, 1, 120) if len(shape) < 2 else (*shape, 1, 120))
    check(kinds.blocks(seen, None, 16, 24, block_sizes=sizes), seen[:, :, torch.arange(192) // 16][..., j // 24] & tokens)


def test_block_sizes_of_a_video_are_not_waited_for():
    """Blocks of 64 become bits without a number that is read from the device, and only where a block is not whole."""
    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
            return function(*args, **(kwargs or {}))

    seen, sizes = torch.rand(1, 2, 4, 6) < 0.5, torch.tensor([64, 64, 64, 48, 64, 64])
    with Reads():
        source = kinds.blocks(seen, None, 64, 64, block_sizes=sizes)
    seen = seen.view(1, 2, 2, 2, 3, 2).transpose(3, 4).flatten(-2)
    assert torch.equal(source.bit_blocks == -2, ~seen.any(-1)) and torch.equal(source.bit_blocks[..., ::2] == -1, seen.all(-1)[..., ::2])
    assert (source.bit_blocks[..., 1] != -1).all()


def test_dense():
    mask = torch.rand(2, 3, 5, 7) < 0.5
    check(kinds.dense(mask), mask)
    check(kinds.dense(mask.to(torch.uint8) * 3), mask)
    check(kinds.dense(mask[0, 0]), mask[:1, :1])
    check(kinds.dense(mask[:, :1, :, :], causal=True), mask[:, :1] & torch.ones(5, 7, dtype=torch.bool).tril(2))
    assert kinds.dense(mask).dense.dtype == torch.uint8
    wide = mask.transpose(2, 3).contiguous().transpose(2, 3)
    check(kinds.dense(wide), mask)
    assert kinds.dense(wide).dense.stride(3) == 1
    row = mask[:, :1, :1].expand(-1, -1, 5, -1)
    assert kinds.dense(row).dense.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()  # no copy
    check(kinds.dense(row), row)


def test_bits():
    mask = torch.rand(2, 3, 5, 19) < 0.5
    packed = torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))
    check(kinds.bits(packed, 19), mask)
    check(kinds.bits(packed | torch.tensor([0, 0, 0xF8], dtype=torch.uint8), 19), mask)  # bits after the last key
    check(kinds.bits(packed[0, 0], 19, causal=True), mask[:1, :1] & torch.ones(5, 19, dtype=torch.bool).tril(14))
    check(kinds.bits(packed[:, :1], 19).sized(5, 19), mask[:, :1])
    wide = packed.transpose(2, 3).contiguous().transpose(2, 3)
    check(kinds.bits(wide, 19), mask)
    assert kinds.bits(wide, 19).bits.stride(3) == 1 and kinds.bits(packed, 19).bits is not None
    assert kinds.bits(packed[1:], 19).bits.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()  # no copy
    check(kinds.bits(torch.empty(4, 0, dtype=torch.uint8), 0), torch.empty(1, 1, 4, 0, dtype=torch.bool))


def test_dimensions_in_front_may_be_left_out():
    bounds, seen = torch.tensor([[0, 3, 1], [4, 6, 2]]), torch.rand(3, 6) < 0.5
    check(kinds.ranges(bounds, seq_k=6), kinds.ranges(bounds[None, None], seq_k=6).to_dense())
    check(kinds.ranges(torch.stack((bounds, bounds + 1)), seq_k=6), kinds.ranges(torch.stack((bounds, bounds + 1))[None], seq_k=6).to_dense())
    check(kinds.dense(seen[None]), seen[None, None])
    counts, indices = torch.tensor([1, 0]), torch.tensor([[1], [0]])
    check(kinds.blocks(counts, indices, 8, 8, seq_q=10, seq_k=20), kinds.blocks(counts[None, None], indices[None, None], 8, 8).sized(10, 20).to_dense())
    blocks = torch.tensor([[False, True], [True, False]])
    check(kinds.blocks(blocks, None, 8, 16, seq_q=10, seq_k=20), pairs(1, 1, 10, 20, lambda b, h, i, j: blocks[i // 8, j // 16]))


@pytest.mark.parametrize("window, sinks", ((3, 2), (0, 4), (5, 0), (50, 50), (1, 1)))
@pytest.mark.parametrize("sizes", ((12, 12), (5, 12), (12, 5)), ids=str)
def test_window_with_sinks(window, sinks, sizes):
    def sees(b, h, i, j):
        own = i + sizes[1] - sizes[0]
        return j <= own and (j < sinks or j > own - window)
    check(kinds.window_with_sinks(window, sinks, *sizes), pairs(1, 1, *sizes, sees))


# ---- operators ----

def sources():
    """Masks of every kind for 2 sequences, 1 or 3 heads, 60 queries and 70 keys."""
    g = torch.Generator().manual_seed(4)
    bounds = torch.randint(-5, 75, (2, 1, 6, 60), generator=g)
    return {
        "band": kinds.band(window=(9, 4)).sized(60, 70),
        "top left": kinds.band(causal=True, mask_alignment="top_left").sized(60, 70),
        "ranges": kinds.ranges(bounds),
        "many": kinds.ranges(torch.randint(-5, 75, (1, 3, 16, 60), generator=g), seq_k=70, window=(50, 3)),
        "documents": kinds.documents(torch.arange(140).view(2, 70) // 9, seq_q=60, causal=True),
        "dense": kinds.dense(torch.rand(1, 3, 60, 70, generator=g) < 0.8, causal=True),
        "blocks": kinds.blocks(torch.rand(2, 1, 4, 3, generator=g) < 0.5, None, 16, 24, seq_q=60, seq_k=70),
        "bit blocks": mods.from_mask_mod(scattered, None, None, 60, 70, "cpu"),
        "bits": kinds.bits(torch.randint(0, 256, (2, 1, 60, 9), dtype=torch.uint8, generator=g), 70, window=(40, None)),
        "nothing": kinds.ranges(torch.zeros(1, 1, 2, 60).long(), seq_k=70),
    }


@pytest.mark.parametrize("a, b", list(itertools.product(sources(), sources())))
def test_operators(a, b):
    a, b = sources()[a].sized(60, 70), sources()[b].sized(60, 70)
    for made, wanted in ((a & b, a.to_dense(2, 3) & b.to_dense(2, 3)), (a | b, a.to_dense(2, 3) | b.to_dense(2, 3))):
        check(made, wanted)
        assert made.seq_q == 60 and made.seq_k == 70


@pytest.mark.parametrize("name", sources())
def test_inversion(name):
    source = sources()[name].sized(60, 70)
    check(~source, ~source.to_dense())
    check(~~source, source.to_dense())


def test_what_operators_make():
    all_kinds = sources()
    assert (all_kinds["documents"] & kinds.band(window=(5, 5))).kind == "documents"
    assert (all_kinds["dense"] & kinds.band(window=(5, 5))).band == Band(5, 0)
    assert (kinds.band(causal=True) & kinds.band(window=(3, None))).band == Band(3, 0)
    assert (all_kinds["documents"] | kinds.band(window=(1, 1))).ranges.shape == (2, 1, 4, 60)
    assert (all_kinds["documents"] & all_kinds["ranges"].sized(60, 70)).ranges.shape == (2, 1, 6, 60)
    assert (all_kinds["many"] | all_kinds["top left"]).kind in ("ranges", "bits")
    assert (all_kinds["blocks"] | all_kinds["band"]).kind == "ranges"  # at most three blocks of keys and a band


def test_normalised_ranges():
    bounds = torch.tensor([5, 9, 0, 2, 8, 12, 7, 7, 2, 3, 40, 50, -9, -3]).view(1, 1, 14, 1)
    assert _mask_ranges.normalised(bounds, 45).flatten().tolist() == [0, 3, 5, 12, 40, 45] + [0] * 8
    assert _mask_ranges.complement(bounds, 45).flatten().tolist()[:4] == [3, 5, 12, 40]


# ---- what a mask is asked ----

def test_arguments_are_those_of_the_library():
    schema = torch.ops.flash3.mask_make.default._schema
    names = [a.name for a in schema.arguments]
    for source in sources().values():
        tensors, named = source.arguments()
        assert len(tensors) == names.index("block_indices") == 5 and {*named} <= {*names}
        given = [name for name, x in zip(names[1:], tensors) if x is not None]
        assert given == {"band": [], "bits": [], "blocks": ["block_counts", "block_indices"]}.get(source.kind, [source.kind])
        assert ({"bits", "bit_blocks"} <= {*named}) == (source.kind == "bits")
    assert kinds.band(causal=True, window=(3, 5), chunk=9, mask_alignment="top_left").arguments()[1] == \
        {"window_left": 3, "window_right": 0, "chunk": 9, "mask_alignment": 1}


def test_a_changed_tensor_is_seen():
    """Nothing that is found of a source's tensors outlives a call."""
    many = kinds.ranges(torch.arange(1, 17)[:, None].repeat(1, 60) * 3, seq_k=60)  # inverted, more ranges than fit
    documents = kinds.documents(torch.arange(60) // 7)
    for mask, tensor in ((documents, documents.documents), (many, many.ranges)):
        before = mask.draw(), (~mask).to_dense()
        tensor += torch.arange(60, dtype=torch.int32) // 5
        assert mask.draw() != before[0]
        check(~mask, ~mask.to_dense())
        assert not torch.equal((~mask).to_dense(), before[1])


def test_source_is_frozen_and_says_what_it_is():
    source = kinds.band(causal=True)
    with pytest.raises(AttributeError):
        source.kind = "dense"
    assert repr(source) == "MaskSource(kind='band', batch=1, heads=1, seq_q=None, seq_k=None, band=(-1, 0, 0, False))"


def area_in(svg):
    """How many pairs lie in squares of each kind."""
    area = {}
    for path in xml.etree.ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"):
        squares = re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-(\d+)z", path.get("d"))
        assert path.get("d") == "".join("M{} {}h{}v{}h-{}z".format(*square) for square in squares)
        area[path.get("class")] = sum(int(width) * int(rows) for _, _, width, rows, _ in squares)
    return area


def test_draw(tmp_path):
    source = kinds.band(causal=True).sized(1000, 1300)
    text = source.draw(tmp_path / "mask.svg")
    assert (tmp_path / "mask.svg").read_text(encoding="utf-8") == text
    assert "1000 queries by 1300 keys" in text and "21 × 21 pairs a square" in text
    area, seen = area_in(text), int(source.to_dense().sum())
    assert area["full"] < seen < area["full"] + area["partial"] and area["partial"] <= 2 * 48 * 21 * 21
    for mask in sources().values():
        for b, h in itertools.product(*map(range, mask.shape)):
            seen = int(mask.sized(60, 70).to_dense()[b, h].sum())
            assert area_in(mask.sized(60, 70).draw(batch=b, head=h, block=1)) == {"full": seen, "partial": 0}
            area = area_in(mask.sized(60, 70).draw(batch=b, head=h, block=13))
            assert area["full"] <= seen <= area["full"] + area["partial"]
    assert "a square is a pair" in kinds.dense(torch.eye(5, dtype=torch.bool)).draw()
    assert source._repr_svg_() == text and kinds.band(causal=True)._repr_svg_() is None
    assert area_in(kinds.documents([]).draw()) == {"full": 0, "partial": 0}


def test_draw_in_parts(small_parts):
    source = sources()["many"].sized(60, 70)
    text = source.draw(head=2, block=8)
    _mask_rows.AT_ONCE = 1 << 25
    assert source.draw(head=2, block=8) == text


def test_pictures_of_the_documents():
    """docs/images/mask_*.svg are what draw() makes."""
    images = pathlib.Path(__file__).parents[2] / "docs" / "images"
    ids = [0] * 300 + [1] * 500 + [2] * 224
    drawn = {"documents": kinds.prefix([[100, 150, 0]], ids=ids), "neighborhood": shapes.neighborhood((16, 16), 7),
             "sinks": kinds.window_with_sinks(192, 48, 1024)}
    assert {path.name for path in images.glob("mask_*.svg")} == {f"mask_{name}.svg" for name in drawn}
    for name, source in drawn.items():
        assert (images / f"mask_{name}.svg").read_text(encoding="utf-8") == source.draw(), f"source.draw('docs/images/mask_{name}.svg') writes it"


# ---- errors ----

@pytest.mark.parametrize("make, error, message", (
    (lambda: kinds.band(chunk=-1), ValueError, "chunk = -1 but it must be at least 0"),
    (lambda: kinds.band(mask_alignment="left"), ValueError, "mask_alignment = 'left'"),
    (lambda: kinds.band(window=3), ValueError, "window = 3 but it must be a pair"),
    (lambda: kinds.documents(), TypeError, "ids or lengths, and one of them"),
    (lambda: kinds.documents([1], lengths=[1]), TypeError, "ids or lengths, and one of them"),
    (lambda: kinds.documents(torch.zeros(3)), TypeError, "ids.dtype = float32 but it must be an integer type"),
    (lambda: kinds.documents(torch.zeros(1, 2, 3).long()), ValueError, "ids.ndim = 3 but it must be 1 or 2"),
    (lambda: kinds.documents([1, 2], seq_k=3), ValueError, "ids.shape[-1] = 2 but seq_k = 3; they must be the same"),
    (lambda: kinds.documents([1, 2], seq_q=-3), ValueError, "seq_q = -3 but it must be from 0"),
    (lambda: kinds.prefix(3, 5), ValueError, "seq_k = None but without ids it must be given"),
    (lambda: kinds.prefix([[3]], 5, 5), ValueError, "lengths.ndim = 2 but it must be 1"),
    (lambda: kinds.prefix([[3], [2], [1]], ids=[[1, 1], [2, 2]]), ValueError, "lengths.shape[0] = 3 but ids.shape[0] = 2"),
    (lambda: kinds.ranges(torch.zeros(1, 1, 3, 4).long()), ValueError, "ranges.shape[2] = 3 but it must be 2 * n, with n from 1 to 8"),
    (lambda: kinds.ranges(torch.zeros(1, 1, 18, 4).long()), ValueError, "ranges.shape[2] = 18 but it must be 2 * n"),
    (lambda: kinds.ranges(torch.zeros(4).long()), ValueError, "ranges.ndim = 1 but it must be 2 or 3 or 4"),
    (lambda: kinds.blocks(torch.ones(1, 1, 2).long()), TypeError, "indices is None, and then counts must be a bool tensor"),
    (lambda: kinds.blocks(torch.ones(1, 1, 2).long(), torch.ones(1, 1, 3, 2).long()), ValueError, "indices.shape[2] = 3 but counts.shape[2] = 2"),
    (lambda: kinds.blocks(torch.ones(1, 1, 2, 2).bool(), None, 20), ValueError, "block_rows = 20 but it must be a positive multiple of 8"),
    (lambda: kinds.blocks(torch.ones(1, 1, 2, 2).bool(), None, 16, 0), ValueError, "block_keys = 0 but it must be a positive multiple of 8"),
    (lambda: kinds.blocks(torch.ones(1, 1, 2, 2).bool(), seq_q=300), ValueError, "counts.shape[2] = 2 but ceil(seq_q / block_rows) = 3"),
    (lambda: kinds.blocks(torch.ones(1, 1, 2, 2).bool(), seq_k=300), ValueError, "counts.shape[3] = 2 but ceil(seq_k / block_keys) = 3"),
    (lambda: kinds.blocks(torch.ones(1, 1, 2, 2).bool(), block_sizes=[1.5, 2]), TypeError, "block_sizes.dtype = float32 but it must be an integer"),
    (lambda: kinds.blocks(torch.ones(1, 1, 2, 2).bool(), block_sizes=[[[[1, 2]]]]), ValueError, "block_sizes.ndim = 4 but it must be 1 or 2"),
    (lambda: kinds.blocks(torch.ones(2, 1, 2, 2).bool(), block_sizes=[[1, 2]] * 3), ValueError, "block_sizes.shape[0] = 3 but counts.shape[0] = 2"),
    (lambda: kinds.blocks(torch.ones(1, 1, 2, 2).bool(), seq_k=200, block_sizes=[1, 2, 3]), ValueError,
     "block_sizes.shape[-1] = 3 but ceil(seq_k / block_keys) = 2"),
    (lambda: kinds.dense(torch.zeros(3, 3)), TypeError, "mask is of float32 but it must be a tensor of bool or uint8"),
    (lambda: kinds.blocks(torch.ones(2).long(), torch.ones(2).long()), ValueError, "indices.ndim = 1 but it must be 2 or 3 or 4"),
    (lambda: kinds.dense([[1]]), TypeError, "mask is of list"),
    (lambda: kinds.dense(torch.zeros(3).bool()), ValueError, "mask.ndim = 1 but it must be 2 or 3 or 4"),
    (lambda: kinds.bits(torch.zeros(3, 3).bool(), 20), TypeError, "packed is of bool but it must be a tensor of uint8"),
    (lambda: kinds.bits([[1]], 3), TypeError, "packed is of list but it must be a tensor of uint8"),
    (lambda: kinds.bits(torch.zeros(3, 3, dtype=torch.uint8), 25), ValueError, "packed.shape[-1] = 3 but ceil(seq_k / 8) = 4; they must be the same"),
    (lambda: kinds.bits(torch.zeros(3, dtype=torch.uint8), 20), ValueError, "packed.ndim = 1 but it must be 2 or 3 or 4"),
    (lambda: kinds.window_with_sinks(-1, 2, 5), ValueError, "window = -1 but it must be from 0"),
    (lambda: kinds.window_with_sinks(1, 2.5, 5), TypeError, "sinks is a float but it must be an integer"),
    (lambda: shapes.neighborhood((4, 4, 4, 4), 3), ValueError, "len(shape) = 4 but it must be 1, 2 or 3"),
    (lambda: shapes.neighborhood((4, 4), (3, 3, 3)), ValueError, "len(kernel) = 3 but len(shape) = 2"),
    (lambda: shapes.neighborhood((4, 4), 3, 4), ValueError, "stride[0] = 4 but kernel[0] = 3; a stride is at most the kernel"),
    (lambda: shapes.neighborhood((4, 9), 3, 1, (1, 4)), ValueError, "kernel[1] * dilation[1] = 12 but shape[1] = 9"),
    (lambda: shapes.neighborhood((4, 9), 0), ValueError, "kernel[0] = 0 but it must be from 1"),
    (lambda: shapes.neighborhood((4, 9), 3, is_causal=(True,)), ValueError, "len(is_causal) = 1 but len(shape) = 2"),
    (lambda: shapes.tiles((4, 9), 2, 1), ValueError, "shape[1] = 9 but tile[1] = 2; a shape is a multiple of its tile"),
    (lambda: shapes.tiles((4, 8), 2, (3, 1)), ValueError, "window[0] = 3 but there are 2 tiles"),
    (lambda: mods.from_mask_mod(3, 1, 1, 4, 4), TypeError, "fn is a int but it must be a function"),
    (lambda: mods.from_mask_mod(lambda b, h, q, k: q + k, 1, 1, 4, 4, "cpu"), TypeError, "the mask_mod returns int64 but it must return bool"),
    (lambda: mods.from_mask_mod(scattered, 1, 1, -4, 4, "cpu"), ValueError, "seq_q = -4 but it must be from 0"),
    (lambda: mods.from_block_mask(torch.zeros(3)), TypeError, "block_mask is a Tensor but it must be a BlockMask"),
    (lambda: mods.from_block_mask(create_block_mask(scattered, 1, 1, 50, 50, "cpu", 10)), ValueError,
     "block_mask.BLOCK_SIZE[0] = 10 but it must be a positive multiple"),
    (lambda: kinds.band().to_dense(), ValueError, "seq_q of the mask is not known; sized(seq_q, seq_k) says"),
    (lambda: ~kinds.band(causal=True), ValueError, "seq_q of the mask is not known"),
    (lambda: kinds.band(causal=True) | kinds.band(chunk=3), ValueError, "seq_q of the mask is not known"),
    (lambda: kinds.documents([1, 2]).sized(3, 2), ValueError, "seq_q = 3 but the mask's seq_q = 2"),
    (lambda: kinds.documents([1, 2]) & kinds.documents([1, 2, 3]), ValueError, "seq_q = 2 but the other mask's seq_q = 3"),
    (lambda: kinds.documents([[1], [2]]) | kinds.documents([[1], [2], [3]]), ValueError, "batch = 2 but the other mask's batch = 3"),
    (lambda: kinds.documents([[1], [2]]).to_dense(3), ValueError, "batch = 3 but the mask's batch = 2; it must be 1, for all, or batch"),
    (lambda: kinds.dense(torch.ones(2, 1, 3, 3).bool()).draw(batch=2), ValueError, "batch = 2 but the mask has 2; it must be from 0 to 1"),
    (lambda: kinds.dense(torch.ones(3, 3).bool()).draw(block=0), ValueError, "block = 0 but it must be at least 1"),
    (lambda: kinds.documents(torch.tensor([1])) & kinds.documents(torch.empty(1, dtype=torch.int32, device="meta")), ValueError,
     "device = cpu but the other mask's device = meta")), ids=lambda x: None)
def test_errors(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_other_things_are_no_masks():
    with pytest.raises(TypeError):
        kinds.band() & True
    with pytest.raises(TypeError):
        kinds.band() | torch.ones(3, 3)
    assert MaskSource("band").shape == (1, 1)
