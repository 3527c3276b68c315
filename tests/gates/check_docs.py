#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The documentation and the tree agree, in every .md file: links within the tree lead to a file and, with #, to a heading of it, those of
notebooks too;
files and names of the code in backticks exist; the C++ example of README.md and the C example of docs/cpp.md are the marked parts of the programs
that the tests compile."""
import collections
import functools
import json
import re
import sys
import textwrap
import urllib.parse

from sources import ROOT, SUFFIXES

sys.path.insert(0, str(ROOT))
from bench.report import trials  # noqa: E402

# The first block of a language in a page: the program that it is the marked part of, and the lines before that part.
EXAMPLES = (("README.md", "cpp", "examples/01_forward.cpp", "#include <flash3/flash3.hpp>\n\n"),
            ("docs/cpp.md", "c", "examples/02_forward_c.c", "#include <flash3/flash3.h>\n#include <stdlib.h>\n\n"))
# What a path in backticks may begin with, so that `flash3/flash3.h` and `cuda/sm90/device/tile.cuh` read as in an #include.
BASES = ("", "include", "src", "src/cuda", "src/cuda/sm90", "tools")
FILE = re.compile(r"[\w.*-]+(/[\w.*-]+)+/?")
# A name of C, C++, Python or CMake in backticks, alone or as it is used: `plan_forward`, `Traits::kTileN`, `flash3.attention(q, k, v)`,
# `.causal = true`, `-DFLASH3_HOPPER=OFF`. In a formula, a command or a phrase nothing is looked for.
IDENTIFIER = re.compile(r"(?:-D|\.)?([A-Za-z_]\w*(?:(?:::|\.)[A-Za-z_]\w*)*)(?:<.*>)?(?:\(.*\)|\[.*\]| ?\{.*\}| ?=(?!=).*)?")
# Names that are not this project's to have.
MATHEMATICS = re.compile(r"[a-z]+_(i|j|h|ij)")  # a quantity with its indices: `lse_i`, `ds_ij`
FOREIGN = {
    "snake_case", "PascalCase", "kCamel",  # how names are written
    "arch_prctl",  # Linux
    "CheckpointError", "mask_mod", "varlen_attn", "torch.nn.attention.bias.causal_lower_right",  # torch
    "LowerTriangularMask", "make_causal_from_bottomright", "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", "memory_efficient_attention_forward_requires_grad",  # xformers
    "diagonal_band_left_bound", "diagonal_band_right_bound", "sliding_window_length", "sink_token", "use_alibi_mask",  # cuDNN
    "reshape_and_cache_flash", "FLASHMLA", "SGLANG_USE_SGL_FA3_KERNEL",  # vLLM, SGLang
}
# These tell of what is gone, too.
HISTORY = {"CHANGELOG.md", "EXPERIMENTS.md"}
# The gate itself speaks of names that do not exist.
NOT_CODE = {"tests/gates/check_docs.py", "tests/gates/check_docs_rules.py"}
EXTENSIONS = re.compile(r"\.(h|hpp|cuh|c|cpp|cu|py|md|txt|json|sh|cmake|in|safetensors)$")


def markdown_files():
    skip = lambda name: name.startswith(("build", ".")) or name == "__pycache__"
    return sorted(path for path in ROOT.rglob("*.md") if not any(skip(part) for part in path.relative_to(ROOT).parts[:-1]))


def without_code_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def without_generated_blocks(text):
    """What scripts write between <!-- name:begin --> and <!-- name:end --> has gates of its own."""
    return re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", text, flags=re.S)


def anchors(text):
    """GitHub's names for the headings of a text, and what HTML in it names."""
    found = set(re.findall(r'<\w+[^>]* (?:id|name)="([^"]+)"', text))
    times = collections.Counter()
    for heading in re.findall(r"^#+ +(.+?)(?: +#+)?$", without_code_blocks(text), re.M):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{name}-{times[name]}" if times[name] else name)
        times[name] += 1
    return found


