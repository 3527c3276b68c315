# SPDX-License-Identifier: Apache-2.0
"""A bool attn_mask of flash3.sdpa and its override, against torch's own; when its mask is made, and when torch does the call."""
import gc
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flash3
from flash3 import _mask_kept, _mask_sources, _sdpa
from test_sdpa import calls_of_flash3, check_like_torch, imported_before, make, only_flash3


def mask_of(device, *shape, seen=0.6):
    made = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < seen
    return made.index_fill(-1, torch.tensor(0), True).to(device)  # torch's kernels differ where a query sees nothing


@pytest.fixture
def counted(monkeypatch):
    """How often a mask is made."""
    made, make = [], _mask_sources.MaskSource.make
    monkeypatch.setattr(_mask_sources.MaskSource, "make", lambda self, **options: made.append(self) or make(self, **options))
    return made


@pytest.mark.parametrize("shape", ((2, 4, 150, 270), (2, 1, 150, 270), (1, 4, 150, 270), (4, 150, 270), (1, 150, 270), (150, 270), (2, 1, 1, 270),
                                   (2, 4, 150, 1), (1, 270), (1, 1)), ids=str)
def test_shapes_that_broadcast(device, shape):
    q, k, v = make(device, (2, 4, 150, 32), (2, 4, 270, 32), (2, 4, 270, 48))
    attn_mask = mask_of(device, *shape)
    check_like_torch(q, k, v, attn_mask=attn_mask)
    check_like_torch(q, k, v, attn_mask=attn_mask.expand(2, 4, 150, 270).transpose(2, 3).contiguous().transpose(2, 3), scale=0.3)


@pytest.mark.parametrize("batch, shape", (((), (30, 40)), ((), (4, 30, 40)), ((2, 3), (4, 30, 40)), ((2, 3), (3, 4, 30, 40)),
                                          ((2, 3), (2, 1, 1, 30, 40)), ((2, 3), (1, 1, 4, 1, 40)), ((1, 2, 2), (2, 1, 4, 30, 40))), ids=str)
def test_any_number_of_batch_dimensions(device, batch, shape):
    q, k, v = make(device, (*batch, 4, 30, 16), (*batch, 4, 40, 16), (*batch, 4, 40, 16))
    check_like_torch(q, k, v, attn_mask=mask_of(device, *shape))


def test_gqa_and_autocast(device):
    q, k, v = make(device, (2, 8, 40, 32), (2, 2, 50, 32), (2, 2, 50, 32))
    check_like_torch(q, k, v, attn_mask=mask_of(device, 2, 8, 40, 50), enable_gqa=True)
    with torch.autocast(device, torch.bfloat16), only_flash3():
        got = flash3.sdpa(*make(device, *((2, 4, 10, 16),) * 3, dtype=torch.float32), mask_of(device, 10, 10))
    assert got.dtype == torch.bfloat16


def test_queries_that_see_nothing(device):
    q, k, v = make(device, *((2, 4, 40, 32),) * 3, grad=True)
    attn_mask = mask_of(device, 40, 40)
    attn_mask[7:9] = False
    with only_flash3():
        out = flash3.sdpa(q, k, v, attn_mask)
    out.float().square().sum().backward()
    assert (out[:, :, 7:9] == 0).all() and (q.grad[:, :, 7:9] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))
    seen = [n for n in range(40) if n not in (7, 8)]
    close = {"atol": 2e-5, "rtol": 2e-5} if device == "cpu" else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(out[:, :, seen], F.scaled_dot_product_attention(q[:, :, seen], k, v, attn_mask[seen]), **close)
    check_like_torch(q[:, :, :0], k, v, attn_mask=attn_mask[:0])


def test_override(device):
    q, k, v = make(device, *((2, 4, 10, 16),) * 3)
    attn_mask = mask_of(device, 10, 10)
    both = lambda: (F.scaled_dot_product_attention(q, k, v, attn_mask), imported_before(q, k, v, attn_mask=attn_mask))
    wanted = both()[0]
    with flash3.sdpa_override():
        assert calls_of_flash3(both) == 2
        torch.testing.assert_close(both()[1], wanted, atol=2e-2, rtol=2e-2)


# ---- how long a mask is kept ----

def check_made(counted, q, k, v, *masks):
    with only_flash3():
        for attn_mask in masks:
            torch.testing.assert_close(flash3.sdpa(q, k, v, attn_mask), F.scaled_dot_product_attention(q, k, v, attn_mask), atol=2e-2, rtol=2e-2)
    return len(counted)


def test_a_mask_is_made_once_for_a_tensor_and_its_views(device, counted):
    q, k, v = make(device, *((2, 4, 30, 16),) * 3)
    wide = mask_of(device, 2, 1, 60, 60)
    views = lambda: [wide[:, :, 30:, :30], wide[:, :, 30:, :30], wide[:, :, :30, 30:]]
    assert check_made(counted, q, k, v, *views()) == 2
    assert check_made(counted, q, k, v, *views()) == 2
    assert check_made(counted, q, k, v, wide[0, 0, :30, :30], wide[0, 0, :30, :30].expand(2, 4, 30, 30)) == 4
    with torch.no_grad():
        assert check_made(counted, q, k, v, *views()) == 4
    gc.collect()
    before = len(_mask_kept._made)
    del wide
    gc.collect()
    assert len(_mask_kept._made) == before - 1


