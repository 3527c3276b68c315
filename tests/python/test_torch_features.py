# SPDX-License-Identifier: Apache-2.0
"""The operators as torch wants them: opcheck, compile, export, autocast, autograd's corners, threads."""
import concurrent.futures
import io

import pytest
import torch
import torch._dynamo
from torch.autograd import forward_ad

import flash3
from flash3 import _library
from test_attention import make, pack

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static",
            "test_aot_dispatch_dynamic")


def cases(device, dtype):
    q, k, v = make(device, dtype, grad=True)
    sink = torch.randn(4, device=device, requires_grad=True)
    used = torch.tensor([20, 33], dtype=torch.int32, device=device)
    pq, pk, pv, cu_q, cu_k = pack(device, dtype)
    pq, pk, pv = (x.requires_grad_() for x in (pq, pk, pv))
    yield "plain", (q, k, v), {}
    yield "causal", (q, k, v), {"causal": True, "softmax_scale": 0.2, "softcap": 3.0, "sm_margin": 2}
    yield "sink", (q, k, v), {"sink": sink, "window_left": 5, "window_right": 2}
    yield "used", (q, k, v), {"seqused_q": used, "seqused_k": used}
    yield "packed", (pq, pk, pv), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 64}


@pytest.mark.parametrize("index", range(5))
def test_opcheck_forward(device, index):
    name, args, kwargs = list(cases(device, torch.bfloat16))[index]
    torch.library.opcheck(torch.ops.flash3.forward.default, args, kwargs, test_utils=OPCHECKS, atol=2e-2, rtol=2e-2)


def test_opcheck_backward(device):
    q, k, v = make(device, torch.bfloat16)
    sink = torch.randn(4, device=device)
    out, lse = torch.ops.flash3.forward(q, k, v, sink=sink)
    args = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse)
    options = {"deterministic": True, "sink": sink}
    torch.library.opcheck(torch.ops.flash3.backward.default, args, options, test_utils=OPCHECKS)
    given = [torch.empty_like(x) for x in (q, k, v, sink)]
    checks = [name for name in OPCHECKS if name != "test_autograd_registration"]
    torch.library.opcheck(torch.ops.flash3.backward_out.default, (*args, *given), options, test_utils=checks)
    torch.library.opcheck(torch.ops.flash3.forward_out.default, (q, k, v, torch.empty_like(out), torch.empty_like(lse)),
                          test_utils=checks)


PLAIN = [{}, {"causal": True, "softmax_scale": 0.2}, {"window_left": 5, "window_right": 2, "softcap": 3.0}]


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("options", PLAIN, ids=["plain", "causal", "window"])
def test_inference_is_forward_without_lse(device, options, heads_first):
    q, k, v = make(device, torch.bfloat16)
    if heads_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        options = {**options, "heads_first": True}
    wanted, _ = torch.ops.flash3.forward(q, k, v, **options)
    got = torch.ops.flash3.inference(q, k, v, **options)
    assert torch.equal(got, wanted) and got.stride() == wanted.stride()
    torch.library.opcheck(torch.ops.flash3.inference.default, (q, k, v), options, test_utils=OPCHECKS, atol=2e-2, rtol=2e-2)


def test_who_calls_inference(device):
    """Calls whose lse is not returned, and which have no gradients; the others call forward. The results have the same bits."""
    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            names.append(operator.name())
            return operator(*args, **(kwargs or {}))

    names = []
    q, k, v = make(device, torch.bfloat16)
    t = [x.transpose(1, 2) for x in (q, k, v)]
    with Names():
        outs = [flash3.attention(q, k, v, window=(7, 1), softcap=2.0),
                flash3.attention(q, k, v, window=(7, 1), softcap=2.0, return_lse=True)[0], flash3.sdpa(*t, is_causal=True, enable_gqa=True)]
    assert names[:2] == ["flash3::inference", "flash3::forward"] and "flash3::inference" in names[2:]
    assert torch.equal(*outs[:2])
    q.requires_grad_()
    assert flash3.attention(q, k, v).requires_grad
    with pytest.raises(NotImplementedError, match="torch.ops.flash3.inference has no gradients"):
        torch.ops.flash3.inference(q, k, v).sum().backward()


