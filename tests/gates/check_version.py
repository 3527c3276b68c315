#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""include/flash3/version.h is the source of the version: every other place that names flash3's version agrees with it, the newest section
of CHANGELOG.md is of it, and abi/ has its dump.

    python3 tests/gates/check_version.py --set 0.3.0    writes it into all of these places but the last two: how a release begins
"""
import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = "include/flash3/version.h"
# Ways to name the version: files and requirements (flash3-X.Y.Z, flash3_drop_in-X.Y.Z, flash3==X.Y.Z), what programs print
# (flash3 X.Y.Z), the tag that a build takes, and the oldest version that it finds.
NAMED = re.compile(r"\bflash3(?:[-_]drop[-_]in)?(?:-|==| )v?(?P<version>\d+\.\d+\.\d+)\b(?!\.abi)|"
                   r"\bGIT_TAG v(?P<tag>\d+\.\d+\.\d+)\b|"
                   r"\bfind_package\(flash3 (?P<least>\d+\.\d+)(?= REQUIRED\))")
SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".py", ".pyi", ".md", ".rst", ".txt", ".toml", ".cmake", ".in", ".sh", ".yml", ".ipynb", ".json"}
# What is not read: what tools made, and files that tell of what was, as results name the version that made them.
PAST = (".git/", ".venv/", "CHANGELOG.md", "abi/", "bench/results/", "build", "data/", "dist/")


def parts(version):
    return [int(part) for part in version.split(".")]


def version_of(header):
    """The version that the header's string says, and what its numbers say instead."""
    said = re.search(r'^#define FLASH3_VERSION_STRING "(\d+\.\d+\.\d+)"$', header, re.M)
    if not said:
        raise SystemExit(f"{HEADER} has no FLASH3_VERSION_STRING of three numbers")
    numbers = ".".join(re.search(rf"^#define FLASH3_VERSION_{name} (\d+)$", header, re.M)[1] for name in ("MAJOR", "MINOR", "PATCH"))
    return said[1], numbers


def with_version(header, version):
    text = re.sub(r'(FLASH3_VERSION_STRING) ".*"', rf'\1 "{version}"', header)
    for name, number in zip(("MAJOR", "MINOR", "PATCH"), parts(version)):
        text = re.sub(rf"(FLASH3_VERSION_{name}) \d+", rf"\1 {number}", text)
    return text


def wanted(match, version):
    """What stands at this place, and what should."""
    kind = match.lastgroup
    return match[kind], version.rpartition(".")[0] if kind == "least" else version


def renamed(text, version):
    """The text with this version in each place that names one."""
    def replace(match):
        old, new = wanted(match, version)
        return match[0].replace(old, new)
    return NAMED.sub(replace, text)


def other_versions(name, text, version):
    for number, line in enumerate(text.splitlines(), 1):
        for match in NAMED.finditer(line):
            old, new = wanted(match, version)
            if old != new:
                yield f"{name}:{number}: {match[0]!r}, but the version is {version}: {new}"


def changelog_complaints(text, version):
    sections = re.findall(r"^## \[(.+?)\](.*)$", text, re.M)
    released = [section for section in sections if section[0] != "Unreleased"]
    for name, rest in released:
        if not re.fullmatch(r"\d+\.\d+\.\d+", name) or not re.fullmatch(r" - \d{4}-\d\d-\d\d", rest):
            yield f"CHANGELOG.md: [{name}]{rest} is no version with a date, as in [1.2.3] - 2026-01-31"
            return
    names = [name for name, _ in released]
    if names != sorted(set(names), key=parts, reverse=True):
        yield f"CHANGELOG.md: the versions are not in order, the newest first: {', '.join(names)}"
    if not names or names[0] != version:
        yield f"CHANGELOG.md: the newest version is {names[0] if names else 'none'}, but {HEADER} says {version}"
    if any(name == "Unreleased" for name, _ in sections[1:]):
        yield "CHANGELOG.md: [Unreleased] is not the first section"


def files(root):
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(PAST) and (path.suffix in SUFFIXES or path.name in ("Makefile", "NOTICE")) and path.is_file():
            yield name, path


def complaints(root):
    version, numbers = version_of((root / HEADER).read_text(encoding="utf-8"))
    if numbers != version:
        yield f"{HEADER}: the string says {version}, the numbers {numbers}"
    places = 0
    for name, path in files(root):
        text = path.read_text(encoding="utf-8")
        places += len(NAMED.findall(text))
        yield from other_versions(name, text, version)
    if not places:
        yield "no place names the version: the gate looks in the wrong place"
    yield from changelog_complaints((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if not (root / f"abi/flash3-{version}.abi").is_file():
        yield f"abi/flash3-{version}.abi is not there: tests/gates/check_abi.py --write"


def set_version(root, version):
    header = root / HEADER
    header.write_text(with_version(header.read_text(encoding="utf-8"), version), encoding="utf-8")
    for name, path in files(root):
        text = path.read_text(encoding="utf-8")
        if (new := renamed(text, version)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"{name}: {version}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", metavar="X.Y.Z")
    version = parser.parse_args().set
    if version is not None:
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            return f"--set {version}: a version is three numbers, as in 1.2.3"
        set_version(ROOT, version)
        return 0
    bad = list(complaints(ROOT))
    print("\n".join(bad) or f"all places name {version_of((ROOT / HEADER).read_text(encoding='utf-8'))[0]}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
