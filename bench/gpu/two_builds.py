# SPDX-License-Identifier: Apache-2.0
"""Times two builds of the library beside each other: what a change of the kernels costs or gains.

    PYTHONPATH=build/release/python python3 -m bench.gpu.two_builds --old old/libflash3.so --new build/release/libflash3.so --json r.json

Points: forward, backward and FP8 of the paper's sweep (d 64, 128 and 256, 512 to 16k keys, full and causal), decode on dense and paged
caches, and with --max-logits the forward with max_logits beside that without, of the new build. Calls are CUDA graphs of C calls, samples of
12 ms that alternate in one process (bench/gpu/gpu_peers.py), data N(0, 1). A ratio is the new build's time over the old one's. The structs are
those of the new build; fields that the old one lacks are zero.
"""
import argparse
import ctypes
import datetime
import pathlib
import statistics
import sys

import torch

import flash3
from flash3 import _fields
from bench import result_file
from bench.gpu.gpu_peers import Sensors, measure, suite

DTYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.int32: 4, torch.float8_e4m3fn: 5}
DIMS, SEQS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)


def described(x):
    return _fields.Tensor(x.data_ptr(), DTYPES[x.dtype], x.dim(), (ctypes.c_int64 * 4)(*x.shape), (ctypes.c_int64 * 4)(*x.stride()))


class Build:
    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.flash3_last_error.restype = ctypes.c_char_p

    def call(self, kind, tensors, **options):
        """A CUDA graph of flash3_forward() or flash3_backward()."""
        type = getattr(_fields, f"{kind.capitalize()}Params")
        params = type(struct_size=ctypes.sizeof(type), **options)
        for name, x in tensors.items():
            setattr(params, name, described(x))
        size = ctypes.c_size_t()
        self.check(getattr(self.lib, f"flash3_{kind}_workspace")(ctypes.byref(params), ctypes.byref(size)))
        workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
        params.workspace, params.workspace_size = workspace.data_ptr(), size.value
        function, graph = getattr(self.lib, f"flash3_{kind}"), torch.cuda.CUDAGraph()

        def run():
            params.stream = torch.cuda.current_stream().cuda_stream
            self.check(function(ctypes.byref(params)))

        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
        graph.held = workspace, tensors  # as long as the graph lives
        return graph.replay, graph

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.flash3_last_error().decode())


def attention_points(kind):
    for shape in suite(DIMS, SEQS):
        name = f"{kind}/d{shape.dim}/{shape.seq}/{'causal' if shape.causal else 'full'}"
        yield name, lambda shape=shape: attention_call(kind, shape)


def attention_call(kind, shape):
    tensors = dict(zip(("q", "k", "v", "out"), shape.tensors(4)))
    tensors["lse"] = torch.empty(shape.batch, shape.heads, shape.seq, device="cuda")
    if kind == "fp8":
        tensors.update({name: tensors[name].to(torch.float8_e4m3fn) for name in ("q", "k", "v")})
    if kind != "backward":
        return "forward", tensors, {"causal": shape.causal}
    tensors["out"], tensors["lse"] = flash3.attention(*(tensors[name] for name in ("q", "k", "v")), causal=shape.causal, return_lse=True)
    tensors.update({f"d{name}": torch.empty_like(tensors[name]) for name in ("q", "k", "v")}, dout=torch.randn_like(tensors["out"]))
    return "backward", tensors, {"causal": shape.causal}


def decode_points():
    for dim, heads, heads_k, batch, keys, seq_q, page in (
            (128, 32, 8, 1, 8192, 1, 0), (128, 32, 8, 16, 8192, 1, 0), (128, 32, 8, 128, 2048, 1, 64), (128, 64, 8, 64, 4096, 1, 16),
            (128, 32, 32, 32, 4096, 1, 0), (128, 16, 1, 64, 8192, 1, 64), (64, 32, 8, 64, 4096, 1, 64), (256, 16, 2, 32, 4096, 1, 64),
            (128, 32, 8, 16, 8192, 4, 64), (64, 64, 8, 16, 8192, 1, 0), (192, 16, 2, 16, 4096, 1, 64), (128, 8, 8, 8, 512, 1, 0)):
        yield f"decode/d{dim}/h{heads}x{heads_k}/b{batch}/k{keys}/q{seq_q}/page{page}", \
            lambda *_, case=(dim, heads, heads_k, batch, keys, seq_q, page): decode_call(*case)


def decode_call(dim, heads, heads_k, batch, keys, seq_q, page):
    shape = (batch * keys // page, page, heads_k, dim) if page else (batch, keys, heads_k, dim)
    tensors = {"q": torch.randn(batch, seq_q, heads, dim, device="cuda").bfloat16(), "k": torch.randn(shape, device="cuda").bfloat16(),
               "v": torch.randn(shape, device="cuda").bfloat16(), "out": torch.empty(batch, seq_q, heads, dim, device="cuda").bfloat16(),
               "seqused_k": torch.full((batch,), keys, dtype=torch.int32, device="cuda")}
    if page:
        tensors["page_table"] = torch.randperm(batch * keys // page, device="cuda").reshape(batch, -1).int()
    return "forward", tensors, {"causal": 1}


def compared(name, calls, samples):
    graphs = {who: call() for who, call in calls.items()}
    with Sensors() as sensors:
        times = measure({who: replay for who, (replay, _) in graphs.items()}, samples)
    (first, (a, *_)), (second, (b, *_)) = times.items()
    point = {"point": name, f"{first}_us": round(1000 * a, 2), f"{second}_us": round(1000 * b, 2), "ratio": round(b / a, 4),
             "sm_mhz": sensors.mhz, "watts": sensors.watts}
    print(point, file=sys.stderr, flush=True)
    return point


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=pathlib.Path, required=True)
    parser.add_argument("--new", type=pathlib.Path, required=True)
    parser.add_argument("--old-commit", required=True)
    parser.add_argument("--new-commit", required=True)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--max-logits", action="store_true", help="forward and decode with max_logits beside those without, of the new build")
    parser.add_argument("--only", default="", help="points whose names hold this")
    args = parser.parse_args()
    old, new = Build(args.old), Build(args.new)
    kinds = ("forward",) if args.max_logits else ("forward", "backward", "fp8")
    points = [point for kind in kinds for point in attention_points(kind)] + list(decode_points())
    found = []
    for name, make in points:
        if args.only not in name:
            continue
        kind, tensors, options = make()
        calls = {"old": lambda: old.call(kind, tensors, **options), "new": lambda: new.call(kind, tensors, **options)}
        if args.max_logits:
            q = tensors["q"]
            rows = {**tensors, "max_logits": torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")}
            calls = {"without": lambda: new.call(kind, tensors, **options), "with": lambda: new.call(kind, rows, **options)}
        found.append(compared(name, calls, args.samples))
        result_file.write(args.json, {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "old": args.old_commit,
                                      "new": args.new_commit, "date": datetime.date.today().isoformat(), "samples": args.samples,
                                      "two_builds_points": found})
    for kind in sorted({point["point"].split("/")[0] for point in found}):
        ratios = [point["ratio"] for point in found if point["point"].startswith(kind)]
        print(f"{kind}: {len(ratios)} points, median {statistics.median(ratios):.4f}, from {min(ratios):.4f} to {max(ratios):.4f}")


if __name__ == "__main__":
    main()
