# SPDX-License-Identifier: Apache-2.0
"""flash3.dropout_mask: where it writes, the same on CPU and GPU, and whether its bits are random."""
import itertools
import math
import types

import numpy as np
import pytest
import torch

import flash3
from conftest import DLPackOnly
from dropout_cases import share

SIZES = (2, 3, 20, 30)


def chi_square(counts, expected):
    return (((counts - expected)**2) / expected).sum()


def check_uniform(kept, p, axis):
    """That the kept share does not differ along one axis more than chance has it differ: chi-square of kept and dropped."""
    counts = kept.sum(tuple(i for i in range(kept.ndim) if i != axis))
    n, keep = kept.size // len(counts), 1 - share(p)
    statistic = chi_square(counts, n * keep) + chi_square(n - counts, n * (1 - keep))
    freedom = len(counts)  # nothing is estimated from the counts
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom) + 5, (axis, statistic, freedom)


@pytest.mark.parametrize("p", [2.0**-16 * 40, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 12345678901234567890])
def test_shares_along_every_axis(p, seed):
    kept = flash3.dropout_mask(8, 16, 128, 192, p, seed=seed).astype(bool)
    deviation = (kept.mean() - (1 - share(p))) * math.sqrt(kept.size / (share(p) * (1 - share(p))))
    assert abs(deviation) < 4.5
    for axis in range(4):
        check_uniform(kept, p, axis)


@pytest.mark.parametrize("field", ["seed", "offset", "both"])
def test_seeds_and_offsets_give_masks_of_their_own(field):
    def mask(n):
        return flash3.dropout_mask(1, 4, 64, 64, 0.5, seed=0 if field == "offset" else n, offset=0 if field == "seed" else n).astype(bool)
    numbers = [*range(40), *(2**i for i in range(6, 64)), 2**64 - 1]
    all_kept = np.stack([mask(n) for n in numbers])
    for axis in range(5):
        check_uniform(all_kept, 0.5, axis)
    n = all_kept[0].size
    for a, b in itertools.combinations(all_kept.reshape(len(numbers), -1), 2):  # pairs of masks agree in half of their elements
        assert abs((a == b).sum() - n / 2) < 6 * math.sqrt(n) / 2


def test_neighbours_are_independent():
    kept = flash3.dropout_mask(4, 8, 128, 128, 0.5, seed=8).astype(bool)
    shifts = [(0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 8), (0, 0, 0, 16), (0, 0, 1, 0), (0, 0, 8, 0), (0, 0, 16, 0), (0, 0, 8, 8), (0, 0, 1, 1),
              (0, 1, 0, 0), (1, 0, 0, 0), (0, 1, 8, 0), (1, 1, 1, 1)]
    for shift in shifts:
        first = kept[tuple(slice(0, size - s) for size, s in zip(kept.shape, shift))]
        second = kept[tuple(slice(s, None) for s in shift)]
        table = np.array([[(first == a)[second == b].sum() for a in (False, True)] for b in (False, True)])
        assert chi_square(table, first.size / 4) < 25, shift  # of three degrees of freedom, and 13 tables
    values = _values_of_groups(kept)
    counts = np.bincount(values, minlength=256)
    statistic = chi_square(counts, values.size / 256)
    assert abs(statistic - 255) < 5 * math.sqrt(2 * 255)


def _values_of_groups(kept):
    """The eight bits of each group of pairs that one evaluation of Philox serves, as a number."""
    batch, heads, seq_q, seq_k = kept.shape
    parts = kept.reshape(batch, heads, seq_q // 16, 2, 8, seq_k // 16, 2, 4, 2)  # I, half, r; J, half, c, which of two
    of_group = parts.transpose(0, 1, 2, 4, 5, 7, 3, 6, 8).reshape(-1, 8)
    return of_group @ (1 << np.arange(8))


def test_in_given_memory():
    wanted = flash3.dropout_mask(*SIZES, 0.4, seed=1, offset=2)
    assert wanted.shape == SIZES and wanted.dtype == np.uint8 and set(np.unique(wanted)) == {0, 1}
    for kept in (torch.full(SIZES, 9, dtype=torch.uint8), torch.full((2, 20, 3, 30), 9, dtype=torch.uint8).transpose(1, 2)):
        assert flash3.dropout_mask(*SIZES, 0.4, dropout_state=torch.tensor([1, 2]), kept=kept) is kept
        assert (kept.numpy() == wanted).all()


# ---- on a GPU ----

@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 2.0**-16, 0.4, 65535 / 65536])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), SIZES, (3, 5, 257, 1000), (300, 4, 64, 33)], ids=str)  # the last: more rows than blocks
def test_a_gpu_writes_the_mask_of_the_cpu(sizes, p):
    seed, offset = 2**64 - 5, 2**63 + 1
    wanted = torch.from_numpy(flash3.dropout_mask(*sizes, p, seed=seed, offset=offset))
    batch, heads, seq_q, seq_k = sizes
    for kept in (torch.full(sizes, 9, dtype=torch.uint8, device="cuda"),
                 torch.full((batch, seq_q, heads, seq_k + 5), 9, dtype=torch.uint8, device="cuda")[..., :seq_k].transpose(1, 2)):
        assert flash3.dropout_mask(*sizes, p, seed=seed, offset=offset, kept=kept) is kept
        assert torch.equal(kept.cpu(), wanted)
        kept.fill_(9)
        state = torch.tensor([seed - 2**64, offset - 2**64], device="cuda")
        flash3.dropout_mask(*sizes, p, dropout_state=state, kept=kept)
        assert torch.equal(kept.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["torch", "dlpack", "cuda array"])
