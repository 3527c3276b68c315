"""Trains a small GPT on real text twice from one seed, with flash3 and with torch's scaled_dot_product_attention.

    pip install . matplotlib
    python examples/07_train_gpt.py                  # a tiny one on the CPU: minutes
    python examples/07_train_gpt.py --device cuda    # 124 M parameters, 1024 tokens, bfloat16

The text is the sources of the Python standard library, byte by byte. Prints both losses side by side and tokens per second, and
with --out writes them as JSON, and their curves as PNG. Checks itself: both curves fall, and stay together.
"""
import argparse
import json
import math
import pathlib
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

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[:tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(attention, data, size, device, seed):
    """The loss of each step, and tokens per second."""
    torch.manual_seed(seed)
    model = GPT(size["layers"], size["dim"], size["heads"], size["length"], attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if device == "cpu" else 3e-4, betas=(0.9, 0.95))
    picks = torch.Generator().manual_seed(seed)
    losses, started, warm = [], None, min(5, size["steps"] // 2)
    for step in range(size["steps"]):
        if step == warm:  # what is compiled and allocated once is not speed
            synchronize(device)
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
        losses.append(loss.detach())
    synchronize(device)
    seconds = time.perf_counter() - started
    return [x.item() for x in losses], (size["steps"] - warm) * size["batch"] * size["length"] / seconds


def synchronize(device):
    if device != "cpu":
        torch.cuda.synchronize()


def draw(path, losses, title):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, values), style in zip(losses.items(), ("-", "--")):
        axes.plot(values, style, label=name, linewidth=1.5)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, help="a folder for train_gpt_DEVICE.json and .png")
    args = parser.parse_args()
    size = {**SIZES[args.device], **({"steps": args.steps} if args.steps else {})}

    data = text()
    losses, speed = {}, {}
    for name, attention in (("flash3", with_flash3), ("torch SDPA", with_sdpa)):
        losses[name], speed[name] = train(attention, data, size, args.device, args.seed)
        print(f"{name:10}  {speed[name]:10.0f} tokens/s")
    ours, theirs = losses.values()
    print(f"\n{'step':>5} {'flash3':>8} {'SDPA':>8}")
    for step in range(0, size["steps"], max(1, size["steps"] // 10)):
        print(f"{step:5} {ours[step]:8.4f} {theirs[step]:8.4f}")
    print(f"{size['steps'] - 1:5} {ours[-1]:8.4f} {theirs[-1]:8.4f}")

    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = args.out / f"train_gpt_{args.device}"
        device = torch.cuda.get_device_name() if args.device == "cuda" else flash3.backends()["cpu"]
        stem.with_suffix(".json").write_text(json.dumps({
            "example": "train_gpt", "device": device, "torch": torch.__version__, "flash3": flash3.version(), "size": size,
            "seed": args.seed, "tokens_per_second": {name: round(x) for name, x in speed.items()},
            "loss": {name: [round(x, 5) for x in values] for name, values in losses.items()}}) + "\n", encoding="utf-8")
        try:
            draw(stem.with_suffix(".png"), losses, f"GPT on the standard library's sources, {device}")
        except ImportError:
            print("no picture: matplotlib is not installed")

    apart = max(abs(a - b) for a, b in zip(ours, theirs))
    fell = ours[0] - sum(ours[-5:]) / len(ours[-5:])
    print(f"\nfarthest apart {apart:.4f}; flash3's loss fell by {fell:.3f}")
    return not (apart < 0.1 and fell > 0.2 and math.isfinite(ours[-1]))


if __name__ == "__main__":
    sys.exit(main())
