#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what repeats the fields of a call, from the C headers and the table in calls.py:

    src/core/fields.hpp                  each params struct as a table of fields: names, kinds, offsets
    include/flash3/calls.hpp             flash3.hpp's structs of arguments
    bindings/torch/operators.hpp         the schemas of torch's operators, and which argument goes to which field
    bindings/tvm_ffi/signatures.hpp      the same of TVM-FFI's functions
    bindings/python/flash3/_fields.py    the structs for ctypes, and what Python's functions take

--check compares instead, and fails where a file is stale (gate.call_fields). A field is read as its C type says; an int32_t whose comment
begins with "1:" is a flag, and one whose comment begins with an enum's name has its values.
"""
import argparse
import difflib
import pathlib
import re
import sys
from typing import NamedTuple

import calls

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTICE = "Written by tools/codegen/call_fields.py from the C headers and tools/codegen/calls.py; not to be edited."

KINDS = {"flash3_tensor": "tensor", "float": "number", "int32_t": "int32", "int64_t": "int64", "uint64_t": "uint64", "size_t": "size",
         "void*": "pointer", "const flash3_schedule*": "schedule", "const flash3_mask*": "mask"}


class Field(NamedTuple):
    name: str
    type: str
    kind: str  # of KINDS, or flag, enumeration
    enum: str  # of an enumeration
    written: bool
    dtype: str = ""  # of a tensor that has one alone
    shapes: str = ""  # of a tensor that calls.py describes

    @property
    def is_option(self):
        return self.kind != "tensor" and self.name not in calls.CONTEXT.split()


# ---- the headers ----

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


def fields_of(text, enums):
    """{call: [Field, …]}"""
    structs = {call: declarations(re.search(rf"typedef struct flash3_{call}_params \{{(.*?)\}} flash3_{call}_params;", text, re.S)[1])
               for call in calls.CALLS}
    comments = {}  # what one struct says of a name holds for the others, which refer to it
    for struct in structs.values():
        for _, name, comment in struct:
            if re.match(r"1:|flash3_\w+\b", comment):
                comments.setdefault(name, comment)

    def field(call, type, name):
        if type not in KINDS:
            raise SystemExit(f"flash3_{call}_params.{name} has the type {type}, which call_fields.py does not know")
        kind, enum = KINDS[type], re.match(r"flash3_\w+", comments.get(name, ""))
        if kind == "int32" and comments.get(name, "").startswith("1:"):
            kind = "flag"
        enum = enum[0] if kind == "int32" and enum and enum[0] in enums else ""
        if tensor := calls.ADDED_TENSORS[call].get(name):
            return Field(name, type, kind, "", tensor.written, tensor.dtype, tensor.shapes)
        dtype = next((dtype for dtype, names in calls.DTYPES.items() if name in names.split()), "")
        return Field(name, type, "enumeration" if enum else kind, enum, name in calls.WRITTEN[call].split(), dtype)
    return {call: [field(call, type, name) for type, name, _ in struct] for call, struct in structs.items()}


def check_added_tensors(headers):
    """calls.py describes the tensors that the headers have gained, and no others."""
    for call in calls.CALLS:
        added = {f.name: f for f in headers.added(call) if f.kind == "tensor"}
        for name in sorted(added.keys() ^ calls.ADDED_TENSORS[call].keys()):
            raise SystemExit(f"flash3_{call}_params.{name} is " + ("a tensor that calls.ADDED_TENSORS lacks" if name in added else
                                                                 "no tensor after those of calls.LISTED, but calls.ADDED_TENSORS has it"))
        for f in added.values():
            if not f.shapes.split() or set(f.shapes.split()) - set(calls.SHAPES):
                raise SystemExit(f"calls.ADDED_TENSORS gives flash3_{call}_params.{f.name} the shapes {f.shapes!r}; there are {', '.join(calls.SHAPES)}")


class Headers:
    def __init__(self, text=None):
        text = header_text() if text is None else text
        enums = enums_of(text)
        self.fields = fields_of(text, enums)
        used = {f.enum for fields in self.fields.values() for f in fields if f.enum}
        self.values = {enum: [name for name, _ in enums[enum]] for enum in used}
        self.words = {enum: words_of(enum, enums[enum]) for enum in sorted(used)}
        check_added_tensors(self)

    def field(self, call, name):
        return next((f for f in self.fields[call] if f.name == name), None)

    def added(self, call):
        """The fields after those that calls.py lists."""
        names = [f.name for f in self.fields[call]]
        return self.fields[call][names.index(calls.LISTED[call]) + 1:]

    def expanded(self, call, names, results, context=False):
        """A list of calls.py, with what the headers have gained since and the list does not place itself; results: tensors that the call
        writes too; context: what is no option too."""
        listed = names.split()
        for name in listed:
            if name != "…":
                yield name
                continue
            yield from (f.name for f in self.added(call) if f.name not in listed and (results or not f.written) and
                        (context or f.name not in calls.CONTEXT.split()))


# ---- C++ ----

def field_table(headers):
    lines = [f"// {NOTICE}", "// The params of each call as a table, so that what treats all fields alike is one loop.",
             "#pragma once", "", "#include \"core/field.hpp\"", "", "namespace flash3 {", ""]
    for call, fields in headers.fields.items():
        lines += ["template <>", f"struct FieldsOf<flash3_{call}_params> {{", f"  using Params = flash3_{call}_params;",
                  "  static constexpr ParamField kFields[] = {"]
        for f in fields:
            options = "".join(f", .{key} = {value}" for key, value in (
                ("is_written", "true" if f.written else ""), ("is_context", "true" if f.name in calls.CONTEXT.split() else ""),
                ("is_flag", "true" if f.kind == "flag" else ""), ("is_rows", "true" if f.name in calls.ROWS.split() else ""),
                ("dtype", f"FLASH3_{f.dtype.upper()}" if f.dtype else ""), ("words", f'"{words(headers, f)}"' if f.enum else ""),
                ("shapes", f'"{f.shapes}"' if f.shapes else "")) if value)
            lines.append(f"    FLASH3_FIELD({f.name}{options}),")
        listed = len(fields) - len(headers.added(call))
        lines += ["  };", f"  static constexpr size_t kListed = {listed};  // those that calls.py places", *added_tensors(fields, listed), "};", ""]
    return "\n".join([*lines, "}  // namespace flash3", ""])


def added_tensors(fields, listed):
    """The visitor of the tensors after those that calls.py places."""
    tensors = [f for f in fields[listed:] if f.kind == "tensor"]
    if not tensors:
        return []
    visits = [f'visit("{f.name}", &Params::{f.name}, problem.{f.name}.data, {str(f.written).lower()})' for f in tensors]
    return ["  // Calls visit(name, member, address, is_written) for each tensor after those, until one returns false; a problem has its",
            "  // address in the member of the same name.", "  template <class Problem, class Visit>",
            "  static bool visit_added_tensors(Problem& problem, const Visit& visit) {",
            "    return " + " &&\n           ".join(visits) + ";", "  }"]


def constant(name):
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def words(headers, field):
    return " ".join(word or "-" for word in headers.words[field.enum])


CPP_TYPES = {"tensor": ("Tensor", "{}"), "flag": ("bool", " = false"), "number": ("float", " = 0.f"), "int32": ("int", " = 0"),
             "int64": ("int64_t", " = 0"), "uint64": ("uint64_t", " = 0"), "size": ("size_t", " = 0"), "pointer": ("void*", " = nullptr"),
             "schedule": ("const flash3_schedule*", " = nullptr"), "mask": ("const flash3_mask*", " = nullptr")}
CPP_OPTIONAL = {"softmax_scale": "0.f", "window_left": "-1", "window_right": "-1"}
CPP_ABOUT = {
    "forward": ("Forward", "The arguments of a forward call; unset optionals take the default in flash3.h."),
    "backward": ("Backward", "The arguments of a backward call; unset optionals take the default in flash3.h. q, k, v, out and\n"
                             "/// lse, and every option of the mask, are those of the forward call."),
    "quantize": ("Quantize", "The arguments of a call that brings q, k and v to FP8; of each that is set, its _out and _scale\n/// are too."),
    "merge": ("Merge", "The arguments of a merge of parts."),
    "mask": ("MaskArguments", "What a mask is made from; unset optionals take the default in mask.h."),
}


def cpp_structs(headers):
    lines = [f"// {NOTICE}", "/// @file", "/// The arguments of each call. A part of flash3.hpp, which includes it.",
             "#pragma once", "", "#include <cstddef>", "#include <cstdint>", "#include <optional>", "", '#include "flash3/flash3.h"', '#include "flash3/mask.h"',
             '#include "flash3/tensors.hpp"', "", "namespace flash3 {", ""]
    for call in calls.CALLS:
        name, about = CPP_ABOUT[call]
        lines += [f"/// {about}", f"struct {name} {{", "  /// @{ @name Fields", "", f"  /// The field of this name in flash3_{call}_params."]
        names = list(headers.expanded(call, calls.CPP[call], True, context=True))
        for f in (headers.field(call, name) for name in names):
            if f.enum:
                lines.append(f"  {f.enum} {f.name} = {headers.values[f.enum][0]};")
            elif f.name in CPP_OPTIONAL:
                lines.append(f"  std::optional<{f.type}> {f.name} = {{}};")
            else:
                lines.append("  {} {}{};".format(CPP_TYPES[f.kind][0], f.name, CPP_TYPES[f.kind][1]))
        lines += ["  /// @}", "", "  /// The C struct of this call.", f"  flash3_{call}_params params() const {{", f"    flash3_{call}_params p{{}};",
                  "    p.struct_size = sizeof p;"]
        if "window_left" in names:
            lines.append("    p.window = window_left.has_value() || window_right.has_value();")
        lines += [f"    p.{n} = {n}{f'.value_or({CPP_OPTIONAL[n]})' if n in CPP_OPTIONAL else ''};" for n in names]
        lines += ["    return p;", "  }", "};", ""]
    return "\n".join([*lines, "}  // namespace flash3", ""])


def tvm_signatures(headers):
    lines = [f"// {NOTICE}", "// The arguments of TVM-FFI's functions, in their order: each the field of its name.",
             "#pragma once", "", '#include "arguments.hpp"', "", "namespace flash3_tvm_ffi {", ""]
    for function, (call, names) in calls.TVM_FFI.items():
        listed = wrapped(headers.expanded(call, names, True), 4)
        lines += [f"inline constexpr auto {constant(function)} = arguments_of<flash3_{call}_params>(", *listed[:-1], f"{listed[-1]});", ""]
    lines += ["inline constexpr Function kFunctions[] = {"]
    lines += [f'    {{"{function}", {constant(function)}}},' for function in calls.TVM_FFI]
    return "\n".join([*lines, "};", "", "}  // namespace flash3_tvm_ffi", ""])


def wrapped(names, indent):
    """String literals of these names, a line each."""
    names = list(names)
    lines, line = [], ""
    for i, name in enumerate(names):
        piece = name + (" " if i + 1 < len(names) else "")
        if len(line) + len(piece) > 110 - indent:
            lines.append(line)
            line = ""
        line += piece
    return [f'{" " * indent}"{line}"' for line in [*lines, line]]


# ---- torch ----

TORCH_TYPES = {"tensor": ("Tensor?", "None"), "flag": ("bool", "False"), "number": ("float", "0."), "int32": ("SymInt", "0"),
               "int64": ("SymInt", "0"), "uint64": ("SymInt", "0"), "enumeration": ("int", "0")}


def torch_type(headers, call, name):
    """(type in a schema, default) of an argument."""
    if name in calls.TORCH_EXTRAS:
        return calls.TORCH_EXTRAS[name]
    if name in calls.TORCH_IGNORED.get(call, ()) or name == "compute_fp8":
        return "bool", "False"
    type, default = TORCH_TYPES[headers.field(call, calls.TORCH_NAMES.get(name, name)).kind]
    return type, "-1" if name in ("window_left", "window_right") else default


def schema(headers, operator):
    call, required, options, results = calls.TORCH[operator]
    parts, letters = [], iter("abcdefgh")
    for argument in required.split():
        name = argument.rstrip("?!")
        type = torch_type(headers, call, name)[0].rstrip("?")
        alias = f"({next(letters)}!)" if "!" in argument else ""
        parts.append(f"{type}{alias}{'?' * argument.endswith('?')} {name}")
    added = {f.name for f in headers.added(call) if f.written}  # what a call writes beside its results, where it is wanted
    given = {argument.rstrip("?!") for argument in required.split() if "!" in argument}
    for name in headers.expanded(call, options, bool(given & set(calls.WRITTEN[call].split()))):
        type, default = torch_type(headers, call, name)
        parts.append(f"{f'Tensor({next(letters)}!)?' if name in added else type} {name}={default}")
    return f"{operator}({', '.join(parts)}) -> {results}"


def torch_operators(headers):
    lines = [f"// {NOTICE}", "// torch.ops.flash3: the operators' schemas, and the params of the call that each makes.",
             "#pragma once", "", '#include "arguments.hpp"', "", "namespace flash3_torch {", ""]
    for operator, (call, *_) in calls.TORCH.items():
        listed = split(schema(headers, operator), 4)
        lines += [f"inline constexpr Schema<flash3_{call}_params> {constant(operator)}(", *listed[:-1], f"{listed[-1]});", ""]
    lines += filled("inline constexpr const char* kSchemas[] = {", [constant(operator) + ".text" for operator in calls.TORCH], "};", 110) + [""]
    lines += ["// What flash3._eager takes: Python's options, a name each.", ""]
    for function in ("attention", "attention_with_kv_cache"):
        call, names = calls.PYTHON[function]
        listed = wrapped(headers.expanded(call, names, True), 4)
        lines += [f"inline constexpr char {constant(function)}Options[] =", *listed[:-1], f"{listed[-1]};", ""]
    return "\n".join([*lines, "}  // namespace flash3_torch", ""])


def split(text, indent):
    """A long text as string literals, a line each."""
    lines, line = [], ""
    for piece in re.findall(r"\S+\s*", text):
        if len(line) + len(piece) > 110 - indent:
            lines.append(line)
            line = ""
        line += piece
    return [f'{" " * indent}"{line}"' for line in [*lines, line]]


# ---- Python ----

CTYPES = {"tensor": "Tensor", "number": "ctypes.c_float", "size": "ctypes.c_size_t", "pointer": "ctypes.c_void_p", "flag": "ctypes.c_int32",
          "int32": "ctypes.c_int32", "enumeration": "ctypes.c_int32", "int64": "ctypes.c_int64", "uint64": "ctypes.c_uint64",
          "schedule": "ctypes.POINTER(Schedule)", "mask": "ctypes.POINTER(Mask)"}


def python_struct(name, struct, header):
    """A struct of plain fields, for ctypes."""
    text = (ROOT / "include/flash3" / header).read_text(encoding="utf-8")
    fields = declarations(re.search(rf"^struct {struct} \{{(.*?)^\}};", text, re.S | re.M)[1])
    return [f"class {name}(ctypes.Structure):",
            *filled("    _fields_ = [", [f'("{field}", {CTYPES[KINDS[type]]})' for type, field, _ in fields], "]")]


def python_fields(headers):
    lines = ["# SPDX-License-Identifier: Apache-2.0", f"# {NOTICE}",
             '"""The C interface\'s structs for ctypes, and what Python\'s functions take of their fields."""', "import ctypes", "", ""]
    lines += ["class Tensor(ctypes.Structure):",
              '    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("ndim", ctypes.c_int32),',
              '                ("shape", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4)]', "", "", "class Schedule(ctypes.Structure):",
              '    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("key", ctypes.c_uint64)]', "", "", *python_struct("Mask", "flash3_mask", "mask.h"), "", ""]
    for call, fields in headers.fields.items():
        lines.append(f"class {call.capitalize()}Params(ctypes.Structure):")
        lines += filled("    _fields_ = [", [f'("{f.name}", {CTYPES[f.kind]})' for f in fields], "]") + ["", ""]
    lines.append("# The words for values that the C interface numbers.")
    lines.append("WORDS = {")
    named = {f.name: f.enum for fields in headers.fields.values() for f in fields if f.enum}
    lines += [f'    "{name}": {{{", ".join(f"{word or None!r}: {i}" for i, word in enumerate(headers.words[enum]))}}},'.replace("'", '"')
              for name, enum in named.items()]
    lines += ["}", "", "# What each option is, and which tensors there are; those that a call writes apart."]
    for title, pick in (("OPTIONS", lambda f: f.is_option and f.name != "window"), ("TENSORS", lambda f: f.kind == "tensor" and not f.written),
                        ("RESULTS", lambda f: f.written)):
        lines.append(f"{title} = {{")
        for call, fields in headers.fields.items():
            chosen = [f for f in fields if pick(f)]
            if title == "OPTIONS":
                lines += filled(f'    "{call}": {{', [f'"{f.name}": "{f.kind}"' for f in chosen], "},")
            else:
                lines += filled(f'    "{call}": (', [f'"{f.name}"' for f in chosen], "),")
        lines.append("}")
    lines += ["", "# Tensors of one dtype alone.", "DTYPE_OF = {"]
    dtypes = {f.name: f.dtype for fields in headers.fields.values() for f in fields if f.dtype}
    lines += [line for each in dict.fromkeys(dtypes.values()) for line in filled(
        "    ", [f'"{name}": "{dtype}"' for name, dtype in dtypes.items() if dtype == each], ",")]
    lines += ["}", "", "# The options of Python's functions, in their order, with their defaults.", "SIGNATURES = {"]
    for function, (call, names) in calls.PYTHON.items():
        entries = [f'"{name}": {python_default(headers, call, name)!r}'.replace("'", '"') for name in headers.expanded(call, names, True)]
        lines += filled(f'    "{function}": {{', entries, "},")
    return "\n".join([*lines, "}", ""])


