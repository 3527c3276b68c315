# SPDX-License-Identifier: Apache-2.0
"""The project's own C, C++ and CUDA files."""
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUFFIXES = {".h", ".hpp", ".cuh", ".c", ".cpp", ".cu"}


def sources(*folders, suffixes=SUFFIXES):
    """Every source file in these folders of the repository, sorted."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    if not found:
        raise SystemExit(f"no source file in {', '.join(folders)}: the gate looks in the wrong place")
    return sorted(found)
