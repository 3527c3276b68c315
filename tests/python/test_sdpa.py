# SPDX-License-Identifier: Apache-2.0
"""flash3.sdpa against torch's own, and the override."""
import contextlib
import inspect
import itertools
import subprocess
import sys
import threading
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import flash3
from flash3 import _sdpa

# Imported by name before any override: an override holds for it all the same.
from torch.nn.functional import scaled_dot_product_attention as imported_before


@contextlib.contextmanager
def only_flash3():
    """Fails where flash3.sdpa leaves a call to torch."""
    with mock.patch.object(_sdpa, "_torch_sdpa", side_effect=AssertionError("left to torch")):
        yield


def make(device, *shapes, dtype=None, seed=0, grad=False):
    g = torch.Generator().manual_seed(seed)
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_(grad) for s in shapes]


def check_like_torch(q, k, v, **options):
    leaves = [[x.detach().clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
    with only_flash3():
        got = flash3.sdpa(*leaves[0], **options)
    # torch's fused kernels do not take every attn_mask that broadcasts.
    with contextlib.nullcontext() if options.get("attn_mask") is None else sdpa_kernel(SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(*leaves[1], **options)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    close = {"atol": 2e-5, "rtol": 2e-5} if q.dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(got, wanted, **close)
    dout = torch.randn_like(got)
    got.backward(dout), wanted.backward(dout)
    for a, b in zip(*leaves):
        torch.testing.assert_close(a.grad, b.grad, **close)


def test_signature_is_torchs():
    parameters = inspect.signature(flash3.sdpa).parameters
    assert list(parameters) == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert [p.default for p in parameters.values()][3:] == [None, 0.0, False, None, False]


@pytest.mark.parametrize("seq_q,seq_k", list(itertools.product([1, 5, 64, 130], [1, 5, 64, 130])))
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(device, seq_q, seq_k, is_causal):
    q, k, v = make(device, (2, 3, seq_q, 32), (2, 3, seq_k, 32), (2, 3, seq_k, 48))
    check_like_torch(q, k, v, is_causal=is_causal)


def test_gqa_and_scale(device):
    q, k, v = make(device, (2, 8, 40, 32), (2, 2, 40, 32), (2, 2, 40, 32))
    check_like_torch(q, k, v, enable_gqa=True, is_causal=True)
    check_like_torch(q, k, v, enable_gqa=True, scale=0.3)
    with only_flash3():  # torch takes dropout_p and scale as integers too
        flash3.sdpa(q, k, v, None, 0, False, 1, True)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (1, 2, 2)])
def test_any_number_of_batch_dimensions(device, batch):
    check_like_torch(*make(device, *(batch + (4, 20, 16),) * 3), is_causal=True)


def test_layouts(device):
    fused = make(device, (2, 30, 3, 4, 16))[0]
    q, k, v = (x.transpose(1, 2) for x in fused.unbind(2))
    check_like_torch(q, k, v, is_causal=True)
    check_like_torch(q.expand(2, -1, -1, -1), k[:1].expand(2, -1, -1, -1), v)


def fallbacks():
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)
    doubles = q.double(), k.double(), v.double()
    yield "mask", doubles, {"attn_mask": torch.zeros(10, 10).double()}, "attn_mask is of torch.float64; flash3 takes one of bool"
    yield "dropout", (q, k, v), {"dropout_p": 1.0}, "dropout_p is not from 0 to below 1"
    yield "float64", doubles, {}, "float64"
    yield "wide", tuple(make("cpu", *((1, 1, 4, 300),) * 3)), {}, "head dim"
    yield "broadcast", (q, k[:1], v[:1]), {}, "shapes"
    yield "scale", (q, k, v), {"scale": -0.5}, "scale"
    yield "scale 0", (q, k, v), {"scale": 0.0}, "scale"
    yield "two dimensions", (q[0, 0], k[0, 0], v[0, 0]), {}, "shapes"


@pytest.mark.parametrize("args,options,reason", [c[1:] for c in fallbacks()], ids=[c[0] for c in fallbacks()])
def test_what_is_left_to_torch_is_said_once(args, options, reason):
    with mock.patch.object(_sdpa, "_said", set()):
        with pytest.warns(UserWarning, match=f"leaves this call to torch: .*{reason}") as said:
            torch.manual_seed(1)
            got = flash3.sdpa(*args, **options)
        assert len(said) == 1 and said[0].filename == __file__
        torch.manual_seed(1)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(*args, **options))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flash3.sdpa(*args, **options)


