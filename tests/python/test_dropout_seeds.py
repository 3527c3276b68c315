# SPDX-License-Identifier: Apache-2.0
"""Where the seeds of dropout come from: torch's generator, in each interface that draws one."""
import pytest
import torch

import flash3
from conftest import DEVICES
from dropout_cases import HEADS, keeps, make, precision, reference

def test_torchs_generator_seeds_a_call():
    q, k, v = (x.requires_grad_() for x in make(torch.float32, 1, 50, 60))

    def run(seed):
        torch.manual_seed(seed)
        out = flash3.attention(q, k, v, dropout_p=0.5)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))
    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(x, y) for x, y in zip(first, again))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(flash3.attention(q, k, v, dropout_p=0.5), flash3.attention(q, k, v, dropout_p=0.5))
    torch.manual_seed(1)
    state = torch.randint(2**63 - 1, (2,))
    assert torch.equal(first[0], flash3.attention(q, k, v, dropout_p=0.5, dropout_state=state))
    seed, offset = state.tolist()
    assert torch.equal(first[0], flash3.attention(q, k, v, dropout_p=0.5, seed=seed, offset=offset))


def test_checkpointing_repeats_the_mask():
    inputs = [x.requires_grad_() for x in make(torch.float32, 1, 50, 60)]
    call = lambda q, k, v: flash3.attention(q, k, v, dropout_p=0.5).square().sum()  # noqa: E731
    grads = []
    for run in (call, lambda *x: torch.utils.checkpoint.checkpoint(call, *x, use_reentrant=False)):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(run(*inputs), inputs))
    assert all(torch.equal(x, y) for x, y in zip(*grads))


@pytest.mark.parametrize("options", [{}, {"seed": 5, "offset": 6}], ids=str)
def test_compiled_as_one_graph(options):
    q, k, v = (x.requires_grad_() for x in make(torch.float32, 1, 50, 60))
    call = lambda q, k, v: flash3.attention(q, k, v, causal=True, dropout_p=0.25, **options)  # noqa: E731
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(4)
        out = run(q, k, v)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(x, y) for x, y in zip(*results))


# ---- sdpa, and torch's own operators ----

def sdpa_reference(q, k, v, state, p, **band):
    kept = flash3.dropout_mask(q.shape[0], q.shape[1], q.shape[2], k.shape[2], p, dropout_state=state)
    return reference(*(x.transpose(1, 2).double() for x in (q, k, v)), kept, p, **band)[0].transpose(1, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(is_causal):
    q, k, v = (torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    for call in (lambda: flash3.sdpa(q, k, v, dropout_p=0.3, is_causal=is_causal),
                 lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=is_causal)):
        with flash3.sdpa_override():
            torch.manual_seed(5)
            out = call()
        torch.manual_seed(5)
        wanted = sdpa_reference(q, k, v, torch.randint(2**63 - 1, (2,)), 0.3, causal=is_causal)
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_sdpa_in_a_layer_that_trains():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True).train()
    x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(0))
    with flash3.sdpa_override():
        torch.manual_seed(6)
        first = layer(x)
        torch.manual_seed(6)
        assert torch.equal(first, layer(x))
        first.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_drop_in():
    interface = pytest.importorskip("flash_attn_interface")
    q, k, v = (x.requires_grad_() for x in make(torch.bfloat16, 1, 50, 60))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (50, 60))
    calls = (lambda: flash3.attention(q, k, v, causal=True, dropout_p=0.3), lambda: interface.flash_attn_func(q, k, v, causal=True, dropout_p=0.3),
             lambda: interface.flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, 50, 60, causal=True, dropout_p=0.3)[None])
    results = []
    for call in calls:
        torch.manual_seed(9)
        out = call()
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0]))
    with pytest.raises(NotImplementedError, match="dropout_p = 0.3"):
        interface.flash_attn_varlen_func(q[0], k, v, cu_q, None, 50, 60, seqused_k=torch.tensor([60], dtype=torch.int32),
                                         page_table=torch.zeros(1, 1, dtype=torch.int32), dropout_p=0.3)
