#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shared libraries to link with in place of this system's glibc, libstdc++ and libgcc: the symbols that manylinux_2_28 promises, in
the newest versions that it promises, and no code. What is linked with these runs on older systems than the one that links."""
import argparse
import collections
import pathlib
import re
import subprocess

# PEP 600: glibc 2.28, and the libstdc++ and libgcc of GCC 8. auditwheel's policy has the same numbers.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = ("ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6")
LINE = re.compile(r"^ *\d+: [0-9a-f]+ +(\w+) (\w+) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +(?!UND)\w+ ([\w.$]+)@@?([A-Z]+)_([\d.]+)$")
# Where a symbol of each kind lies, and what the assembler calls it.
KINDS = {"FUNC": (".text", "function"), "IFUNC": (".text", "function"), "OBJECT": (".data", "object"),
         "TLS": ('.tdata,"awT",@progbits', "tls_object")}


def promised(readelf, library):
    """Each symbol of a library: {name: (version, its kind, size)}; the newest version of those that are promised."""
    text = subprocess.run([readelf, "--wide", "--dyn-syms", library], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in text.splitlines():
        match = LINE.match(line)
        if not match or match[2] not in KINDS:
            continue
        size, kind, name, family, number = match.groups()
        numbers = tuple(int(part) for part in number.split("."))
        if family in NEWEST and numbers <= NEWEST[family]:
            found[name] = max(found.get(name, ((),)), (numbers, f"{family}_{number}", kind, int(size, 0)))
    if not found:
        raise SystemExit(f"{library}: {readelf} shows no symbol of {NEWEST}")
    return {name: entry[1:] for name, entry in found.items()}


def write_stub(compiler, folder, name, symbols):
    assembly, versions = ['.section .note.GNU-stack,"",@progbits'], collections.defaultdict(list)
    for symbol, (version, kind, size) in sorted(symbols.items()):
        versions[version].append(symbol)
        section, type_ = KINDS[kind]
        size = 1 if type_ == "function" else max(size, 1)
        assembly.append(f".section {section}\n.globl {symbol}\n.type {symbol}, @{type_}\n.size {symbol}, {size}\n{symbol}: .zero {size}")
    source, script = folder / f"{name}.s", folder / f"{name}.map"
    source.write_text("\n".join(assembly) + "\n", encoding="ascii")
    script.write_text("".join(f"{version} {{ {'; '.join(names)}; }};\n" for version, names in sorted(versions.items())), encoding="ascii")
    subprocess.run([compiler, "-shared", "-nostdlib", "-o", folder / name, source, f"-Wl,-soname,{name}",
                    f"-Wl,--version-script,{script}"], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--readelf", default="readelf")
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        path = subprocess.run([args.compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        write_stub(args.compiler, args.folder, name, promised(args.readelf, path))


if __name__ == "__main__":
    main()