def test_sm_margin(device):
    """It reaches the operator of each call, and changes neither results nor gradients."""
    class Margins(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator is torch.ops.flash3.forward.default:
                arguments = operator._schema.arguments
                seen.append(dict(zip((a.name for a in arguments), args))["sm_margin"])
            return operator(*args, **(kwargs or {}))

    seen = []
    q, k, v = make(device, torch.bfloat16, grad=True)
    packed = [x.requires_grad_() for x in pack(device, torch.bfloat16)[:3]]
    ends = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), pack(device, torch.bfloat16)[3:]))
    sink = torch.randn(4, device=device)
    for tensors, options in (((q, k, v), {}), ((q, k, v), {"causal": True, "sink": sink, "return_lse": True}), (packed, ends),
                             ((q, k, v), {"compute": "fp8", "rotation_seed": 5})):
        given = flash3.attention(*tensors, **options, sm_margin=3), flash3.attention(*tensors, **options)
        results = [x if isinstance(x, tuple) else (x,) for x in given]
        assert all(torch.equal(a, b) for a, b in zip(*results))
        for a, b in zip(*(torch.autograd.grad(x[0].float().sum(), tensors) for x in results)):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
        with torch.no_grad(), Margins():
            flash3.attention(*tensors, **options, sm_margin=3)
    assert seen == [3] * 4
    # The forward's alone: no backward takes it, as flash3.h says.
    of_forward, of_backward = ({a.name for a in getattr(torch.ops.flash3, name).default._schema.arguments} for name in ("forward", "backward"))
    assert "sm_margin" in of_forward and "sm_margin" not in of_backward
    fields = [{name for name, _ in params._fields_} for params in (_library.ForwardParams, _library.BackwardParams)]
    assert "sm_margin" in fields[0] and "sm_margin" not in fields[1]
    assert flash3.supported(q, k, v, sm_margin=3) and flash3.supported(q, k, v, sm_margin=3, backward=True)
    compiled = torch.compile(lambda margin: flash3.attention(q, k, v, sm_margin=margin), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(3), flash3.attention(q, k, v))
    torch._dynamo.reset()


def test_gradcheck_in_float32():
    """The kernels compute in float32 at most, so that steps and tolerances are wide; float64 has its own tests."""
    q, k, v = (x.mul(0.5).detach().requires_grad_() for x in make("cpu", torch.float32, batch=1, seq_q=3, seq_k=4, dim=4))
    sink = torch.randn(4, requires_grad=True)

    def call(q, k, v, sink):
        return flash3.attention(q, k, v, causal=True, sink=sink, softcap=4.0, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, sink), eps=2e-3, atol=2e-3, rtol=1e-2, nondet_tol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_has_no_graph_break(device, backend):
    torch._dynamo.reset()
    q, k, v = make(device, torch.bfloat16, grad=True)

    def block(q, k, v):
        out, lse = flash3.attention(q * 2, k, v, causal=True, window=(20, None), softmax_scale=0.1, return_lse=True)
        return out.float().sin() + lse.transpose(1, 2)[..., None]

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    got, wanted = compiled(q, k, v), block(q, k, v)
    torch.testing.assert_close(got, wanted, atol=1e-2, rtol=1e-2)
    for a, b in zip(torch.autograd.grad(got.sum(), [q, k, v]), torch.autograd.grad(wanted.sum(), [q, k, v])):
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)


@torch._dynamo.config.patch(error_on_recompile=True)
def test_compile_once_for_all_lengths(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flash3.attention(q, k, v, causal=True) * 2, fullgraph=True, dynamic=True,
                             backend="aot_eager")
    for seq in (16, 17, 65, 130):
        q, k, v = make(device, torch.bfloat16, seq_q=seq, seq_k=seq + 3)
        torch.testing.assert_close(compiled(q, k, v), flash3.attention(q, k, v, causal=True) * 2)


