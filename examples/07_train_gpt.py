# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on real text twice from one seed, with flash3 and with torch's scaled_dot_product_attention.

    pip install . matplotlib
    python examples/07_train_gpt.py                  # a tiny one on the CPU: about two minutes
    python examples/07_train_gpt.py --device cuda    # 86 M parameters, 1024 tokens, bfloat16: about a minute
    python examples/07_train_gpt.py --draw train_gpt_cuda.json    # the curves of a run that --out kept

The text is the sources of the Python standard library, byte by byte. The two models take turns, step by step. Prints both losses
side by side and tokens per second, and with --out writes them as JSON, and their curves as PNG. Checks itself: both curves fall,
and stay together.
"""
import argparse
import json
import math
import pathlib
import statistics
import sys
import sysconfig
import time

import torch
import torch.nn.functional as F
from torch import nn

import flash3

SIZES = {"cpu": dict(layers=2, dim=128, heads=4, length=128, batch=8, steps=200),
         "cuda": dict(layers=12, dim=768, heads=12, length=1024, batch=16, steps=400)}
VOCABULARY = 256


def text(limit=8_000_000):
    """The standard library's modules, as bytes."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py"))[:200])
    return torch.frombuffer(bytearray(data[:limit]), dtype=torch.uint8)


def with_flash3(q, k, v):
    return flash3.attention(q, k, v, causal=True)


def with_sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, dim, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [batch, seq, heads, dim]
        x = x + self.project(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers, dim, heads, length, attention):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, places=None):
        """places: those of the tokens in their sequence, [tokens]; None: one after the other."""
        x = self.token(tokens) + (self.position.weight[:tokens.shape[1]] if places is None else self.position(places))
        return self.head(self.norm(self.blocks(x)))


def training(attention, data, size, device, seed):
    """Yields the loss and the seconds of each step."""
    torch.manual_seed(seed)
    model = GPT(size["layers"], size["dim"], size["heads"], size["length"], attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if device == "cpu" else 3e-4, betas=(0.9, 0.95))
    picks = torch.Generator().manual_seed(seed)
    while True:
        started = time.perf_counter()
        starts = torch.randint(len(data) - size["length"] - 1, (size["batch"],), generator=picks)
        rows = torch.stack([data[i:i + size["length"] + 1] for i in starts]).long().to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        synchronize(device)
        yield loss.item(), time.perf_counter() - started


def synchronize(device):
    if device != "cpu":
        torch.cuda.synchronize()


def draw(report, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, values), style in zip(report["loss"].items(), ("-", "--")):
        axes.plot(values, style, label=f"{name}, {report['tokens_per_second'][name]:,} tokens/s", linewidth=1.5)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=f"GPT on the standard library's sources, {report['device']}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def windows(losses, length=10):
    """The means of so many steps: single ones are as uneven as the text."""
    return [statistics.fmean(losses[i:i + length]) for i in range(0, len(losses), length)]


def run(size, device, seed):
    """The report of both trainings."""
    data = text()
    runs = {name: training(attention, data, size, device, seed)
            for name, attention in (("flash3", with_flash3), ("torch SDPA", with_sdpa))}
    losses, seconds = {name: [] for name in runs}, {name: [] for name in runs}
    for _ in range(size["steps"]):
        for name, steps in runs.items():
            loss, spent = next(steps)
            losses[name].append(loss)
            seconds[name].append(spent)
    tokens = size["batch"] * size["length"]
    return {"example": "train_gpt", "device": torch.cuda.get_device_name() if device == "cuda" else flash3.backends()["cpu"],
            "torch": torch.__version__, "flash3": flash3.version(), "date": time.strftime("%Y-%m-%d"), "size": size, "seed": seed,
            "tokens_per_second": {name: round(tokens / statistics.median(spent)) for name, spent in seconds.items()},
            "loss": {name: [round(x, 5) for x in values] for name, values in losses.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="of flash3, for the JSON")
    parser.add_argument("--out", type=pathlib.Path, help="a folder for train_gpt_DEVICE.json and .png")
    parser.add_argument("--draw", type=pathlib.Path, metavar="JSON", help="train nothing; draw what is in this file beside it")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.draw.read_text(encoding="utf-8")), args.draw.with_suffix(".png"))
        return 0
    if args.steps is not None and args.steps < 2:
        parser.error(f"--steps = {args.steps} but it must be at least 2")

    report = run({**SIZES[args.device], **({"steps": args.steps} if args.steps else {})}, args.device, args.seed)
    if args.commit:
        report["commit"] = args.commit
    for name, speed in report["tokens_per_second"].items():
        print(f"{name:10}  {speed:10} tokens/s")
    ours, theirs = report["loss"].values()
    print(f"\n{'step':>5} {'flash3':>8} {'SDPA':>8}")
    last = len(ours) - 1
    for step in sorted({*range(0, last, max(1, len(ours) // 10)), last}):
        print(f"{step:5} {ours[step]:8.4f} {theirs[step]:8.4f}")

    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = args.out / f"train_gpt_{args.device}"
        stem.with_suffix(".json").write_text(json.dumps(report) + "\n", encoding="utf-8")
        try:
            draw(report, stem.with_suffix(".png"))
        except ImportError:
            print("no picture: matplotlib is not installed; --draw makes it from the JSON")

    apart = max(abs(a - b) for a, b in zip(windows(ours), windows(theirs)))
    fell = ours[0] - statistics.fmean(ours[-5:])
    print(f"\nover 10 steps farthest apart {apart:.4f}; flash3's loss fell by {fell:.3f}")
    return not (apart < 0.1 and fell > 0.2 and math.isfinite(ours[-1]))


if __name__ == "__main__":
    sys.exit(main())
