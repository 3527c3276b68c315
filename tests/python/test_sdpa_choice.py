# SPDX-License-Identifier: Apache-2.0
"""What flash3.sdpa and its override leave to torch: calls for which torch was told what to use, and tensors that flash3 does not know."""
import contextlib
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash3
from flash3 import _sdpa
from test_sdpa import calls_of_flash3, imported_before, make, only_flash3


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
