# SPDX-License-Identifier: Apache-2.0
"""Points, timing, and the report that plot.py draws; its form is that of bench/gpu/peers.py."""
import importlib
import importlib.metadata
import importlib.util
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from .._attention import attention
from .._library import backends, version
from .._quantize import quantize

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


# The libraries that are compared: each a function of (q, k, v, causal), [batch, seq, heads, dim] in and out, with autograd.


def _flash3(q, k, v, causal):
    return attention(q, k, v, causal=causal)


def _flash3_fp8():
    """Attention alone: the first call with tensors brings them to FP8, later ones with the same find them so."""
    last = []

    def call(q, k, v, causal):
        if not last or any(x is not y for x, y in zip(last[0], (q, k, v))):
            last[:] = (q, k, v), quantize(q, k, v, rotate=True)
        made = last[1]
        return attention(made.q, made.k, made.v, causal=causal, q_scale=made.q_scale, k_scale=made.k_scale, v_scale=made.v_scale,
                         out_dtype=q.dtype)

    return call


def _flash3_quantize_fp8(q, k, v, causal):
    return attention(q, k, v, causal=causal, compute="fp8")


def _sdpa(backend):
    from torch.nn.attention import sdpa_kernel

    def call(q, k, v, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return call


def _torch(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _flex():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    compiled, masks = torch.compile(flex_attention), {}

    def call(q, k, v, causal):
        seq = q.shape[1]
        if causal and seq not in masks:
            masks[seq] = create_block_mask(lambda b, h, i, j: i >= j, None, None, seq, seq, device=q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=masks[seq] if causal else None).transpose(1, 2)

    return call


def _first(function):
    """A library's function without its other results."""
    def call(q, k, v, causal):
        out = function(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return call


def _upstream_fa3():
    """FlashAttention-3 itself; flash3's drop-in has its name."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        raise ImportError("flash_attn_interface is not installed")
    module = importlib.import_module("flash_attn_interface")
    if "flash3" in (module.__doc__ or ""):
        raise ImportError("flash_attn_interface is flash3's drop-in")
    return _first(module.flash_attn_func)


def _fa4():
    return _first(importlib.import_module("flash_attn.cute").flash_attn_func)


def find(device, wanted=None, backward=False):
    """(functions by name, why the others are not there); flash3 comes first. FP8 has no backward, and on a CPU it is for accuracy."""
    from torch.nn.attention import SDPBackend
    makers = {"flash3": lambda: _flash3}
    if not backward and (device != "cpu" or wanted):
        makers |= {"flash3_fp8": _flash3_fp8, "flash3_quantize_fp8": lambda: _flash3_quantize_fp8}
    if device == "cpu":
        makers["torch"] = lambda: _torch
    else:
        makers |= {"cudnn": lambda: _sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": lambda: _sdpa(SDPBackend.FLASH_ATTENTION),
                   "fa3": _upstream_fa3, "fa4": _fa4, "flex": _flex}
    for name in wanted or ():
        if name not in makers:
            raise ValueError(f"peer {name!r} but on {device} there are {', '.join(makers)}")
    found, missing = {}, {}
    for name, make in makers.items():
        if wanted and name != "flash3" and name not in wanted:
            continue
        try:
            found[name] = make()
        except (ImportError, OSError, RuntimeError) as error:
            missing[name] = str(error).splitlines()[0]
    return found, missing
