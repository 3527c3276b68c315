# SPDX-License-Identifier: Apache-2.0
"""Masks as data that torch.compile(fullgraph=True) and torch.export make inside of their graphs, against calls outside of one."""
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import flash3
from flash3 import masks
from test_masks import inputs, plain

torch.manual_seed(0)
IDS = torch.randint(0, 2, (2, 270)).cumsum(1).int().div(10, rounding_mode="floor").int()
BLOCKS = torch.rand(2, 1, 3, 5) < 0.6
DENSE = torch.rand(2, 1, 150, 270) < 0.5
FIVE, OTHERS = (masks.ranges(torch.randint(0, 270, (2, 1, 10, 150), dtype=torch.int32), seq_k=270) for _ in range(2))


def of_blocks(**sizes):
    return masks.blocks(BLOCKS, block_rows=64, block_keys=64, **sizes)


# What a function that is compiled makes, each time that it runs.
SOURCES = {
    "documents": lambda: masks.documents(IDS, seq_q=150),
    "lengths": lambda: masks.documents(lengths=[100, 70, 100], seq_q=150),
    "lengths of sequences": lambda: masks.documents(lengths=[[100, 70, 100], [200, 70, 0]], seq_q=150),
    "prefix": lambda: masks.prefix(20, 150, 270),
    "prefix of documents": lambda: masks.prefix([[20, 3]], seq_q=150, ids=IDS),
    "sinks": lambda: masks.window_with_sinks(30, 4, 150, 270),
    "band": lambda: masks.band(causal=True, chunk=100),
    "ranges": lambda: masks.ranges(torch.tensor([[3], [70]]).expand(2, 150)),
    "blocks": of_blocks,
    "block_sizes": lambda: of_blocks(block_sizes=torch.tensor([[64, 3, 50, 64, 14]]), seq_q=150, seq_k=270),
    "dense": lambda: masks.dense(DENSE),
    "bits": lambda: masks.bits(torch.arange(150 * 34).view(150, 34).to(torch.uint8), 270),
    "and": lambda: masks.documents(IDS, seq_q=150) & masks.window_with_sinks(30, 4, 150, 270),
    "or": lambda: masks.documents(IDS, seq_q=150) | masks.prefix(20, 150, 270),
    "too many ranges": lambda: FIVE | OTHERS,
    "and dense": lambda: FIVE & masks.dense(DENSE),
    "mask_mod": lambda: masks.from_mask_mod(lambda b, h, i, j: (i + j) % 3 == 0, None, None, 150, 270, "cpu"),
    "made": lambda: masks.documents(IDS, seq_q=150).make(),
    "made with room": lambda: masks.dense(DENSE).make(max_blocks=12),
}


def same(call, tensors, exactly=True, **options):
    """What is compiled gives what the call does, and the same gradients."""
    torch._dynamo.reset()  # the cases of a test share its code, which compiles only so often
    wanted = call(*tensors)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, **options)
    got = compiled(*tensors)
    torch.testing.assert_close(got, wanted, **({"rtol": 0, "atol": 0} if exactly else {}))
    weights = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad((out * weights).sum(), tensors) for out in (got, wanted)))
    return compiled


def compiled_inputs(**sizes):
    return tuple(x.requires_grad_() for x in inputs(**sizes))


@pytest.mark.parametrize("name", SOURCES)
def test_made_in_a_graph(name):
    # bits of all pairs take other blocks than what a mask holds that was counted: the sums may have another order
    exactly = name not in ("too many ranges", "and dense", "mask_mod")
    same(lambda q, k, v: flash3.attention(q, k, v, mask=SOURCES[name]()), compiled_inputs(), exactly)


@pytest.mark.parametrize("name", ["documents", "sinks", "dense", "blocks", "mask_mod"])
def test_a_source_from_outside(name):
    source = SOURCES[name]()
    same(lambda q, k, v: flash3.attention(q, k, v, mask=source, causal=True), compiled_inputs())


@pytest.mark.parametrize("shape", [{"shape": (10, 15), "kernel": 5}, {"shape": (10, 15), "kernel": 9}, {"shape": 150, "kernel": 7, "dilation": 3}],
                         ids=str)
def test_neighborhoods(shape):
    same(lambda q, k, v: flash3.attention(q, k, v, mask=masks.neighborhood(**shape)), compiled_inputs(seq_k=150), shape["kernel"] != 9)


@pytest.mark.parametrize("tile", [(2, 2, 4), (1, 2, 2)])
def test_tiles(tile):
    def call(q, k, v):
        return flash3.attention(q, k, v, mask=masks.tiles((4, 4, 8), tile=tile, window=(1, 2, 1), text=22))
    same(call, compiled_inputs(seq_k=150), tile != (1, 2, 2))


@pytest.mark.parametrize("name", ["sinks", "documents", "dense", "blocks", "bits"])
def test_sequences_that_are_used_in_part(name):
    used = {"seqused_q": torch.tensor([150, 77], dtype=torch.int32), "seqused_k": torch.tensor([129, 270], dtype=torch.int32)}
    same(lambda q, k, v: flash3.attention(q, k, v, mask=SOURCES[name](), window=(100, 20), **used), compiled_inputs())


