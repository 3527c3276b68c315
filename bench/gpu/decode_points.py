# SPDX-License-Identifier: Apache-2.0
"""The points of bench/gpu/decode_peers.py: attention over a KV cache in bf16 and in e4m3, latent too. Nothing here needs torch or a GPU."""
import math
from dataclasses import dataclass
from itertools import accumulate

from bench.gpu.ragged_points import uniforms

K = 1024
SPAN = 640e6  # bytes that keys and values of all buffers take at least: more than ten times the L2
FEW_CALLS = 4
ELEMENT = {"bf16": 2, "e4m3": 1}  # bytes


@dataclass(frozen=True)
class CachePoint:
    """Queries at the end of sequences in a cache."""
    batch: int
    ctx: int  # keys of the longest sequence
    heads: int = 32
    heads_k: int = 8
    dim: int = 128
    queries: int = 1
    page: int = 0  # keys of a page; 0: dense
    kind: str = "decode"  # or "ragged", lengths from ctx / 64 to ctx; "chunked", a part of a prompt; "mixed", a half of each; "sparse"
    dtype: str = "bf16"  # of q, k and v
    dim_latent: int = 0  # latent attention: v has so many dims, and q a second part that meets v
    listed: int = 0  # of "sparse": keys that each query's list has, of one cache of ctx keys for all; pages of one key, k and v side by side

    @property
    def case(self):
        ctx = f"{self.ctx // K}k" if self.ctx % K == 0 else f"{self.ctx}"
        queries = [f"q{self.queries}"] * (self.queries > 1) + [f"list{self.listed}"] * (self.listed > 0)
        layout = f"p{self.page}" if self.page else "dense"
        dtype = [self.dtype] * (self.dtype != "bf16")
        dims = f"d{self.dim}x{self.dim_latent}" if self.dim_latent else f"d{self.dim}"
        return "/".join([self.kind, f"b{self.batch}", ctx, *queries, f"h{self.heads}x{self.heads_k}", dims, layout, *dtype])

    @property
    def dim_v(self):
        return self.dim_latent or self.dim

    @property
    def score_dim(self):
        """Dims of the products that make a score."""
        return self.dim + self.dim_latent

    @property
    def lengths_k(self):
        """Log-uniform where ragged, the same each time; the first is the longest."""
        if self.kind != "ragged":
            return [self.listed or self.ctx] * self.batch
        uniform = uniforms(self.batch)
        drawn = [max(self.queries, math.floor(self.ctx * 64 ** -next(uniform))) for _ in range(self.batch - 1)]
        return [self.ctx, *drawn]

    @property
    def lengths_q(self):
        decoding = self.batch // 2 if self.kind == "mixed" else 0
        return [1] * decoding + [self.queries] * (self.batch - decoding)

    @property
    def cu_seqlens_q(self):
        return [0, *accumulate(self.lengths_q)]

    @property
    def is_packed(self):
        """Whether q is packed, as sequences have different numbers of queries."""
        return self.kind == "mixed"

    @property
    def pages_per_sequence(self):
        return -(-(self.listed or self.ctx) // self.page)

    @property
    def rows(self):
        """The rows of one buffer's cache."""
        if self.listed:
            return self.ctx
        return self.batch * (self.pages_per_sequence * self.page if self.page else self.ctx)

    @property
    def row_bytes(self):
        """The bytes of a token's key and value in all heads."""
        return self.heads_k * (self.dim + self.dim_v) * ELEMENT[self.dtype]

    @property
    def kv_bytes(self):
        """The bytes of the keys that count, and of their values, each read once."""
        return sum(self.lengths_k) * self.row_bytes

    @property
    def flops(self):
        """The operations on the pairs that the causal mask leaves."""
        pairs = sum(q * k - q * (q - 1) // 2 for q, k in zip(self.lengths_q, self.lengths_k))
        return 2 * self.heads * (self.score_dim + self.dim_v) * pairs

    @property
    def buffers(self):
        return max(1, math.ceil(SPAN / self.kv_bytes))

    @property
    def caches(self):
        """The caches of the buffers: as many as there are, but lists have one cache for several buffers, each with its own lists."""
        return min(self.buffers, math.ceil(SPAN / (self.rows * self.row_bytes))) if self.listed else self.buffers

    @property
    def calls(self):
        """The calls of a CUDA graph: each buffer as often as any other, and a few, so that the gap between two replays hides."""
        return self.buffers * math.ceil(FEW_CALLS / self.buffers)


def cache_suite():
    """The most important ones first."""
    def both(*sizes, **more):
        return [CachePoint(*sizes, **more), CachePoint(*sizes, page=64, **more)]

    few = ((1, 16 * K), (16, 16 * K), (64, 4 * K))
    points = []
    for sizes in ((64, 4 * K), (16, 16 * K), (1, 64 * K), (256, 4 * K), (1, 4 * K), (1, 16 * K), (4, 4 * K), (16, 128 * K), (64, 64 * K),
                  (1, K), (16, K), (256, K), (1, 128 * K), (4, 64 * K)):
        points += both(*sizes)
    for sizes in ((64, 32 * K), (16, 128 * K), (256, 8 * K)):
        points += both(*sizes, kind="ragged")
    points += both(4, 16 * K, queries=512, kind="chunked")
    for sizes in ((16, 4 * K), (64, 4 * K), (16, 16 * K)):
        points += both(*sizes, queries=512, kind="mixed")
    for sizes in few:
        points += both(*sizes, queries=4)
    for heads in ((64, 8), (8, 1), (16, 16), (128, 8)):
        for sizes in few:
            points += both(*sizes, *heads)
    for dim in (64, 256):
        for sizes in few:
            points += both(*sizes, dim=dim)
    points += [CachePoint(*sizes, page=page) for sizes in ((64, 4 * K), (1, 64 * K)) for page in (16, 128, 256, 1)]
    for batch, ctx in ((1, 4), (1, 16), (1, 64), (16, 4), (16, 16), (16, 64), (64, 4), (64, 16), (256, 4)):
        points += both(batch, ctx * K, dtype="e4m3")
    for sizes in few:
        points += [CachePoint(*sizes, queries=queries, page=64) for queries in (2, 8, 16)]
    for heads in (128, 16):
        for batch, ctx in ((1, 16), (16, 4), (64, 4), (64, 16), (128, 4)):
            points += both(batch, ctx * K, heads, 1, dim=64, dim_latent=512)
    # A token of vLLM's sparse MLA is a sequence of one query, whose pages are its list.
    points += [CachePoint(batch, 128 * K, heads, 1, dim=64, dim_latent=512, page=1, kind="sparse", listed=2 * K)
               for batch in (1, 16, 128) for heads in (128, 16)]
    return points