@torch._dynamo.config.patch(error_on_recompile=True)
def test_compile_with_a_longest_length_that_changes(device):
    torch._dynamo.reset()
    q, k, v, cu_q, cu_k = pack(device, torch.bfloat16)
    compiled = torch.compile(lambda n: flash3.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=n),
                             fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (64, 65, 100, 200):
        torch.testing.assert_close(compiled(n), flash3.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=n))


def test_compile_of_a_training_step(device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 192, device=device, dtype=torch.bfloat16)
    x = torch.randn(2, 40, 64, device=device, dtype=torch.bfloat16)

    def loss(x):
        q, k, v = model(x).view(2, 40, 3, 4, 16).unbind(2)
        return flash3.attention(q, k, v, causal=True).float().square().mean()

    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        model.zero_grad()
        function(x).backward()
        gradients.append(model.weight.grad.clone())
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=5e-2)


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return flash3.attention(q, k, v, causal=True)


def test_export(device):
    q, k, v = make(device, torch.bfloat16)
    seq_q, seq_k = torch.export.Dim("seq_q", min=2, max=1000), torch.export.Dim("seq_k", min=2, max=1000)
    program = torch.export.export(Attend(), (q, k, v), dynamic_shapes=({1: seq_q}, {1: seq_k}, {1: seq_k}), strict=True)
    assert any(node.target is torch.ops.flash3.forward.default for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for other in ((q, k, v), make(device, torch.bfloat16, seq_q=70, seq_k=71)):
        torch.testing.assert_close(loaded(*other), flash3.attention(*other, causal=True))


def test_autocast(device):
    q, k, v = make(device, torch.float32, grad=True)
    with torch.autocast(device, torch.bfloat16):
        out, lse = flash3.attention(q, k.bfloat16(), v, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out, flash3.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.abs().sum() > 0
    compiled = torch.compile(lambda q, k, v: flash3.attention(q, k, v), fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16):
        torch.testing.assert_close(compiled(q, k, v), out)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sink", "qv", "ksink"])
def test_some_inputs_need_no_gradient(device, wanted):
    q, k, v = make(device, torch.bfloat16)
    inputs = {"q": q, "k": k, "v": v, "sink": torch.randn(4, device=device)}
    everything = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    flash3.attention(**everything).float().square().sum().backward()
    some = {name: x.clone().requires_grad_(name in wanted or name == wanted) for name, x in inputs.items()}
    flash3.attention(**some).float().square().sum().backward()
    for name, x in some.items():
        if x.requires_grad:
            torch.testing.assert_close(x.grad, everything[name].grad, atol=2e-2, rtol=2e-2)
        else:
            assert x.grad is None


def test_no_gradient_is_kept_where_none_is_wanted(device):
    q, k, v = make(device, torch.bfloat16)
    assert flash3.attention(q, k, v).grad_fn is None
    q.requires_grad_()
    with torch.no_grad():
        assert flash3.attention(q, k, v).grad_fn is None
    with torch.inference_mode():
        assert flash3.attention(q, k, v).is_inference()
    assert flash3.attention(q, k, v).requires_grad


def test_a_graph_used_twice_and_one_used_up(device):
    q, k, v = make(device, torch.bfloat16, grad=True)
    out = flash3.attention(q, k, v, deterministic=True)
    first = torch.autograd.grad(out.float().sum(), [q, k, v], retain_graph=True)
    second = torch.autograd.grad(out.float().sum(), [q, k, v])
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.float().sum(), [q, k, v])


def test_one_tensor_as_all_three(device):
    x = make(device, torch.bfloat16, heads_q=2, seq_q=50)[0].requires_grad_()
    got, = torch.autograd.grad(flash3.attention(x, x, x).float().sum(), x)
    three = [x.detach().clone().requires_grad_() for _ in range(3)]
    parts = torch.autograd.grad(flash3.attention(*three).float().sum(), three)
    torch.testing.assert_close(got, sum(p.float() for p in parts).bfloat16(), atol=3e-2, rtol=3e-2)


def test_an_input_changed_before_backward_is_refused(device):
    q, k, v = make(device, torch.bfloat16, grad=True)
    held = q * 1
    out = flash3.attention(held, k, v)
    held.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_and_tangents_are_refused(device):
    q, k, v = make(device, torch.bfloat16, grad=True)
    first, = torch.autograd.grad(flash3.attention(q, k, v).float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first.sum().backward()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="tangent"):
        flash3.attention(forward_ad.make_dual(q.detach(), torch.ones_like(q)), k.detach(), v.detach())


def test_checkpointing(device):
    q, k, v = make(device, torch.bfloat16, grad=True)
    call = lambda q, k, v: flash3.attention(q, k, v, causal=True, deterministic=True)
    got = torch.autograd.grad(torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False).float().sum(), [q, k, v])
    for a, b in zip(got, torch.autograd.grad(call(q, k, v).float().sum(), [q, k, v])):
        assert torch.equal(a, b)


