# SPDX-License-Identifier: Apache-2.0
"""flash3.masks.neighborhood and tiles, against their definitions token by token."""
import itertools
import math

import pytest
import torch
from oracle import check, pairs

from flash3 import _mask_shapes as shapes


def natten(shape, kernel, stride, dilation, causal):
    """NATTEN's definition (arXiv:2504.16922), place by place: for each place along one dimension the keys that it sees."""
    along = []
    for length, k, s, d, only_before in zip(shape, kernel, stride, dilation, causal):
        seen = []
        for place in range(length):
            line = list(range(place % d, length, d))  # what a dilation lets it see at all
            own = line.index(place)
            group = [n for n in range(len(line)) if n // s == own // s]
            if only_before:
                leader = group[-1]
                window = [n for n in range(leader - k + 1, own + 1) if n >= 0]
            else:
                leader = group[s // 2] if s // 2 < len(group) else group[-1]
                begin = leader - k // 2
                while begin < 0:
                    begin += 1
                while begin + k > len(line):
                    begin -= 1
                window = range(begin, begin + k)
            seen.append({line[n] for n in window})
        along.append(seen)
    tokens = list(itertools.product(*map(range, shape)))
    return torch.tensor([[all(y in seen[x] for seen, x, y in zip(along, q, k)) for k in tokens] for q in tokens], dtype=torch.bool)[None, None]


NEIGHBORHOODS = [
    ((13,), 5, 1, 1, False), ((13,), 4, 1, 1, False), ((13,), 1, 1, 1, False), ((13,), 5, 2, 2, False), ((14,), 4, 4, 3, False),
    ((13,), 13, 1, 1, False), ((13,), 5, 3, 1, True), ((13,), 4, 2, 3, True), ((13,), 6, 5, 1, False), ((13,), 9, 1, 1, True),
    ((6, 7), 3, 1, 1, False), ((6, 7), (4, 3), (2, 1), (1, 2), False), ((6, 7), (2, 7), 1, 1, False), ((6, 7), (6, 7), 1, 1, False),
    ((6, 7), 3, 1, 2, (True, False)), ((6, 7), (6, 3), 3, 1, (False, True)), ((9, 10), 9, 1, 1, False), ((9, 10), (8, 3), 1, 1, (True, True)),
    ((4, 5, 6), (2, 3, 3), (1, 2, 1), 1, False), ((4, 5, 6), (3, 5, 6), 1, 1, False), ((4, 5, 6), (2, 2, 2), 1, (2, 1, 3), (True, False, True)),
    ((4, 5, 6), 3, 3, 1, (True, False, False)), ((4, 1, 6), (2, 1, 6), 1, 1, (True, False, False)),
    ((4, 6), (2, 6), 1, 1, (False, True)), ((3, 2, 5), (2, 2, 5), 1, 1, (False, True, False))]


@pytest.mark.parametrize("shape, kernel, stride, dilation, causal", NEIGHBORHOODS, ids=str)
def test_neighborhood(shape, kernel, stride, dilation, causal):
    each = lambda x: x if isinstance(x, tuple) else (x,) * len(shape)
    source = shapes.neighborhood(shape, kernel, stride, dilation, causal)
    assert source.seq_q == source.seq_k == math.prod(shape)
    check(source, natten(shape, each(kernel), each(stride), each(dilation), each(causal)))


def test_neighborhoods_of_few_lines_are_ranges():
    assert shapes.neighborhood((32, 32), 7).kind == "ranges"
    assert shapes.neighborhood((8, 20, 20), (3, 20, 20)).ranges.shape == (1, 1, 2, 3200)
    assert shapes.neighborhood(100, (3,), dilation=5).ranges.shape[2] == 6
    assert shapes.neighborhood((12, 12), (9, 3)).kind == "bits"


@pytest.mark.parametrize("shape, tile, window, text", (
    ((8, 12), (2, 4), (3, 2), 0), ((8, 12), (2, 4), 1, 11), ((4, 4, 8), (2, 2, 2), (1, 2, 3), 0), ((4, 4, 8), (2, 2, 2), (2, 1, 4), 5),
    ((24,), 8, 2, 3), ((6, 6), (3, 3), (1, 2), 4), ((6, 6), 2, 3, 0)), ids=str)
def test_tiles(shape, tile, window, text):
    each = lambda x: x if isinstance(x, tuple) else (x,) * len(shape)
    tile, window = each(tile), each(window)
    coordinates = list(itertools.product(*map(range, shape)))
    order = shapes.tile_order(shape, tile).tolist()
    numbered = sorted(range(len(coordinates)), key=lambda n: ([x // t for x, t in zip(coordinates[n], tile)], n))
    assert order == numbered

    def sees(b, h, i, j):
        if i >= len(order) or j >= len(order):
            return True
        for x, y, t, w, n in zip(coordinates[order[i]], coordinates[order[j]], tile, window, shape):
            begin = min(max(x // t - w // 2, 0), n // t - w)
            if not begin <= y // t < begin + w:
                return False
        return True

    source = shapes.tiles(shape, tile, window, text=text)
    assert (source.kind == "blocks") == (math.prod(tile) % 8 == 0)
    check(source, pairs(1, 1, len(order) + text, len(order) + text, sees))
