# SPDX-License-Identifier: Apache-2.0
"""What each method would take: a small model, by which method="auto" chooses and which explain() prints.

A call's time is its work over the kernel's rate; a message's, its bytes over the link's rate and a latency. What a method sends
under its kernels counts only as far as it takes longer than they do.
"""
from typing import NamedTuple

from ._heads import why_not
from ._methods import HEAD_GROUPS
from ._peer_gather import group_count


class Rates(NamedTuple):
    """What a rank does in a second, and what each message and each call takes before."""
    flops: float
    link: float  # bytes to another rank, while as many come
    memory: float  # bytes, of the sums of parts
    copy: float  # bytes that a rank reads out of others' memory; 0: ranks send messages instead
    message: float  # seconds
    call: float  # seconds


# Estimates: an H200 of eight with NVLink, bfloat16, head dim 128; and a few cores over loopback.
RATES = {"cuda": Rates(6.0e14, 2.4e11, 3.5e12, 3.5e11, 4e-5, 2e-5), "cpu": Rates(1e11, 1e9, 1e10, 0, 2e-4, 2e-5)}
HOST = 8  # ranks that may all be on one host, where they reach each other's memory


class Shape(NamedTuple):
    """A rank's share of a call."""
    batch: int
    tokens: int
    heads_q: int
    heads_k: int
    dims: int  # head_dim + head_dim_v
    size: int  # bytes of an element
    part: float  # of all pairs, those that the mask leaves


def times(shape, sizes, device):
    """{method: (seconds of a forward call, or why not, bytes that a rank sends)}, of a group, or of a mesh (ring, heads)."""
    rates = RATES[device]
    ranks = sizes[0] * sizes[-1] if len(sizes) == 2 else sizes[0]
    rows = shape.batch * shape.tokens
    work = 2 * shape.part * rows * shape.tokens * ranks * shape.heads_q * shape.dims / rates.flops
    keys = rows * shape.heads_k * shape.dims * shape.size
    sums = 3 * 4 * rows * shape.heads_q * shape.dims / 2 / rates.memory  # read, read, write

    def ring(steps, keys):
        return max(work, steps * keys / rates.link) + steps * (rates.message + rates.call + sums), steps * keys

    def gather(steps):
        groups = max(1, min(HEAD_GROUPS, shape.heads_k))
        sent = steps * keys
        return sent / groups / rates.link + max(work, sent * (groups - 1) / groups / rates.link) + groups * (
            rates.message + rates.call), sent

    def pull(steps):  # the own keys come first, under which the first group's are copied
        groups = max(1, group_count(shape.tokens, shape.heads_q, shape.heads_k))
        sent = steps * keys
        late = max(0, sent / rates.copy - work / ranks) / groups
        laid = 2 * keys / rates.memory
        return max(work, sent / rates.copy) + late + laid + (sums + groups * 2 * rates.call) / groups, sent

    def exchanged(sharing):  # q and out, k and v, each to the others
        per_head = rows * shape.dims * shape.size
        copies = max(1, sharing // max(1, shape.heads_k))  # of KV heads that several ranks get
        return (shape.heads_q + shape.heads_k * copies) * per_head * (sharing - 1) / sharing

    found = {}
    reason = why_not(shape.heads_q, shape.heads_k, sizes[-1])
    if len(sizes) == 1:
        found["ring"] = ring(ranks - 1, keys)
        found["all_gather"] = (pull if rates.copy and ranks <= HOST else gather)(ranks - 1)
        sent = exchanged(ranks)
        found["ulysses"] = (reason, 0) if reason else (work + sent / rates.link + 3 * rates.message + rates.call, sent)
    else:
        sent = exchanged(sizes[1])
        seconds, passed = ring(sizes[0] - 1, keys * max(1, sizes[1] // max(1, shape.heads_k)))
        found["ulysses_ring"] = (reason, 0) if reason else (seconds + sent / rates.link + 3 * rates.message, sent + passed)
    return found


def cheapest(found):
    """The method of the least time; None: none can run."""
    best = None
    for method, (seconds, _) in found.items():
        if not isinstance(seconds, str) and (best is None or seconds < found[best][0]):
            best = method
    return best
