# SPDX-License-Identifier: Apache-2.0
"""context_parallel, torch.compile, checkpointing, the choice of a method, and what goes wrong: cases of test_distributed.py."""
import datetime
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flash3.distributed as fd
from flash3 import attention


class Layers(nn.Module):
    """Two blocks of attention over [batch, tokens, 32], by whichever function they are given."""

    def __init__(self, function, checkpoints=False):
        super().__init__()
        self.function, self.checkpoints = function, checkpoints
        self.qkv = nn.ModuleList(nn.Linear(32, 96, bias=False) for _ in range(2))

    def block(self, qkv, x):
        q, k, v = qkv(x).view(*x.shape[:-1], 3, 4, 8).unbind(2)  # no unflatten, which torch.compile cannot trace under a mode
        return x + self.function(q, k, v).flatten(2)

    def forward(self, x):
        for qkv in self.qkv:
            x = checkpoint(self.block, qkv, x, use_reentrant=False) if self.checkpoints else self.block(qkv, x)
        return x


def by_sdpa(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def by_flash3(q, k, v):
    return attention(q, k, v, causal=True)


def trained(model, run, x, y):
    """(the sum of squares, gradients of the weights) of run(x), which is the model's or compiled, with these targets."""
    model.zero_grad(set_to_none=True)
    loss = (run(x) - y).square().sum()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def summed(loss, gradients):
    for x in (loss, *gradients):
        dist.all_reduce(x)
    return loss, gradients


def assert_same(got, want):
    for x, y in zip((got[0], *got[1]), (want[0], *want[1])):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-4)


def in_context(function, checkpoints=False, compiles=False):
    """A model of one process, on the ranks' parts of its tokens: the same loss and the same gradients."""
    model, counter = Layers(function, checkpoints), CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True) if compiles else model
    for _ in range(3 if compiles else 1):
        x, y = torch.randn(2, 46, 32), torch.randn(2, 46, 32)
        whole_x, whole_y = x.clone(), y.clone()
        want = trained(model, model, x, y)
        with fd.context_parallel(buffers=(x, y), method="ring"):
            assert x.shape[1] < 46
            loss, gradients = trained(model, run, x, y)
        assert torch.equal(x, whole_x) and torch.equal(y, whole_y)
        assert_same(summed(loss, gradients), want)
        assert_same(trained(model, model, x, y), want)  # and outside it is what it was
    assert counter.frame_count == compiles, counter.frame_count


def compiled(method):
    """No graph break, and no new compilation for the plan of another batch of as many tokens."""
    plans = [fd.plan(cu_seqlens=cu) for cu in ((0, 48), (0, 7, 30, 48), (0, 20, 48))]
    frames = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, plan):
        return 2 * fd.attention(q, k, v, plan, method=method, causal=True)
    fast = torch.compile(call, backend=frames, fullgraph=True)
    for plan in plans:
        whole = [torch.randn(1, 48, 4, 8) for _ in range(3)]
        results = []
        for function in (call, fast):
            own = [plan.shard(x).requires_grad_() for x in whole]
            out = function(*own, plan)
            (out * out.detach()).sum().backward()
            results.append([out.detach(), *(x.grad for x in own)])
        for a, b in zip(*results):
            assert torch.equal(a, b)
    assert frames.frame_count <= 2, frames.frame_count  # the second time sizes may become symbols


def compiled_without_a_plan():
    """A group or a mesh instead of a plan: what follows from it is traced too."""
    own = [torch.randn(2, 24, 4, 8) for _ in range(3)]
    for group in (None, dist.group.WORLD, dist.init_device_mesh("cpu", (dist.get_world_size(),))):
        def call(q, k, v):
            return fd.attention(q, k, v, group, causal=True)
        assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(*own), call(*own))


def under_autocast():
    plan = fd.plan(seqlen=40)
    q, k, v = (plan.shard(torch.randn(1, 40, 4, 8)).requires_grad_() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = fd.attention(q, k, v, plan, method="ring", causal=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, fd.attention(*(x.bfloat16() for x in (q, k, v)), plan, method="ring", causal=True))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def compiled_contexts():
    """What was traced under one plan holds under another one, with that one's documents."""
    model = Layers(by_flash3)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for cu in ((0, 46), (0, 20, 46), (0, 9, 9, 46)):
        plan = fd.plan(cu_seqlens=cu)
        x, y = torch.randn(1, 46, 32), torch.randn(1, 46, 32)
        with fd.context_parallel(plan, buffers=(x, y), method="all_gather"):
            assert_same(trained(model, fast, x, y), trained(model, model, x, y))


def transformers_model():
    """A Llama through attn_implementation="f3": its logits of the own tokens are those of one process."""
    transformers = __import__("transformers")
    from flash3.integrations import transformers as integration
    integration.register()
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                                      attn_implementation="f3")
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(64, (2, 40))
    positions = torch.arange(40).repeat(2, 1)
    with torch.no_grad():
        want = model(input_ids=tokens, position_ids=positions).logits
        plan = fd.plan(seqlen=40)
        with fd.context_parallel(plan, buffers=(tokens, positions)):
            got = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(plan.unshard(got), want, rtol=1e-4, atol=1e-4)