def test_a_changed_tensor_makes_another_mask(device, counted):
    q, k, v = make(device, *((2, 4, 30, 16),) * 3)
    wide = mask_of(device, 2, 1, 60, 60)
    view = wide[:, :, 30:, :30]
    assert check_made(counted, q, k, v, view, view) == 1
    wide[:, :, 40, 1:20].logical_not_()
    assert check_made(counted, q, k, v, view, view) == 2
    view[0] = True
    assert check_made(counted, q, k, v, view, wide[:, :, 30:, :30]) == 3
    wide.data = wide.flip(2)
    assert check_made(counted, q, k, v, wide[:, :, 30:, :30], wide[:, :, 30:, :30]) == 4


def test_what_torch_does_not_count_is_made_at_each_call(device, counted):
    q, k, v = make(device, *((2, 4, 30, 16),) * 3)
    with torch.inference_mode():
        attn_mask = mask_of(device, 30, 30)
        assert check_made(counted, q, k, v, attn_mask) == 1
        attn_mask[3:9, 1:] = False
        assert check_made(counted, q, k, v, attn_mask) == 2


@pytest.mark.gpu
def test_a_graph_reads_the_tensor_at_each_replay(counted):
    q, k, v = make("cuda", *((2, 4, 30, 16),) * 3)
    attn_mask = mask_of("cuda", 30, 30)
    flash3.sdpa(q, k, v, attn_mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash3.sdpa(q, k, v, attn_mask)
    for _ in range(2):
        graph.replay()
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask), atol=2e-2, rtol=2e-2)
        attn_mask[:, 1:].logical_not_()


# ---- what torch does ----

def left_to_torch(call):
    """The reason why."""
    with mock.patch.object(_sdpa, "_said", set()), pytest.warns(UserWarning, match="leaves this call to torch") as said:
        call()
    reasons = [text.partition("torch: ")[2] for x in said if "leaves this call" in (text := str(x.message))]
    assert len(reasons) == 1
    return reasons[0]


def attend(q, k, v, attn_mask):
    return flash3.sdpa(q, k, v, attn_mask)


def test_calls_left_to_torch():
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)
    attn_mask = mask_of("cpu", 10, 10)
    assert left_to_torch(lambda: flash3.sdpa(q, k, v, torch.zeros(10, 10))).startswith("attn_mask is of torch.float32")
    assert left_to_torch(lambda: flash3.sdpa(q, k, v, attn_mask, dropout_p=0.5)) == "dropout_p is not 0"
    transformed = lambda: torch.testing.assert_close(torch.vmap(lambda m: flash3.sdpa(q, k, v, m))(attn_mask[None]),
                                                     F.scaled_dot_product_attention(q, k, v, attn_mask)[None])
    assert left_to_torch(transformed).endswith("something traces or transforms the call")
    assert left_to_torch(lambda: make_fx(attend)(q, k, v, attn_mask)).endswith("something traces or transforms the call")
    assert left_to_torch(lambda: torch.jit.trace(attend, (q, k, v, attn_mask))).endswith("something traces or transforms the call")
    with FakeTensorMode():
        assert left_to_torch(lambda: flash3.sdpa(*torch.empty(3, 2, 4, 10, 16), torch.ones(10, 10).bool())).endswith("not all are plain tensors")


def test_a_traced_call_reads_its_mask():
    """What is traced with one mask is right with another."""
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)
    first, second = mask_of("cpu", 10, 10), mask_of("cpu", 1, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = make_fx(attend)(q, k, v, first), torch.jit.trace(attend, (q, k, v, first)), \
            torch.compile(attend, backend="aot_eager", fullgraph=True)
        for call in traced:
            for attn_mask in (first, first.logical_not().index_fill(1, torch.tensor(0), True)):
                torch.testing.assert_close(call(q, k, v, attn_mask), F.scaled_dot_product_attention(q, k, v, attn_mask))
        torch.testing.assert_close(traced[2](q, k, v, second), F.scaled_dot_product_attention(q, k, v, second))


@pytest.mark.parametrize("change", ({"attn_mask": torch.ones(10, 9).bool()}, {"attn_mask": torch.ones(3, 1, 10, 10).bool()},
                                    {"attn_mask": torch.ones(1, 1, 1, 10, 10).bool()}, {"attn_mask": torch.ones(10, 10).bool(), "is_causal": True},
                                    {"attn_mask": torch.ones(10).bool()}, {"attn_mask": torch.ones(10, 10).int()}),
                         ids=("keys", "batch", "dimensions", "causal", "one dimension", "int32"))
def test_what_is_wrong_gets_torchs_error(change):
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)
    results = []
    for function in (F.scaled_dot_product_attention, flash3.sdpa):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results.append(function(q, k, v, **change))
            except Exception as error:
                results.append((type(error), str(error)))
    assert type(results[0]) is type(results[1]) and (torch.equal(*results) if isinstance(results[0], torch.Tensor) else results[0] == results[1])
