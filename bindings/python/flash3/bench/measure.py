# SPDX-License-Identifier: Apache-2.0
"""Points, timing, and the report that plot.py draws; its form is that of bench/gpu/peers.py."""
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch

from .._library import backends, version

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Point:
    batch: int
    seq: int
    heads: int
    dim: int
    causal: bool

    def flops(self, backward):
        """4 * seq^2 * dim a head, half of it for causal; the gradients take five products instead of two."""
        forward = 4 * self.batch * self.heads * self.seq**2 * self.dim // (2 if self.causal else 1)
        return forward * 5 // 2 if backward else forward


def suite(device, dims, seqs):
    """The papers' points; a CPU gets an eighth of the tokens and of the heads."""
    tokens, hidden = (16384, 2048) if device == "cuda" else (2048, 256)
    return [Point(max(1, tokens // seq), seq, max(1, hidden // dim), dim, causal)
            for dim in dims for causal in (False, True) for seq in seqs]


def _span(call, count, device):
    """Milliseconds a call, of `count` back to back."""
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) * 1e3 / count
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def _call(function, point, dtype, device, backward):
    q, k, v = (torch.randn(point.batch, point.seq, point.heads, point.dim, device=device).to(dtype).requires_grad_(backward)
               for _ in range(3))
    if not backward:
        return lambda: function(q, k, v, point.causal)
    out = function(q, k, v, point.causal)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, [q, k, v], dout, retain_graph=True)


def measure_point(functions, point, *, dtype, device, backward, samples, sample_ms):
    """TFLOP/s of each library, interleaved; of those that refuse the point, why."""
    calls, refused = {}, {}
    for name, function in functions.items():
        try:
            calls[name] = _call(function, point, dtype, device, backward)
            calls[name]()
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # whatever another library raises: the others go on
            calls.pop(name, None)
            refused[name] = (str(error) or type(error).__name__).splitlines()[0]
    counts = {name: max(2, math.ceil(sample_ms / _span(call, 2, device))) for name, call in calls.items()}
    times, names = {name: [] for name in calls}, list(calls)
    for i in range(samples):
        for name in names[i % len(names):] + names[:i % len(names)]:
            times[name].append(_span(calls[name], counts[name], device))
    median = {name: statistics.median(t) for name, t in times.items()}
    flops = point.flops(backward)
    record = {**asdict(point), "tflops": {name: float(f"{flops / ms / 1e9:.4g}") for name, ms in median.items()},
              "spread_min_max": {name: round((max(t) - min(t)) / median[name], 4) for name, t in times.items()}}
    return record | ({"refused": refused} if refused else {})


class Progress:
    """A bar on standard error, where that is a terminal; lines for the points go to standard output."""

    def __init__(self, total):
        self.total, self.done, self.begin = total, 0, time.perf_counter()
        self.bar = sys.stderr.isatty()
        self.show("")

    def show(self, what):
        if self.bar:
            filled = 30 * self.done // self.total
            spent = time.perf_counter() - self.begin
            left = f", {spent / self.done * (self.total - self.done):.0f} s left" if self.done else ""
            print(f"\r\x1b[K[{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total}{left}  {what}", end="", file=sys.stderr,
                  flush=True)

    def line(self, text):
        if self.bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        print(text, flush=True)
        self.done += 1
        self.show("")

    def end(self):
        if self.bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def describe(device):
    about = {"device": torch.cuda.get_device_name() if device == "cuda" else backends()["cpu"], "torch": torch.__version__,
             "flash3": version(), "date": time.strftime("%Y-%m-%d")}
    return about | ({"cudnn": torch.backends.cudnn.version()} if device == "cuda" else {"threads": torch.get_num_threads()})


def run(functions, points, path, *, dtype, device, backward, samples, sample_ms):
    """Measures all points and writes the report after each."""
    report = {**describe(device), "dtype": dtype, "pass": "backward" if backward else "forward", "sample_ms": sample_ms,
              "samples": samples, "points": []}
    progress = Progress(len(points))
    for point in points:
        label = f"d {point.dim:3} {'causal' if point.causal else 'full  '} {point.seq:6}"
        progress.show(label)
        record = measure_point(functions, point, dtype=DTYPES[dtype], device=device, backward=backward, samples=samples,
                               sample_ms=sample_ms)
        report["points"].append(record)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        progress.line("  ".join([label, *(f"{name} {value:.4g}" for name, value in record["tflops"].items()),
                                 *(f"no {name}: {why}" for name, why in record.get("refused", {}).items())]))
    progress.end()
    return report
