# SPDX-License-Identifier: Apache-2.0
"""What pip's builds decide before they compile anything, which kernels and whose headers, and what they tell the user."""
import inspect
import os
import pathlib
import pty
import re
import subprocess
import sys
import sysconfig
from unittest import mock

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytest.importorskip("scikit_build_core")
sys.path[:0] = [str(ROOT / "packaging/backend"), str(ROOT / "bindings/dropin/backend")]
import drop_in_backend
import flash3_backend as backend

HOPPER, TORCH = "cmake.define.FLASH3_HOPPER", "cmake.define.FLASH3_TORCH_DIR"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("FLASH3_HOPPER", "CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def gpu(tmp_path, monkeypatch, request):
    device = tmp_path / "nvidiactl"
    if getattr(request, "param", False):
        device.touch()
    monkeypatch.setattr(backend, "GPU", (str(tmp_path / "dxg"), str(device)))


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(backend, "say", lines.append)
    return lines


@pytest.mark.parametrize("gpu,asked,wanted,line", [
    (False, None, "OFF", r"^flash3: no NVIDIA GPU here: .*FLASH3_HOPPER=ON pip install .*-v shows progress$"),
    (True, None, "AUTO", r"^flash3: building the GPU kernels too, .*FLASH3_HOPPER=OFF.*-v shows progress$"),
    (False, "ON", "ON", None), (True, "OFF", "OFF", None), (False, "AUTO", "AUTO", None)], indirect=["gpu"])
def test_which_kernels(gpu, environment, said, asked, wanted, line):
    if asked:
        environment.setenv("FLASH3_HOPPER", asked)
    assert backend.settings_of_build({"build-dir": "x"}) == {"build-dir": "x", HOPPER: wanted, TORCH: mock.ANY}
    assert len(said) == (line is not None) and all(re.search(line, text) for text in said)


@pytest.mark.parametrize("settings,variable", [({HOPPER: "ON"}, None), ({"cmake.args": "-DFLASH3_HOPPER=ON"}, None),
                                               ({"cmake.args": ["-G", "-DFLASH3_HOPPER=ON"]}, None), ({}, "CMAKE_ARGS"),
                                               ({}, "SKBUILD_CMAKE_DEFINE")])
def test_settings_of_the_caller_stay(gpu, environment, said, settings, variable):
    environment.setenv("FLASH3_HOPPER", "OFF")  # the setting is nearer
    if variable:
        environment.setenv(variable, "-DFLASH3_HOPPER=ON" if variable == "CMAKE_ARGS" else "FLASH3_HOPPER=ON")
    assert backend.settings_of_build(settings) == {**settings, TORCH: mock.ANY} and not said


def test_a_wrong_value(gpu, environment):
    environment.setenv("FLASH3_HOPPER", "yes")
    with pytest.raises(SystemExit, match="FLASH3_HOPPER = 'yes' but it must be ON, OFF or AUTO"):
        backend.settings_of_build(None)


def fake_torch(folder, version, headers=True):
    header = folder / "torch/include/torch/csrc/stable/library.h"
    header.parent.mkdir(parents=True)
    if headers:
        header.touch()
    (folder / "torch/__init__.py").touch()
    (folder / "torch/version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{version}'\n", encoding="utf-8")
    return str(folder / "torch")


@pytest.fixture
def inside(tmp_path):
    """Calls the backend as pip does: in the Python that it installs into, whose packages the environment's variables hide."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    packages, = tmp_path.glob("venv/lib/python*/site-packages")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [p for p in sys.path if p != {str(packages)!r}]\n", encoding="utf-8")
    paths = (tmp_path / "hidden", ROOT / "packaging/backend", tmp_path / "build")
    (tmp_path / "build").mkdir()
    tools = pathlib.Path(sysconfig.get_path("purelib"))
    for name in ("scikit_build_core", "packaging", "pathspec"):
        (tmp_path / "build" / name).symlink_to(tools / name)

    def call(expression):
        code = f"import importlib.util as u; assert not u.find_spec('torch'); import flash3_backend as b; print({expression})"
        done = subprocess.run([tmp_path / "venv/bin/python", "-c", code], capture_output=True, text=True, cwd=ROOT,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
    call.packages = packages
    return call


@pytest.mark.parametrize("version,headers,taken", [("2.15.0+cu132", True, True), ("2.10.0", True, True), ("2.9.1", True, False),
                                                   ("2.13.0", False, False), (None, False, False)])
def test_whose_headers(inside, version, headers, taken):
    folder = fake_torch(inside.packages, version, headers) if version else None
    assert inside("b.torch_folder()") == str(folder if taken else None)
    required = inside("b.get_requires_for_build_wheel(), b.get_requires_for_build_editable()")
    assert required.count(repr(backend.FETCHED)) == (0 if taken else 2)
    assert inside(f"b.settings_of_build({{'{HOPPER}': 'OFF'}})") == str({HOPPER: "OFF", TORCH: folder if taken else ""})
    assert backend.FETCHED not in inside(f"b.get_requires_for_build_wheel({{'{TORCH}': '/somewhere'}})")


def test_hooks_get_the_settings(gpu, said):
    for name, more in (("build_wheel", ("info",)), ("build_editable", ("info",))):
        with mock.patch.object(backend.hooks, name, return_value="a.whl") as hook:
            assert getattr(backend, name)("folder", {TORCH: "x"}, *more) == "a.whl"
        hook.assert_called_once_with("folder", {TORCH: "x", HOPPER: "OFF"}, *more)
    for name in backend.hooks.__all__:
        assert callable(getattr(backend, name))


@pytest.mark.parametrize("name", ["build_wheel", "build_editable"])
def test_the_drop_in_says_what_it_does_not_bring(monkeypatch, name):
    lines = []
    monkeypatch.setattr(drop_in_backend, "say", lines.append)
    with mock.patch.object(backend.hooks, name, return_value="a.whl") as hook:
        assert getattr(drop_in_backend, name)("folder", {"a": "b"}, "info") == "a.whl"
    hook.assert_called_once_with("folder", {"a": "b"}, "info")
    assert len(lines) == 1 and "flash_attention_3" in lines[0]
    folder = re.search(r"pip install (\S+)$", lines[0])[1]
    assert 'name = "flash_attn_3"' in (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")


def test_pyproject_takes_the_backend():
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    for folder, module in ((ROOT, backend), (ROOT / "bindings/dropin", drop_in_backend)):
        system = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
        assert system["build-backend"] == module.__name__
        assert (folder / system["backend-path"][0] / f"{module.__name__}.py").samefile(module.__file__)
        assert not any(requirement.startswith("torch") for requirement in system["requires"])
    assert inspect.getsource(drop_in_backend.say) == inspect.getsource(backend.say)  # each archive has its own
    tried = (ROOT / "scripts/requirements-python.txt").read_text(encoding="utf-8").splitlines()
    assert backend.FETCHED in tried


SAYS = f"import sys; sys.path.insert(0, {str(ROOT / 'packaging/backend')!r}); import flash3_backend; flash3_backend.say('a line')"


def test_a_line_reaches_the_terminal_that_pip_keeps_output_from():
    child, terminal = pty.fork()
    if child == 0:
        done = subprocess.run([sys.executable, "-c", SAYS], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os._exit(done.returncode)
    shown = b""
    try:
        while part := os.read(terminal, 1024):
            shown += part
    except OSError:  # the terminal is gone with its process
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shown.split() == [b"a", b"line"]


def test_without_a_terminal_it_is_in_the_log():
    done = subprocess.run([sys.executable, "-c", SAYS], stderr=subprocess.PIPE, text=True, start_new_session=True, check=True)
    assert done.stderr == "a line\n"