def test_what_is_wrong_gets_torchs_error():
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)
    for args in ((q, k[..., :8], v), (q, k[:, :3], v[:, :3]), (q, k.half(), v)):
        with pytest.raises(Exception) as wanted:
            F.scaled_dot_product_attention(*args)
        with warnings.catch_warnings(), pytest.raises(type(wanted.value)) as got:
            warnings.simplefilter("ignore")
            flash3.sdpa(*args)
        assert str(got.value) == str(wanted.value)


@pytest.mark.parametrize("options", [{}, {"attn_mask": torch.zeros(10, 9)}, {"dropout_p": 0.1}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("override", [False, True])
def test_keys_and_values_of_different_lengths_are_refused(options, override):
    """torch reads after the end of the shorter ones."""
    q, k, v = make("cpu", (2, 4, 10, 16), (2, 4, 9, 16), (2, 4, 12, 16))
    call = F.scaled_dot_product_attention if override else flash3.sdpa
    for tensors in ((q, k, v), (q, v, k), (q.double(), k.double(), v.double()), (q[0], k[0], v[0])):
        with flash3.sdpa_override() if override else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match=r"key.shape\[-2\] = \d+ but value.shape\[-2\] = \d+; key and value must have the same"):
                call(*tensors, **options)


def test_scale_with_a_gradient():
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)
    scale = torch.tensor(0.3, requires_grad=True)
    for mask in (None, torch.zeros(10, 10)):
        with pytest.raises(TypeError, match="scale.requires_grad = True but scale is taken as a number"):
            flash3.sdpa(q, k, v, mask, scale=scale)
    with torch.no_grad(), only_flash3():
        torch.testing.assert_close(flash3.sdpa(q, k, v, scale=scale), flash3.sdpa(q, k, v, scale=float(scale)))


def test_autocast(device):
    q, k, v = make(device, *((2, 4, 10, 16),) * 3, dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16), only_flash3():
        got = flash3.sdpa(q, k, v)
    assert got.dtype == torch.bfloat16


def test_compile(device):
    q, k, v = make(device, *((2, 4, 10, 16),) * 3)
    for is_causal in (False, True):
        compiled = torch.compile(lambda q, k, v: flash3.sdpa(q, k, v, is_causal=is_causal), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v), flash3.sdpa(q, k, v, is_causal=is_causal))
    masked = torch.compile(lambda q, k, v: flash3.sdpa(q, k, v, torch.zeros(10, 10, device=device, dtype=q.dtype)),
                           fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(masked(q, k, v), F.scaled_dot_product_attention(q, k, v), atol=2e-2, rtol=2e-2)


def test_the_question_for_the_gpu_does_not_break_a_graph():
    with mock.patch.object(_sdpa, "_capabilities", {}), \
            mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)) as asked:
        compiled = torch.compile(lambda x: x + 1 if _sdpa._is_hopper(0) else x, fullgraph=True, backend="eager")
        assert compiled(torch.zeros(1)) == 1 and asked.called


def calls_of_flash3(function):
    with mock.patch.object(_sdpa, "run_forward", wraps=_sdpa.run_forward) as spy:
        function()
    return spy.call_count


def test_override(device):
    q, k, v = make(device, *((2, 4, 10, 16),) * 3)
    both = lambda: (F.scaled_dot_product_attention(q, k, v, is_causal=True), imported_before(q, k, v))
    assert calls_of_flash3(both) == 0
    with flash3.sdpa_override():
        assert calls_of_flash3(both) == 2
        with flash3.sdpa_override():
            assert calls_of_flash3(both) == 2
        assert calls_of_flash3(both) == 2
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(calls_of_flash3(both)))
        thread.start(), thread.join()
        assert elsewhere == [0]
    assert calls_of_flash3(both) == 0
    with pytest.raises(KeyError), flash3.sdpa_override():
        raise KeyError
    assert calls_of_flash3(both) == 0


