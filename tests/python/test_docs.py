# SPDX-License-Identifier: Apache-2.0
"""The Python examples in README.md and docs/*.md run as they stand, those of a page in order and in one namespace."""
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/gates"))
from snippets import blocks, pages  # noqa: E402

# A page that has a test of its own: each of its blocks holds another library's call too.
ELSEWHERE = {"migration.md"}
# What a page needs beside torch and flash3, all of it optional.
NEEDS = {"jax.md": "jax", "engines.md": "transformers"}


def python_blocks(page):
    return [block for block in blocks(page.read_text(encoding="utf-8")) if block.language == "python" and not block.not_run]


PAGES = {page.name: page for page in pages() if page.name not in ELSEWHERE and python_blocks(page)}


@pytest.fixture
def one_process(monkeypatch, tmp_path):
    """What a page has changed is taken back: modules that it puts into the place of others, torch's flash attention, a process group. And what
    torchrun tells a process of a group of one."""
    import torch.distributed
    modules = dict(sys.modules)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if hasattr(torch.nn.attention, "restore_flash_attention_impl") and torch.nn.attention.current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()
    for name in set(sys.modules) - set(modules):
        if name.partition(".")[0] in ("vllm", "sgl_kernel"):
            del sys.modules[name]


def test_the_pages_have_examples():
    assert {"README.md", "python.md", "index.md", "jax.md", "fp8.md", "engines.md", "distributed.md"} <= set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_python_blocks(name, one_process, capsys):
    page = PAGES[name]
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    if name == "jax.md":
        pytest.importorskip("flash3.jax", reason="flash3.jax needs a build with jaxlib's headers", exc_type=ImportError)
    scope = {"__name__": "a_page"}
    for block in python_blocks(page):
        code = "\n" * (block.line - 1) + block.code  # errors name the page's line
        exec(compile(code, str(page.relative_to(ROOT)), "exec"), scope)
    for output in scope.get("outputs", {}).values() if name == "engines.md" else ():
        assert output.error is None and len(output.generated_tokens) > 0


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
