#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what repeats the fields of a call, from the C headers and the table in calls.py:

    src/core/fields.hpp                  each params struct as a table of fields: names, kinds, offsets
    src/core/added_views.hpp             what problems hold of the tensors that the headers have gained
    include/flash3/calls.hpp             flash3.hpp's structs of arguments
    bindings/torch/operators.hpp         the schemas of torch's operators, and which argument goes to which field
    bindings/tvm_ffi/signatures.hpp      the same of TVM-FFI's functions
    bindings/python/flash3/_fields.py    the structs for ctypes, and what Python's functions take
    fuzz/case_id.dict                    at its end: what a case's id says of those tensors

--check compares instead, and fails where a file is stale (gate.call_fields). headers.py says what of a field's comment is read.
"""
import argparse
import difflib
import re
import sys

import calls
from headers import KINDS, ROOT, Headers, declarations, header_text  # noqa: F401  the last for the tests

NOTICE = "Written by tools/codegen/call_fields.py from the C headers and tools/codegen/calls.py; not to be edited."

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
                ("shapes", f'"{f.shapes}"' if f.shapes else ""), ("without", f'"{f.without}"' if f.without else ""),
                ("like", f'"{f.like}"' if f.like else ""), ("is_cpu_alone", "true" if f.cpu_alone else ""),
                ("any_strides", "true" if f.any_strides else "")) if value)
            lines.append(f"    FLASH3_FIELD({f.name}{options}),")
        listed = len(fields) - len(headers.added(call))
        lines += ["  };", f"  static constexpr size_t kListed = {listed};  // those that calls.py places", *added_tensors(fields, listed), "};",
                  ""]
    return "\n".join([*lines, "}  // namespace flash3", ""])


def added_tensors(fields, listed):
    """The visitor of the tensors after those that calls.py places."""
    visits = [f"visit(kFields[{at}], &Params::{f.name}, problem.{f.name})" for at, f in enumerate(fields) if at >= listed and f.kind == "tensor"]
    if not visits:
        return []
    return ["  // Calls visit(field, member, view) for each tensor after those, until one returns false; a problem's view of it is the",
            "  // member of the same name (core/added_views.hpp).", "  template <class Problem, class Visit>",
            "  static bool visit_added_tensors(Problem& problem, const Visit& visit) {",
            "    return " + " &&\n           ".join(visits) + ";", "  }"]


def added_views(headers):
    """The views of those tensors that forward and backward problems hold: one struct of what both have, and one each of the rest."""
    of = {call: headers.added_tensors(call) for call in ("forward", "backward")}
    names = {call: {f.name for f in fields} for call, fields in of.items()}
    both = names["forward"] & names["backward"]
    lines = [f"// {NOTICE}", "// What a problem holds of each tensor of flash3_forward_params and flash3_backward_params that calls.py does not place.",
             "#pragma once", "", "#include \"core/tensor_view.hpp\"", "", "namespace flash3 {", ""]
    for struct, about, fields in (("AddedViews", "Of forward and backward calls", [f for f in of["forward"] if f.name in both]),
                                  ("AddedForwardViews", "Of forward calls alone", [f for f in of["forward"] if f.name not in both]),
                                  ("AddedBackwardViews", "Of backward calls alone", [f for f in of["backward"] if f.name not in both])):
        lines += [f"// {about}.", f"struct {struct} {{", *(f"  {view_of(f)} {f.name};" for f in fields),
                  "};", ""]
    return "\n".join([*lines, "}  // namespace flash3", ""])


def view_of(field):
    shapes = field.shapes.split()
    return calls.VIEWS["rows" if "rows" in shapes else shapes[0]]


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


def wrapped(names, indent, width=110):
    """String literals of these names, a line each."""
    names = list(names)
    lines, line = [], ""
    for i, name in enumerate(names):
        piece = name + (" " if i + 1 < len(names) else "")
        if len(line) + len(piece) > width - indent:
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
    lines += ["", "# Of each call the tensors after those that calls.py places, which it reads, and the shapes that they may have.", "ADDED = {"]
    for call in calls.CALLS:
        chosen = [f for f in headers.added_tensors(call) if not f.written]
        lines += filled(f'    "{call}": {{', [f'"{f.name}": "{f.shapes}"' for f in chosen], "},")
    lines += ["}", "", "# Their gradients, where they have one.", "GRADIENTS = {"]
    lines += [f'    "{name}": "{gradient}",' for name, gradient in headers.gradients().items()]
    lines += ["}", "", "# What the docstrings say of such tensors, written or not.", "ABOUT = {"]
    for f in {f.name: f for call in calls.CALLS for f in headers.added_tensors(call)}.values():
        lines += [f'    "{f.name}":', *wrapped(about_in_python(f).split(), 8, 130)]
        lines[-1] += ","
    lines += ["}", "", "# Tensors of one dtype alone.", "DTYPE_OF = {"]
    dtypes = {f.name: f.dtype for fields in headers.fields.values() for f in fields if f.dtype}
    lines += [line for each in dict.fromkeys(dtypes.values()) for line in filled(
        "    ", [f'"{name}": "{dtype}"' for name, dtype in dtypes.items() if dtype == each], ",")]
    lines += ["}", "", "# The options of Python's functions, in their order, with their defaults.", "SIGNATURES = {"]
    for function, (call, names) in calls.PYTHON.items():
        entries = [f'"{name}": {python_default(headers, call, name)!r}'.replace("'", '"') for name in headers.expanded(call, names, True)]
        lines += filled(f'    "{function}": {{', entries, "},")
    return "\n".join([*lines, "}", ""])


def about_in_python(field):
    """A tensor's description as a docstring has it."""
    text = field.about
    for c, python in (("·", "*"), ("−∞", "-inf"), ("−", "-"), ("All zero:", "None:")):
        text = text.replace(c, python)
    words = field.shapes.split()
    shapes = " or ".join(shape.replace("·", "*") for shape, names in calls.SHAPES.items() if names.split()[0] in words)
    return f"{shapes} {field.dtypes}: {'the call writes ' if field.written else ''}{text}"


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


def case_ids(headers):
    """The end of a dictionary for fuzzers of case ids."""
    path = ROOT / CASE_IDS
    head = path.read_text(encoding="utf-8").partition(f"# {NOTICE}")[0]
    ids = [f'"/{f.name}={shape}"' for f in headers.added_tensors("forward") for shape in f.shapes.split()]
    return "\n".join([f"{head}# {NOTICE}", *ids, ""])


# ---- files ----

CASE_IDS = "fuzz/case_id.dict"


def spdx(file, text):
    return text if not file.endswith(".hpp") else f"// SPDX-License-Identifier: Apache-2.0\n// clang-format off\n{text}"


FILES = {"src/core/fields.hpp": field_table, "src/core/added_views.hpp": added_views, CASE_IDS: case_ids,
         "include/flash3/calls.hpp": cpp_structs, "bindings/torch/operators.hpp": torch_operators,
         "bindings/tvm_ffi/signatures.hpp": tvm_signatures, "bindings/python/flash3/_fields.py": python_fields}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    headers, stale = Headers(), 0
    for file, make in FILES.items():
        path, text = ROOT / file, spdx(file, make(headers))
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
