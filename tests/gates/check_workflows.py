#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The forge's workflows: every action is named by its commit, one for all files, and what they call in this tree is there. actionlint
reads them too, where it is installed."""
import re
import shutil
import subprocess
import sys

from sources import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def complaints():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    commits = {}
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        for action in re.findall(r"\buses: *(.+)", text):
            if action.startswith("./"):
                if not (ROOT / action).is_file():
                    yield f"{path.name}: there is no {action}"
            elif not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action):
                yield f"{path.name}: {action!r} is not NAME@COMMIT # vVERSION: a tag may be moved to other code"
            elif commits.setdefault(action.partition("@")[0], action) != action:
                yield f"{path.name}: {action!r}, but elsewhere {commits[action.partition('@')[0]]!r}"
        for target in re.findall(r"^ *(?:- )?run: *make ([\w-]+)", text, re.M):
            if target not in targets:
                yield f"{path.name}: the Makefile has no target {target!r}"
        for name in re.findall(r"(?<![\w./])((?:scripts|packaging|\.ci)/[\w./-]+)", text):
            if not (ROOT / name).exists():
                yield f"{path.name}: there is no {name}"
    if not commits:
        yield "no workflow uses an action"


def main():
    bad = list(complaints())
    actionlint = shutil.which("actionlint")
    if actionlint:
        done = subprocess.run([actionlint, *WORKFLOWS], capture_output=True, text=True)
        bad += [done.stdout + done.stderr] if done.returncode else []
    print("\n".join(bad) or f"{len(WORKFLOWS)} workflows in order{'' if actionlint else '; without actionlint, which is not installed'}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
