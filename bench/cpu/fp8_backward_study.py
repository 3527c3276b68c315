#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks, on a CPU, whether a backward on e4m3 operands would be worth a kernel: the errors of its gradients, a training with it, and the most that it
could gain.

    PYTHONPATH=build/release/python python3 -m bench.cpu.fp8_backward_study --json bench/results/fp8_backward_study_cpu.json --commit COMMIT
    ... --only gain --json FILE       # one of errors, training, gain; the rest of FILE stays

Errors: RMS of the difference to the float64 gradient of the tensors before they became e4m3, of the gradient's own RMS, and one minus the cosine,
for each recipe of rounding (RECIPES; fp8_backward_sim.py computes them) beside flash3's own bfloat16 backward (KERNELS). Training: the GPT of
examples/07_train_gpt.py with the same seeds and batches. Gain: fp8_backward_gain.py. About ten minutes on two cores.
"""
import argparse
import importlib.util
import json
import pathlib
import platform
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import flash3
from bench import ROOT, result_file
from bench.cpu import fp8_backward_gain
from bench.cpu.fp8_backward_sim import Attention, Dequantised, Recipe, backward

ALL = dict(qkv="e4m3", dout="e4m3", weights="e4m3", ds="e4m3")
RECIPES = {
    "bf16": Recipe(qkv="bf16", dout="bf16", weights="bf16", ds="bf16"),
    "inputs": Recipe(qkv="e4m3", dout="e4m3"),
    "qkv": Recipe(qkv="e4m3"),
    "dout": Recipe(dout="e4m3"),
    "dout_e5m2": Recipe(dout="e5m2"),
    "p_ds": Recipe(weights="e4m3", ds="e4m3"),
    "fp8": Recipe(**ALL),
    "fp8_unrotated": Recipe(**ALL, rotate=False),
    "fp8_tile_128": Recipe(**ALL, ds_scale=(128, 128)),
    "fp8_scale_per_head": Recipe(**ALL, ds_scale="head"),
    "fp8_dout_e5m2": Recipe(**{**ALL, "dout": "e5m2"}),
    "fp8_lse_of_16_bits": Recipe(**ALL, own_forward=False),
    "s_dp_fp8": Recipe(qkv="e4m3", dout="e4m3", weights="bf16", ds="bf16", outer="bf16"),
    "fp8_short_sums": Recipe(**ALL, sums="tile"),
    "fp8_one_short_sum": Recipe(**ALL, sums="one"),
}
SHORT_UP_TO = 1024  # queries: a tensor core's sums are simulated term by term
GRADIENTS = ("dq", "dk", "dv")
SIZE = dict(layers=2, dim=128, heads=2, length=256, batch=4)
CAPTURE = dict(layers=2, dim=128, heads=2, length=1024, batch=1)


# Data: functions (seq, dim, generator) -> q, k, v, dout of [1, 1, seq, dim], in float32 that holds bfloat16.

def normal(seq, dim, generator):
    return [torch.randn(1, 1, seq, dim, generator=generator) for _ in range(4)]


def outliers(seq, dim, generator):
    """N(0, 1) + N(0, 100) . Bernoulli(0.001): those of docs/fp8.md."""
    shape = (1, 1, seq, dim)
    return [x + 10 * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.001)
            for x in normal(seq, dim, generator)]


def channels(seq, dim, generator):
    """Two channels of k, and two of dout, are 20 times as wide."""
    q, k, v, dout = normal(seq, dim, generator)
    k[..., :2] *= 20
    dout[..., -2:] *= 20
    return q, k, v, dout


DATA = {"normal": normal, "outliers": outliers, "channels": channels}


def example():
    """examples/07_train_gpt.py as a module."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples/07_train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def minilm(layer):
    """q, k, v of a trained BERT, [batch, heads, seq, dim]; dout is N(0, 1), since the real one was not kept."""
    file = (ROOT / f"data/minilm_layer{layer}.safetensors").read_bytes()
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8:8 + length])
    tensors = []
    for name in "qkv":
        begin, end = (8 + length + offset for offset in header[name]["data_offsets"])
        x = torch.frombuffer(bytearray(file[begin:end]), dtype=torch.bfloat16).reshape(header[name]["shape"])
        tensors.append(x[:1].transpose(1, 2).float())
    generator = torch.Generator().manual_seed(layer)
    return *tensors, torch.randn(tensors[0].shape, generator=generator)