def links(text):
    """Where a text's links, pictures and references lead, in Markdown or in HTML."""
    yield from re.findall(r"\]\(<?([^)\s>]+)>?(?: +[\"'][^)]*)?\)", text)
    yield from re.findall(r"^ {0,3}\[[^\]\n]+\]: +<?([^\s>]+)", text, re.M)
    yield from re.findall(r'<\w+[^>]*? (?:href|src|srcset)="([^"]+)"', text)


def check_links(path, text):
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / urllib.parse.unquote(file)).resolve() if file else path
        if not target.exists() or target.is_relative_to(ROOT / "build"):
            yield f"link to {link}: there is no such file"
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target.read_text(encoding="utf-8"))):
            yield f"link to {link}: there is no such heading"


def notebook_texts():
    """(path, what its cells of text hold) of each notebook."""
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield path, "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def check_file_names(path, text):
    top_level = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith("build") and entry.name != "dist"}
    for name in re.findall(r"`((?:[^`\n]|\n(?!\n))+)`", text):
        if not FILE.fullmatch(name) or name.startswith(("build", "dist/")):
            continue  # a path of the build, or no path
        if name.split("/")[0] not in top_level | {"..", "."} and not EXTENSIONS.search(name):
            continue
        bases = [path.parent, *(ROOT / base for base in BASES)]
        if not any(list(base.glob(name)) if "*" in name else (base / name).exists() for base in bases):
            yield f"`{name}`: there is no such file"


def gates():
    """gate.NAME for each of tests/gates/CMakeLists.txt."""
    text = (ROOT / "tests/gates/CMakeLists.txt").read_text(encoding="utf-8")
    return {f"gate.{name}" for name in re.findall(r"flash3_add_gate\((\w+)", text)}


def check_identifiers(path, text, code, known=frozenset()):
    for span in re.findall(r"`((?:[^`\n]|\n(?!\n))+)`", text):
        name = match[1] if (match := IDENTIFIER.fullmatch(span)) else None
        if name is None or name in FOREIGN | known or MATHEMATICS.fullmatch(name):
            continue
        if EXTENSIONS.search(name):
            if name not in code.files and name not in code.text and not (path.parent / name).exists():
                yield f"`{span}`: there is no such file"
        elif not code.has(name):
            yield f"`{span}`: no code has this name"


def check_tiles(limits, kernels):
    """The tiles of kernels that a table of docs/limits.md is about are those of docs/kernels.csv, or said to be gone."""
    for name, m, n in re.findall(r"^\| ((?:backward |FP8 )?d \d+ [^|]*?(\d+)×(\d+)) \|", limits, re.M):
        if f",{m} × {n}," not in kernels:
            yield f"a table is about {name}, and no kernel has such a tile: write \"(gone)\" after it"


def check_example(language, page, source, front):
    """front: what the block holds before the part of the source between its marks."""
    block = re.search(rf"^```{language}\n(.*?)^```", page, re.M | re.S)
    marked = re.search(r"^ *(?://|/\*) README: begin(?: \*/)?\n(.*?)^ *(?://|/\*) README: end(?: \*/)?$", source, re.M | re.S)
    if not block or not marked:
        yield f"there must be a block of {language}, and the marks around it in its program"
    elif block[1] != front + textwrap.dedent(marked[1]):
        yield f"the example in {language} is not the marked part of the program"


def check_examples():
    for page, language, program, front in EXAMPLES:
        for complaint in check_example(language, *((ROOT / name).read_text(encoding="utf-8") for name in (page, program)), front):
            yield f"{page}: {complaint}: {program}"


def main():
    bad, files = list(check_examples()), markdown_files()
    bad += [f"{path.relative_to(ROOT)}: {complaint}" for path, text in notebook_texts() for complaint in check_links(path, text)]
    code, known = project_code(NOT_CODE), gates() | {path.name for path in files} | set(trials.load())
    read = lambda name: (ROOT / name).read_text(encoding="utf-8")
    bad += [f"docs/limits.md: {complaint}" for complaint in check_tiles(read("docs/limits.md"), read("docs/kernels.csv"))]
    for path in files:
        text = without_code_blocks(path.read_text(encoding="utf-8"))
        complaints = [*check_links(path, text), *check_file_names(path, text)]
        if path.name not in HISTORY:
            complaints += check_identifiers(path, without_generated_blocks(text), code, known)
        for complaint in complaints:
            bad.append(f"{path.relative_to(ROOT)}: {complaint}")
    print("\n".join(bad) or f"{len(files)} files in order")
    return bool(bad)


