# SPDX-License-Identifier: Apache-2.0
"""torch.nn.attention.activate_flash_attention_impl("FLASH3"): torch's flash operators, scaled_dot_product_attention and varlen_attn.

On the CPU scaled_dot_product_attention has an operator of its own: there its flash operator is called by name.
"""
import inspect
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
    with pytest.raises(NotImplementedError, match="from 2.11 on"):
        import flash3.integrations.torch
    pytest.skip("torch has no torch.nn.attention.restore_flash_attention_impl", allow_module_level=True)

import flash3
import oracle
from flash3.integrations import torch as integration
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, current_flash_attention_impl, \
    list_flash_attention_impls, restore_flash_attention_impl, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn

aten = torch.ops.aten
HAS_CACHES = "block_table" in inspect.signature(varlen_attn).parameters
caches = pytest.mark.skipif(not HAS_CACHES, reason="this torch's varlen_attn takes no KV cache")


@pytest.fixture(autouse=True)
def calls():
    """Activates flash3, and counts its forwards and backwards."""
    with mock.patch.object(integration, "_attend", wraps=integration._attend) as forward, \
            mock.patch.object(integration, "_gradients", wraps=integration._gradients) as backward:
        activate_flash_attention_impl("FLASH3")
        yield forward, backward
    restore_flash_attention_impl(_raise_warn=False)


@pytest.fixture
def dtype(device):
    return torch.float32 if device == "cpu" else torch.bfloat16


def make(device, dtype, *shapes, grad=True):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad) for shape in shapes]


def sdpa(q, k, v, is_causal=False, scale=None):
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)


def starts(device, *lengths):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(device)


def check(got, inputs, dout, reference):
    """got and its gradients against reference(q, k, v) of the same inputs in float64."""
    exact, naive = ([x.detach().to(kind).requires_grad_() for x in inputs] for kind in (torch.float64, got.dtype))
    wanted = reference(*exact)
    oracle.assert_close(got, wanted, reference(*naive))
    close = {"atol": 1e-5, "rtol": 1e-4} if got.dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for a, b in zip(torch.autograd.grad(got, inputs, dout), torch.autograd.grad(wanted, exact, dout.double())):
        torch.testing.assert_close(a, b.to(a.dtype), **close)


def test_the_registry():
    assert "FLASH3" in list_flash_attention_impls() and current_flash_attention_impl() == "FLASH3"
    q, = make("cpu", torch.float32, (1, 2, 3, 8))
    sdpa(q, q, q)
    activate_flash_attention_impl("FLASH3")  # torch restores before it activates
    sdpa(q, q, q)
    assert torch._C._get_fa3_sdp_enabled()
    restore_flash_attention_impl()
    assert current_flash_attention_impl() is None and not torch._C._get_fa3_sdp_enabled()
    with pytest.raises(NotImplementedError, match="Could not run"):
        sdpa(q, q, q)


def test_another_name():
    restore_flash_attention_impl()
    integration.register("other")
    try:
        activate_flash_attention_impl("other")
        assert current_flash_attention_impl() == "other"
    finally:
        restore_flash_attention_impl()
        torch.nn.attention._registry._FLASH_ATTENTION_IMPLS.pop("other")


def test_what_fails_to_register_leaves_nothing():
    restore_flash_attention_impl()
    q, = make("cpu", torch.float32, (1, 2, 3, 8))
    with pytest.raises(RuntimeError, match="no such key|NoSuchKey|could not parse dispatch key"):
        integration.Overrides(("CPU", "NoSuchKey"))
    with pytest.raises(NotImplementedError, match="Could not run"):
        sdpa(q, q, q)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 4, 33, 32), (1, 6, 2, 70, 20), (2, 3, 1, 1, 64)])
def test_sdpa(device, dtype, calls, shape, is_causal):
    batch, heads, heads_k, seq, dim = shape
    q, k, v = inputs = make(device, dtype, (batch, heads, seq, dim), *((batch, heads_k, seq, dim),) * 2)

    def reference(*tensors):
        return oracle.naive(*(x.transpose(1, 2) for x in tensors), causal=is_causal, softmax_scale=0.3)[0].transpose(1, 2)

    check(sdpa(q, k, v, is_causal, scale=0.3), inputs, torch.randn_like(q), reference)
    assert [c.call_count for c in calls] == [1, 1]