def helpers(ranks):
    """shard, unshard and position ids, with and without a plan, along any dimension."""
    x = torch.randn(3, 4 * ranks, 2)
    own = fd.shard(x)
    assert own.shape == (3, 4, 2) and torch.equal(fd.unshard(own), x)
    rank = dist.get_rank()
    assert torch.equal(own[:, :2], x[:, 2 * rank:2 * rank + 2]), "zigzag"
    assert torch.equal(own[:, 2:], x[:, 4 * ranks - 2 * rank - 2:4 * ranks - 2 * rank])
    plan = fd.plan(cu_seqlens=[0, 5, 5, 17, 30])
    places = torch.cat([torch.arange(5), torch.arange(12), torch.arange(13)])
    assert torch.equal(plan.unshard(plan.position_ids(), 0), places)
    assert torch.equal(plan.unshard(plan.shard(x.new_tensor(range(30)), 0), 0), torch.arange(30.0))
    q, k, v = (torch.randn(1, 8 * ranks, 4 * ranks, 8) for _ in range(3))
    without = fd.attention(*(fd.shard(y) for y in (q, k, v)), causal=True)
    same = fd.plan(seqlen=8 * ranks)
    assert torch.equal(without, fd.attention(*(same.shard(y) for y in (q, k, v)), same, causal=True))
    own = [same.shard(y) for y in (q, k, v)]
    fd.attention(*own, same, causal=True, method="all_gather")
    assert "copies: of the other ranks' memory\n" in fd.explain(*own, same, causal=True, method="all_gather")
    other = dist.new_group()
    assert "copies: not known before the first call" in fd.explain(*own, other, causal=True, method="all_gather")
    text = fd.explain(*own, same, causal=True)
    assert text.splitlines()[0].split(": ")[1] in ("ring", "all_gather", "ulysses") and "us, " in text, text


def raises(error, words, call):
    try:
        call()
    except error as raised:
        assert all(word in str(raised) for word in words), raised
        return
    raise AssertionError(f"no {error.__name__} with {words}")


def other_shapes(method):
    """A rank that passes other shapes, another mask, or tokens that are not the plan's: an error on every rank."""
    last = dist.get_world_size() - 1
    odd = dist.get_rank() == last
    plan = fd.plan(seqlen=16 * (last + 1))

    def call(heads=4, dim=16, tokens=plan.tokens, dtype=torch.float32, **options):
        q, k, v = (torch.randn(1, tokens, heads, dim).to(dtype) for _ in range(3))
        return lambda: fd.attention(q, k, v, plan, method=method, **options)
    raises(ValueError, [f"q.shape[2] is 8 on rank {last} but 4 on rank 0"], call(heads=8 if odd else 4))
    raises(ValueError, [f"q.shape[3] is 8 on rank {last} but 16 on rank 0"], call(dim=8 if odd else 16))
    raises(ValueError, [f"on rank {last}", "less the tokens of q that the plan has"], call(tokens=plan.tokens + odd))
    raises(ValueError, [f"the mask's right is 0 on rank {last} but None on rank 0"], call(causal=odd))
    raises(ValueError, [f"softcap is 2.0 on rank {last} but 1.0 on rank 0"], call(softcap=2.0 if odd else 1.0))
    raises(ValueError, [f"q.dtype is torch.float16 on rank {last} but torch.bfloat16"], call(
        dtype=torch.float16 if odd else torch.bfloat16))
    raises(ValueError, [f"q.dtype is another dtype on rank {last}"], call(dtype=torch.float64 if odd else torch.float32))
    raises(ValueError, ["softmax_scale is"], call(softmax_scale=0.5 if odd else None))
    raises(ValueError, [f"sink.dtype is torch.float32 on rank {last} but None"], call(sink=torch.zeros(4) if odd else None))
    raises(ValueError, [f"rotation_seed is {2**63 - 1} on rank {last} but {2**64 - 1} on rank 0"], call(
        compute="fp8", rotation_seed=2**63 - 1 if odd else 2**64 - 1))
    raises(TypeError, ["q.dtype = float64"], call(dtype=torch.float64))
    for _ in range(2):
        raises(ValueError, ["head_dim must be from 1 to 576"], call(dim=600))
    call()()  # and then they can go on