def with_flash3(q, k, v, causal):
    return flash3.attention(q, k, v, causal=causal)


def with_fp8_forward(q, k, v, causal):
    return flash3.attention(q, k, v, causal=causal, compute="fp8")


# flash3's own: what runs the forward decides about LSE, and so about the gradients.
KERNELS = {"kernel_bf16": with_flash3, "kernel_fp8_forward": with_fp8_forward, "kernel_fp8_forward_dequantised": Dequantised.apply}


def kernel_gradients(attention, q, k, v, dout, causal):
    """The gradients of flash3's own backward in bfloat16, rounded to it."""
    q, k, v, dout = (x.transpose(1, 2).bfloat16() for x in (q, k, v, dout))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attention(*leaves, causal).backward(dout)
    return [x.grad.transpose(1, 2).float() for x in leaves]


def difference(made, exact):
    """(RMS of the difference, of the RMS of the exact one; 1 - cosine)."""
    made = made.double()
    apart = float((made - exact).norm() / exact.norm())
    return float(f"{apart:.3g}"), float(f"{max(0.0, 1 - float(F.cosine_similarity(made.flatten(), exact.flatten(), 0))):.3g}")


def error_point(data, inputs, causal, recipes=RECIPES):
    """The errors of all recipes on one problem."""
    inputs = [x.bfloat16().float() for x in inputs]
    *exact, out, lse = backward(*(x.double() for x in inputs), causal, Recipe())
    seq, dim = inputs[0].shape[-2:]
    made = {name: kernel_gradients(attention, *inputs, causal) for name, attention in KERNELS.items()}
    for name, recipe in recipes.items():
        if recipe.sums == "float32" or seq <= SHORT_UP_TO and inputs[0].shape[:2].numel() <= 2:
            made[name] = backward(*inputs, causal, recipe, (out.float(), lse.float()))[:3]
    errors = {name: {what: difference(x, y) for what, x, y in zip(GRADIENTS, grads, exact)} for name, grads in made.items()}
    return {"data": data, "seq": seq, "dim": dim, "heads": inputs[0].shape[:2].numel(), "causal": causal, "errors": errors}


def random_points(lengths, dims):
    for data, make in DATA.items():
        for seq in lengths:
            for dim in dims:
                for causal in (False, True):
                    inputs = make(seq, dim, torch.Generator().manual_seed(seq + dim))
                    yield error_point(data, inputs, causal)
                    print(line(data, seq, dim, causal), flush=True)


def line(*words):
    return "  ".join(str(word) for word in words)


def error_points(lengths, dims, steps):
    """The three kinds of random data, a BERT, and the GPT that was trained for some steps."""
    points = list(random_points(lengths, dims))
    for layer in (0, 5):
        points.append(error_point(f"minilm_layer{layer}", minilm(layer), False))
    for layer, inputs in enumerate(captured(steps)):
        points.append(error_point(f"gpt_layer{layer}", inputs, True))
    return points


class Capture:
    """An attention that keeps what it is called with, and what comes back."""

    def __init__(self, attention):
        self.attention, self.calls = attention, []

    def __call__(self, q, k, v):
        out = self.attention(q, k, v)
        out.retain_grad()
        self.calls.append((q.detach(), k.detach(), v.detach(), out))
        return out

    def inputs(self):
        return [[x.transpose(1, 2).float() for x in (q, k, v, out.grad)] for q, k, v, out in self.calls]


def captured(steps, size=CAPTURE):
    """q, k, v, dout of each layer at the last step of a training in bfloat16."""
    gpt, data = example(), example().text()
    model, optimizer, batch = start(gpt, data, size, attention_of("bf16"), 0)
    for _ in range(steps):
        step(model, optimizer, batch())
    kept = Capture(attention_of("bf16"))
    for block in model.blocks:
        block.attention = kept
    step(model, optimizer, batch())
    return kept.inputs()


# Training

ARMS = {"float32": "flash3 in float32", "bf16": "flash3 in bf16", "fp8_forward": "FP8 forward, bf16 backward",
        "fp8_forward_dequantised": "FP8 forward, bf16 backward of its tensors",
        "fp8": "FP8 forward and backward", "fp8_dout_e5m2": "the same, dOut in e5m2"}


