# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of distributed_cases.py in processes of their own, over gloo, or with --cuda those for GPUs, over NCCL:

    python distributed_run.py [--cuda] WORLDS OUT [NAMES]

WORLDS are numbers of processes, as 2,3,4: those of a world run together, one world after the other. Each process makes every case in turn,
and writes what came of it to OUT/PROCESSES/RANK.json. On the
CPU all are forked from this one, so that what cases import is imported once.
"""
import datetime
import importlib
import json
import multiprocessing
import os
import pathlib
import sys
import time
import traceback

import torch
import torch.distributed as dist

import distributed_cases

LIMIT = 3000  # seconds, after which processes that are left are killed: they hang, on any machine
IMPORTED = ("torch._dynamo.backends.debugging", "torch._functorch.aot_autograd", "torch._inductor.compile_fx",
            "flash3.integrations.transformers", "transformers.models.llama.modeling_llama", "transformers.masking_utils")
TIMEOUT = datetime.timedelta(seconds=300)  # the group's: no busy machine makes a rank so late


def child(rank, ranks, out, names, device):
    torch.set_num_threads(1)
    own = {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
        own = {"device_id": torch.device("cuda", rank)}
    dist.init_process_group("gloo" if device == "cpu" else "nccl", init_method=f"file://{out}/rendezvous", rank=rank, world_size=ranks,
                            timeout=TIMEOUT, **own)
    results = {}
    for name, case in (distributed_cases.cases if device == "cpu" else distributed_cases.gpu_cases)(ranks).items():
        if names and name not in names:
            continue
        torch.manual_seed(sum(map(ord, name)))
        started = time.perf_counter()
        try:
            case()
            results[name] = "passed"
        except Exception:
            results[name] = traceback.format_exc()
        results[f"{name}, seconds"] = time.perf_counter() - started
        (out / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")  # so far: a case may end its process
    os._exit(0)  # not by way of a group of which a member is gone


def run(ranks, out, names, device):
    """How many processes of a world are left after LIMIT."""
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")  # CUDA does not survive a fork
    children = [context.Process(target=child, args=(rank, ranks, out, names, device)) for rank in range(ranks)]
    for one in children:
        one.start()
    until = time.monotonic() + LIMIT
    for one in children:
        one.join(max(0, until - time.monotonic()))
    late = [one for one in children if one.is_alive()]
    for one in late:
        one.kill()
        one.join()
    return len(late)


def main():
    device = "cuda" if sys.argv[1] == "--cuda" else "cpu"
    worlds, out, *names = sys.argv[1 + (device == "cuda"):]
    worlds, out = [int(ranks) for ranks in worlds.split(",")], pathlib.Path(out)
    if device == "cpu":
        for name in IMPORTED:
            importlib.import_module(name)
    late = 0
    for ranks in worlds:
        (out / str(ranks)).mkdir()
        late += run(ranks, out / str(ranks), names, device)
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
