#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds inputs to the corpus of a fuzz target: fuzz/corpus/<target>.zip, which CMake unpacks into the build folder.

    fuzz/pack.py TARGET PATH...           adds files, and those in folders, to what is there
    fuzz/pack.py --replace TARGET PATH... they are all that there is, as after libFuzzer's -merge=1

An archive has the same bytes whenever it has the same inputs; each is named after the hash of its bytes unless it has a name that
says something.
"""
import argparse
import hashlib
import pathlib
import re
import zipfile

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus"


def inputs_of(paths):
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            data = file.read_bytes()
            is_hash = re.fullmatch(r"[0-9a-f]{40}|(crash|leak|oom|timeout)-.*|.*-(crash|leak|oom|timeout)-.*", file.name)
            yield (hashlib.sha1(data, usedforsecurity=False).hexdigest() if is_hash else file.name), data


def packed(archive, inputs):
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for name, data in sorted(inputs.items()):
            about = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            about.compress_type = zipfile.ZIP_DEFLATED
            about.external_attr = 0o644 << 16
            out.writestr(about, data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("target")
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    archive = CORPUS / f"{args.target}.zip"
    known = {}
    if archive.exists() and not args.replace:
        with zipfile.ZipFile(archive) as old:
            known = {name: old.read(name) for name in old.namelist()}
    known.update(inputs_of(args.paths))
    packed(archive, known)
    print(f"{archive.name}: {len(known)} inputs, {archive.stat().st_size} bytes")


if __name__ == "__main__":
    main()
