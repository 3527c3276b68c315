# SPDX-License-Identifier: Apache-2.0
"""The Python examples in the documentation run as they stand, each file's one behind the other."""
import pathlib
import re
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["README.md", "docs/python.md", "docs/index.md", "docs/jax.md"])
def test_python_blocks(name, capsys):
    if name == "docs/jax.md":
        pytest.importorskip("flash3.jax", reason="flash3.jax needs jax, and a build with jaxlib's headers", exc_type=ImportError)
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", (ROOT / name).read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    scope = {}
    for _, block in blocks:
        exec(compile(textwrap.dedent(block), name, "exec"), scope)


def migrations():
    """The calls of FlashAttention-3 in docs/python.md's table, and what it says to write for each."""
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(flash_attn_\w+\(.*?\))` \| `(flash3\.attention\(.*?\))`(?=[ ,:;])", text, re.M)


def test_the_table_has_migrations():
    assert len(migrations()) == 5


@pytest.mark.parametrize("theirs, ours", migrations())
def test_migration(theirs, ours):
    torch = pytest.importorskip("torch")
    import flash3
    import flash_attn_interface
    torch.manual_seed(0)
    scope = {**vars(flash_attn_interface), "flash3": flash3, "s": 0.3, "c": True, "l": 5, "r": 2, "x": 4.0, "max_q": 12, "max_k": 12}
    scope["qkv"] = torch.randn(2, 12, 3, 4, 32)
    scope["q"], scope["k"], scope["v"] = torch.randn(2, 6, 4, 32), *torch.randn(2, 2, 12, 2, 32)
    if "varlen" in theirs:
        scope["q"], scope["k"], scope["v"] = torch.randn(3, 20, 2, 32)
        scope["cu_q"] = scope["cu_k"] = torch.tensor([0, 8, 20], dtype=torch.int32)
    scope["k_cache"], scope["v_cache"], scope["n"] = scope["k"], scope["v"], torch.tensor([12, 7], dtype=torch.int32)
    scope.update({name + "8": scope[name].to(torch.float8_e4m3fn) for name in "qkv"})
    scope.update({name: torch.rand(2, 2) + 0.5 for name in "abc"} if "q8" in theirs else {})
    got, wanted = eval(ours, scope), eval(theirs, scope)
    assert torch.equal(got, wanted) and got.any()
