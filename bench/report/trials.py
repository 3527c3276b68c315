#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds result files that no table is made of, such as those of trials, to bench/results/trials.zip, or lists what is in it. A file of the same name is replaced; the archive has the
same bytes whenever it holds the same files.

    python3 -m bench.report.trials [FILE...]
    unzip bench/results/trials.zip -d DIR      # to read them
"""
import argparse
import json
import pathlib
import zipfile

from bench import RESULTS
from bench.result_file import text_of

ARCHIVE = RESULTS / "trials.zip"


def load():
    """{name of a file: its text}"""
    with zipfile.ZipFile(ARCHIVE) as old:
        return {name: old.read(name).decode() for name in sorted(old.namelist())}


def write(texts):
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for name, text in sorted(texts.items()):
            about = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            about.compress_type = zipfile.ZIP_DEFLATED
            about.external_attr = 0o644 << 16
            out.writestr(about, text)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE", help="what a script wrote with --json")
    args = parser.parse_args(arguments)
    texts = load() if ARCHIVE.exists() else {}
    if args.files:
        texts |= {file.name: text_of(json.loads(file.read_text(encoding="utf-8"))) for file in args.files}
        write(texts)
    print("\n".join(sorted(texts)))


if __name__ == "__main__":
    main()
