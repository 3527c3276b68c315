# SPDX-License-Identifier: Apache-2.0
"""The fields of each call, read from the C headers.

A field is read as its C type says; an int32_t whose comment begins with "1:" is a flag, and one whose comment begins with an enum's name has
its values. The comment of a tensor that a header gains is its description. It begins with "Written: " where the call writes it, then come
its shapes (SHAPES of calls.py), its dtype and a colon: "[heads_q] or [batch, heads_q] float32: what it means." The dtype may also be
"float16, bfloat16 or float32", or that of another: "float32 or the dtype of bias". Four of its sentences are rules: "Not with tree_mask, qv."
names fields that may not be given beside it, "On the CPU alone." says that no GPU kernel takes it yet, "Any strides." that its last dimension
need not be contiguous, and "The shape of bias, which must be given." names a field whose shape it has. What is called dbias then is the
gradient of bias, which has none otherwise.
"""
import pathlib
import re
from typing import NamedTuple

import calls

ROOT = pathlib.Path(__file__).resolve().parents[2]

KINDS = {"flash3_tensor": "tensor", "float": "number", "int32_t": "int32", "int64_t": "int64", "uint64_t": "uint64", "size_t": "size",
         "void*": "pointer", "const flash3_schedule*": "schedule", "const flash3_mask*": "mask"}


class Field(NamedTuple):
    name: str
    type: str
    kind: str  # of KINDS, or flag, enumeration
    enum: str  # of an enumeration
    written: bool
    dtype: str = ""  # of a tensor that has one alone
    shapes: str = ""  # of a tensor that its comment describes, as calls.SHAPES has them
    without: str = ""  # the fields that it does not go with
    like: str = ""  # the field whose shape it has
    any_strides: bool = False  # that of the last dimension too
    cpu_alone: bool = False  # no GPU kernel takes it
    about: str = ""  # what its comment says after its shapes and dtype
    dtypes: str = ""  # which it may have, in words

    @property
    def is_option(self):
        return self.kind != "tensor" and self.name not in calls.CONTEXT.split()


def header_text():
    folder = ROOT / "include/flash3"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in calls.HEADERS if (folder / name).exists())


def enums_of(text):
    """{enum: [(name, value), …]}"""
    found = {}
    for name, body in re.findall(r"typedef enum (\w+)[^{]*\{(.*?)\}\s*\w+;", text, re.S):
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
        found[name] = [(entry, int(value)) for entry, value in re.findall(r"(\w+)\s*=\s*(-?\d+)", body)]
    return found


def words_of(enum, values):
    """What Python calls an enum's values, by number."""
    if enum in calls.WORDS:
        return calls.WORDS[enum]
    if [value for _, value in values] != list(range(len(values))):
        raise SystemExit(f"the values of {enum} are not 0, 1 …: give its words in calls.py")
    parts = [name.split("_") for name, _ in values]
    common = next(i for i, column in enumerate(zip(*parts)) if len(set(column)) > 1)
    return tuple("_".join(part[common:]).lower() for part in parts)


def declarations(body):
    """(type, name, comment) of each field of a struct."""
    found, before = [], ""
    for comment, declaration in re.findall(r"/\*(.*?)\*/|([^;/]+);", body, re.S):
        if declaration:
            match = re.fullmatch(r"\s*((?:const )?\w+\s*\*?)\s*(\w+)\s*", declaration)
            if not match:
                raise SystemExit(f"a field that call_fields.py cannot read: {declaration.strip()}")
            found.append([re.sub(r"\s+\*", "*", match[1].strip()), match[2], before])
            before = ""
        elif comment.startswith("*<"):
            found[-1][2] = comment[2:].strip()
        else:
            before = comment.lstrip("*").strip()
    return found


_FLOATS = "float16, bfloat16 or float32"
_DESCRIPTION = re.compile(rf"(Written: )?(\[[^\]]*\](?: or \[[^\]]*\])*) ({_FLOATS}|float32 or the dtype of \w+|\w+): (.*)")
_NDIM = {"heads": {1}, "batch_heads": {2}, "rows": {2, 3}, "hqk": {4}, "hd": {2}, "state": {1}}  # packed rows have one less


