#!/usr/bin/env python3
"""flash3 beside its peers on one GPU, interleaved in one process: torch SDPA's cuDNN and FA2 backends, and FA4 if installed.

    python3 bench/peers.py --lib build/release/libflash3.so --json bench/results/forward_h200.json

The paper's points: 16k tokens in all, hidden size 2048, bf16, N(0,1) data. A sample is 12 ms of back-to-back calls, so that
launch time hides; samples of all libraries rotate; the median counts. TFLOP/s count 4·S²·d·H·B, half of it for causal.
Clocks and watts are those that NVML reports while the samples run. Needs torch with CUDA, and a Hopper GPU.
"""
import argparse
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash3_torch import Flash3

SAMPLE_MS = 12.0


@dataclass(frozen=True)
class Shape:
    batch: int
    seq: int
    heads: int
    dim: int
    causal: bool

    @property
    def flops(self):
        return 4 * self.batch * self.heads * self.seq**2 * self.dim // (2 if self.causal else 1)

    def tensors(self):
        return [torch.randn(self.batch, self.seq, self.heads, self.dim, device="cuda").bfloat16() for _ in range(3)]


def suite(dims, seqs, tokens=16384, hidden=2048):
    return [Shape(tokens // seq, seq, hidden // dim, dim, causal) for dim in dims for causal in (False, True) for seq in seqs]


class Sensors:
    """Mean SM clock and power while the block runs."""

    def __enter__(self):
        self.clocks, self.watts, self.done = [], [], threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self):
        import pynvml
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        while not self.done.is_set():
            self.clocks.append(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))
            self.watts.append(pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
            time.sleep(0.02)

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.mhz, self.power = round(statistics.mean(self.clocks)), round(statistics.mean(self.watts))


def span(call, count):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def measure(calls, samples):
    """Milliseconds of each call: [median, 10th percentile, 90th percentile]."""
    count = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        count[name] = max(2, math.ceil(SAMPLE_MS / span(call, 3)))
    times, names = {name: [] for name in calls}, list(calls)
    for i in range(samples):
        for name in names[i % len(names):] + names[: i % len(names)]:
            times[name].append(span(calls[name], count[name]))
    return {name: [statistics.median(t), *statistics.quantiles(t, n=10)[:: 8]] for name, t in times.items()}


def sdpa(backend, qkv, causal):
    q, k, v = [x.transpose(1, 2) for x in qkv]

    def call():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def peers(qkv, causal, names):
    calls = {}
    if "cudnn" in names:
        calls["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION, qkv, causal)
    if "fa2" in names:
        calls["fa2"] = sdpa(SDPBackend.FLASH_ATTENTION, qkv, causal)
    if "fa4" in names:
        from flash_attn.cute.interface import _flash_attn_fwd
        out, lse = _flash_attn_fwd(*qkv, causal=causal, return_lse=True)[:2]
        calls["fa4"] = lambda: _flash_attn_fwd(*qkv, causal=causal, out=out, lse=lse)
    return calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", required=True, metavar="[NAME=]PATH",
                        help="libflash3.so; several to compare builds")
    parser.add_argument("--peers", default="cudnn,fa2", help="any of cudnn,fa2,fa4")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--seqs", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--commit", help="of the library, where there is no git to ask")
    args = parser.parse_args()
    libs = {name or "flash3": Flash3(path) for name, _, path in (text.rpartition("=") for text in args.lib)}
    numbers = lambda text: [int(n) for n in text.split(",")]

    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True).stdout.strip()
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    commit = args.commit or described or "unknown"
    result = {"device": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__,
              "cudnn": torch.backends.cudnn.version(), "commit": commit, "date": time.strftime("%Y-%m-%d"),
              "dtype": "bf16", "sample_ms": SAMPLE_MS, "samples": args.samples, "points": []}
    for shape in suite(numbers(args.dims), numbers(args.seqs)):
        qkv = shape.tensors()
        outs = {name: torch.full_like(qkv[0], float("nan")) for name in libs}
        calls = {name: lib.forward(*qkv, outs[name], shape.causal) for name, lib in libs.items()}
        calls.update(peers(qkv, shape.causal, args.peers.split(",")))
        with Sensors() as sensors:
            times = measure(calls, args.samples)
        reference = sdpa(SDPBackend.FLASH_ATTENTION, qkv, shape.causal)().transpose(1, 2).float()
        error = max((out.float() - reference).abs().max().item() for out in outs.values())
        tflops = {name: round(shape.flops / ms[0] / 1e9, 1) for name, ms in times.items()}
        spread = {name: round((ms[2] - ms[1]) / ms[0], 4) for name, ms in times.items()}
        point = {**shape.__dict__, "tflops": tflops, "spread_p10_p90": spread, "sm_mhz": sensors.mhz,
                 "watts": sensors.power, "max_abs_diff_to_fa2": error}
        result["points"].append(point)
        row = "  ".join(f"{name} {value:6.1f}" for name, value in tflops.items())
        ratio = f"  /cudnn {tflops[next(iter(libs))] / tflops['cudnn']:.3f}" if "cudnn" in tflops else ""
        print(f"d {shape.dim:3} {'causal' if shape.causal else 'full  '} {shape.seq:6}  {row}{ratio}  "
              f"{sensors.mhz} MHz {sensors.power} W  diff {error:.1e}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
