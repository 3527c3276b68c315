#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Programs built with an earlier flash3.h go on working with this one: abidiff against the dumps in abi/ (docs/md).

    python3 tests/gates/check_abi.py --write      writes abi/flash3-VERSION.abi: part of a release
    python3 tests/gates/check_abi.py --release    that dump is there, and has all that the headers have
"""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree


SKIPPED = 77


def version():
    return re.search(r'FLASH3_VERSION_STRING "(.+)"', (ROOT / "include/flash3/version.h").read_text(encoding="utf-8"))[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="cc")
    parser.add_argument("--abidw", default="abidw")
    parser.add_argument("--abidiff", default="abidiff")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--release", action="store_true")
    args = parser.parse_args()
    own = DUMPS / f"flash3-{version()}.abi"

    new = dump(args.compiler, args.abidw)
    if args.write:
        own.write_text(new, encoding="utf-8")
        print(f"wrote {own.relative_to(ROOT)}")
        return 0
    if args.release and not own.is_file():
        return f"{own.relative_to(ROOT)} is not there: tests/gates/check_abi.py --write"
    dumps = sorted(DUMPS.glob("flash3-*.abi"))
    if not dumps:
        return f"no dump in {DUMPS}: the gate looks in the wrong place"
    failed = False
    for path in dumps:
        old = path.read_text(encoding="utf-8")
        if architecture(old) != architecture(new):
            print(f"{path.name} is of {architecture(old)}, this machine is {architecture(new)}")
            return SKIPPED
        changes = incompatible(old, new, args.abidiff)
        if args.release and path == own and (lacking := incompatible(new, old, args.abidiff)):
            print(f"{path.name} lacks what the headers have (tests/gates/check_abi.py --write):\n{lacking}")
            failed = True
        print(f"{path.name}: programs built with it would break:\n{changes}" if changes else f"{path.name}: compatible")
        failed = failed or bool(changes)
    return failed


# The C interface as the binaries of its users see it: what abidw reads in the debug information of
# the C headers.
#
# A C file made from the headers defines each function that they declare and points to each of their types and constants. So the
# dump is that of the headers alone, whatever compiler builds the library, with CUDA or without. That the library has these
# functions and no others is for gate.exported_symbols, and that it defines them as declared for its compiler.

ROOT = pathlib.Path(__file__).resolve().parents[2]
DUMPS = ROOT / "abi"
FUNCTION = re.compile(r"^FLASH3_API\b[^;]*?\b\w+\([^;]*?\);", re.M)
TYPE = re.compile(r"^typedef (?:enum |struct |\w+\*? \(\*)(\w+)", re.M)  # the last: of a function
CONSTANT = re.compile(r"^#define (FLASH3_\w+) +[^:\s].*$", re.M)
GROWING = re.compile(r"flash3_\w+_params")  # their struct_size tells which fields a caller has


HEADERS = ("types.h", "flash3.h", "quantize.h", "merge.h", "interrupt.h", "plan.h", "schedule.h", "mask.h", "dropout.h", "limits.h")


def c_source(header):
    functions = [declaration.removesuffix(";") + " { __builtin_trap(); }" for declaration in FUNCTION.findall(header)]
    types = [f"FLASH3_API {name}* abi_type_{name};" for name in TYPE.findall(header)]
    constants = [f"  abi_constant_{name} = {name}," for name in CONSTANT.findall(header)]
    if len(functions) != header.count("\nFLASH3_API ") or len(types) != header.count("\ntypedef ") or not constants:
        raise SystemExit("a declaration that tests/gates/check_abi.py cannot read")
    return "\n".join([*(f"#include <flash3/{name}>" for name in HEADERS), *functions, *types, "enum abi_constants {", *constants,
                      "};", "FLASH3_API enum abi_constants* abi_constants;", ""])


def run(*command, cwd=None):
    try:
        done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"cannot run {command[0]}: {error}; scripts/setup.sh gates brings it") from error
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr or done.stdout}")
    return done.stdout


def dump(compiler, abidw="abidw", include=ROOT / "include"):
    """The XML for the headers in `include`/flash3."""
    header = "".join((pathlib.Path(include) / "flash3" / name).read_text(encoding="utf-8") for name in HEADERS)
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "abi.c").write_text(c_source(header), encoding="utf-8")
        run(compiler, "-std=c11", "-gdwarf-4", "-O0", "-w", "-shared", "-fPIC", "-fvisibility=hidden",
            "-DFLASH3_BUILDING_SHARED", f"-I{include}", "abi.c", "-o", "abi.so", cwd=folder)
        return run(abidw, "--no-show-locs", "--no-corpus-path", "--no-comp-dir-path", "--no-elf-needed",
                   "--no-parameter-names", "--type-id-style", "hash", "abi.so", cwd=folder)


def architecture(xml):
    return ElementTree.fromstring(xml).get("architecture")


def as_known_to(old, new):
    """The XML `new` without what the header of `old` lacks and docs/md lets come later: fields after the end of params,
    and enumerators. What is left must be `old`, but for new functions and types."""
    old, new = ElementTree.fromstring(old), ElementTree.fromstring(new)
    sizes = {struct.get("name"): int(struct.get("size-in-bits")) for struct in old.iter("class-decl")
             if GROWING.fullmatch(struct.get("name"))}
    for struct in new.iter("class-decl"):
        size = sizes.get(struct.get("name"))
        if size is not None and size < int(struct.get("size-in-bits")):
            struct.set("size-in-bits", str(size))
            for member in struct.findall("data-member"):
                if int(member.get("layout-offset-in-bits")) >= size:
                    struct.remove(member)
    known = {enumerator.get("name") for enumerator in old.iter("enumerator")}
    for enum in new.iter("enum-decl"):
        for enumerator in enum.findall("enumerator"):
            if enumerator.get("name") not in known:
                enum.remove(enumerator)
    return ElementTree.tostring(new, encoding="unicode")


def incompatible(old, new, abidiff="abidiff"):
    """What callers of `old` would notice if the library became `new`, in abidiff's words; "" if nothing."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = pathlib.Path(folder, "before.abi"), pathlib.Path(folder, "after.abi")
        before.write_text(old, encoding="utf-8")
        after.write_text(as_known_to(old, new), encoding="utf-8")
        # Harmless to a binary are other names of fields too; they would not compile.
        command = [abidiff, "--no-added-syms", "--harmless", "--leaf-changes-only", str(before), str(after)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise SystemExit(f"cannot run {abidiff}: {error}; scripts/setup.sh gates brings it") from error
        if done.returncode & 3:  # it or its arguments failed; 4 and 8 are differences
            raise SystemExit(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
