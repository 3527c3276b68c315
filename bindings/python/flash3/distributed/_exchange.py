# SPDX-License-Identifier: Apache-2.0
"""What goes from rank to rank: messages of several tensors, to one rank or to each of a group, and what is wrong when none comes.

NCCL sends on a stream of its own: what is posted here runs under the kernels launched after it, until wait().
"""
import collections
import math
import struct
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist

from .._arguments import signed


class explained:
    """A context that says of torch's error which exchange it was. A class: one made of a generator costs a message more."""

    def __init__(self, what, group):
        self._what, self._group = what, group

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if isinstance(error, RuntimeError):
            group = self._group
            raise RuntimeError(f"flash3.distributed: {self._what} failed on rank {dist.get_rank(group)} of "
                               f"{dist.get_world_size(group)}: another rank has ended, has raised, is late by more than the group's "
                               f"time-out, or makes another call; torch says: {error}") from error


def packed(tensors):
    """Tensors of one dtype as one message."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([x.reshape(-1) for x in tensors])


def unpacked(message, shapes):
    return [x.view(shape) for x, shape in zip(message.split([math.prod(shape) for shape in shapes]), shapes)]


class Swap:
    """Tensors that go to one rank of a group while others come from a third. Empty ones are not sent."""

    def __init__(self, group, tensors, destination, shapes, source):
        """What comes has these shapes, and the dtypes of the tensors."""
        self._group, self._source = group, source
        self._sent = [x.contiguous() for x in tensors]
        self._come = [x.new_empty(shape) for x, shape in zip(tensors, shapes)]
        swaps = []
        with explained(f"sending to rank {destination}", group):
            for tag, (sent, come) in enumerate(zip(self._sent, self._come)):
                if sent.numel():
                    swaps.append(dist.P2POp(dist.isend, sent, group=group, group_peer=destination, tag=tag))
                if come.numel():
                    swaps.append(dist.P2POp(dist.irecv, come, group=group, group_peer=source, tag=tag))
            self._works = dist.batch_isend_irecv(swaps) if swaps else []

    def wait(self):
        """The tensors that have come."""
        with explained(f"receiving from rank {self._source}", self._group):
            for work in self._works:
                work.wait()
        self._sent = None
        return self._come


class RowsToAll:
    """Some rows of a tensor to each rank of a group, one rank's after the other's, and rows from each."""

    def __init__(self, group, rows, sent, received):
        """sent, received: how many rows, for each rank."""
        self._group, self._sent = group, rows.contiguous()
        self._come = rows.new_empty((sum(received), *rows.shape[1:]))
        with explained("an all-to-all", group):
            self._work = dist.all_to_all_single(self._come, self._sent, received, sent, group=group, async_op=True)

    def wait(self):
        """What has come."""
        with explained("an all-to-all", self._group):
            self._work.wait()
        self._sent = None
        return self._come


class AllToAll:
    """Tensors for each rank of a group, and tensors from each."""

    def __init__(self, group, messages, shapes):
        """messages: the tensors for each rank; shapes: of the tensors that come, for each rank."""
        self._shapes, self._sizes = shapes, [sum(math.prod(shape) for shape in those) for those in shapes]
        self._swap = RowsToAll(group, torch.cat([x.reshape(-1) for those in messages for x in those]),
                               [sum(x.numel() for x in those) for those in messages], self._sizes)

    def wait(self):
        """The tensors of each rank."""
        return [unpacked(message, those) for message, those in zip(self._swap.wait().split(self._sizes), self._shapes)]


class Field(NamedTuple):
    """What must be the same on all ranks."""
    name: str
    number: int
    show: Callable[[int], object] = int  # what the number stands for


_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def dtype_field(name, dtype):
    return Field(name, _DTYPES.index(dtype) if dtype in _DTYPES else -1, lambda i: "another dtype" if i < 0 else _DTYPES[i])


def number_field(name, value):
    if isinstance(value, float):
        return Field(name, struct.unpack("q", struct.pack("d", value))[0], lambda x: struct.unpack("d", struct.pack("q", x))[0])
    if value is None or isinstance(value, str):
        return Field(name, int(value is not None), lambda x: value if x == (value is not None) else "something else")
    if name == "rotation_seed":  # unsigned, which torch's integers are not
        return Field(name, signed(value), lambda x: x % 2**64)
    return Field(name, int(value))


# Which calls the ranks of these groups have compared. All ranks note the same calls in the same order, and so forget the same ones.
_compared = collections.defaultdict(dict)
_KEPT = 4096


def compare(groups, key, fields, device, check=lambda: None):
    """Raises ValueError on all ranks where some number differs, unless the ranks have compared this call before.

    key: the call, as this rank makes it; fields: a function that makes the Fields; check: what raises for calls that all ranks make
    alike, on all of them.
    """
    compared = _compared[tuple(group.group_name for group in groups)]
    if key in compared:
        return
    made = fields()
    table = gather_numbers([field.number for field in made], groups, device)
    for i, (name, _, show) in enumerate(made):
        for rank, row in enumerate(table):
            if row[i] != table[0][i]:
                raise ValueError(f"{name} is {show(row[i])} on rank {rank} but {show(table[0][i])} on rank 0; all ranks must make "
                                 "the same call")
    check()
    compared[key] = None
    if len(compared) > _KEPT:
        del compared[next(iter(compared))]


def gather_numbers(numbers, groups, device):
    """[rank of a mesh][number]: these integers of each rank of the groups, the first of which changes slowest."""
    table = torch.tensor([numbers], dtype=torch.int64, device=device)
    for group in reversed(groups):
        come = [torch.empty_like(table) for _ in range(dist.get_world_size(group))]
        with explained("comparing the ranks' calls", group):
            dist.all_gather(come, table, group=group)
        table = torch.cat(come)
    return table.tolist()


# Ulysses: from some tokens of all heads to all tokens of some heads, and back (arXiv:2309.14509).
#
# With fewer KV heads than ranks several ranks get the same one, and its gradients are summed in float32 on their way back.


def heads_of(heads, ranks, rank):
    """The heads of a tensor with so many that a rank gets."""
    first = rank * heads // ranks
    return slice(first, (rank + 1) * heads // ranks if heads % ranks == 0 else first + 1)


def why_not(heads_q, heads_k, ranks):
    """Why heads cannot be dealt to ranks; None: they can."""
    if heads_q % ranks == 0 and (heads_k % ranks == 0 or heads_k and ranks % heads_k == 0):
        return None
    return (f"heads_q = {heads_q} and heads_k = {heads_k} but {ranks} ranks share the heads; heads_q must be a multiple of that, "
            "and heads_k a multiple or a divisor of it")


class HeadExchange:
    """Between ranks that share their tokens; rank: this one's, among them; first: the first one's, among all."""

    def __init__(self, layout, group, rank, ranks, first):
        self._layout, self._group, self._rank, self._ranks = layout, group, rank, ranks
        self._members = range(first, first + ranks)

    def _tokens(self, side):
        return [self._layout.tokens(side, member) for member in self._members]

    def to_heads(self, **tensors):
        """q=, k=, v= of one dtype, [batch, own tokens, heads, dim]: the same of all tokens in their order and of the own heads.

        What belongs to queries but is not q has a name that begins with q.
        """
        messages = [[x[:, :, heads_of(x.shape[2], self._ranks, other)] for x in tensors.values()]
                    for other in range(self._ranks)]
        shapes = [[] for _ in range(self._ranks)]
        for name, x in tensors.items():
            own = heads_of(x.shape[2], self._ranks, self._rank)
            for mine, tokens in zip(shapes, self._tokens(_side(name))):
                mine.append((x.shape[0], tokens, own.stop - own.start, x.shape[3]))
        come = AllToAll(self._group, messages, shapes).wait()
        return [self._layout.order_of_group(_side(name), self._members).of(torch.cat(parts, 1))
                for name, parts in zip(tensors, zip(*come))]

    def to_tokens(self, heads, **tensors):
        """The way back, of tensors that have so many heads in all."""
        parts = []
        for name, x in tensors.items():
            order = self._layout.order_of_group(_side(name), self._members)
            parts.append(order.undo(x).split(self._tokens(_side(name)), 1))
        shapes = [(x.shape[0], self._tokens(_side(name))[self._rank], *x.shape[2:]) for name, x in tensors.items()]
        come = AllToAll(self._group, list(zip(*parts)), [shapes] * self._ranks).wait()
        return [self._all_heads(x, heads) for x in zip(*come)]

    def _all_heads(self, parts, heads):
        if heads % self._ranks == 0:
            return torch.cat(parts, 2)
        return torch.stack([sum(parts[rank] for rank in range(self._ranks) if rank * heads // self._ranks == head)
                            for head in range(heads)], 2).squeeze(3)


def _side(name):
    return "q" if name.startswith("q") else "k"
