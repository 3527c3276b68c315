# SPDX-License-Identifier: Apache-2.0
"""What the GPU kernels have passed, in docs/accuracy.md, from the record that `flash3 verify --record` wrote (CONTRIBUTING.md says what it is)."""
import json

from bench import ROOT

RECORD = "tests/verified/hopper.json"
TABLES = ("full", "backward", "ragged", "ragged-backward", "masks", "masks-backward", "quantize", "decode")


def verified_text(record):
    """A paragraph; parts that the record does not have are left out."""
    parts = record["parts"]
    where = ", ".join(sorted({part["device"].partition(",")[0] for part in parts.values()}))
    when = ", ".join(sorted({f"{part['date'][:10]} at {part['commit']}" for part in parts.values()}))
    passed = [f"{sum(parts[name]['passed'] for name in TABLES if name in parts):,} cases of the tables"]
    if "random" in parts:
        passed.append(f"{parts['random']['forward']:,} random forward and {parts['random']['backward']:,} random backward problems")
    if "repeat" in parts:
        passed.append(f"{parts['repeat']['passed']} cases {parts['repeat']['repetitions']:,} times over with the same bits")
    if "sanitizer" in parts:
        passed.append(f"{parts['sanitizer']['passed']} cases under compute-sanitizer's memcheck, racecheck, synccheck and initcheck")
    listed = ", ".join(passed[:-1]) + (" and " if len(passed) > 1 else "") + passed[-1]
    failed = sum(part["failed"] for part in parts.values())
    return (f"The {len(record['kernels'])} GPU kernels whose machine code [{RECORD}](../{RECORD}) has by its hash have passed\n{listed},\nand failed "
            f"{failed or 'none'} ({where}, {when}). `gate.kernels_verified` lists the kernels that have changed since.")


def load():
    return json.loads((ROOT / RECORD).read_text(encoding="utf-8"))
