# SPDX-License-Identifier: Apache-2.0
"""flash3.attention and flash3.sdpa on DTensors over gloo, in as many processes as a mesh has, against the same call on whole tensors.

    python test_dtensor.py FOLDER SIZE...

SIZE... are the mesh's, as 2 or 2 2. Each process prints nothing, and writes the result of each case to FOLDER/RANK.json. The tests run this
program and read the files.
"""
import datetime
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import subprocess
import sys
import traceback
from unittest import mock

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh  # noqa: E402

import flash3  # noqa: E402
from added_examples import examples  # noqa: E402
from flash3._fields import ADDED  # noqa: E402

B, S, D = 4, 12, 16
WHOLE, BATCH, HEADS = Replicate(), Shard(0), Shard(2)  # of [batch, seq, heads, dim]


def tensors(heads_q, heads_k, packed=False):
    shape = (B * S,) if packed else (B, S)
    return [torch.randn(*shape, heads, D, requires_grad=True) for heads in (heads_q, heads_k, heads_k)]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(call, leaves, placements, mesh, wanted=None, dout_placements=None):
    """call of DTensors and its gradients against those of whole tensors. wanted: the placements of its first result."""
    given = [None if x is None else distribute_tensor(x.detach().clone(), mesh, where).requires_grad_(x.requires_grad)
             for x, where in zip(leaves, placements)]
    results = []
    for each in (leaves, given):
        made = call(*each)
        made = made if isinstance(made, tuple) else (made,)
        results.append(made)
    douts = [torch.randn_like(x) for x in results[0]]
    torch.autograd.backward(results[0], douts)
    torch.autograd.backward(results[1], [distribute_tensor(x, mesh, dout_placements or [Replicate()] * mesh.ndim) for x in douts])
    if wanted is not None:
        assert list(results[1][0].placements) == list(wanted), results[1][0].placements
    for a, b in zip(results[0], results[1]):
        assert isinstance(b, DTensor) and a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(whole(b), a)
    for a, b in zip(leaves, given):
        if a is not None and a.requires_grad:
            torch.testing.assert_close(whole(b.grad), a.grad, rtol=1e-5, atol=1e-5)


def attention(q, k, v, sink=None, **options):
    return flash3.attention(q, k, v, sink=sink, return_lse=True, **options)


def no_communication():
    """Fails where torch would move data between ranks."""
    return mock.patch("torch.distributed.tensor._dispatch.OpDispatcher.redistribute_local_args",
                      side_effect=AssertionError("what is sharded as the call takes it is moved"))


