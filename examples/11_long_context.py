# SPDX-License-Identifier: Apache-2.0
"""Trains the GPT of 07_train_gpt.py on one long sequence, in one process and in several that each have a part of its tokens.

    pip install .
    python examples/11_long_context.py                               # 2 processes on the CPU, over gloo: about a minute
    python examples/11_long_context.py --device cuda --ranks 2       # 2 GPUs, over NCCL: 65,536 tokens, bfloat16

Each step is one sequence of the Python standard library's sources, byte by byte. flash3.distributed.plan says which tokens a rank
has. The model runs on those, attends to all ranks' keys, and sums the weights' gradients. Prints both losses and tokens per second, and
with --out writes them as JSON. Checks itself: the losses are the same within rounding.
"""
import argparse
import functools
import importlib.util
import json
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import flash3
import flash3.distributed

SIZES = {"cpu": dict(layers=2, dim=128, heads=4, length=1500, steps=10), "cuda": dict(layers=12, dim=768, heads=12, length=65536, steps=20)}
# How far the losses may be apart, relatively: AdamW divides by gradients, so that roundings grow from step to step.
CLOSE = {"cpu": 1e-3, "cuda": 2e-2}


def gpt_example():
    spec = importlib.util.spec_from_file_location("train_gpt", pathlib.Path(__file__).with_name("07_train_gpt.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(rank, ranks, rendezvous, size, device, method, seed, report):
    """A process: trains on its part of each sequence, and leaves losses and seconds in a file."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    if device == "cuda":
        torch.cuda.set_device(rank)
    example = gpt_example()
    plan = flash3.distributed.plan(seqlen=size["length"])
    attention = functools.partial(flash3.distributed.attention, group=plan, method=method, causal=True)
    torch.manual_seed(seed)  # the same weights everywhere
    model = example.GPT(size["layers"], size["dim"], size["heads"], size["length"], attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if device == "cpu" else 3e-4, betas=(0.9, 0.95))
    data, picks = example.text(), torch.Generator().manual_seed(seed)
    losses, seconds = [], []
    for _ in range(size["steps"]):
        started = time.perf_counter()
        start = int(torch.randint(len(data) - size["length"] - 1, (1,), generator=picks))
        row = data[start:start + size["length"] + 1].long().to(device)[None]
        tokens, labels = plan.shard(row[:, :-1]), plan.shard(row[:, 1:])  # labels are the next tokens of the whole sequence
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            logits = model(tokens, plan.position_ids(device))
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / size["length"]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()] + [loss.detach()[None]])
        dist.all_reduce(gradients)
        for p, whole in zip(model.parameters(), gradients[:-1].split([p.numel() for p in model.parameters()])):
            p.grad.copy_(whole.view_as(p))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(gradients[-1].item())  # waits for the device
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        report.write_text(json.dumps({"loss": losses, "tokens_per_second": round(size["length"] / statistics.median(seconds[1:] or seconds))}),
                          encoding="utf-8")
    dist.destroy_process_group()


def run(ranks, *arguments):
    """The report of a training by so many processes; one is this one."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        arguments = ranks, f"{folder}/rendezvous", *arguments, report
        if ranks == 1:
            train(0, *arguments)
        else:
            torch.multiprocessing.spawn(train, arguments, nprocs=ranks)
        return json.loads(report.read_text(encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--method", default="auto", choices=["auto", "ring", "all_gather", "ulysses"])
    parser.add_argument("--length", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, help="a file for the JSON")
    args = parser.parse_args()
    size = {**SIZES[args.device], **{name: getattr(args, name) for name in ("length", "steps") if getattr(args, name)}}
    reports = {ranks: run(ranks, size, args.device, args.method, args.seed) for ranks in (1, args.ranks)}

    one, several = (reports[ranks]["loss"] for ranks in (1, args.ranks))
    print(f"{'step':>4} {'1 rank':>9} {f'{args.ranks} ranks':>9}")
    for step, (a, b) in enumerate(zip(one, several)):
        print(f"{step:>4} {a:>9.5f} {b:>9.5f}")
    for ranks, report in reports.items():
        print(f"{ranks} rank{'s' * (ranks > 1)}: {report['tokens_per_second']:,} tokens/s, sequences of {size['length']:,} tokens")
    if args.out:
        args.out.write_text(json.dumps({"example": "long_context", "device": args.device, "torch": torch.__version__,
                                        "flash3": flash3.version(), "size": size, "seed": args.seed, "ranks": reports}, indent=1),
                            encoding="utf-8")
    apart = max(abs(a - b) / a for a, b in zip(one, several))
    if apart > CLOSE[args.device] or not one[-1] < one[0]:
        sys.exit(f"FAILED: the losses are apart by {apart:.1e}, of {CLOSE[args.device]:.0e} allowed; the first is {one[0]:.4f}, the last "
                 f"{one[-1]:.4f}")
    print(f"the losses are apart by {apart:.1e} at most")


if __name__ == "__main__":
    main()