def test_sdpa_of_fused_projections(device, dtype, calls):
    """Tensors as a model has them: views of one, heads after rows."""
    x, = make(device, dtype, (2, 24, 3, 4, 16))
    q, k, v = (y.transpose(1, 2) for y in x.unbind(2))
    out = sdpa(q, k, v, True)
    assert out.transpose(1, 2).is_contiguous()  # the order of query's dimensions, which spares a copy
    dx, = torch.autograd.grad(out, x, torch.ones_like(out))
    with sdpa_kernel(SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    close = {"atol": 1e-5, "rtol": 1e-5} if device == "cpu" else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(out, wanted, **close)
    torch.testing.assert_close(dx, *torch.autograd.grad(wanted, x, torch.ones_like(out)), **close)
    assert calls[0].call_count == 1


def test_causal_is_aligned_to_the_bottom_right(device, dtype):
    """As torch's own flash kernels, on which causal_lower_right relies."""
    q, k, v = make(device, dtype, (1, 2, 5, 16), *((1, 2, 9, 16),) * 2, grad=False)
    got = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    exact, naive = (f(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)[0].transpose(1, 2) for f in (oracle.exact, oracle.naive))
    oracle.assert_close(got, exact, naive)


def test_rows_with_gaps(device, dtype):
    """An operator that is called by name gets what strides there are; results have torch's."""
    q, k, v = (x.transpose(2, 3) for x in make(device, dtype, *((1, 2, 8, 16),) * 3, grad=False))
    out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    assert out.stride() == torch.empty_like(q).stride()
    exact, naive = (f(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2) for f in (oracle.exact, oracle.naive))
    oracle.assert_close(out, exact, naive)


LENGTHS = (13, 1, 40, 26)


def by_sequence(**options):
    """Attention of packed tensors, one sequence after the other."""
    def reference(q, k, v):
        return torch.cat([oracle.naive(*(x[None] for x in part), **options)[0][0] for part in
                          zip(*(x.split(LENGTHS) for x in (q, k, v)))])
    return reference


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0), (-1, 4), (0, 0), (0, -1), (8, 2), (1025, 1025)])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_varlen_attn(device, dtype, calls, window, scale):
    q, k, v = inputs = make(device, dtype, *((sum(LENGTHS), 3, 32),) * 3)
    cu = starts(device, *LENGTHS)
    got, lse = varlen_attn(q, k, v, cu, cu, 40, 40, scale=scale, window_size=window, return_aux=AuxRequest(lse=True))
    check(got, inputs, torch.randn_like(got), by_sequence(window=window, softmax_scale=scale))
    wanted = flash3.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, window=window, softmax_scale=scale, return_lse=True)[1]
    assert torch.equal(lse, wanted)
    assert [c.call_count for c in calls] == [1, 1]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_a_sequence_has_the_same_bits_in_any_order_of_the_batch(device, dtype, window):
    q, k, v = inputs = make(device, dtype, *((sum(LENGTHS), 2, 64),) * 3)

    def run(order):
        moved = [torch.cat([x.split(LENGTHS)[n] for n in order]) for x in inputs]
        lengths = [LENGTHS[n] for n in order]
        cu = starts(device, *lengths)
        out = varlen_attn(*moved, cu, cu, 40, 40, window_size=window)
        back = sorted(range(4), key=lambda n: order[n])
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
        return [torch.cat([out.split(lengths)[n] for n in back]), *gradients]

    torch.use_deterministic_algorithms(True)
    try:
        for a, b in zip(run([0, 1, 2, 3]), run([2, 0, 3, 1])):
            assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_are_asked_for(device, dtype):
    q, = make(device, dtype, (1, 2, 9, 16))
    for asked in (True, False):
        torch.use_deterministic_algorithms(asked)
        try:
            out = sdpa(q, q, q)
            with mock.patch.object(integration, "given", wraps=integration.given) as options:
                torch.autograd.grad(out, q, torch.ones_like(out))
        finally:
            torch.use_deterministic_algorithms(False)
        assert options.call_args.kwargs["deterministic"] is asked


@caches
def test_grouped_queries(device, dtype):
    q, k, v = inputs = make(device, dtype, (80, 6, 24), *((80, 2, 24),) * 2)
    cu = starts(device, *LENGTHS)
    with pytest.raises(ValueError, match="enable_gqa"):
        varlen_attn(q, k, v, cu, cu, 40, 40)
    got = varlen_attn(q, k, v, cu, cu, 40, 40, enable_gqa=True)
    check(got, inputs, torch.randn_like(got), by_sequence())


