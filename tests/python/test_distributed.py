# SPDX-License-Identifier: Apache-2.0
"""flash3.distributed in 2, 3 and 4 processes over gloo, and on as many GPUs over NCCL. The processes of a world make all cases of distributed_cases.py, one after
the other; here each has a test, which says what came of it on every rank."""
import json
import pathlib
import subprocess
import sys

import pytest

import distributed_cases

HERE = pathlib.Path(__file__).resolve().parent
WORLDS = (2, 3, 4)


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """What running the worlds that tests ask for says, and what came of their cases, by number of ranks and rank."""
    worlds = sorted({item.callspec.params["ranks"] for item in request.session.items if item.name.startswith("test_distributed[")})
    out = tmp_path_factory.mktemp("worlds")
    run = subprocess.run([sys.executable, HERE / "distributed_run.py", ",".join(map(str, worlds)), out], capture_output=True, text=True,
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
    import torch
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs: there are {torch.cuda.device_count()}")
    run = subprocess.run([sys.executable, HERE / "distributed_run.py", "--cuda", str(ranks), tmp_path], capture_output=True, text=True, cwd=HERE)
    made = [json.loads((tmp_path / str(ranks) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    failed = {f"{name} on rank {rank}": said for rank, of in enumerate(made) for name, said in of.items() if said != "passed" and isinstance(said, str)}
    assert run.returncode == 0 and not failed, (failed, run.stdout + run.stderr)
    assert all({name for name in of if not name.endswith(", seconds")} == set(distributed_cases.gpu_cases(ranks)) for of in made)
