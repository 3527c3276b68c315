# SPDX-License-Identifier: Apache-2.0
"""What each method would take: a small model, by which method="auto" chooses and which explain() prints.

A pass's time is its work over the kernels' rate; a message's, its bytes over the link's rate and a latency. What a method sends
under its kernels counts only as far as it takes longer than they do.
"""
from typing import NamedTuple

from ._exchange import why_not
from ._methods import HEAD_GROUPS
from ._peer_gather import group_count


class Rates(NamedTuple):
    """What a rank does in a second, and what each message and each call takes before."""
    forward: float  # operations of the kernels
    backward: float
    link: float  # bytes to another rank, while as many come
    memory: float  # bytes, of the sums of parts
    copy: float  # bytes that a rank reads out of others' memory; 0: ranks send messages instead
    message: float  # seconds
    call: float  # seconds


# Four H200 with NVLink, bfloat16, head dim 128, as measured (bench/results/context_parallel_4_h200.json); a few cores over loopback, estimated.
RATES = {"cuda": Rates(7.0e14, 6.2e14, 2.9e11, 3.5e12, 3.6e11, 5e-5, 2e-5), "cpu": Rates(1e11, 1e11, 1e9, 1e10, 0, 2e-4, 2e-5)}
HOST = 8  # ranks that may all be on one host, where they reach each other's memory
BACKWARD = 2.5  # of the forward's operations
FLOAT32 = 4  # bytes of an element of the gradients of k and v on their way


class Shape(NamedTuple):
    """A rank's share of a call."""
    batch: int
    tokens: int
    heads_q: int
    heads_k: int
    dims: int  # head_dim + head_dim_v
    size: int  # bytes of an element
    part: float  # of all pairs, those that the mask leaves


def times(shape, sizes, device, gradients=False):
    """{method: (seconds of a call, with gradients those of its backward too, or why not, bytes that a rank sends)}, of a group, or of a
    mesh (ring, heads)."""
    passes = [pass_times(shape, sizes, RATES[device], backward) for backward in ((False, True) if gradients else (False,))]
    return {method: found if isinstance(found[0], str) else tuple(map(sum, zip(*(of[method] for of in passes))))
            for method, found in passes[0].items()}


def pass_times(shape, sizes, rates, backward=False):
    """The same of one pass."""
    ranks = sizes[0] * sizes[-1] if len(sizes) == 2 else sizes[0]
    rows = shape.batch * shape.tokens
    pairs = shape.part * rows * shape.tokens * ranks * shape.heads_q
    work = 2 * pairs * shape.dims * BACKWARD / rates.backward if backward else 2 * pairs * shape.dims / rates.forward
    keys = rows * shape.heads_k * shape.dims * shape.size
    gradients = rows * shape.heads_k * shape.dims * FLOAT32 if backward else 0
    sums = 3 * 4 * rows * shape.heads_q * shape.dims / 2 / rates.memory  # read, read, write

    def ring(steps, keys, gradients):  # the gradients of a step's keys go back under the next step; the last ones under none
        sent = steps * (keys + gradients)
        return max(work, sent / rates.link) + gradients / rates.link + steps * (rates.message + rates.call + sums), sent

    def gather(steps):  # gradients go back under no kernel
        groups = max(1, min(HEAD_GROUPS, shape.heads_k))
        sent = steps * keys
        seconds = sent / groups / rates.link + max(work, sent * (groups - 1) / groups / rates.link) + groups * (rates.message + rates.call)
        return seconds + steps * gradients / rates.link, sent + steps * gradients

    def pull(steps):  # the own keys come first, under which the first group's are copied
        heads = shape.heads_k if backward else shape.heads_q
        groups = max(1, group_count(shape.tokens, heads, shape.heads_k))
        sent, returned = steps * keys, steps * gradients
        late = max(0, sent / rates.copy - work / ranks) / groups
        laid = 2 * keys / rates.memory
        if backward:  # half of the gradients, or all if there is one group, is measured to come after the kernels
            merged = returned / min(groups, 2) / rates.copy + (ranks + 1) * gradients / rates.memory + groups * 2 * rates.call
        else:
            merged = (sums + groups * 2 * rates.call) / groups
        return max(work, (sent + returned) / rates.copy) + late + laid + merged, sent + returned

    def exchanged(sharing):  # q and out, k and v, each to the others, and their gradients
        per_head = rows * shape.dims
        copies = max(1, sharing // max(1, shape.heads_k))  # of KV heads that several ranks get
        of_keys = FLOAT32 if backward and copies > 1 else shape.size
        return (shape.heads_q * shape.size + shape.heads_k * copies * of_keys) * per_head * (sharing - 1) / sharing

    found = {}
    reason = why_not(shape.heads_q, shape.heads_k, sizes[-1])
    if len(sizes) == 1:
        found["ring"] = ring(ranks - 1, keys, gradients)
        found["all_gather"] = (pull if rates.copy and ranks <= HOST else gather)(ranks - 1)
        sent = exchanged(ranks)
        found["ulysses"] = (reason, 0) if reason else (work + sent / rates.link + 3 * rates.message + rates.call, sent)
    else:
        sent, copies = exchanged(sizes[1]), max(1, sizes[1] // max(1, shape.heads_k))
        seconds, passed = ring(sizes[0] - 1, keys * copies, gradients * copies)
        found["ulysses_ring"] = (reason, 0) if reason else (seconds + sent / rates.link + 3 * rates.message, sent + passed)
    return found


def cheapest(found):
    """The method of the least time; None: none can run."""
    best = None
    for method, (seconds, _) in found.items():
        if not isinstance(seconds, str) and (best is None or seconds < found[best][0]):
            best = method
    return best
