# SPDX-License-Identifier: Apache-2.0
"""The libraries that bench/gpu/peers.py compares, as callables, and how it times them: everything that needs torch and a GPU."""
import argparse
import datetime
import math
import pathlib
import statistics
import threading
import time
from dataclasses import dataclass

import pynvml
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import result_file
from bench.gpu import fa3_peers

SAMPLE_MS = 12.0
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; nvmlDeviceGetPowerUsage is the mean of the last second


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

    @property
    def backward_flops(self):
        """Five products instead of two."""
        return self.flops * 5 // 2

    def tensors(self, count=3):
        return [torch.randn(self.batch, self.seq, self.heads, self.dim, device="cuda").bfloat16() for _ in range(count)]


def suite(dims, seqs, tokens=16384, hidden=2048):
    return [Shape(tokens // seq, seq, hidden // dim, dim, causal) for dim in dims for causal in (False, True) for seq in seqs]


class Sensors:
    """SM clock and power while the block runs: `mhz` and `watts`, means.

    `counted_watts` is the better figure where there is one: from the driver's energy counter, which moves on in steps;
    between the first and the last step inside the block, if they are half a second apart. None otherwise.
    """

    def __enter__(self):
        pynvml.nvmlInit()
        self.gpu = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        self.clocks, self.powers, self.steps, self.done = [], [], [], threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def power(self):
        field = pynvml.nvmlDeviceGetFieldValues(self.gpu, [POWER_INSTANT])[0]
        if field.nvmlReturn == pynvml.NVML_SUCCESS:
            return field.value.uiVal / 1000
        return pynvml.nvmlDeviceGetPowerUsage(self.gpu) / 1000

    def look_at_counter(self):
        try:
            millijoules = pynvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu)
        except pynvml.NVMLError_NotSupported:
            return  # no counter: counted_watts stays None
        if not self.steps or self.steps[-1][1] != millijoules:
            self.steps.append((time.perf_counter(), millijoules))

    def run(self):
        while True:
            self.clocks.append(pynvml.nvmlDeviceGetClockInfo(self.gpu, pynvml.NVML_CLOCK_SM))
            self.powers.append(self.power())
            self.look_at_counter()
            if self.done.wait(0.01):
                return

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.mhz, self.watts = round(statistics.mean(self.clocks)), round(statistics.mean(self.powers))
        self.counted_watts = counted_watts(self.steps)


def counted_watts(steps):
    """Mean power from (seconds, millijoules) as they were first seen. The first is no step: it stood there before."""
    steps = steps[1:]
    if len(steps) < 2 or steps[-1][0] - steps[0][0] < 0.5:
        return None
    return (steps[-1][1] - steps[0][1]) / 1000 / (steps[-1][0] - steps[0][0])


def span(call, count):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def calls_per_sample(call, sample_ms=SAMPLE_MS):
    call()
    torch.cuda.synchronize()
    return max(2, math.ceil(sample_ms / span(call, 3)))


def measure(calls, samples, sample_ms=SAMPLE_MS):
    """Milliseconds of each call: [median, 10th percentile, 90th percentile]."""
    count = {name: calls_per_sample(call, sample_ms) for name, call in calls.items()}
    times, names = {name: [] for name in calls}, list(calls)
    for i in range(samples):
        for name in names[i % len(names):] + names[: i % len(names)]:
            times[name].append(span(calls[name], count[name]))
    return {name: [statistics.median(t), *statistics.quantiles(t, n=10)[:: 8]] for name, t in times.items()}


def measure_points(description, points, run, field):
    """The program of a script with points of its own: {name: point}, of each of which run(name, point, samples, flex) makes a row of the file,
    under this field."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--only", default="", help="points whose names hold one of these, by commas")
    parser.add_argument("--flex", action="store_true", help="beside torch's FlexAttention, which compiles for seconds a point")
    parser.add_argument("--commit", default="", help="of flash3")
    args = parser.parse_args()
    found = []
    for name, point in points.items():
        if not any(part in name for part in args.only.split(",")):
            continue
        torch.manual_seed(0)
        found.append(run(name, point, args.samples, args.flex))
        torch.cuda.empty_cache()
        result_file.write(args.json, {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "samples": args.samples,
                                      "commit": args.commit, "date": datetime.date.today().isoformat(), field: found})


def measure_alone(call, seconds, flops):
    """One library for so long without the others: its own speed, clock and watts, and what an operation costs.

    12 ms may be shorter than a step of the energy counter; a second is not.
    """
    count = calls_per_sample(call)

    def run(duration):
        times, end = [], time.perf_counter() + duration
        while time.perf_counter() < end:
            times.append(span(call, count))
        return statistics.mean(times)

    run(0.2)  # until the power is this library's own
    with Sensors() as sensors:
        milliseconds = run(seconds)
    tflops, watts = flops / milliseconds / 1e9, sensors.counted_watts or sensors.watts
    return {"tflops": round(tflops, 1), "sm_mhz": sensors.mhz, "watts": round(watts), "pj_per_flop": round(watts / tflops, 4),
            "watts_from": "energy counter" if sensors.counted_watts else "samples of the power"}


def sdpa(backend, qkv, causal):
    q, k, v = [x.transpose(1, 2) for x in qkv]

    def call():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def fa2(qkv, causal):
    return sdpa(SDPBackend.FLASH_ATTENTION, qkv, causal)


def fa4(qkv, causal):
    from flash_attn.cute.interface import _flash_attn_fwd
    out, lse = _flash_attn_fwd(*qkv, causal=causal, return_lse=True)[:2]
    return lambda: _flash_attn_fwd(*qkv, causal=causal, out=out, lse=lse)


def peers(qkv, causal, names):
    makers = {"cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION, qkv, causal), "fa2": lambda: fa2(qkv, causal),
              "fa3": lambda: fa3_peers.forward(qkv, causal), "fa4": lambda: fa4(qkv, causal)}
    return {name: makers[name]() for name in names}


def use_deterministic():
    """torch's operators in their deterministic mode from now on, without its filling of fresh memory, which costs time."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


# The gradients' operators are called directly: what autograd does around them is not the libraries'. Each returns a callable
# that gives (dq, dk, dv) as [batch, seq, heads, dim].

def cudnn_backward(qkv, dout, causal):
    q, k, v, grad = [x.transpose(1, 2) for x in (*qkv, dout)]
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False)
    return lambda: [x.transpose(1, 2) for x in torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal)]


