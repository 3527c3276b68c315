# SPDX-License-Identifier: Apache-2.0
"""The points of `bench/gpu/peers.py --ragged`: which sequences, how many operations and bytes. Nothing here needs torch or a GPU;
names, lengths and counts are those of `flash3 bench --suite ragged`."""
import math
from dataclasses import dataclass, replace
from itertools import accumulate

DRAWS = range(1, 21)
DEVIATION = 1.2  # of the logarithm of a length
MASK64 = (1 << 64) - 1


def uniforms(seed):
    """SplitMix64 as numbers in (0, 1]."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        yield (((z ^ (z >> 31)) >> 11) + 1) * 2.0**-53


def log_normal_lengths(tokens, draw):
    """Long-tailed lengths with this sum: as log_normal_lengths() of tools/cases/sequences.hpp draws them."""
    lengths, uniform, left = [], uniforms(draw), tokens
    while left > 0:
        radius = math.sqrt(-2 * math.log(next(uniform)))
        normal = radius * math.cos(2 * math.pi * next(uniform))
        lengths.append(min(max(1, math.floor(tokens / 128 * math.exp(DEVIATION * normal))), left))
        left -= lengths[-1]
    return lengths


@dataclass(frozen=True)
class RaggedPoint:
    """One self-attention over sequences of these lengths, bf16; not packed: all of one length."""
    group: str  # "log-normal", "short", "scores" or "window"
    lengths: tuple
    heads: int
    heads_k: int
    dim: int
    causal: bool
    packed: bool = True
    draw: int = 0      # of log-normal lengths
    window: int = -1   # keys to the left of the diagonal; -1: all
    sink: bool = False
    softcap: float = 0.0
    backward: bool = False

    @property
    def tokens(self):
        return sum(self.lengths)

    @property
    def longest(self):
        return max(self.lengths)

    @property
    def cu_seqlens(self):
        return [0, *accumulate(self.lengths)]

    @property
    def cost_per_token(self):
        return sum(n * n for n in self.lengths) / self.tokens

    @property
    def pairs(self):
        """(query, key) pairs of one head that count: what the mask leaves, and half of a causal square."""
        if self.window < 0:
            return sum(n * n for n in self.lengths) / (2 if self.causal else 1)
        seen = [min(n, self.window + 1) for n in self.lengths]  # by the last row; the first `s` rows see 1 … s keys
        return sum(s * (s + 1) / 2 + (n - s) * s for n, s in zip(self.lengths, seen))

    @property
    def flops(self):
        return (10 if self.backward else 4) * self.pairs * self.heads * self.dim

    @property
    def bytes(self):
        """The bytes of q, k, v and out, each moved once, and of lse; backward: of their gradients too."""
        tensors = 2 * 2 * self.dim * self.tokens * (self.heads + self.heads_k)
        return (2 * tensors if self.backward else tensors) + 4 * self.tokens * self.heads

    @property
    def case(self):
        """The id of this case for `flash3 bench --case`."""
        n, heads = self.longest, f"{self.heads}" if self.heads == self.heads_k else f"{self.heads}x{self.heads_k}"
        parts = ["bf16", f"b{len(self.lengths)}", f"q{n}", f"k{n}", f"h{heads}", f"d{self.dim}"]
        parts.append(("causal" if self.causal else "full") + (f"+w{self.window}:" if self.window >= 0 else ""))
        parts += [f"lognormal{self.tokens}:{self.draw}"] * (self.draw > 0) + ["packed"] * self.packed
        parts += ["sink"] * self.sink + [f"softcap{self.softcap:g}"] * (self.softcap > 0) + ["bwd"] * self.backward
        return "/".join(parts)


def dense(batch, seq, heads, dim, backward):
    """A dense causal call."""
    return RaggedPoint("dense", (seq,) * batch, heads, heads, dim, True, packed=False, backward=backward)


def beside_of(point):
    """The dense call that a point's speed is divided by, or None: of log-normal lengths the one with the same cost per token,
    of a sink or a softcap the plain one."""
    if point.group == "log-normal":
        seq = math.floor(point.cost_per_token + 0.5)
        return dense(max(1, (point.tokens + seq // 2) // seq), seq, point.heads, point.dim, point.backward)
    if point.sink or point.softcap:
        return replace(point, sink=False, softcap=0.0)
    return None


def ragged_suite(backward=False, tokens=65536, hidden=2048, dims=(64, 128, 256)):
    """Groups (b), (c) and (d) of `flash3 bench --suite ragged` on a GPU, those of these dims."""
    points = []
    for dim in (d for d in (64, 128) if d in dims):
        for draw in DRAWS:
            points.append(RaggedPoint("log-normal", tuple(log_normal_lengths(tokens, draw)), hidden // dim, hidden // dim, dim, True,
                                      draw=draw))
    if 128 in dims:
        points += [RaggedPoint("short", (seq,) * (tokens // seq), hidden // 128, hidden // 128, 128, False) for seq in (16, 64)]
    for dim in dims:
        plain = RaggedPoint("scores", (tokens // 4,), hidden // dim, hidden // dim, dim, True, packed=False)
        points += [plain, replace(plain, sink=True), replace(plain, softcap=50.0)]
    if 64 in dims:
        heads = 2 * hidden // 64
        points.append(RaggedPoint("window", (tokens // 4,), heads, heads // 8, 64, True, packed=False, window=128))
    return [replace(point, backward=backward) for point in points]
