# SPDX-License-Identifier: Apache-2.0
"""Measurements of flash3, and the tables and figures made of them. Each script is a module that runs from the repository's root, as in
`python3 -m bench.gpu.peers`; README.md lists them."""
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"


def environment(**changed):
    """The environment, with what changed, of a process that imports bench from any folder."""
    found = {**os.environ, **changed}
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), found.get("PYTHONPATH"))))}