@caches
@pytest.mark.parametrize("keys, out", [("packed", False), ("packed", True), ("padded", False), ("pages", False), ("pages", True)])
def test_a_kv_cache(device, dtype, calls, keys, out):
    from torch.nn.attention.varlen import varlen_attn_out
    used, queries = (20, 7, 32), (1, 3, 2)
    q, k, v = make(device, dtype, (sum(queries), 4, 32), *((3, 32, 2, 32),) * 2, grad=False)
    cu_q, seqused_k, table = starts(device, *queries), torch.tensor(used, dtype=torch.int32, device=device), None
    cu_k = starts(device, 32, 32, 32) if keys == "packed" else None
    given = [k, v]
    if keys == "packed":
        given = [x.flatten(0, 1) for x in given]
    elif keys == "pages":
        order = torch.randperm(6, generator=torch.Generator().manual_seed(1)).to(device)
        table = order.view(3, 2).int()
        given = [torch.empty_like(x).view(6, 16, 2, 32).index_copy(0, order, x.reshape(6, 16, 2, 32)) for x in given]
    options = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": seqused_k, "block_table": table, "num_splits": 1}
    if keys == "padded":  # which varlen_attn itself does not take
        named = {"seqused_k": seqused_k, "num_splits": 1}
        got = aten._flash_attention_forward(q, *given, cu_q, None, 3, 32, 0.0, True, False, **named)[0]
    elif out:
        got = torch.full_like(q, float("nan"))
        assert varlen_attn_out(got, q, *given, cu_q, cu_k, 3, 32, **options) is got
    else:
        got = varlen_attn(q, *given, cu_q, cu_k, 3, 32, **options)
    exact, naive = (torch.cat([f(part[None], k[n:n + 1, :used[n]], v[n:n + 1, :used[n]], causal=True)[0][0]
                               for n, part in enumerate(q.split(queries))]) for f in (oracle.exact, oracle.naive))
    oracle.assert_close(got, exact, naive)
    assert calls[0].call_count == 1


@caches
def test_a_cache_has_no_gradients(device, dtype):
    q, k = make(device, dtype, (3, 2, 16), (1, 8, 2, 16))
    cu, used = starts(device, 3), torch.tensor([8], dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="inference-only"):  # torch's own word
        varlen_attn(q, k, k, cu, None, 3, 8, seqused_k=used, block_table=torch.zeros_like(used)[None])
    out = aten._flash_attention_forward(q, k, k, cu, None, 3, 8, 0.0, False, False, seqused_k=used)[0]
    with pytest.raises(NotImplementedError, match="there are no gradients through a KV cache"):
        out.sum().backward()
    with pytest.raises(ValueError, match="block_table is given but seqused_k is not"):
        aten._flash_attention_forward(q, k, k, cu, None, 3, 8, 0.0, False, False, block_table=used[None])


def quantized(device, *shape):
    codes = [x.to(torch.float8_e4m3fn) for x in make(device, torch.float32, *(shape,) * 3, grad=False)]
    return codes, [torch.rand(2, 2, device=device) + 0.5 for _ in range(3)]


def test_fp8(device):
    codes, scales = quantized(device, 2, 2, 40, 64)
    got, lse, *_ = aten._scaled_dot_product_flash_attention.quantized(*codes, *scales, 0.0, True)
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales))
    wanted, wanted_lse = flash3.attention(*(x.transpose(1, 2) for x in codes), causal=True, return_lse=True, **named)
    assert got.dtype == torch.bfloat16 and torch.equal(got, wanted.transpose(1, 2)) and torch.equal(lse, wanted_lse)
    cu = starts(device, 40, 40)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in codes]
    got = aten._flash_attention_forward.quantized(*packed, cu, cu, 40, 40, 0.0, True, False, *scales)[0]
    wanted = flash3.attention(*packed, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=40, max_seqlen_k=40, **named)
    assert torch.equal(got, wanted)
    without = aten._scaled_dot_product_flash_attention(*codes)[0]
    assert torch.equal(without, flash3.attention(*(x.transpose(1, 2) for x in codes)).transpose(1, 2))


