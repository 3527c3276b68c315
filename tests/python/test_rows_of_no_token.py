# SPDX-License-Identifier: Apache-2.0
"""Rows that belong to no token are 0, and their lse -inf, whichever call allocates them: a NaN in one spreads through the next layer's
weight gradients."""
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


def check(device, expected, **environment):
    ran = subprocess.run([sys.executable, HERE / "rows_of_no_token.py", device], capture_output=True, text=True,
                         env={**os.environ, **environment})
    assert ran.returncode == 0, ran.stderr
    verdicts = [line.split() for line in ran.stdout.splitlines()]
    assert {name for name, verdict in verdicts if verdict != "right"} == set()
    asked = {name for name, _ in verdicts}
    for call in expected:
        assert {f"{call}.out", f"{call}.lse"} <= asked


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MALLOC_PERTURB_ is glibc's")
def test_no_result_shows_what_memory_held():
    check("cpu", ("attention", "kv_cache", "kv_cache.paged", "dropin", "dropin.fwd", "numpy", "arrays.numpy", "arrays.torch"),
          MALLOC_PERTURB_="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_nor_on_a_gpu():
    check("cuda", ("attention", "kv_cache", "kv_cache.paged", "dropin", "dropin.fwd"))
