# SPDX-License-Identifier: Apache-2.0
"""Where the seeds of dropout come from: torch's generator, in each interface that draws one."""
import pytest
import torch

import flash3
from conftest import DEVICES
from dropout_cases import HEADS, keeps, make, precision, reference

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
