#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which kernels of this build are those that were last verified on a GPU (`flash3 verify --record`), by hashes of their machine code.

CI has no GPU, so it cannot run them; it can tell that they have not changed. What is not verified is a warning (the test shows as
skipped), and an error where a release is made: HEAD has a tag vX.Y.Z, or FLASH3_RELEASE is set.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

from cuda_objects import log_of
from sources import ROOT

SKIPPED = 77

# Every part of a record, and the least counts that it needs.
PARTS = {"full": {}, "backward": {}, "ragged": {}, "ragged-backward": {}, "masks": {}, "masks-backward": {}, "quantize": {}, "decode": {},
         "accuracy": {}, "random": {"forward": 100_000, "backward": 50_000}, "repeat": {"repetitions": 1000}, "sanitizer": {}}
TOOLS = {"memcheck", "racecheck", "synccheck", "initcheck"}


def weaknesses(record):
    """Why the record, whatever its hashes, does not verify anything."""
    if record["backend"] != "hopper":
        return [f"it is of the {record['backend']} backend"]
    found = []
    for name, least in PARTS.items():
        part = record["parts"].get(name)
        if part is None:
            found.append(f"part {name} is missing")
            continue
        counts = {"passed": 1, **least}
        found += [f"part {name}: {part.get(count, 0):,} {count}, {wanted:,} needed" for count, wanted in counts.items()
                  if part.get(count, 0) < wanted]
        if part["failed"]:
            found.append(f"part {name}: {part['failed']} failed")
        if part["commit"].endswith("-dirty") or part["commit"] == "unknown":
            found.append(f"part {name} ran at commit {part['commit']}, which cannot be built again")
    if missing := TOOLS - set(record["parts"].get("sanitizer", {}).get("tools", TOOLS)):
        found.append(f"part sanitizer: without {', '.join(sorted(missing))}")
    return found


def differences(record, build):
    """Kernels of the build that the record does not verify: {what is the matter: [name, …]}."""
    then, now = record["kernels"], {kernel["name"]: kernel["hash"] for kernel in build["kernels"]}
    found = {
        "changed since": [name for name in now if name in then and now[name] != then[name]],
        "new since": [name for name in now if name not in then],
        "never launched by a case with checked results": [name for name in now if now[name] == then.get(name) and name in record["not_launched"]],
    }
    return {what: names for what, names in found.items() if names}


def made_on(record):
    """"NVIDIA H200, driver 580.1, 2026-11-23 (commit abc)"; of parts that differ, all."""
    parts = record["parts"].values()
    devices = sorted({f"{part['device']}, driver {part.get('driver', '?')}" for part in parts})
    dates = sorted({part["date"][:10] for part in parts})
    commits = sorted({part["commit"] for part in parts})
    return f"{'; '.join(devices)}, {' … '.join(dict.fromkeys((dates[0], dates[-1])))} (commit {', '.join(commits)})"


def compare(record, build):
    """(the report's lines, whether every kernel of the build is verified)."""
    if found := weaknesses(record):
        return ["the record is not complete, so no kernel counts as verified:", *(f"  {line}" for line in found)], False
    if record["compiler"] != build["compiler"]:
        return [f"the record is of nvcc {record['compiler']}, this build of nvcc {build['compiler']}: other machine code, nothing can be "
                f"compared"], False
    found = differences(record, build)
    not_verified = sum(map(len, found.values()))
    lines = [f"{len(build['kernels']) - not_verified} kernels as verified on {made_on(record)}"]
    for what, names in found.items():
        lines += [f"{len(names)} {what}:", *(f"  {name}" for name in names)]
    if gone := sorted(set(record["kernels"]) - {kernel["name"] for kernel in build["kernels"]}):
        lines.append(f"gone since: {', '.join(gone)}")
    return lines, not not_verified


def lost_kernels(build, logs):
    """Kernels that nvcc compiled and `flash3 info --machine-code` does not tell of, or the reverse."""
    compiled = {name for log in logs for name in re.findall(r"Compiling entry function '(\S+)'", log)}
    return sorted(compiled ^ {kernel["function"] for kernel in build["kernels"]})


def release_reason(environment, tags):
    """Why this counts as a release; None if it does not."""
    if environment.get("FLASH3_RELEASE", "0") not in ("", "0"):
        return "FLASH3_RELEASE is set"
    versions = [tag for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    return f"HEAD is {versions[0]}" if versions else None


def tags_of_head():
    """None in what is no git checkout."""
    try:
        git = subprocess.run(["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"], capture_output=True, text=True)
    except OSError:
        return []
    return git.stdout.split() if git.returncode == 0 else []


def load(path):
    """The record; None if there is none."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SystemExit(f"{path} is no record: {error}") from error
    if missing := [key for key in ("backend", "compiler", "kernels", "not_launched", "parts") if key not in record]:
        raise SystemExit(f"{path} is no record: no {missing[0]} in it")
    return record


def check_record(record, build, release):
    """(the report, the exit code)."""
    if not build["kernels"]:
        return ["a build without CUDA has no kernel to compare"], SKIPPED
    if record is None:
        lines, verified = ["there is no record: no kernel counts as verified"], False
    else:
        lines, verified = compare(record, build)
    if verified:
        return lines, 0
    how = "CONTRIBUTING.md, \"The record\", says how a record is made"
    if release:
        return [*lines, f"ERROR: {release}, and a release has verified kernels alone; {how}"], 1
    return [*lines, f"WARNING: a release could not be made of this; {how}"], SKIPPED


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flash3", required=True, help="the program of this build")
    parser.add_argument("--objects", type=pathlib.Path, help="file that lists the library's CUDA objects")
    parser.add_argument("--record", type=pathlib.Path, default=ROOT / "tests/verified/hopper.json")
    args = parser.parse_args()
    shown = subprocess.run([args.flash3, "info", "--machine-code", "--json"], capture_output=True, text=True)
    if shown.returncode:
        raise SystemExit(f"{args.flash3} info --machine-code: {shown.stderr}")
    build = json.loads(shown.stdout)
    objects = [pathlib.Path(line) for line in args.objects.read_text(encoding="utf-8").split()] if args.objects else []
    if lost := lost_kernels(build, map(log_of, objects)) if objects else []:
        raise SystemExit("\n".join(["of these kernels nvcc's log and the program do not both know:", *lost]))
    lines, code = check_record(load(args.record), build, release_reason(os.environ, tags_of_head()))
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