def cases(mesh):
    """{name: function}; names say how tensors are sharded along the mesh's dimensions."""
    made = {}

    def add(name):
        return lambda function: made.__setitem__(name, function)

    for where in itertools.product((WHOLE, BATCH, HEADS, Shard(1), Shard(3)), repeat=mesh.ndim):
        if mesh.ndim > 1 and where[0] in (WHOLE, Shard(3)):
            continue

        @add(f"attention {where}")
        def _(where=where):
            compare(lambda q, k, v: attention(q, k, v, causal=True, window=(7, None), softcap=9.0), tensors(8, 4), [where] * 3, mesh,
                    where if all(p in (WHOLE, BATCH, HEADS) for p in where) else None)

    for where in itertools.product((WHOLE, BATCH, HEADS), repeat=mesh.ndim):
        in_order = [Shard(1) if p == HEADS else p for p in where]

        @add(f"sdpa {where}")
        def _(where=where, in_order=in_order):
            leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors(8, 4)]
            with flash3.sdpa_override(), mock.patch("flash3._sdpa._torch_sdpa", side_effect=AssertionError("left to torch")):
                compare(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), leaves, [in_order] * 3,
                        mesh, in_order)

        @add(f"sink {where}")
        def _(where=where):
            sink = torch.randn(8, requires_grad=True)
            of_sink = [Shard(0) if p == HEADS else WHOLE for p in where]
            compare(attention, [*tensors(8, 4), sink], [where] * 3 + [of_sink], mesh, where)

        @add(f"one KV head {where}")
        def _(where=where):
            of_keys = [BATCH if p == BATCH else WHOLE for p in where]
            compare(attention, tensors(8, 1), [where, of_keys, of_keys], mesh, where)

        @add(f"lengths {where}")
        def _(where=where):
            used = torch.tensor([3, 12, 0, 7], dtype=torch.int32)
            of_lengths = [BATCH if p == BATCH else WHOLE for p in where]
            compare(lambda q, k, v, n: attention(q, k, v, seqused_q=n, seqused_k=n), [*tensors(8, 4), used],
                    [where] * 3 + [of_lengths], mesh, where)

        @add(f"inference {where}")
        def _(where=where):
            """Nothing is moved."""
            q, k, v = (x.detach() for x in tensors(8, 4))
            wanted = flash3.attention(q, k, v, causal=True)
            given = [distribute_tensor(x, mesh, where) for x in (q, k, v)]
            with no_communication():
                got = flash3.attention(*given, causal=True)
            assert list(got.placements) == list(where)
            torch.testing.assert_close(whole(got), wanted)

    for where in itertools.product((WHOLE, Shard(1)), repeat=mesh.ndim):
        @add(f"packed {where}")
        def _(where=where):
            starts = torch.tensor([0, 5, 30, 48], dtype=torch.int32)
            nothing = [WHOLE] * mesh.ndim
            compare(lambda q, k, v, s: attention(q, k, v, cu_seqlens_q=s, cu_seqlens_k=s, causal=True), [*tensors(8, 4, packed=True), starts],
                    [where] * 3 + [nothing], mesh, where)

    @add("heads that ranks cannot share")
    def _():
        compare(attention, tensors(9, 3), [[HEADS] * mesh.ndim] * 3, mesh)

    @add("a batch that ranks cannot share")
    def _():
        leaves = [torch.randn(3, S, 2, D, requires_grad=True) for _ in range(3)]
        compare(attention, leaves, [[BATCH] * mesh.ndim] * 3, mesh)

    @add("both orders of heads")
    def _():
        """The same shapes with heads_first and without: what torch keeps of one is not for the other."""
        leaves = [torch.randn(4, 8, 8, D) for _ in range(3)]
        given = [distribute_tensor(x, mesh, [Shard(1)] * mesh.ndim) for x in leaves]
        for heads_first in (True, False, True):
            for operator in (torch.ops.flash3.forward, torch.ops.flash3.inference):
                a, b = (operator(*x, 0.0, False, heads_first, -1, -1, 9.0) for x in (leaves, given))
                torch.testing.assert_close(whole(b if isinstance(b, DTensor) else b[0]), a if isinstance(a, torch.Tensor) else a[0])

    @add("partial sums")
    def _():
        leaves = [x.detach() for x in tensors(8, 4)]
        given = [DTensor.from_local(x / mesh.size(), mesh, [Partial()] * mesh.ndim) for x in leaves]
        torch.testing.assert_close(whole(flash3.attention(*given)), flash3.attention(*leaves))

    @add("attention_backward")
    def _():
        q, k, v = (x.detach() for x in tensors(8, 4))
        out, lse = attention(q, k, v)
        dout = torch.randn_like(out)
        where = [HEADS] * mesh.ndim
        given = [distribute_tensor(x, mesh, where) for x in (dout, q, k, v, out)]
        of_lse = distribute_tensor(lse, mesh, [Shard(1)] * mesh.ndim)
        for a, b in zip(flash3.attention_backward(*given, of_lse)[:3], flash3.attention_backward(dout, q, k, v, out, lse)[:3]):
            torch.testing.assert_close(whole(a), b)

    if mesh.ndim > 1:
        return made

    @add("max_logits is for plain tensors")
    def _():
        q, k, v = (x.detach() for x in tensors(8, 4))
        largest, sharded = torch.empty(8), [distribute_tensor(x, mesh, [HEADS] * mesh.ndim) for x in (q, k, v)]
        for tensor in (largest, distribute_tensor(largest, mesh, [Shard(0)] * mesh.ndim)):
            for options in ({}, {"compute": "fp8"}):
                with pytest.raises(NotImplementedError, match="q is a DTensor but max_logits is given"):
                    attention(*sharded, max_logits=tensor, **options)
        with pytest.raises(NotImplementedError, match="max_logits is a DTensor"):
            attention(q, k, v, max_logits=distribute_tensor(largest, mesh, [Shard(0)] * mesh.ndim))

    @add("tensors that the headers have gained")
    def _():
        q, k, v = (x.detach() for x in tensors(8, 4))
        for name in ADDED["forward"]:
            for (shape, x), where in itertools.product(examples(name, B, 8, q.shape[1], k.shape[1]).items(), (BATCH, HEADS)):
                x, dims = torch.from_numpy(x), {"heads": " h", "batch_heads": "bh", "hd": " h", "d": "  "}.get(shape, "bh")
                dim = dims.find("b" if where == BATCH else "h")
                dim = dim - (dims[0] == " ") if dim >= 0 else dim
                own = Replicate() if dim < 0 or x.shape[dim] == 1 else Shard(dim)
                given = [distribute_tensor(x, mesh, [where] * mesh.ndim) for x in (q, k, v)]
                sharded = distribute_tensor(x, mesh, [own] * mesh.ndim)
                with no_communication():
                    out = flash3.attention(*given, **{name: sharded})
                torch.testing.assert_close(whole(out), flash3.attention(q, k, v, **{name: x}))

    @add("dropout drops by places in the whole call")
    def _():
        q, k, v = (x.detach() for x in tensors(8, 4))
        state, options = torch.tensor([3, 4]), {"dropout_p": 0.3}
        for where in (BATCH, HEADS):
            given = [distribute_tensor(x, mesh, [where] * mesh.ndim) for x in (q, k, v)]
            out = flash3.attention(*given, **options, seed=3, offset=4)
            torch.testing.assert_close(whole(out), flash3.attention(q, k, v, **options, dropout_state=state))
            with pytest.raises(ValueError, match="dropout_p = 0.3 but neither seed nor dropout_state is given"):
                flash3.attention(*given, **options)
            # Without dropout a state changes nothing.
            own = distribute_tensor(state, mesh, [Replicate()] * mesh.ndim)
            torch.testing.assert_close(whole(flash3.attention(*given, dropout_state=own)), flash3.attention(q, k, v))

    @add("compiled")
    def _():
        compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), backend="aot_eager", fullgraph=True)
        compare(lambda *x: compiled(*x) if isinstance(x[0], DTensor) else attention(*x, causal=True), tensors(8, 4),
                [[HEADS] * mesh.ndim] * 3, mesh)

    @add("compiled sdpa")
    def _():
        leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors(8, 8)]
        compiled = torch.compile(lambda q, k, v: flash3.sdpa(q, k, v, is_causal=True), backend="aot_eager", fullgraph=True)
        with mock.patch("flash3._sdpa._torch_sdpa", side_effect=AssertionError("left to torch")):
            compare(lambda *x: compiled(*x) if isinstance(x[0], DTensor) else flash3.sdpa(*x, is_causal=True), leaves,
                    [[Shard(1)] * mesh.ndim] * 3, mesh)

    @add("a tensor-parallel layer")
    def _():
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k, self.v, self.o = (torch.nn.Linear(64, 64) for _ in range(4))

            def forward(self, x):
                q, k, v = (f(x).unflatten(-1, (4, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
                return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

        torch.manual_seed(3)
        plain, parallel, x = Layer(), Layer(), torch.randn(2, 10, 64)
        parallel.load_state_dict(plain.state_dict())
        column = ColwiseParallel(use_local_output=False)
        parallelize_module(parallel, mesh, {"q": column, "k": column, "v": column, "o": RowwiseParallel()})
        wanted = plain(x)
        wanted.square().sum().backward()
        with flash3.sdpa_override(), mock.patch("flash3._sdpa._torch_sdpa", side_effect=AssertionError("left to torch")):
            got = parallel(x)
            got.square().sum().backward()
        torch.testing.assert_close(whole(got), wanted)
        for a, b in zip(parallel.parameters(), plain.parameters()):
            torch.testing.assert_close(whole(a.grad), b.grad, rtol=1e-4, atol=1e-4)
    return made


def child(rank, sizes, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=math.prod(sizes),
                            timeout=datetime.timedelta(seconds=60))
    results = {}
    for name, case in cases(init_device_mesh("cpu", tuple(sizes))).items():
        torch.manual_seed(sum(map(ord, name)))  # the same tensors on each rank
        try:
            case()
            results[name] = "passed"
        except Exception:
            results[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    os._exit(0)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_sharded_calls(sizes, tmp_path):
    run = subprocess.run([sys.executable, __file__, tmp_path, *map(str, sizes)], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent)
    assert run.returncode == 0, run.stdout + run.stderr
    made = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(math.prod(sizes))]
    assert made[0] and {name: said for of in made for name, said in of.items() if said != "passed"} == {}
    assert all(of.keys() == made[0].keys() for of in made)


def test_a_torch_without_strategies_says_so(monkeypatch):
    import torch.distributed.tensor._op_schema as schema
    from flash3 import _sharding
    monkeypatch.delattr(schema, "OpStrategy")
    _sharding.register.cache_clear()
    assert "takes no sharding strategies as flash3 registers them" in _sharding.register()
    _sharding.register.cache_clear()


def main():
    folder, sizes = pathlib.Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=child, args=(rank, sizes, folder)) for rank in range(math.prod(sizes))]
    for one in children:
        one.start()
    for one in children:
        one.join(280)
    late = [one for one in children if one.is_alive()]
    for one in late:
        one.kill()
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