def attention_of(arm):
    """A function of q, k, v in float32, [batch, seq, heads, dim]."""
    def attention(q, k, v):
        if arm != "float32":
            q, k, v = (x.bfloat16() for x in (q, k, v))
        if arm in RECIPES and arm != "bf16":
            return Attention.apply(q, k, v, RECIPES[arm]).float()
        return KERNELS["kernel_bf16" if arm == "float32" else f"kernel_{arm}"](q, k, v, True).float()
    return attention


def start(gpt, data, size, attention, seed):
    """(model, optimizer, a function that makes the next batch): those of the example."""
    torch.manual_seed(seed)
    model = gpt.GPT(size["layers"], size["dim"], size["heads"], size["length"], attention)
    picks = torch.Generator().manual_seed(seed)
    training = data[:-len(data) // 10]

    def batch():
        starts = torch.randint(len(training) - size["length"] - 1, (size["batch"],), generator=picks)
        return torch.stack([training[i:i + size["length"] + 1] for i in starts]).long()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)), batch


def loss_of(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def step(model, optimizer, rows):
    loss = loss_of(model, rows)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def held_out_loss(model, data, size, sequences=64):
    """The loss on text that no step has seen."""
    held = data[-len(data) // 10:]
    places = torch.linspace(0, len(held) - size["length"] - 2, sequences).long()
    rows = torch.stack([held[i:i + size["length"] + 1] for i in places]).long()
    with torch.no_grad():
        return statistics.fmean(loss_of(model, part).item() for part in rows.split(16))


def train(steps, seeds, size=SIZE, arms=ARMS):
    """Losses of each arm and seed: of each step, and on held-out text at the end."""
    gpt, data = example(), example().text()
    runs = []
    for seed in range(seeds):
        for arm in arms:
            model, optimizer, batch = start(gpt, data, size, attention_of(arm), seed)
            began = time.perf_counter()
            losses = [round(step(model, optimizer, batch()), 4) for _ in range(steps)]
            runs.append({"arm": arm, "seed": seed, "held_out": round(held_out_loss(model, data, size), 5), "loss": losses,
                         "seconds": round(time.perf_counter() - began, 1)})
            print(line("training", seed, arm, runs[-1]["held_out"], f"{runs[-1]['seconds']} s"), flush=True)
    return {"size": size, "steps": steps, "bytes_of_text": len(data), "python": platform.python_version(), "arms": dict(arms), "runs": runs}


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the results are written; what --only leaves out stays")
    parser.add_argument("--only", choices=("errors", "training", "gain"))
    parser.add_argument("--commit", default="", help="of flash3, for the JSON")
    parser.add_argument("--lengths", default="1024,4096,8192", help="queries and keys of the random data, multiples of 128")
    parser.add_argument("--dims", default="64,128", help="head dims of the random data, powers of two")
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    parser.add_argument("--capture-steps", type=int, default=400, help="after which the GPT's tensors are captured")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch and flash3; these problems are small")
    args = parser.parse_args(argv)
    args.lengths, args.dims = ([int(x) for x in text.split(",")] for text in (args.lengths, args.dims))
    for length in args.lengths:
        if length < 128 or length % 128:
            parser.error(f"--lengths has {length}; each must be a multiple of 128")
    for dim in args.dims:
        if dim < 1 or dim & (dim - 1):
            parser.error(f"--dims has {dim}; each must be a power of two")
    for name in ("steps", "seeds", "capture_steps", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} = {getattr(args, name)} but it must be at least 1")
    return args


def main(argv=None):
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    report = json.loads(args.json.read_text(encoding="utf-8")) if args.only and args.json and args.json.exists() else {}
    report |= {"study": "fp8_backward", "device": flash3.backends()["cpu"], "machine": platform.machine(), "torch": torch.__version__,
               "flash3": flash3.version(), "date": time.strftime("%Y-%m-%d")}
    if args.commit:
        report["commit"] = args.commit
    if args.only in (None, "errors"):
        report["error_points"] = error_points(args.lengths, args.dims, args.capture_steps)
        report["capture"] = {**CAPTURE, "steps": args.capture_steps}
    if args.only in (None, "training"):
        report["training"] = train(args.steps, args.seeds)
    if args.only in (None, "gain"):
        report["gain"] = fp8_backward_gain.gain()
    if args.json:
        result_file.write(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