def no_deterministic_cudnn():
    raise NotImplementedError("torch builds its cuDNN backward without asking for a deterministic one")


def fa2_backward(qkv, dout, causal):
    q, k, v, grad = [x.transpose(1, 2) for x in (*qkv, dout)]
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False)
    return lambda: [x.transpose(1, 2) for x in torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)]


def fa4_backward(qkv, dout, causal, deterministic):
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    out, lse = _flash_attn_fwd(*qkv, causal=causal, return_lse=True)[:2]
    return lambda: _flash_attn_bwd(*qkv, out, dout, lse, causal=causal, deterministic=deterministic)[:3]


def backward_peers(qkv, dout, causal, names, deterministic):
    """(callables, why the others refuse this shape), each by name: not every library has every head_dim deterministic."""
    makers = {"cudnn": no_deterministic_cudnn if deterministic else lambda: cudnn_backward(qkv, dout, causal),
              "fa2": lambda: fa2_backward(qkv, dout, causal),
              "fa3": lambda: fa3_peers.backward(qkv, dout, causal, deterministic),
              "fa4": lambda: fa4_backward(qkv, dout, causal, deterministic)}
    calls, refused = {}, {}
    for name in names:
        try:
            call = makers[name]()
            call()
            torch.cuda.synchronize()
            calls[name] = call
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            refused[name] = (str(error) or type(error).__name__).splitlines()[0]
    return calls, refused


def flash3_backward(libs, qkv, dout, causal, deterministic):
    """(callables, gradients), by name. With deterministic each library is there twice: NAME and NAME_default."""
    calls, gradients = {}, {}
    modes = {"": True, "_default": False} if deterministic else {"": False}
    for name, lib in libs.items():
        q, k, v = qkv
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device, dtype=torch.float32)
        lib.forward(q, k, v, out, causal, lse=lse)()
        for suffix, mode in modes.items():
            made = {f"d{x}": torch.full_like(q, float("nan")) for x in "qkv"}
            tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, **made}
            calls[name + suffix] = lib.backward(tensors, causal, mode)
            gradients[name + suffix] = list(made.values())
    return calls, gradients


def describe():
    """What a result must tell about the machine."""
    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    return {"device": torch.cuda.get_device_name(), "driver": driver if isinstance(driver, str) else driver.decode(),
            "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
