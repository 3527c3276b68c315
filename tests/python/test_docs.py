"""The Python examples in the documentation run as they stand, each file's one behind the other."""
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["README.md", "docs/python.md"])
def test_python_blocks(name, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    scope = {}
    for block in blocks:
        exec(compile(block, name, "exec"), scope)