# The names in the project's own code, comments left out: what a document may speak of.

FOLDERS = (".ci", "bench", "bindings", "cmake", "data", "examples", "fuzz", "include", "scripts", "src", "tests", "tools")
HASHES = {".py", ".cmake", ".sh", ".toml", ".in"}
HASH_FILES = {"CMakeLists.txt", "CMakePresets.json", "Makefile", "run"}
PACKAGES = "bindings/python"
NAME = re.compile(r"[A-Za-z_]\w*")
STRING = r'"(?:\\.|[^"\\\n])*"'


def without_comments(text, suffix):
    if suffix in SUFFIXES:  # // and /* */ are comments, { } are scopes
        # A string is matched first, so that // in it begins no comment.
        return re.sub(rf"({STRING})|//[^\n]*|/\*.*?\*/", lambda match: match[1] or " ", text, flags=re.S)
    return re.sub(r"(^|\s)#[^\n]*", r"\1", text)


def body(text, begin):
    """What stands between the brace just before `begin` and its partner."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin:begin + brace.start()]
    return text[begin:]


class Code:
    """`files` maps a path to its contents."""

    def __init__(self, files):
        self.files = {path.rsplit("/", 1)[-1] for path in files}
        self.texts = {path: without_comments(text, path[path.rfind("."):] if "." in path.rsplit("/", 1)[-1] else "")
                      for path, text in files.items()}
        self.text = "\n".join(self.texts.values())
        self.names = set(NAME.findall(self.text))
        scoped = [text for path, text in self.texts.items() if path.endswith(tuple(SUFFIXES))]
        self.scoped = "\n".join(re.sub(STRING, '""', text) for text in scoped)

    @functools.cached_property
    def python_modules(self):
        """flash3.integrations.transformers → its text; a package's is its __init__.py's."""
        inside = ((path[len(PACKAGES) + 1:-len(".py")], text) for path, text in self.texts.items()
                  if path.startswith(PACKAGES + "/") and path.endswith(".py"))
        return {path.removesuffix("/__init__").replace("/", "."): text for path, text in inside}

    @functools.lru_cache(maxsize=None)
    def members(self, scope):
        """The names inside of this namespace or type, or of what it is an alias of; None if there is no such scope."""
        begins = rf"\b(?:namespace|struct|class|enum|union)\s+(?:class\s+)?(?:\w+::)*{scope}\b[^;{{}}()]*\{{"
        found = [set(NAME.findall(body(self.scoped, begin.end()))) for begin in re.finditer(begins, self.scoped)]
        for target in re.findall(rf"\busing\s+{scope}\s*=\s*(?:\w+::)*(\w+)", self.scoped):
            found.append((self.members(target) if target != scope else None) or set())
        return set().union(*found) if found else None

    def has_python(self, name):
        """flash3.bench, flash3.attention, flash3.arrays.E4M3."""
        module, _, last = name.rpartition(".")
        return name in self.python_modules or last in NAME.findall(self.python_modules.get(module, ""))

    def has(self, name):
        """A name may be scoped: `Band::make` must be a member, or stand so in the code; `tiles.wanted` is any two names."""
        parts = NAME.findall(name)
        if parts[0] in self.python_modules and "." in name:
            return self.has_python(name)
        if not self.names.issuperset(parts):
            return False
        if "::" not in name or re.search(rf"(?<![\w:]){name}\b", self.scoped):
            return True
        return all(member in (self.members(scope) or ()) for scope, member in zip(parts, parts[1:]))


def project_code(leave_out=()):
    files = {}
    for path in [*(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")), *ROOT.iterdir()]:
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and (path.suffix in SUFFIXES | HASHES or path.name in HASH_FILES) and name not in leave_out:
            files[name] = path.read_text(encoding="utf-8")
    return Code(files)


if __name__ == "__main__":
    sys.exit(main())
