# SPDX-License-Identifier: Apache-2.0
"""flash3.attention and flash3.sdpa on DTensors, in processes of their own over gloo (dtensor_run.py)."""
import json
import math
import pathlib
import subprocess
import sys

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_sharded_calls(sizes, tmp_path):
    run = subprocess.run([sys.executable, HERE / "dtensor_run.py", tmp_path, *map(str, sizes)], capture_output=True, text=True, cwd=HERE)
    assert run.returncode == 0, run.stdout + run.stderr
    made = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(math.prod(sizes))]
    assert made[0] and {name: said for of in made for name, said in of.items() if said != "passed"} == {}
    assert all(of.keys() == made[0].keys() for of in made)


def test_a_torch_without_strategies_says_so(monkeypatch):
    import torch.distributed.tensor._op_schema as schema
    from flash3 import _sharding
    monkeypatch.delattr(schema, "OpStrategy")
    _sharding.register.cache_clear()
    assert "takes no sharding strategies as flash3 registers them" in _sharding.register()
    _sharding.register.cache_clear()
