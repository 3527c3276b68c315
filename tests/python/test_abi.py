# SPDX-License-Identifier: Apache-2.0
"""_fields.py and _library.py say of the C interface what the compiler says of flash3.h: fields, sizes, values and signatures, read from its debug
information by abidw (tests/gates/check_abi.py)."""
import ctypes
import pathlib
import shutil
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from flash3 import _fields, _library

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/gates"))
import check_abi  # noqa: E402

STRUCTS = {"flash3_tensor": _library.Tensor, "flash3_forward_params": _library.ForwardParams,
           "flash3_backward_params": _library.BackwardParams, "flash3_quantize_params": _library.QuantizeParams,
           "flash3_merge_params": _library.MergeParams, "flash3_schedule": _library.Schedule,
           "flash3_mask_params": _fields.MaskParams, "flash3_mask": _fields.Mask,
           "flash3_dropout_mask_params": _library.DropoutMaskParams}
SCALARS = {"float": ctypes.c_float, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
           "size_t": ctypes.c_size_t}


class Header:
    """flash3.h, its types as ctypes has them."""

    def __init__(self, xml):
        self.root = ElementTree.fromstring(xml)
        self.types = {node.get("id"): node for node in self.root.iter() if node.get("id")}

    def structs(self):
        """The structs whose fields the header shows."""
        return {node.get("name"): node for node in self.root.iter("class-decl") if node.get("is-declaration-only") != "yes"}

    def fields(self, struct):
        """[(name, offset in bytes, type), …] in order."""
        members = [(int(member.get("layout-offset-in-bits")) // 8, member.find("var-decl"))
                   for member in self.structs()[struct].findall("data-member")]
        return [(variable.get("name"), offset, self.type(variable.get("type-id"))) for offset, variable in members]

    def values(self, enum):
        found = [node for node in self.root.iter("enum-decl") if node.get("name") == enum]
        return {node.get("name"): int(node.get("value")) for node in found[0].findall("enumerator")}

    def functions(self):
        """{name: (result, [parameter, …])}"""
        result = lambda node: self.type(node.find("return").get("type-id"))
        return {node.get("name"): (None if result(node) == "void" else result(node),
                                   [self.type(parameter.get("type-id")) for parameter in node.findall("parameter")])
                for node in self.root.iter("function-decl")}

    def type(self, name):
        node = self.types[name]
        if node.get("name") in STRUCTS:
            return STRUCTS[node.get("name")]
        if node.get("name") in SCALARS:
            return SCALARS[node.get("name")]
        if node.tag == "enum-decl":
            return ctypes.c_int32
        if node.tag == "array-type-def":
            return self.type(node.get("type-id")) * int(node.find("subrange").get("length"))
        if node.tag in ("qualified-type-def", "typedef-decl"):
            return self.type(node.get("type-id"))
        if node.get("name") in ("char", "void"):
            return node.get("name")
        if node.get("is-declaration-only") == "yes" or node.tag == "function-type":  # an opaque type; ctypes takes any address
            return "void"
        if node.tag == "pointer-type-def":
            pointed = self.type(node.get("type-id"))
            return {"char": ctypes.c_char_p, "void": ctypes.c_void_p}.get(pointed) or ctypes.POINTER(pointed)
        raise AssertionError(f"{ElementTree.tostring(node)}: a type that ctypes has no name for here")


@pytest.fixture(scope="module")
def header():
    compiler = shutil.which("cc") or shutil.which("clang") or shutil.which("gcc")
    if not compiler or not shutil.which("abidw"):
        pytest.skip("there is no C compiler or no abidw (Debian: abigail-tools)")
    return Header(check_abi.dump(compiler))


def test_every_struct_is_mirrored(header):
    assert set(STRUCTS) == set(header.structs())


@pytest.mark.parametrize("name", STRUCTS)
def test_fields(header, name):
    mirror = STRUCTS[name]
    assert [(field, getattr(mirror, field).offset, kind) for field, kind in mirror._fields_] == header.fields(name)
    assert ctypes.sizeof(mirror) * 8 == int(header.structs()[name].get("size-in-bits"))


def without_prefix(values, prefix):
    return {name.removeprefix(prefix): value for name, value in values.items()}


def test_values(header):
    for name, value in without_prefix(header.values("flash3_status"), "FLASH3_").items():
        assert getattr(_library, name) == value, name
    backends = without_prefix(header.values("flash3_backend"), "FLASH3_BACKEND_")
    assert _library.BACKENDS == {name.lower(): value for name, value in backends.items()}
    dtypes = without_prefix(header.values("flash3_dtype"), "FLASH3_")
    assert dtypes.pop("DTYPE_NONE") == 0  # a tensor of zero bytes is not given
    dtypes["FLOAT8_E4M3FN"] = dtypes.pop("FLOAT8_E4M3")  # torch's name
    assert _library.DTYPES == {name.lower(): value for name, value in dtypes.items()}
    assert without_prefix(header.values("flash3_compute"), "FLASH3_") == {
        "COMPUTE_AS_GIVEN": _fields.WORDS["compute"][None], "COMPUTE_FP8": _fields.WORDS["compute"]["fp8"]}
    assert without_prefix(header.values("flash3_fp8_sums"), "FLASH3_FP8_SUMS_") == {
        "AUTO": _fields.WORDS["fp8_sums"]["auto"], "ONE_LEVEL": _fields.WORDS["fp8_sums"]["one"], "TWO_LEVELS": _fields.WORDS["fp8_sums"]["two"]}
    assert without_prefix(header.values("abi_constants"), "abi_constant_FLASH3_") == {
        "FP8_BLOCK": _library.FP8_BLOCK, "WORKSPACE_ALIGNMENT": _library.WORKSPACE_ALIGNMENT,
        "MASK_BLOCK": _library.MASK_BLOCK, "MASK_MOST_RANGES": _library.MASK_MOST_RANGES,
        "MASK_ALL_SEEN": _library.MASK_ALL_SEEN, **{f"MASK_{name.upper()}": bit for name, bit in _library.MASK_LENGTHS.items()}}


def test_signatures(header):
    declared = header.functions()
    used = {name: function for name, function in vars(_library.lib).items() if name.startswith("flash3_")}
    assert len(used) >= 16 and set(used) <= set(declared)
    for name, function in used.items():
        result, parameters = declared[name]
        assert (function.restype, list(function.argtypes)) == (result, parameters), name
