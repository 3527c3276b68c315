# SPDX-License-Identifier: Apache-2.0
"""flash3.distributed in 2, 3 and 4 processes over gloo. The processes of a world make all cases of distributed_cases.py, one after
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
def results(tmp_path_factory):
    """A function of the ranks of a world: what came of its cases, by rank."""
    done = {}

    def of(ranks):
        if ranks not in done:
            out = tmp_path_factory.mktemp(f"world{ranks}")
            run = subprocess.run([sys.executable, HERE / "distributed_run.py", str(ranks), out], capture_output=True,
                                 text=True, cwd=HERE, timeout=400)
            files = [out / f"{rank}.json" for rank in range(ranks)]
            done[ranks] = run, [json.loads(f.read_text(encoding="utf-8")) if f.exists() else {} for f in files]
        return done[ranks]
    return of


@pytest.mark.parametrize("ranks, case", [(ranks, case) for ranks in WORLDS for case in distributed_cases.cases(ranks)])
def test_distributed(results, ranks, case):
    run, by_rank = results(ranks)
    assert run.returncode == 0, run.stdout + run.stderr
    for rank, made in enumerate(by_rank):
        if case == "one_ends" and rank == ranks - 1:
            assert case not in made  # it has ended
            continue
        assert made.get(case) == "passed", f"rank {rank} of {ranks}: {made.get(case, 'not reached: ' + run.stderr[-2000:])}"
