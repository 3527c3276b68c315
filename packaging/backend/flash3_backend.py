# SPDX-License-Identifier: Apache-2.0
"""What pip calls to build the wheel: scikit-build-core, after two decisions that pyproject.toml cannot make.

Whether GPU kernels are compiled, which takes minutes: as FLASH3_HOPPER says (ON, OFF or AUTO; in the environment, or as pip's
--config-settings=cmake.define.FLASH3_HOPPER=ON), and otherwise only where there is an NVIDIA GPU.

Whose headers torch's operators are built with: those of the torch that is installed, if it is 2.10 or newer. Only where there is none pip
fetches one, into the folder that it removes after the build.
"""
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from scikit_build_core import build as hooks
from scikit_build_core.build import *  # noqa: F403  the hooks that stay as they are

FETCHED = "torch==2.13.0"
OLDEST = (2, 10)
GPU = ("/dev/nvidiactl", "/dev/dxg")  # the second is WSL's
WHERE = "import importlib.util as u; s = u.find_spec('torch'); print(*(s and s.submodule_search_locations or ()), sep='\\n', end='')"


def has_headers(folder):
    """Whether the torch in this folder is new enough to build with, and not without headers, as Debian's is."""
    version = folder / "version.py"
    found = version.is_file() and re.search(r"^__version__\b.*?['\"](\d+)\.(\d+)", version.read_text(encoding="utf-8"), re.M)
    return bool(found) and tuple(map(int, found.groups())) >= OLDEST and (folder / "include/torch/csrc/stable/library.h").is_file()


def torch_folder():
    """The folder of the torch to build with, as a string; None: none is installed.

    pip hides what is installed from the build by PYTHONPATH; the same Python without the environment's variables sees it.
    """
    here = importlib.util.find_spec("torch")
    folders = list(here.submodule_search_locations or ()) if here else []
    done = subprocess.run([sys.executable, "-E", "-c", WHERE], cwd=os.sep, capture_output=True, text=True)
    folders += done.stdout.splitlines()
    return next((folder for folder in folders if has_headers(Path(folder))), None)


def is_set(name, settings):
    """Whether the caller sets this variable of CMake, in any of the ways that scikit-build-core has."""
    given = [f"{key}={value}" for key, value in settings.items()]
    given += [os.environ.get(variable, "") for variable in ("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE")]
    return any(name in text for text in given)


def hopper():
    """The value of FLASH3_HOPPER where no setting has one, and what to tell the user."""
    asked = os.environ.get("FLASH3_HOPPER")
    if asked is not None and asked not in ("ON", "OFF", "AUTO"):
        raise SystemExit(f"FLASH3_HOPPER = {asked!r} but it must be ON, OFF or AUTO")
    if asked is not None:
        return asked, None
    if any(map(os.path.exists, GPU)):
        return "AUTO", "building the GPU kernels too, if there is a CUDA compiler; that takes minutes (FLASH3_HOPPER=OFF leaves them out)"
    return "OFF", "no NVIDIA GPU here: building the CPU backend alone (FLASH3_HOPPER=ON pip install … builds the GPU kernels too)"


def say(line):
    """Tells the user in spite of pip, which shows a build's output with -v alone."""
    try:
        with open("/dev/tty", "w", encoding="utf-8") as terminal:
            terminal.write(f"\n{line}\n")
    except OSError:
        print(line, file=sys.stderr, flush=True)


def settings_of_build(given):
    """The caller's settings with those that are decided here. Each build sets both: build/wheel keeps those of the one before."""
    settings = dict(given or {})
    if not is_set("FLASH3_HOPPER", settings):
        settings["cmake.define.FLASH3_HOPPER"], line = hopper()
        if line:
            say(f"flash3: {line}; pip install -v shows progress")
    if not is_set("FLASH3_TORCH_DIR", settings):
        settings["cmake.define.FLASH3_TORCH_DIR"] = torch_folder() or ""
    return settings


def requirements(of_hook, given):
    is_there = is_set("FLASH3_TORCH_DIR", given or {}) or torch_folder() is not None
    return [*of_hook(given), *([] if is_there else [FETCHED])]


def get_requires_for_build_wheel(config_settings=None):
    return requirements(hooks.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings=None):
    return requirements(hooks.get_requires_for_build_editable, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return hooks.build_wheel(wheel_directory, settings_of_build(config_settings), metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return hooks.build_editable(wheel_directory, settings_of_build(config_settings), metadata_directory)
