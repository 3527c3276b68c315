#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A needle in an FP8 KV cache: whether decoding finds one key among up to 128k in e4m3, with the rotation and without.

    PYTHONPATH=build/release/python python3 -m bench.gpu.cache_needle --json bench/results/cache_needle_h200.json

Keys and values in bfloat16, like those of needle.py or with outliers in the keys too ("outliers"), are appended to e4m3 caches by
flash3.attention_with_kv_cache, which quantises them in the kernel, and to a bfloat16 cache beside them: in pages, and in one element of a dense
cache. Then sequences of --queries queries each, which all have that cache, look for their needles. Scales are one for the tensor, one for each
head, or one for each 128 rows, those of a page; they are the smallest powers of two for which nothing overflows, which flash3.quantize finds.
"Rotated": the append and the queries with rotate=True.

Each out is compared with float64 of what the cache and its queries hold (found, error, gain), and of the 16-bit tensors (near, error_unquantised,
found_unquantised); haystack.py has the definitions.

Needs torch, and with --device cuda, the default, a Hopper GPU and pynvml.
"""
import argparse
import random
import sys
import time

from bench import result_file
from bench.gpu.needle import describe
from bench.gpu.peers import numbers
from bench.result_file import commit_of

SEED = 0x5EED  # of the rotation
SCALES = ("tensor", "heads", "page")
CACHES = ("bf16", *(name + suffix for name in SCALES for suffix in ("", "_rotated")))
LAYOUTS = ("dense", "paged")
DATA = ("normal", "model", "outliers")


def parse_args(arguments=None):
    from bench.gpu import haystack
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--keys", type=numbers, default="131072")
    parser.add_argument("--dims", type=numbers, default="64,128,256")
    parser.add_argument("--data", default=",".join(DATA), help="of %(default)s")
    parser.add_argument("--levels", default=",".join(haystack.LEVELS), help="what a needle weighs, of %(default)s")
    parser.add_argument("--rows", type=int, default=256, help="queries of a head")
    parser.add_argument("--queries", type=int, default=4, help="queries of a sequence")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--page-size", type=int, default=128, help="rows; a multiple of 128, the rows of a scale")
    parser.add_argument("--seed", type=int, help="of the data (default: a new one, which the result names)")
    parser.add_argument("--json", help="write the results here, after each point")
    parser.add_argument("--commit", help="of the library, where there is no git to ask")
    args = parser.parse_args(arguments)

    args.commit = commit_of(args.commit, parser.error)
    for option, known in (("data", DATA), ("levels", haystack.LEVELS)):
        setattr(args, option, [name for name in getattr(args, option).split(",") if name])
        for name in getattr(args, option):
            if name not in known:
                parser.error(f"--{option} names '{name}'; there is {', '.join(known)}")
    for option in ("keys", "dims", "rows", "queries", "heads", "page_size"):
        values = getattr(args, option) if option in ("keys", "dims") else [getattr(args, option)]
        if min(values) < 1:
            parser.error(f"--{option.replace('_', '-')} has {min(values)}; at least 1")
    if args.page_size % 128:
        parser.error(f"--page-size {args.page_size} but it must be a multiple of 128, so that a page has scales of its own")
    if args.rows % args.queries:
        parser.error(f"--rows {args.rows} but --queries {args.queries}; sequences have as many queries each")
    if args.rows > min(args.keys):
        parser.error(f"--rows {args.rows} but --keys has {min(args.keys)}: each row of a head has a key of its own")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 31)
    return args


def rotation(dim, seed, device):
    """D·H/√n of flash3_quantize_params, [dim, dim] float64, from its definition."""
    import torch
    matrix, begin = torch.zeros(dim, dim, dtype=torch.float64), 0
    while begin < dim:
        n = 1 << ((dim - begin).bit_length() - 1)
        h = torch.ones(1, 1, dtype=torch.float64)
        while len(h) < n:
            h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
        signs = torch.tensor([-1.0 if split_mix(seed, i // 64) >> i % 64 & 1 else 1.0 for i in range(begin, begin + n)], dtype=torch.float64)
        matrix[begin:begin + n, begin:begin + n] = signs[:, None] * h / n**0.5
        begin += n
    return matrix.to(device)


def split_mix(seed, word):
    """Output `word` of SplitMix64 started at the seed."""
    mask = 2**64 - 1
    z = (seed + (word + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


class Cache:
    """k and v of a Haystack in memory of its own, written by an append; sequences share it."""

    def __init__(self, stack, name, layout, page_size):
        import flash3
        import torch
        self.rotates, scales = name.endswith("_rotated"), name.removesuffix("_rotated")
        self.paged, (_, keys, heads, dim), device = layout == "paged", stack.k.shape, stack.k.device
        self.of = {"rotate": True, "rotation_seed": SEED} if self.rotates else {}
        pages = -(-keys // page_size)
        shape = (pages + 1, page_size, heads, dim) if self.paged else (2, pages * page_size, heads, dim)
        dtype = torch.bfloat16 if name == "bf16" else torch.float8_e4m3fn
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        # Pages in an order of their own, and an element that is not the first.
        self.table = (torch.randperm(pages, device=device) + 1).int() if self.paged else torch.ones(1, dtype=torch.int32, device=device)
        self.scales = {}
        if name != "bf16":
            made = flash3.quantize(k=stack.k, v=stack.v, scales="blocks" if scales == "page" else scales, heads_k=heads,
                                   rotate=self.rotates, rotation_seed=SEED)
            for tensor in ("k_scale", "v_scale"):
                self.scales[tensor] = self._placed(getattr(made, tensor), shape) if scales == "page" else getattr(made, tensor)
        used = torch.zeros(1, dtype=torch.int32, device=device)
        flash3.attention_with_kv_cache(stack.q[:, :1], self.k, self.v, seqused_k=used, k_new=stack.k, v_new=stack.v, **self._call(1))

    def _placed(self, scale, shape):
        """Scales of 128 tokens each, [1, heads, blocks], as those of the cache's rows."""
        import torch
        blocks = shape[1] // 128
        made = torch.ones(shape[0], shape[2], blocks, device=scale.device)
        if not self.paged:
            made[1, :, :scale.shape[2]] = scale[0]
            return made
        padded = torch.nn.functional.pad(scale[0], (0, len(self.table) * blocks - scale.shape[2]), value=1.0)
        made[self.table.long()] = padded.reshape(shape[2], len(self.table), blocks).transpose(0, 1)
        return made

    def _call(self, batch):
        """The arguments of a call of so many sequences, which all have this cache."""
        where = {"page_table": self.table.expand(batch, -1)} if self.paged else {"cache_batch_idx": self.table.expand(batch).contiguous()}
        scales = {name: x.expand(batch, -1).contiguous() if x.dim() == 2 else x for name, x in self.scales.items()}
        return where | scales | self.of

    def attend(self, q, keys):
        """q [batch, queries, heads, dim] to out."""
        import flash3
        import torch
        used = torch.full((len(q),), keys, dtype=torch.int32, device=q.device)
        return flash3.attention_with_kv_cache(q, self.k, self.v, seqused_k=used, **self._call(len(q)))

    def stands_for(self, q, keys):
        """(q, k, v) [1, tokens, heads, dim] float64: what the attention computes with."""
        import torch
        if self.rotates:
            q = (q.double() @ rotation(q.shape[-1], SEED, q.device)).to(q.dtype)
        values = []
        for x, name in ((self.k, "k_scale"), (self.v, "v_scale")):
            x, scale = x[self.table.long()].double(), self.scales.get(name)
            if scale is not None and scale.dim() == 3:
                x *= scale[self.table.long()].repeat_interleave(128, 2).transpose(1, 2)[..., None]
            elif scale is not None:
                x *= scale[..., None]  # [1], or [1, heads]
            values.append(x.flatten(0, 1)[None, :keys])
        return q.double(), *values