def test_override_of_a_module_and_its_gradients(device):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=device).train()
    x = torch.randn(2, 12, 32, device=device)
    if device == "cuda":
        layer, x = layer.bfloat16(), x.bfloat16()
    results = []
    for context in (contextlib.nullcontext(), flash3.sdpa_override()):
        layer.zero_grad()
        with context:
            out = layer(x)
        out.float().square().sum().backward()
        results.append((out, layer.self_attn.in_proj_weight.grad.clone()))
    close = {"atol": 1e-4, "rtol": 1e-4} if device == "cpu" else {"atol": 0.1, "rtol": 0.1}
    torch.testing.assert_close(results[0], results[1], **close)
    with flash3.sdpa_override():
        assert calls_of_flash3(lambda: layer(x)) == 1


class Nested(torch.autograd.Function):
    """Its backward is a call of backward() in one of backward(), and so on, and then a function."""

    @staticmethod
    def forward(ctx, x, depth, function):
        ctx.depth, ctx.function = depth, function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            if ctx.depth == 0:
                ctx.function()
            else:
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.function).backward()
        return gradient, None, None


def in_autograds_thread(function):
    """Calls it in a thread of autograd. A GPU has one for all its work; on the CPU calls beyond a depth of 60 get one."""
    threads = []
    Nested.apply(torch.ones(1, requires_grad=True), 70, lambda: threads.append(threading.get_ident()) or function()).backward()
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def recomputed_by_flash3(layer, x, use_reentrant):
    """How many calls of flash3 the backward of a checkpoint makes, in a thread of autograd."""
    loss = checkpoint(layer, x, use_reentrant=use_reentrant).float().square().sum()
    return calls_of_flash3(lambda: loss.backward() if x.is_cuda else in_autograds_thread(loss.backward))


@pytest.fixture
def layer_and_input(device):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=device, dtype=dtype).train()
    return layer, torch.randn(2, 12, 32, device=device, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_override_holds_where_autograd_computes_again(layer_and_input, use_reentrant):
    layer, x = layer_and_input
    with flash3.sdpa_override():
        layer(x).float().square().sum().backward()
        wanted, x.grad = x.grad, None
        assert recomputed_by_flash3(layer, x, use_reentrant) == 1
        torch.testing.assert_close(x.grad, wanted, rtol=0, atol=0)
        with flash3.sdpa_override():
            assert recomputed_by_flash3(layer, x, use_reentrant) == 1
        with pytest.raises(KeyError), flash3.sdpa_override():
            raise KeyError
        assert recomputed_by_flash3(layer, x, use_reentrant) == 1
        functional = lambda x: F.scaled_dot_product_attention(x, x, x)
        assert recomputed_by_flash3(functional, x, use_reentrant) == 1
    assert recomputed_by_flash3(layer, x, use_reentrant) == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_override_leaves_the_backward_of_other_threads_alone(layer_and_input, use_reentrant):
    layer, x = layer_and_input
    with flash3.sdpa_override():
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(recomputed_by_flash3(layer, x, use_reentrant)))
        thread.start(), thread.join()
    assert elsewhere == [0]


def test_an_override_elsewhere_does_not_reach_what_is_compiled():
    q, k, v = make("cpu", *((2, 4, 10, 16),) * 3)
    call = torch.compile(lambda: F.scaled_dot_product_attention(q, k, v), backend="eager", fullgraph=True)
    with flash3.sdpa_override():
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(calls_of_flash3(call)))
        thread.start(), thread.join()
    assert elsewhere == [0]


def test_override_under_compile(device):
    torch._dynamo.reset()
    q, k, v = make(device, *((2, 4, 10, 16),) * 3)
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    with flash3.sdpa_override():
        got = torch.compile(lambda: imported_before(q, k, v, is_causal=True), backend=backend, fullgraph=True)()
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=2e-2, rtol=2e-2)
    assert torch.ops.flash3.forward.default in seen


def test_the_first_that_is_compiled_may_be_in_an_override():
    code = """if True:
        import torch, flash3
        from torch.nn.functional import scaled_dot_product_attention as imported_before
        q, seen = torch.randn(1, 2, 5, 8), []

        def backend(graph, inputs):
            seen.extend(node.target for node in graph.graph.nodes)
            return graph

        with flash3.sdpa_override():
            torch.compile(lambda: imported_before(q, q, q), backend=backend, fullgraph=True)()
        assert torch.ops.flash3.forward.default in seen, seen
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_works_where_torch_is_imported_second():
    code = "import flash3, torch; x = torch.ones(1, 1, 3, 8); assert flash3.sdpa(x, x, x).shape == x.shape"
    subprocess.run([sys.executable, "-c", code], check=True)
