# SPDX-License-Identifier: Apache-2.0
"""The points of bench/distributed/context_parallel.py: which tokens each rank has, how many operations and bytes. Nothing here needs torch or a GPU."""
import math
from dataclasses import dataclass, replace
from itertools import accumulate, count

from bench.gpu.ragged_points import DEVIATION, log_normal_lengths

K = 1024
ELEMENT = 2  # bytes of a bf16
PASSES = {"forward": 1.0, "backward": 2.5}  # and the forward's operations that each has
METHODS = ("ring", "all_gather", "ulysses")
PEERS = ("torch_allgather", "torch_alltoall", "plain_ring")
PARTS = ("computing", "copies")  # of the ring, each without the other
BARS = {"causal": {"forward": 0.95, "backward": 0.93}, "documents": {"forward": 0.88, "backward": 0.88}}  # of the speed alone


def meshes(ranks):
    """[(ranks of a ring, ranks that share heads)]: how so many can be arranged in two dimensions."""
    return [(ring, ranks // ring) for ring in range(2, ranks) if ranks % ring == 0]


def methods(ranks):
    """The ways of flash3.distributed.attention, one for each mesh among them."""
    return (*METHODS, *(f"mesh_{ring}x{heads}" for ring, heads in meshes(ranks)))


def ways(ranks):
    return ("alone", *methods(ranks), *PEERS)


def document_lengths(tokens, mean):
    """Log-normal lengths with this sum and about this mean, the same each time; the last is cut."""
    lengths = []
    for draw in count(1):
        # log_normal_lengths() draws around a median of a 128th of what it is given.
        for length in log_normal_lengths(round(128 * mean / math.exp(DEVIATION**2 / 2)), draw):
            lengths.append(min(length, tokens - sum(lengths)))
            if sum(lengths) == tokens:
                return tuple(lengths)


@dataclass(frozen=True)
class ContextPoint:
    """Causal self-attention over tokens of which each rank has as many."""
    kind: str  # "causal", one sequence; or "documents", packed ones
    tokens: int  # of a rank
    heads: int
    heads_k: int
    ranks: int
    dim: int = 128
    mean: int = 4096  # of documents

    @property
    def case(self):
        tokens = f"{self.tokens // K}k" if self.tokens % K == 0 else f"{self.tokens}"
        return f"{self.kind}/{tokens}/h{self.heads}x{self.heads_k}/d{self.dim}"

    @property
    def lengths(self):
        total = self.tokens * self.ranks
        return (total,) if self.kind == "causal" else document_lengths(total, self.mean)

    @property
    def cu_seqlens(self):
        return [0, *accumulate(self.lengths)]

    @property
    def pairs(self):
        """The pairs of a query and a key that it sees, of one head, of all ranks."""
        return sum(n * (n + 1) // 2 for n in self.lengths)

    @property
    def flops(self):
        """Operations of a rank in the mean, by pass."""
        return {name: 4 * self.pairs * self.heads * self.dim / self.ranks * factor for name, factor in PASSES.items()}

    @property
    def block_bytes(self):
        """Bytes of a rank's own K and V."""
        return 2 * self.tokens * self.heads_k * self.dim * ELEMENT

    @property
    def own_bytes(self):
        """Bytes of a rank's own q, k, v, out and their gradients, in bf16."""
        return 4 * self.tokens * (self.heads + self.heads_k) * self.dim * ELEMENT

    def small(self, tokens):
        """The same, of few tokens."""
        return replace(self, tokens=tokens, mean=max(1, self.mean * tokens // self.tokens))


def context_suite(ranks, device="cuda"):
    """The cheapest first, so that a run that is cut short has most of them."""
    if device == "cpu":  # for the tests
        return [ContextPoint(kind, 256, heads, heads_k, ranks, mean=64) for kind in ("causal", "documents") for heads, heads_k in ((8, 2), (4, 4))]
    many, few = (64, 8), (16, 16)
    points = [ContextPoint(kind, tokens * K, *heads, ranks) for tokens in (8, 16) for kind in ("causal", "documents") for heads in (few, many)]
    points += [ContextPoint(kind, 64 * K, *heads, ranks) for kind in ("documents", "causal") for heads in (few, many)]
    return points + [ContextPoint("causal", 128 * K, *heads, ranks) for heads in (few, many)]
