# SPDX-License-Identifier: Apache-2.0
"""docs/migration.md: both halves of each block run, and have the same results."""
import pathlib
import re
import sys

import pytest

torch = pytest.importorskip("torch")
from stand_ins import MODULES  # noqa: E402

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs/migration.md").read_text(encoding="utf-8")
SETUP, *BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture
def scope(monkeypatch):
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)
    found = {}
    exec(SETUP, found)
    return found


def results(out):
    return list(out) if isinstance(out, tuple) else [out]


def test_there_are_blocks_of_each_library():
    sections = re.split(r"^## ", PAGE, flags=re.M)[1:]
    counts = {section.splitlines()[0]: section.count("\n# flash3\n") for section in sections}
    assert counts == {"FlashAttention-2": 6, "FlashAttention-3": 3, "torch's scaled_dot_product_attention": 3, "xformers": 3, "cuDNN": 1}
    assert len(BLOCKS) == sum(counts.values())


@pytest.mark.parametrize("block", BLOCKS, ids=[re.sub(r"\W+", "_", block.partition("\n# flash3\n")[2])[:60] for block in BLOCKS])
def test_both_halves(block, scope):
    theirs, ours = block.split("\n# flash3\n")
    exec(theirs, scope)
    wanted = results(scope.pop("out"))
    exec(ours, scope)
    got = results(scope.pop("out"))
    assert len(got) == len(wanted) and "flash3." in ours
    for x, y in zip(got, wanted):
        assert x.shape == y.shape and y.any()
        torch.testing.assert_close(x.float(), y.float(), rtol=1e-5, atol=1e-5)