def points(args):
    """{"keys", "dim", "data", "level", "layout", "weight", "libraries"}, one after the other."""
    from bench.gpu import haystack
    for keys in args.keys:
        for dim in args.dims:
            for data in args.data:
                stack, directions = haystack.spread(data, keys, args.rows, args.heads, dim, args.device)
                stack.q = directions[:, :1].transpose(0, 1)[None].bfloat16()  # of the append, whose result is not used
                caches = {layout: {name: Cache(stack, name, layout, args.page_size) for name in CACHES} for layout in LAYOUTS}
                for level in args.levels:
                    aimed = haystack.aimed(stack, directions, level)
                    unquantised, weight = haystack.exact(aimed.q, aimed.k, aimed.v)
                    for layout, of in caches.items():
                        about = {"keys": keys, "dim": dim, "data": data, "level": level, "layout": layout,
                                 "weight": float(f"{weight.median().item():.4g}")}
                        yield about | {"libraries": {name: measure(cache, aimed, keys, args.queries, unquantised)
                                                     for name, cache in of.items()}}


def measure(cache, stack, keys, queries, unquantised):
    from bench.gpu import haystack
    rows, heads, dim = stack.q.shape[1:]
    out = cache.attend(stack.q.reshape(rows // queries, queries, heads, dim), keys).reshape(1, rows, heads, dim)
    own, _ = haystack.exact(*cache.stands_for(stack.q, keys))
    return haystack.agreement(out.double(), own, unquantised, stack)


def line(point):
    """A point in words."""
    text = f"{point['keys']:6} keys d {point['dim']:3} {point['data']:6} {point['level']:5} {point['layout']:5} weight {point['weight']:.2g}"
    for name, got in point["libraries"].items():
        text += (f"  {name}: retrieved {100 * got['retrieved']:.0f} % found {100 * got['found']:.0f} % near 16 bits "
                 f"{100 * got['near_unquantised']:.0f} % error {100 * got['error']:.2f} %, of 16 bits {100 * got['error_unquantised']:.2f} %")
    return text


def main(arguments=None):
    args = parse_args(arguments)
    import flash3
    import torch
    torch.manual_seed(args.seed)
    result = {**describe(args.device), "flash3": flash3.version(), "commit": args.commit, "date": time.strftime("%Y-%m-%d"), "seed": args.seed,
              "rows": args.rows, "heads": args.heads, "queries": args.queries, "page_size": args.page_size, "cache_needle_points": []}
    for point in points(args):
        result["cache_needle_points"].append(point)
        print(line(point), flush=True)
        if args.json:
            result_file.write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
