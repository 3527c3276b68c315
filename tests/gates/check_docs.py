#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The documentation and the tree agree, in every .md file: relative links lead to a file and, with #, to a heading of it;
files named in backticks exist; README.md's C++ example is the marked part of examples/01_forward.cpp."""
import re
import sys

from sources import ROOT

EXAMPLE = "examples/01_forward.cpp"
# What a path in backticks may begin with, so that `flash3/flash3.h` and `hopper/device/tma.cuh` read as in an #include.
BASES = ("", "include", "src", "src/hopper", "tools")
FILE = re.compile(r"[\w.*-]+(/[\w.*-]+)+/?")
EXTENSIONS = re.compile(r"\.(h|hpp|cuh|c|cpp|cu|py|md|txt|json|sh|cmake|in|map|safetensors)$")


def markdown_files():
    skip = lambda name: name.startswith(("build", ".")) or name == "__pycache__"
    return sorted(path for path in ROOT.rglob("*.md") if not any(skip(part) for part in path.relative_to(ROOT).parts[:-1]))


def without_code_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(path):
    """GitHub's names for the headings of a file."""
    headings = re.findall(r"^#+ +(.+)$", without_code_blocks(path.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_links(path, text):
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            yield f"link to {link}: there is no such file"
        elif anchor and anchor not in anchors(target):
            yield f"link to {link}: there is no such heading"


def check_file_names(path, text):
    top_level = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith("build")}
    for name in re.findall(r"`([^`\n]+)`", text):
        if not FILE.fullmatch(name) or name.startswith("build"):
            continue  # a path of the build, or no path
        if name.split("/")[0] not in top_level | {"..", "."} and not EXTENSIONS.search(name):
            continue
        bases = [path.parent, *(ROOT / base for base in BASES)]
        if not any(list(base.glob(name)) if "*" in name else (base / name).exists() for base in bases):
            yield f"`{name}`: there is no such file"


def check_example():
    block = re.search(r"```cpp\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    source = (ROOT / EXAMPLE).read_text(encoding="utf-8")
    marked = re.search(r"^// README: begin\n(.*?)^// README: end$", source, re.M | re.S)
    if not block or not marked:
        yield "README.md must hold a block of cpp, and " + EXAMPLE + " the marks around it"
    elif block[1] != "#include <flash3/flash3.hpp>\n\n" + marked[1]:
        yield f"README.md: its C++ example is not the marked part of {EXAMPLE}, behind the #include"


def main():
    bad, files = list(check_example()), markdown_files()
    for path in files:
        text = without_code_blocks(path.read_text(encoding="utf-8"))
        for complaint in [*check_links(path, text), *check_file_names(path, text)]:
            bad.append(f"{path.relative_to(ROOT)}: {complaint}")
    print("\n".join(bad) or f"{len(files)} files in order")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