def python_default(headers, call, name):
    if name in calls.PYTHON_EXTRAS:
        return calls.PYTHON_EXTRAS[name]
    f = headers.field(call, name)
    if f.enum:
        return headers.words[f.enum][0] or None
    if f.kind == "tensor" or name in ("softmax_scale", "max_seqlen_q", "max_seqlen_k"):
        return None
    return {"flag": False, "number": 0.0}.get(f.kind, 0)


def filled(head, entries, tail, width=140):
    """Entries of a list, as many a line as fit."""
    lines, line = [], head
    for i, entry in enumerate(entries):
        piece = entry + (tail if i + 1 == len(entries) else ", ")
        if len(line) + len(piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = " " * len(head)
        line += piece
    return [*lines, line if entries else head + tail]


# ---- files ----

def spdx(text):
    return text if text.startswith("# SPDX") else f"// SPDX-License-Identifier: Apache-2.0\n// clang-format off\n{text}"


FILES = {"src/core/fields.hpp": field_table, "include/flash3/calls.hpp": cpp_structs, "bindings/torch/operators.hpp": torch_operators,
         "bindings/tvm_ffi/signatures.hpp": tvm_signatures, "bindings/python/flash3/_fields.py": python_fields}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    headers, stale = Headers(), 0
    for file, make in FILES.items():
        path, text = ROOT / file, spdx(make(headers))
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == text:
            continue
        stale += 1
        if args.check:
            print("\n".join(difflib.unified_diff(old.splitlines(), text.splitlines(), file, "generated", "", "", 0, "")))
        else:
            path.write_text(text, encoding="utf-8")
            print(f"{file}: written")
    if args.check and stale:
        print(f"{stale} files are stale: python3 tools/codegen/call_fields.py")
    return bool(args.check and stale)


if __name__ == "__main__":
    sys.exit(main())
