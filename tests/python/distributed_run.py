# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of distributed_cases.py in processes of their own, over gloo:

    python distributed_run.py WORLDS OUT [NAMES]

WORLDS are numbers of processes, as 2,3,4: those of a world run together, one world after the other. Each process makes every case in turn,
and writes what came of it to OUT/PROCESSES/RANK.json. All are forked from this one, so that what cases import is imported once.
"""
import datetime
import importlib
import json
import os
import pathlib
import sys
import time
import traceback

import torch
import torch.distributed as dist

import distributed_cases

LIMIT = 300  # seconds, after which processes that are left are killed
IMPORTED = ("torch._dynamo.backends.debugging", "torch._functorch.aot_autograd", "torch._inductor.compile_fx",
            "flash3.integrations.transformers", "transformers.models.llama.modeling_llama", "transformers.masking_utils")
TIMEOUT = datetime.timedelta(seconds=30)


def child(rank, ranks, out, names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=ranks, timeout=TIMEOUT)
    results = {}
    for name, case in distributed_cases.cases(ranks).items():
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


def run(ranks, out, names):
    """How many processes of a world are left after LIMIT."""
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                child(rank, ranks, out, names)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(pid)
    until = time.monotonic() + LIMIT
    while children and time.monotonic() < until:
        done, _ = os.waitpid(-1, os.WNOHANG)
        if done:
            children.remove(done)
        time.sleep(0.01)
    for pid in children:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return len(children)


def main():
    worlds, out, names = [int(ranks) for ranks in sys.argv[1].split(",")], pathlib.Path(sys.argv[2]), sys.argv[3:]
    for name in IMPORTED:
        importlib.import_module(name)
    late = 0
    for ranks in worlds:
        (out / str(ranks)).mkdir()
        late += run(ranks, out / str(ranks), names)
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