def one_is_late(method):
    """All ranks but the first call a second time: they are told within the group's time-out."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    q, k, v = (torch.randn(1, 24, 12, 16) for _ in range(3))
    dist.barrier()  # which waits longer
    fd.attention(q, k, v, group, method=method, causal=True)
    if dist.get_rank():
        raises(RuntimeError, ["flash3.distributed: ", "failed on rank", "late by more than the group's time-out"],
               lambda: fd.attention(q, k, v, group, method=method, causal=True))
    dist.barrier()


def one_ends(method):
    """The last rank ends instead of its second call: the others are told."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=30))
    q, k, v = (torch.randn(1, 24, 12, 16) for _ in range(3))
    fd.attention(q, k, v, group, method=method)
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(0)
    raises(RuntimeError, ["flash3.distributed: ", "another rank has ended"], lambda: fd.attention(q, k, v, group, method=method))


def bad_arguments(ranks):
    q = torch.randn(1, 8, 4, 16)
    plan = fd.plan(seqlen=8 * ranks)
    raises(ValueError, ["method = 'star'"], lambda: fd.attention(q, q, q, method="star"))
    raises(ValueError, ["method = 'ulysses_ring'", "DeviceMesh"], lambda: fd.attention(q, q, q, method="ulysses_ring"))
    raises(ValueError, ["heads_q = 1", f"{ranks} ranks"], lambda: fd.attention(*[q[:, :, :1]] * 3, method="ulysses"))
    raises(ValueError, ["q.ndim = 3", "flash3.distributed.plan"], lambda: fd.attention(q[0], q[0], q[0]))
    raises(ValueError, ["k.ndim = 3", "q.ndim = 4"], lambda: fd.attention(q, q[0], q))
    raises(TypeError, ["k is a ndarray"], lambda: fd.attention(q, q.numpy(), q))
    raises(NotImplementedError, ["float8_e4m3fn", 'compute="fp8"'], lambda: fd.attention(*[q.to(torch.float8_e4m3fn)] * 3))
    raises(ValueError, ["seqlen = None and cu_seqlens = None"], fd.plan)
    raises(ValueError, ["cu_seqlens[2] = 3 but cu_seqlens[1] = 5"], lambda: fd.plan(cu_seqlens=[0, 5, 3]))
    raises(ValueError, ["begin with 0"], lambda: fd.plan(cu_seqlens=[1, 5]))
    raises(ValueError, ["cu_seqlens_k has 2", "has 3"], lambda: fd.plan(cu_seqlens=[0, 5, 8], cu_seqlens_k=[0, 4]))
    raises(ValueError, [f"the plan is for {8 * ranks} tokens"], lambda: plan.shard(q))
    raises(ValueError, ["x.shape[1] = 9"], lambda: plan.unshard(torch.zeros(1, 9)))
    raises(ValueError, ["buffers[0].requires_grad"], lambda: fd.context_parallel(buffers=[q.clone().requires_grad_()]))
    with fd.context_parallel():
        x, mask = q.transpose(1, 2), torch.ones(8, 8, dtype=torch.bool)
        raises(NotImplementedError, ["attn_mask is not None"],
               lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask))
        raises(NotImplementedError, ["dropout_p = 0.5"],
               lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
        raises(NotImplementedError, ["seqused_k is given"], lambda: attention(q, q, q, seqused_k=torch.ones(1, dtype=torch.int32)))


def cases(ranks):
    method = {2: "ring", 3: "all_gather", 4: "ulysses"}[ranks]
    found = {"helpers": functools.partial(helpers, ranks), "bad_arguments": functools.partial(bad_arguments, ranks)}
    for function in (by_sdpa, by_flash3):
        for checkpoints in (False, True):
            name = f"context_{function.__name__}{'_checkpointed' * checkpoints}"
            found[name] = functools.partial(in_context, function, checkpoints)
    found["transformers"] = transformers_model
    if ranks == 2:
        for one in ("auto", "ring", "all_gather", "ulysses"):
            found[f"compiled_{one}"] = functools.partial(compiled, one)
        found.update({one.__name__: one for one in (compiled_without_a_plan, compiled_contexts, under_autocast)})
        found["compiled_context_sdpa"] = functools.partial(in_context, by_sdpa, compiles=True)
        found["compiled_context_flash3"] = functools.partial(in_context, by_flash3, compiles=True)
    found["other_shapes"] = functools.partial(other_shapes, method)
    found["one_is_late"] = functools.partial(one_is_late, method)
    found["one_ends"] = functools.partial(one_ends, method)
    return found