@pytest.mark.parametrize("source", [lambda: masks.window_with_sinks(30, 4, 90, 140), lambda: masks.documents(IDS[0]),
                                    lambda: masks.ranges(torch.tensor([[3], [70]]).expand(2, 150)), lambda: masks.dense(DENSE[:, :, :90, :140])],
                         ids=["sinks", "documents", "ranges", "dense"])
def test_packed_sequences(source):
    lengths = {"cu_seqlens_q": torch.tensor([0, 60, 150], dtype=torch.int32), "cu_seqlens_k": torch.tensor([0, 130, 270], dtype=torch.int32),
               "max_seqlen_q": 90, "max_seqlen_k": 140}
    packed = tuple(x.detach()[0].requires_grad_() for x in compiled_inputs())
    same(lambda q, k, v: flash3.attention(q, k, v, mask=source(), causal=True, **lengths), packed)


def test_the_mask_is_made_in_each_run():
    """What changes in the source, by torch or unseen, is read again; other sizes make another graph."""
    q, k, v = inputs()
    ids = IDS.clone()
    source = masks.documents(ids, seq_q=150)
    compiled = torch.compile(lambda: flash3.attention(q, k, v, mask=source), backend="aot_eager", fullgraph=True)
    first = compiled()
    source.documents.numpy()[:] = torch.arange(270).div(30, rounding_mode="floor")
    second = compiled()
    runs = source.documents[:, None, -150:, None] == source.documents[:, None, None]
    torch.testing.assert_close(second.double(), plain(q, k, v, runs)[0], rtol=1e-4, atol=1e-4)
    assert not torch.equal(first, second)


def test_sizes_that_change():
    def call(q, k, v):
        return flash3.attention(q, k, v, mask=masks.window_with_sinks(30, 4, q.shape[1], k.shape[1]))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for seq_q, seq_k in ((150, 270), (140, 131), (33, 270)):
        tensors = inputs(seq_q, seq_k)
        assert torch.equal(compiled(*tensors), call(*tensors))


@pytest.mark.parametrize("makes_it_first", [False, True])
def test_masks_of_two_layers(makes_it_first):
    """Each call of a graph has a mask of its own, but for one that is made before."""
    found = []

    def compiler(graph, _):
        found.append(sum("mask_data" in str(node.target) and node.op == "call_function" for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def call(q, k, v):
        source = masks.documents(IDS, seq_q=150)
        mask = source.make() if makes_it_first else source
        return flash3.attention(flash3.attention(q, k, v, mask=mask), k, v, mask=mask)
    tensors = inputs()
    got = torch.compile(call, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*tensors)
    assert torch.equal(got, call(*tensors)) and found == [1 if makes_it_first else 2]


class Attends(torch.nn.Module):
    def forward(self, q, k, v, ids):
        return flash3.attention(q, k, v, mask=masks.documents(ids, seq_q=150), causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    tensors = *inputs(), IDS
    program = torch.export.export(Attends(), tensors, strict=strict)
    others = *(x + 1 for x in tensors[:3]), IDS.flip(1).contiguous()
    assert torch.equal(program.module()(*others), Attends()(*others))


def test_tensors_without_memory():
    tensors = *inputs(), IDS
    made = masks.documents(IDS, seq_q=150).make(max_blocks=0)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in tensors]
        assert Attends()(*fake).shape == (2, 150, 4, 32)
        mask = masks.documents(fake[3], seq_q=150).make(max_blocks=0)
        assert mask[1:] == made[1:] and mask.data.shape == made.data.shape
    assert Attends()(*(x.to("meta") for x in tensors)).shape == (2, 150, 4, 32)


def test_the_operators():
    arguments = (torch.empty(0), None, IDS, None, None, None)
    sizes = {"batch": 2, "heads_q": 1, "seq_q": 150, "seq_k": 270, "window_right": 0}
    data, fields = torch.ops.flash3.mask_make(*arguments, **sizes)
    again = torch.ops.flash3.mask_data(*arguments, **sizes)
    q, k, v = inputs()
    assert torch.equal(*(torch.ops.flash3.forward(q, k, v, mask=x, mask_fields=fields)[0] for x in (data, again)))
    checks = ("test_schema", "test_autograd_registration")  # the others compare all of the memory, of which much is never written
    torch.library.opcheck(torch.ops.flash3.mask_data.default, arguments, sizes, test_utils=checks)
    for rest in ({**sizes, "seq_k": 271}, {**sizes, "window_right": -1, "chunk": -1}):
        with pytest.raises(RuntimeError) as eager:
            torch.ops.flash3.mask_data(*arguments, **rest)
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError) as traced:
            torch.ops.flash3.mask_data(*arguments, **rest)
        assert str(traced.value) in str(eager.value).replace("is all zero", "is None"), (traced.value, eager.value)
