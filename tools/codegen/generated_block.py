# SPDX-License-Identifier: Apache-2.0
"""Parts of hand-written Markdown files that a script writes, between <!-- name:begin --> and <!-- name:end -->."""
import difflib
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def replace(text, name, content):
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"there must be one {begin} and one {end}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n\n{content.strip()}\n\n{end}{rest.split(end)[1]}"


def update(file, name, content, check):
    """Writes the block, or with check=True compares it. Returns an exit status."""
    path = ROOT / file
    old = path.read_text(encoding="utf-8")
    new = replace(old, name, content)
    if old == new:
        print(f"{file}: the block '{name}' is up to date")
        return 0
    if not check:
        path.write_text(new, encoding="utf-8")
        print(f"{file}: wrote the block '{name}'")
        return 0
    print("\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), file, "generated", "", "", 0, "")))
    return 1
