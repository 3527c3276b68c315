# SPDX-License-Identifier: Apache-2.0
"""The random numbers of dropout: flash3.dropout_mask (where it writes, the same on CPU and GPU, whether its bits are random), and where a
call's seeds come from: torch's generator, in each interface that draws one."""
import itertools
import math
import types

import numpy as np
import pytest
import torch

import flash3
from conftest import DEVICES, DLPackOnly
from dropout_cases import HEADS, keeps, make, precision, reference, share

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


@pytest.mark.parametrize("device", DEVICES)
def test_torchs_generator_seeds_a_call(device):
    q, k, v = (x.requires_grad_() for x in make(precision(device)[0], 1, 50, 60, device=device))

    def run(seed):
        torch.manual_seed(seed)
        out = flash3.attention(q, k, v, dropout_p=0.5, deterministic=True)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))
    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(x, y) for x, y in zip(first, again))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(flash3.attention(q, k, v, dropout_p=0.5), flash3.attention(q, k, v, dropout_p=0.5))
    torch.manual_seed(1)
    state = torch.randint(2**63 - 1, (2,), device=device)
    assert torch.equal(first[0], flash3.attention(q, k, v, dropout_p=0.5, dropout_state=state))
    seed, offset = state.tolist()
    assert torch.equal(first[0], flash3.attention(q, k, v, dropout_p=0.5, seed=seed, offset=offset))


@pytest.mark.parametrize("device", DEVICES)
def test_checkpointing_repeats_the_mask(device):
    inputs = [x.requires_grad_() for x in make(precision(device)[0], 1, 50, 60, device=device)]
    call = lambda q, k, v: flash3.attention(q, k, v, dropout_p=0.5, deterministic=True).square().sum()  # noqa: E731
    grads = []
    for run in (call, lambda *x: torch.utils.checkpoint.checkpoint(call, *x, use_reentrant=False)):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(run(*inputs), inputs))
    assert all(torch.equal(x, y) for x, y in zip(*grads))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"seed": 5, "offset": 6}], ids=str)
def test_compiled_as_one_graph(options, device):
    q, k, v = (x.requires_grad_() for x in make(precision(device)[0], 1, 50, 60, device=device))
    call = lambda q, k, v: flash3.attention(q, k, v, causal=True, dropout_p=0.25, deterministic=True, **options)  # noqa: E731
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(4)
        out = run(q, k, v)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(x, y) for x, y in zip(*results))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids=str)
def test_a_cuda_graph_replays_with_another_state(dims):
    sizes, p = (2, 100, 130), 0.3
    q, k, v = make(torch.float16, *sizes, dims=dims, device="cuda")
    state, dout = torch.tensor([3, 4], device="cuda"), torch.randn(2, 100, HEADS, dims[1], device="cuda").half()
    kept = torch.empty(2, HEADS, 100, 130, dtype=torch.uint8, device="cuda")

    def run():
        out, lse = flash3.attention(q, k, v, dropout_p=p, dropout_state=state, return_lse=True)
        grads = flash3.attention_backward(dout, q, k, v, out, lse, dropout_p=p, dropout_state=state, deterministic=True)
        keeps(sizes, p, dropout_state=state, kept=kept)
        return out, *grads[:3]
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    seen = []
    for seed, offset in ((5, 6), (7, 2**40)):
        state.copy_(torch.tensor([seed, offset]))
        graph.replay()
        assert (kept.cpu().numpy() == keeps(sizes, p, seed=seed, offset=offset)).all()
        seen.append([x.clone() for x in captured])
        assert all(map(torch.equal, seen[-1], run()))
    assert not torch.equal(seen[0][0], seen[1][0])


@pytest.mark.gpu
def test_a_cuda_graph_draws_another_state_each_time():
    q, k, v = make(torch.float16, 2, 100, 130, device="cuda")
    flash3.attention(q, k, v, dropout_p=0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash3.attention(q, k, v, dropout_p=0.3)
    results = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        results.append(out.clone())
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


# ---- sdpa, and torch's own operators ----

def sdpa_reference(q, k, v, state, p, **band):
    kept = flash3.dropout_mask(q.shape[0], q.shape[1], q.shape[2], k.shape[2], p, dropout_state=state.cpu())
    return reference(*(x.transpose(1, 2).double() for x in (q, k, v)), kept, p, **band)[0].transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(is_causal, device):
    dtype, tolerance = precision(device)
    q, k, v = (torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(n)).to(device, dtype) for n in range(3))
    for call in (lambda: flash3.sdpa(q, k, v, dropout_p=0.3, is_causal=is_causal),
                 lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=is_causal)):
        with flash3.sdpa_override():
            torch.manual_seed(5)
            out = call()
        torch.manual_seed(5)
        wanted = sdpa_reference(q, k, v, torch.randint(2**63 - 1, (2,), device=device), 0.3, causal=is_causal)
        torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_sdpa_in_a_layer_that_trains(device):
    dtype, _ = precision(device)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True).to(device, dtype).train()
    x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    with flash3.sdpa_override():
        torch.manual_seed(6)
        first = layer(x)
        torch.manual_seed(6)
        assert torch.equal(first, layer(x))
        first.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_drop_in(device):
    interface = pytest.importorskip("flash_attn_interface")
    q, k, v = (x.requires_grad_() for x in make(torch.bfloat16, 1, 50, 60, device=device))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (50, 60))
    options = {"causal": True, "dropout_p": 0.3, "deterministic": True}
    calls = (lambda: flash3.attention(q, k, v, **options), lambda: interface.flash_attn_func(q, k, v, **options),
             lambda: interface.flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, 50, 60, **options)[None])
    results = []
    for call in calls:
        torch.manual_seed(9)
        out = call()
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    for result in results[1:]:
        if device == "cpu" or result is results[1]:
            assert all(map(torch.equal, result, results[0]))
        else:  # kernels for packed sequences round elsewhere
            torch.testing.assert_close(result, results[0], atol=2e-2, rtol=2e-2)
    with pytest.raises(NotImplementedError, match="dropout_p = 0.3"):
        interface.flash_attn_varlen_func(q[0], k, v, cu_q, None, 50, 60, seqused_k=torch.tensor([60], dtype=torch.int32, device=device),
                                         page_table=torch.zeros(1, 1, dtype=torch.int32, device=device), dropout_p=0.3)
