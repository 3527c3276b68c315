#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gate.abi tells what breaks a program from what does not: each rule of docs/abi.md, broken and kept once in a copy of the headers."""
import argparse
import pathlib
import re
import shutil
import sys
import tempfile

import check_abi


def without_comments(text):
    return re.sub(r"\s*/\*.*?\*/", "", text, flags=re.S)


HEADERS = {name: without_comments((check_abi.ROOT / "include/flash3" / name).read_text(encoding="utf-8")) for name in ("flash3.h", "types.h")}
LAST_FIELD = re.search(r"  [^;\n]+;\n\} flash3_forward_params;", HEADERS["flash3.h"])[0]


def with_last(field):
    """The end of the params with another field after it."""
    return LAST_FIELD.replace("\n}", f"\n  {field};\n}}")


APPENDED = (LAST_FIELD, with_last("int64_t extra"))
SOFTCAP = "  float softcap;"

# What was changed: (old text, new text), …
BREAKS = {
    "function removed": [("FLASH3_API const char* flash3_version(void);", "")],
    "parameter added": [("flash3_forward(const flash3_forward_params* params)",
                         "flash3_forward(const flash3_forward_params* params, int x)")],
    "return type": [("FLASH3_API flash3_status flash3_forward(", "FLASH3_API int64_t flash3_forward(")],
    "enum value": [("FLASH3_INT32 = 4", "FLASH3_INT32 = 7")],
    "value of an enum that no function takes": [("FLASH3_COMPUTE_FP8 = 1", "FLASH3_COMPUTE_FP8 = 2")],
    "enumerator removed": [("  FLASH3_FLOAT32 = 3,\n", "")],
    "enumerator renamed": [("  FLASH3_FLOAT32 = 3,\n", "  FLASH3_SINGLE = 3,\n")],
    "constant": [("FLASH3_FP8_BLOCK 128", "FLASH3_FP8_BLOCK 64")],
    "type removed": [("enum flash3_compute", "enum flash3_other"), ("} flash3_compute;", "} flash3_other;")],
    "tensor grown": [("  int64_t stride[4];\n}", "  int64_t stride[4];\n  int64_t more;\n}")],
    "field moved": [("  int32_t causal;\n", "  int32_t causal;\n  int64_t other;\n")],
    "field narrowed, none moved": [("  int64_t chunk;", "  int32_t chunk;")],
    "field of another type": [(SOFTCAP, "  int32_t softcap;")],
    "field renamed": [(SOFTCAP, "  float soft_cap;")],
    "last field removed": [(LAST_FIELD, "} flash3_forward_params;")],
    "last field replaced": [(LAST_FIELD, "  int32_t other, another;\n} flash3_forward_params;")],
    "field appended, another renamed": [APPENDED, (SOFTCAP, "  float soft_cap;")],
    "field appended, another of other type": [APPENDED, (SOFTCAP, "  int32_t softcap;")],
}
KEEPS = {
    "nothing": [],
    "function added": [("FLASH3_API const char* flash3_version(void);",
                        "FLASH3_API const char* flash3_version(void);\nFLASH3_API int flash3_more(int x);")],
    "field appended": [APPENDED],
    "tensor appended": [(LAST_FIELD, with_last("flash3_tensor extra"))],
    "enumerator added": [("FLASH3_INT32 = 4,", "FLASH3_INT32 = 4, FLASH3_MORE = 70,")],
    "constant added": [("#define FLASH3_FP8_BLOCK 128", "#define FLASH3_FP8_BLOCK 128\n#define FLASH3_MORE 3")],
    "type added": [("typedef struct flash3_tensor {",
                    "typedef struct flash3_page {\n  int x;\n} flash3_page;\ntypedef struct flash3_tensor {")],
}


def changed(edits):
    """{header: its text with these edits}"""
    texts = dict(HEADERS)
    for old, new in edits:
        holder = next((name for name, text in texts.items() if old in text), None)
        if holder is None:
            raise SystemExit(f"the headers no longer hold {old!r}: write this case again")
        texts[holder] = texts[holder].replace(old, new, 1)
    return texts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", default="cc")
    parser.add_argument("--abidw", default="abidw")
    parser.add_argument("--abidiff", default="abidiff")
    args = parser.parse_args()

    old, wrong = check_abi.dump(args.compiler, args.abidw), []
    with tempfile.TemporaryDirectory() as folder:
        include = pathlib.Path(folder, "include")
        shutil.copytree(check_abi.ROOT / "include", include)
        for cases, breaks in ((BREAKS, True), (KEEPS, False)):
            for name, edits in cases.items():
                for header, text in changed(edits).items():
                    (include / "flash3" / header).write_text(text, encoding="utf-8")
                new = check_abi.dump(args.compiler, args.abidw, include)
                found = check_abi.incompatible(old, new, args.abidiff)
                if bool(found) != breaks:
                    wrong.append(f"{name}: {'not found' if breaks else f'taken for a break:{chr(10)}{found}'}")
                # What check_abi.py --release asks: the dump of a release has the newest parts of the interface too.
                if edits and not breaks and not check_abi.incompatible(new, old, args.abidiff):
                    wrong.append(f"{name}: the older dump is taken for complete")
    print("\n".join(wrong) or f"{len(BREAKS)} changes that break, {len(KEEPS)} that do not")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
