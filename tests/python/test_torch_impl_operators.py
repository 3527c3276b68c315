# SPDX-License-Identifier: Apache-2.0
"""torch's flash operators as flash3.integrations.torch registers them: their results against torch's fake kernels, torch.compile, what
they refuse."""
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from test_torch_impl import LENGTHS, aten, calls, dtype, integration, make, quantized, sdpa, starts, varlen_attn  # noqa: F401: fixtures; skips

from torch.nn.attention import restore_flash_attention_impl  # noqa: E402: torch 2.10 has none, and is skipped before


def operators(device, dtype):
    """Calls of every operator that is overridden, but those with FP8."""
    q, k, v = make(device, dtype, (2, 4, 12, 16), *((2, 2, 12, 16),) * 2, grad=False)
    fused = make(device, dtype, (2, 12, 3, 4, 16), grad=False)[0]
    lse, seed = torch.zeros(2, 4, 12, device=device), torch.zeros(2, dtype=torch.uint64, device=device)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    cu = starts(device, 12, 12)
    views = [x.transpose(1, 2) for x in fused.unbind(2)]
    yield "sdpa", aten._scaled_dot_product_flash_attention.default, (q, k, v)
    yield "sdpa of views", aten._scaled_dot_product_flash_attention.default, tuple(views)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    yield "sdpa's backward", backward, (q, q, k, v, q, lse, None, None, 12, 12, 0.0, False, seed, seed[0])
    yield "backward of views", backward, (q, *views, q, lse, None, None, 12, 12, 0.0, False, seed, seed[0])
    yield "dense", aten._flash_attention_forward.default, (*fused.unbind(2), None, None, 12, 12, 0.0, True, False)
    yield "packed", aten._flash_attention_forward.default, (*packed, cu, cu, 12, 12, 0.0, True, False)
    yield "packed backward", aten._flash_attention_backward.default, (packed[0], *packed, packed[0], lse[0].repeat(1, 2), cu, cu, 12, 12,
                                                                      0.0, True, seed, seed[0])


def test_results_are_those_of_torchs_fake_kernels(device, dtype):
    """Shapes, dtypes and strides, on which compiled code relies: philox outputs too."""
    for name, operator, args in operators(device, dtype):
        results = operator(*args)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args))
        assert len(results) == len(fakes)
        for n, (real, fake) in enumerate(zip(results, fakes)):
            if isinstance(real, torch.Tensor):
                assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride()), (name, n)
            else:
                assert real == fake, (name, n)


def test_philox_outputs_are_zero(device, dtype):
    q, = make(device, dtype, (1, 2, 3, 16), grad=False)
    *_, seed, offset, mask = aten._scaled_dot_product_flash_attention(q, q, q)
    assert seed.dtype == offset.dtype == torch.uint64 and seed.tolist() == [0, 0] and offset.item() == 0
    assert mask.shape == (0,) and mask.dtype == q.dtype and {x.device for x in (seed, offset, mask)} == {q.device}


def test_compiled_varlen_attn(device, dtype, calls):
    q, k, v = inputs = make(device, dtype, *((80, 2, 16),) * 3)
    cu = starts(device, *LENGTHS)
    compiled = torch.compile(lambda *tensors: varlen_attn(*tensors, cu, cu, 40, 40) * 2, backend="aot_eager", fullgraph=True)
    out = compiled(*inputs)
    got = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert [c.call_count for c in calls] == [1, 1]
    plain = varlen_attn(*inputs, cu, cu, 40, 40) * 2
    torch.testing.assert_close(out, plain)
    for a, b in zip(got, torch.autograd.grad(plain, inputs, torch.ones_like(out))):
        torch.testing.assert_close(a, b)


