#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No file in src/, include/ or bindings/ is longer than a reader takes in: 450 lines."""
import sys

from sources import ROOT, sources

LIMIT = 450


def main():
    files = sources("src", "include", "bindings")
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    too_long = [f"{path.relative_to(ROOT)}: {n} lines, {LIMIT} allowed" for path, n in lengths.items() if n > LIMIT]
    print("\n".join(too_long) or f"{len(files)} files, the longest has {max(lengths.values())} lines")
    return bool(too_long)


if __name__ == "__main__":
    sys.exit(main())
