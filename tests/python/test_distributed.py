# SPDX-License-Identifier: Apache-2.0
"""flash3.distributed in 2, 3 and 4 processes over gloo, and on as many GPUs over NCCL. The processes of a world make all cases of
distributed_cases.py, one after the other; here each has a test, which gives its result on every rank. The tests run this program:

    python test_distributed.py [--cuda] WORLDS OUT [NAMES]

WORLDS are numbers of processes, as 2,3,4: those of a world run together, one world after the other. Each process makes every case in turn,
and writes its result to OUT/PROCESSES/RANK.json. On the CPU all are forked from this one, so that what cases import is imported once; with
--cuda the cases are those for GPUs.
"""
import datetime
import importlib
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist

import distributed_cases

HERE = pathlib.Path(__file__).resolve().parent
WORLDS = (2, 3, 4)
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


def run_world(ranks, out, names, device):
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


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """What running the worlds that tests ask for says, and what came of their cases, by number of ranks and rank."""
    worlds = sorted({item.callspec.params["ranks"] for item in request.session.items if item.name.startswith("test_distributed[")})
    out = tmp_path_factory.mktemp("worlds")
    run = subprocess.run([sys.executable, __file__, ",".join(map(str, worlds)), out], capture_output=True, text=True,
                         cwd=HERE)
    files = {ranks: [out / str(ranks) / f"{rank}.json" for rank in range(ranks)] for ranks in worlds}
    return run, {ranks: [json.loads(f.read_text(encoding="utf-8")) if f.exists() else {} for f in of] for ranks, of in files.items()}


@pytest.mark.parametrize("ranks, case", [(ranks, case) for ranks in WORLDS for case in distributed_cases.cases(ranks)])
def test_distributed(results, ranks, case):
    run, worlds = results
    assert run.returncode == 0, run.stdout + run.stderr
    for rank, made in enumerate(worlds[ranks]):
        if case == "one_ends" and rank == ranks - 1:
            assert case not in made  # it has ended
            continue
        assert made.get(case) == "passed", f"rank {rank} of {ranks}: {made.get(case, 'not reached: ' + run.stderr[-2000:])}"


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", (2, 4))
def test_gpus(ranks, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs: there are {torch.cuda.device_count()}")
    run = subprocess.run([sys.executable, __file__, "--cuda", str(ranks), tmp_path], capture_output=True, text=True, cwd=HERE)
    made = [json.loads((tmp_path / str(ranks) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    failed = {f"{name} on rank {rank}": said for rank, of in enumerate(made) for name, said in of.items() if said != "passed" and isinstance(said, str)}
    assert run.returncode == 0 and not failed, (failed, run.stdout + run.stderr)
    assert all({name for name in of if not name.endswith(", seconds")} == set(distributed_cases.gpu_cases(ranks)) for of in made)


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
        late += run_world(ranks, out / str(ranks), names, device)
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