def test_compiled_sdpa(device, dtype, calls):
    q, k, v = inputs = make(device, dtype, *((2, 4, 24, 16),) * 3)
    out = torch.compile(lambda *tensors: sdpa(*tensors, True) * 2, backend="aot_eager", fullgraph=device == "cpu")(*inputs)
    got = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert [c.call_count for c in calls] == [1, 1]
    plain = sdpa(*inputs, True) * 2
    torch.testing.assert_close(out, plain)
    for a, b in zip(got, torch.autograd.grad(plain, inputs, torch.ones_like(out))):
        torch.testing.assert_close(a, b)


def test_torchs_own_check_of_operators(device, dtype):
    q, k, v = make(device, dtype, *((80, 2, 16),) * 3, grad=False)
    cu = starts(device, *LENGTHS)
    tests = ["test_schema", "test_faketensor"]
    torch.library.opcheck(torch.ops.torch_attn._varlen_attn, (q, k, v, cu, cu, 40, 40, False), test_utils=tests)
    out, lse, seed = torch.ops.torch_attn._varlen_attn(q, k, v, cu, cu, 40, 40, False)
    torch.library.opcheck(torch.ops.torch_attn._varlen_attn_backward, (q, q, k, v, out, lse, cu, cu, 40, 40, False, seed),
                          test_utils=tests)


@pytest.mark.parametrize("message, options", [
    ("return_debug_mask = True but", {"return_debug_mask": True}),
    ("query.dtype = torch.float64|dtype", {"dtype": torch.float64}),
    (r"value.shape\[2\] = 3 but key.shape\[2\] = 2", {"heads_v": 3}),
    ("query.ndim = 3 but it must be 4", {"ndim": 3})])
def test_refusals(device, dtype, message, options):
    options = dict(options)
    dtype = options.pop("dtype", dtype)
    q, = make(device, dtype, (2, 2, 8, 16)[4 - options.pop("ndim", 4):], grad=False)
    v, = make(device, dtype, (2, options.pop("heads_v", 2), 8, 16)[4 - q.dim():], grad=False)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message) as error:
        aten._scaled_dot_product_flash_attention(q, q, v, **options)
    assert not options or isinstance(error.value, RuntimeError)  # as torch's own


def test_refusals_of_the_other_operator(device, dtype):
    q, = make(device, dtype, (8, 2, 16), grad=False)
    with pytest.raises(RuntimeError, match="alibi_slopes is given"):
        aten._flash_attention_forward(q, q, q, starts(device, 8), starts(device, 8), 8, 8, 0.0, False, False,
                                      alibi_slopes=torch.ones(2, device=device))
    with pytest.raises(ValueError, match="query.ndim = 3 but cum_seq_q is not given"):
        aten._flash_attention_forward(q, q, q, None, None, 8, 8, 0.0, False, False)
    codes, _ = quantized(device, 1, 2, 8, 16)
    lse, seed = torch.zeros(1, 2, 8, device=device), torch.zeros(2, dtype=torch.uint64, device=device)
    with pytest.raises(RuntimeError, match="FP8 has no gradients"):
        aten._scaled_dot_product_flash_attention_backward(*codes[:1] * 2, *codes[1:], codes[0], lse, None, None, 8, 8, 0.0, False,
                                                          seed, seed[0])


def test_a_torch_with_other_operators_is_refused():
    restore_flash_attention_impl()
    schema = aten._flash_attention_forward.default._schema
    with pytest.raises(NotImplementedError, match="the names must be these"):
        integration.check_schema("_flash_attention_forward", lambda query, key, value: None, schema)
    for name, kernel in integration.KERNELS.items():
        if integration._schema(name) is not None:
            integration.check_schema(name, kernel, integration._schema(name))
    with mock.patch.dict(integration.KERNELS, {"_flash_attention_of_another_day": integration._sdpa}), \
            pytest.raises(NotImplementedError, match="has no operator aten::_flash_attention_of_another_day"):
        integration.Overrides()
    with mock.patch.object(torch.nn, "attention", object()), pytest.raises(NotImplementedError, match="from 2.11 on"):
        integration.register()
