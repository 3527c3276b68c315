# SPDX-License-Identifier: Apache-2.0
"""What flash3.sdpa and its override leave to torch: calls for which torch was told what to use, and tensors that flash3 does not know."""
import contextlib
import gc
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash3
from flash3 import _mask_kept, _mask_sources, _sdpa
from test_sdpa import calls_of_flash3, check_like_torch, imported_before, make, only_flash3


@contextlib.contextmanager
def switched_off(name):
    enable, enabled = (getattr(torch.backends.cuda, f) for f in (f"enable_{name}_sdp", f"{name}_sdp_enabled"))
    before = enabled()
    enable(False)
    try:
        yield
    finally:
        enable(before)


CHOICES = {**{backend.name: lambda backend=backend: sdpa_kernel(backend)
              for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)},
           "two": lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
           "first": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                                         SDPBackend.CUDNN_ATTENTION], set_priority=True),
           **{f"no {name}": lambda name=name: switched_off(name) for name in ("flash", "mem_efficient", "math", "cudnn")}}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_what_torch_was_told_to_use_is_used(choose):
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)

    def called(call):
        with mock.patch.object(_sdpa, "_torch_sdpa", return_value=None) as theirs:
            call(q, k, v)
        return theirs.call_count

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert called(flash3.sdpa) == 0
        with choose():
            assert called(flash3.sdpa) == 1
        assert called(flash3.sdpa) == 0
        with flash3.sdpa_override(), choose():
            assert calls_of_flash3(lambda: attempt(F.scaled_dot_product_attention, q, k, v)) == 0
            layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
            assert calls_of_flash3(lambda: attempt(layer, q[0], q[0], q[0], need_weights=False)) == 0


def test_an_order_that_torch_has_on_its_own_is_no_choice():
    """On a Hopper GPU torch puts cuDNN first at its first call."""
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([_sdpa._CUDNN, *(x for x in before if x != _sdpa._CUDNN)])
    try:
        with only_flash3():
            flash3.sdpa(q, k, v)
    finally:
        torch._C._set_sdp_priority_order(before)


def attempt(call, *arguments, **named):
    """A call that torch may refuse: it has no such backend on the CPU."""
    with contextlib.suppress(RuntimeError):
        call(*arguments, **named)


def test_the_choice_inside_what_is_compiled_is_torchs():
    torch._dynamo.reset()
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)
    seen = []

    def backend(graph, inputs):
        seen.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def chosen(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)

    with flash3.sdpa_override():
        torch.testing.assert_close(torch.compile(chosen, backend=backend)(q, k, v), chosen(q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            torch.compile(lambda q: F.scaled_dot_product_attention(q, k, v) * 2, backend=backend, fullgraph=True)(q)
        torch.compile(lambda q: F.scaled_dot_product_attention(q, k, v) * 3, backend=backend, fullgraph=True)(q)
    assert [torch.ops.flash3.forward.default in of for of in seen] == [False, False, True]


def test_double_backward_as_torch_was_told():
    gradients = []
    for override in (False, True):
        q, k, v = make("cpu", *((1, 2, 6, 8),) * 3, dtype=torch.float64 if not override else torch.float32, grad=True)
        with flash3.sdpa_override() if override else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with sdpa_kernel(SDPBackend.MATH):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            first, = torch.autograd.grad(out.square().sum(), q, create_graph=True)
            gradients.append(torch.autograd.grad(first.square().sum(), (q, k, v)))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a.float(), b, rtol=1e-3, atol=1e-4)
    q, k, v = make("cpu", *((1, 2, 6, 8),) * 3, grad=True)
    first, = torch.autograd.grad(flash3.sdpa(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivatives.*sdpa_kernel\(SDPBackend.MATH\)"):
        first.sum().backward()


class Wrapper(torch.Tensor):
    """Knows what aten's operators do, and no others."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
                                                   requires_grad=inner.requires_grad)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function.namespace == "aten", function
        unwrap = lambda x: x.inner if isinstance(x, cls) else x
        made = function(*torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {}))
        return torch.utils._pytree.tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, made)


class Named(torch.Tensor):
    """A subclass that adds nothing."""


def test_tensors_of_another_class_are_torchs():
    plain = make("cpu", *((2, 4, 10, 16),) * 3)
    wanted = F.scaled_dot_product_attention(*plain)
    for wrap, unwrap in ((Wrapper, lambda x: x.inner), (lambda x: x.as_subclass(Named), lambda x: x.as_subclass(torch.Tensor))):
        wrapped = [wrap(x) for x in plain]
        for tensors in (wrapped, [plain[0], wrapped[1], plain[2]]):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = [flash3.sdpa(*tensors)]
                with flash3.sdpa_override():
                    made.append(F.scaled_dot_product_attention(*tensors))
            for one in made:
                assert type(one) is type(wrapped[0])
                torch.testing.assert_close(unwrap(one), wanted)


def test_tensors_that_flash3_knows():
    """Parameters, fake tensors, what torch.func makes, and what a collective gives before it has come."""
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)
    with only_flash3():
        flash3.sdpa(torch.nn.Parameter(q), k, v).sum().backward()
        torch.compile(flash3.sdpa, backend="aot_eager", fullgraph=True)(torch.nn.Parameter(q), k, v)
        torch.func.grad(lambda q: flash3.sdpa(q, k, v).sum())(q)
        torch.vmap(flash3.sdpa)(*(torch.stack([x, x]) for x in (q, k, v)))
        make_fx(lambda q, k, v: flash3.sdpa(q, k, v))(q, k, v)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert flash3.sdpa(torch.empty(2, 4, 10, 16), k, v).shape == q.shape
        if torch.distributed.is_available():
            from torch.distributed._functional_collectives import AsyncCollectiveTensor
            torch.testing.assert_close(flash3.sdpa(AsyncCollectiveTensor(q), k, v), flash3.sdpa(q, k, v))


def test_a_symbolic_trace_records_torchs_function():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    with flash3.sdpa_override(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.fx.symbolic_trace(Layer())
    assert imported_before in [node.target for node in traced.graph.nodes]


# A bool attn_mask of flash3.sdpa and its override, against torch's own; when its mask is made, and when torch does the call.


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
    assert left_to_torch(lambda: flash3.sdpa(q.double(), k.double(), v.double(), torch.zeros(10, 10).double())).startswith("attn_mask is of torch.float64")
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