def test_many_threads(device):
    inputs = [make(device, torch.bfloat16, seq_q=20 + i, seq_k=40 + i, seed=i, grad=True) for i in range(8)]

    def work(x):
        out = flash3.attention(*x, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out.float().square().sum(), x)

    alone = [work(x) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for got, wanted in zip(pool.map(work, inputs), alone):
                assert all(torch.equal(a, b) for a, b in zip(got, wanted))


def test_torch_num_threads_counts():
    q, k, v = make("cpu", torch.float32, seq_q=500, seq_k=500)
    before, wanted = torch.get_num_threads(), flash3.attention(q, k, v)
    try:
        torch.set_num_threads(1)
        torch.testing.assert_close(flash3.attention(q, k, v), wanted)
    finally:
        torch.set_num_threads(before)


def test_vmap(device):
    q, k, v = make(device, torch.bfloat16)
    got = torch.vmap(lambda q: flash3.attention(q, k, v, causal=True))(torch.stack([q, q * 2]))
    torch.testing.assert_close(got, torch.stack([flash3.attention(x, k, v, causal=True) for x in (q, q * 2)]))


def test_torch_func(device):
    q, k, v = make(device, torch.bfloat16)

    def loss(q):
        return flash3.attention(q, k, v, causal=True, deterministic=True).float().square().sum()

    leaf = q.clone().requires_grad_()
    wanted, = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(q), wanted)
    assert torch.equal(torch.func.vjp(loss, q)[1](torch.ones((), device=device))[0], wanted)
    for each in torch.vmap(torch.func.grad(loss))(torch.stack([q, q])):
        torch.testing.assert_close(each, wanted)
    for second in (torch.func.jacrev(torch.func.grad(loss)), torch.func.jacfwd(loss)):
        with pytest.raises((NotImplementedError, RuntimeError), match="second derivatives|tangent|jvp"):
            second(q)


@pytest.mark.gpu
def test_runs_on_the_current_stream():
    q, k, v = make("cuda", torch.bfloat16, seq_q=512, seq_k=512)
    wanted = flash3.attention(q, k, v)
    stream = torch.cuda.Stream()
    for _ in range(20):
        late = torch.zeros_like(q)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            late.copy_(q)
            got = flash3.attention(late, k, v)
        stream.synchronize()
        assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_cuda_graph():
    q, k, v = make("cuda", torch.bfloat16, dim=60)  # 60: a copy of the inputs goes through workspace
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        flash3.attention(q, k, v, causal=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash3.attention(q, k, v, causal=True)
    for seed in range(3):
        for old, new in zip((q, k, v), make("cuda", torch.bfloat16, dim=60, seed=seed)):
            old.copy_(new)
        graph.replay()
        assert torch.equal(out, flash3.attention(q, k, v, causal=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current_one():
    q, k, v = make("cuda:1", torch.bfloat16)
    with torch.cuda.device(0):
        torch.testing.assert_close(flash3.attention(q, k, v).to("cuda:0"), flash3.attention(*(x.to("cuda:0") for x in (q, k, v))))