def test_on_a_stream(kind):
    """After what was enqueued there: a wait, and what overwrites all."""
    wanted = torch.from_numpy(flash3.dropout_mask(*SIZES, 0.4, seed=1))
    stream = torch.cuda.Stream()
    kept = torch.empty(SIZES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles
        kept.fill_(9)
        if kind == "torch":
            flash3.dropout_mask(*SIZES, 0.4, seed=1, kept=kept)
    if kind != "torch":
        other = DLPackOnly(kept) if kind == "dlpack" else types.SimpleNamespace(__cuda_array_interface__=kept.__cuda_array_interface__)
        flash3.dropout_mask(*SIZES, 0.4, seed=1, kept=other, stream=stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(kept.cpu(), wanted)


@pytest.mark.gpu
def test_on_a_gpu_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    kept = torch.full(SIZES, 9, dtype=torch.uint8, device="cuda:1")
    flash3.dropout_mask(*SIZES, 0.4, dropout_state=torch.tensor([1, 2], device="cuda:1"), kept=kept)
    assert torch.cuda.current_device() == 0
    assert (kept.cpu().numpy() == flash3.dropout_mask(*SIZES, 0.4, seed=1, offset=2)).all()
    with pytest.raises(ValueError, match="^dropout_state is on cuda:0 but kept is on cuda:1; they must be on one device"):
        flash3.dropout_mask(*SIZES, 0.4, dropout_state=torch.tensor([1, 2], device="cuda:0"), kept=kept)


# ---- errors ----

class SaysGpu(DLPackOnly):
    """Memory of the host that says that it is a GPU's."""

    def __dlpack__(self, *, stream=None, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return 2, 0


def test_refused_by_name():
    kept = torch.full((1, 2, 3, 4), 9, dtype=torch.uint8)
    state = torch.tensor([1, 2])
    for options, kind, message in (
            (dict(batch=-1), ValueError, "^batch = -1 but a size must be at least 0"), (dict(seq_k=2.5), TypeError, "^seq_k is a float"),
            (dict(dropout_p=1.0), ValueError, "^dropout_p = 1 but"), (dict(seed=None), ValueError, "^dropout_p = 0.5 but neither seed"),
            (dict(kept=torch.zeros(1, 2, 3, 5, dtype=torch.uint8)), ValueError, r"^kept\.shape = \(1, 2, 3, 5\) but it must be \(1, 2, 3, 4\)"),
            (dict(kept=torch.zeros(1, 2, 3, 4)), (TypeError, ValueError), r"^kept\.dtype = float32 but it must be uint8"),
            (dict(num_threads=-1), ValueError, "^num_threads = -1 but"),
            (dict(kept=kept, seed=None, dropout_state=SaysGpu(state)), ValueError, "^dropout_state is on cuda:0 but kept is on cpu; they must be"),
            (dict(seed=None, dropout_state=SaysGpu(state)), ValueError, "^dropout_state is on cuda:0 but kept is on cpu; they must be on one"),
            (dict(kept=SaysGpu(kept), seed=None, dropout_state=state), ValueError, "^dropout_state is on cpu but kept is on cuda:0; they must"),
            # Where there is no Hopper GPU, that is the reason: never does the CPU write to what is a GPU's.
            (dict(kept=SaysGpu(kept)), (NotImplementedError, ValueError, RuntimeError), "hopper|CUDA device")):
        with pytest.raises(kind, match=message):
            flash3.dropout_mask(**{**dict(batch=1, heads=2, seq_q=3, seq_k=4, dropout_p=0.5, seed=1), **options})
    assert (kept == 9).all()