def described(comment):
    """What the comment of a tensor says, as a Field's members; {}: it is no description."""
    match = _DESCRIPTION.fullmatch(" ".join(re.sub(r"\n\s*\*", " ", comment).split()))
    if not match:
        return {}
    shapes = [calls.SHAPES.get(shape, "") for shape in re.findall(r"\[[^\]]*\]", match[2])]
    if not all(shapes):
        return {}
    ndim = [n for shape in shapes for n in _NDIM[shape.split()[0]]]
    if len(ndim) > len(set(ndim)):  # which shape a tensor has would not be known
        return {}
    about = match[4]
    without, like = re.search(r"(?:^|\. )Not with ([\w, ]+)\.", about), re.search(r"The shape of (\w+), which must be given\.", about)
    of = match[3].partition("the dtype of ")[2]
    if of and (not like or like[1] != of):
        return {}
    return {"written": bool(match[1]), "shapes": " ".join(shapes), "dtype": "" if of or match[3] == _FLOATS else match[3], "about": about,
            "without": without[1].replace(",", "") if without else "", "cpu_alone": "On the CPU alone." in about,
            "like": like[1] if like else "", "any_strides": "Any strides." in about, "dtypes": match[3]}


def fields_of(text, enums):
    """{call: [Field, …]}"""
    structs = {call: declarations(re.search(rf"typedef struct flash3_{call}_params \{{(.*?)\}} flash3_{call}_params;", text, re.S)[1])
               for call in calls.CALLS}
    comments = {}  # what one struct says of a name holds for the others, which refer to it
    for struct in structs.values():
        for _, name, comment in struct:
            if re.match(r"1:|flash3_\w+\b", comment) or described(comment):
                comments.setdefault(name, comment)
    listed = {call: [name for _, name, _ in struct].index(calls.LISTED[call]) for call, struct in structs.items()}

    def field(call, place, type, name):
        if type not in KINDS:
            raise SystemExit(f"flash3_{call}_params.{name} has the type {type}, which call_fields.py does not know")
        kind, enum = KINDS[type], re.match(r"flash3_\w+", comments.get(name, ""))
        if kind == "int32" and comments.get(name, "").startswith("1:"):
            kind = "flag"
        enum = enum[0] if kind == "int32" and enum and enum[0] in enums else ""
        if kind == "tensor" and place > listed[call]:
            if not (about := described(comments.get(name, ""))):
                raise SystemExit(f"flash3_{call}_params.{name} is a tensor whose comment does not begin with its shapes, of which there are "
                                 f"{', '.join(calls.SHAPES)}, its dtype and a colon, as in '[heads_q] float32: '")
            return Field(name, type, kind, "", **about)
        dtype = next((dtype for dtype, names in calls.DTYPES.items() if name in names.split()), "")
        return Field(name, type, "enumeration" if enum else kind, enum, name in calls.WRITTEN[call].split(), dtype)
    return {call: [field(call, place, type, name) for place, (type, name, _) in enumerate(struct)] for call, struct in structs.items()}


def check_rules(headers):
    """What a tensor does not go with is a field, and what its shape is of."""
    for call in calls.CALLS:
        for f in headers.added(call):
            if f.like and not headers.field(call, f.like):
                raise SystemExit(f"flash3_{call}_params.{f.name} has the shape of {f.like}, which is no field of it")
            for other in f.without.split():
                if not headers.field("forward", other):
                    raise SystemExit(f"flash3_{call}_params.{f.name} does not go with {other}, which is no field of flash3_forward_params")


class Headers:
    def __init__(self, text=None):
        text = header_text() if text is None else text
        enums = enums_of(text)
        self.fields = fields_of(text, enums)
        used = {f.enum for fields in self.fields.values() for f in fields if f.enum}
        self.values = {enum: [name for name, _ in enums[enum]] for enum in used}
        self.words = {enum: words_of(enum, enums[enum]) for enum in sorted(used)}
        check_rules(self)

    def field(self, call, name):
        return next((f for f in self.fields[call] if f.name == name), None)

    def added(self, call):
        """The fields after those that calls.py lists."""
        names = [f.name for f in self.fields[call]]
        return self.fields[call][names.index(calls.LISTED[call]) + 1:]

    def added_tensors(self, call):
        return [f for f in self.added(call) if f.kind == "tensor"]

    def gradients(self):
        """{tensor: its gradient}, of those that the headers have gained."""
        return {f.like: f.name for f in self.added_tensors("backward") if f.written and f.like and f.name == f"d{f.like}"}

    def expanded(self, call, names, results, context=False):
        """A list of calls.py, with what the headers have gained since and the list neither places nor leaves out itself; results: tensors
        that the call writes too; context: what is no option too."""
        words = names.split()
        listed = {word.removeprefix("-") for word in words}
        for name in words:
            if name != "…":
                if not name.startswith("-"):
                    yield name
                continue
            yield from (f.name for f in self.added(call) if f.name not in listed and (results or not f.written) and
                        (context or f.name not in calls.CONTEXT.split()))