@pytest.mark.parametrize("packed", [False, True])
def test_dropout(device, dtype, packed):
    shapes = ((80, 2, 16), (80, 2, 16)) if packed else ((2, 2, 30, 16), (2, 2, 40, 16))
    q, k = make(device, dtype, *shapes)
    cu, p = starts(device, *LENGTHS), 0.4
    torch.manual_seed(8)
    if packed:
        out, lse, state, offset, _ = aten._flash_attention_forward(q, k, k, cu, cu, 40, 40, p, True, False)
        grads = aten._flash_attention_backward(out.detach(), q, k, k, out, lse, cu, cu, 40, 40, p, True, state, offset)
    else:
        out, lse, *_, state, offset, _ = aten._scaled_dot_product_flash_attention(q, k, k, p, True)
        grads = aten._scaled_dot_product_flash_attention_backward(out.detach(), q, k, k, out, lse, None, None, 30, 40, p, True, state, offset)
    torch.manual_seed(8)
    same = torch.randint(2**63 - 1, (2,), device=device)
    assert torch.equal(state.view(torch.int64), same)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 40, "max_seqlen_k": 40} if packed else {}
    inputs = [x if packed else x.transpose(1, 2) for x in (q, k, k)]
    wanted, lse_wanted = flash3.attention(*inputs, causal=True, dropout_p=p, dropout_state=same, return_lse=True, **lengths)
    torch.testing.assert_close(out, wanted if packed else wanted.transpose(1, 2))
    torch.testing.assert_close(lse, lse_wanted)
    of = flash3.attention_backward(wanted.detach(), *inputs, wanted, lse_wanted, causal=True, dropout_p=p, dropout_state=same, **lengths)
    close = {} if device == "cpu" else {"atol": 2e-2, "rtol": 2e-2}  # sums in no fixed order
    for got, x in zip(grads, of[:3]):
        torch.testing.assert_close(got, x if packed else x.transpose(1, 2), **close)


def test_dropout_through_a_cache_is_refused(device, dtype):
    q, = make(device, dtype, (8, 2, 16), grad=False)
    with pytest.raises(RuntimeError, match="dropout_p = 0.5 but the keys lie in a cache"):
        aten._flash_attention_forward(q, q[None], q[None], starts(device, 8), None, 8, 8, 0.5, False, False)


@pytest.mark.gpu
def test_sdpa_drops_weights(calls):
    q, k = make("cuda", torch.bfloat16, (1, 2, 160, 64), (1, 2, 160, 64))
    results = []
    for _ in range(2):
        torch.manual_seed(8)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            results.append(F.scaled_dot_product_attention(q, k, k, dropout_p=0.5))
    torch.manual_seed(8)
    state = torch.randint(2**63 - 1, (2,), device="cuda")
    wanted = flash3.attention(*(x.transpose(1, 2) for x in (q, k, k)), dropout_p=0.5, dropout_state=state).transpose(1, 2)
    assert torch.equal(results[0], wanted) and torch.equal(results[1], wanted)
    for got, x in zip(torch.autograd.grad(results[0].sum(), (q, k)), torch.autograd.grad(wanted.sum(), (q, k))):
        torch.testing.assert_close(got, x, atol=2e-2, rtol=2e-2)
    assert [c.call_count for c in calls] == [2, 1]


@pytest.mark.gpu
def test_sdpa_takes_fp8():
    codes, _ = quantized("cuda", 1, 2, 40, 64)
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        got = F.scaled_dot_product_attention(*codes)
    assert torch.equal(got, flash3.attention(*(x.transpose(1, 2) for x in codes)).transpose(1, 2))


@pytest.mark.gpu
def test_nested_tensors(calls):
    parts = make("cuda", torch.bfloat16, *((n, 4, 64) for n in LENGTHS), grad=False)
    q = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3).transpose(1, 2)
    out.values().sum().backward()
    x = torch.cat(parts).requires_grad_()
    cu = starts("cuda", *LENGTHS)
    wanted = flash3.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=40, max_seqlen_k=40)
    wanted.sum().backward()
    torch.testing.assert_close(out.values(), wanted)
    torch.testing.assert_close(q.grad.values(), x.grad, atol=2e-2, rtol=2e-2)
    assert [c.call_count for c in calls] == [1, 1]


@pytest.mark.gpu
def test_a_cuda_graph():
    q, = make("cuda", torch.bfloat16, (2, 4, 100, 64), grad=False)
    sdpa(q, q, q, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(q, q, q, True)
    q.mul_(0.5)
    graph.replay()
    assert torch.equal(out, sdpa(q, q, q, True))
