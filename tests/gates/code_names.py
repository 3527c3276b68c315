# SPDX-License-Identifier: Apache-2.0
"""The names in the project's own code, comments left out: what a document may speak of."""
import functools
import re

from sources import ROOT, SUFFIXES

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
