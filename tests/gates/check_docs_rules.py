#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which names in backticks the gate of the documents (check_docs.py) takes for names of the code, and which of these it finds."""
import pathlib
import unittest

import check_docs
from code_names import Code

CODE = Code({
    "src/core/mask.hpp": """
        // Band::full_tiles and the removed select_tile are gone.
        namespace flash3 {
        template <class Index> struct BandOf { Index lo; static BandOf make(Index lo) { return {lo}; } };
        template <class Index> struct MaskOf { int full_tiles() const { return print("}"); } };
        using Band = BandOf<long long>;
        using Mask = MaskOf<long long>;
        enum class Barrier : int { kOutputStaged = 5 };
        template <class Traits> int tile() { return Traits::kTileN; }
        }
    """,
    "include/flash3/flash3.hpp": "namespace flash3 { struct Forward { bool causal; }; void forward(const Forward&); }",
    "bindings/python/flash3/__init__.py": "from ._attention import attention  # and no_such_name\n",
    "bindings/python/flash3/arrays.py": "class E4M3: pass\n",
    "CMakeLists.txt": "option(FLASH3_HOPPER \"\" ON)\n# FLASH3_OLD\n",
})


def complaints(text, known=frozenset()):
    return list(check_docs.check_identifiers(pathlib.Path("x.md"), text, CODE, known))


class Identifiers(unittest.TestCase):
    def test_names_that_exist(self):
        for name in ("Band", "Band::make", "Mask::full_tiles", "MaskOf<int>", "flash3::Forward", "flash3::forward(call)", ".causal = true",
                     "Traits::kTileN", "Barrier::kOutputStaged", "flash3.attention", "flash3.attention(q, k, v)", "flash3.arrays.E4M3(x)",
                     "FLASH3_HOPPER", "-DFLASH3_HOPPER=OFF", "FLASH3_HOPPER=ON", "mask.hpp", "arrays.py"):
            self.assertEqual(complaints(f"see `{name}`"), [], name)

    def test_names_that_do_not(self):
        for name in ("encode_key_map", "encode_key_map()", "select_tile", "Band::full_tiles", "Mask::make", "Barrier::kTurn", "Forward::window",
                     "no_scope::Band", "Traits::kStages", "flash3.no_such_name", "flash3.arrays.attention", "flash3.E4M3", "FLASH3_OLD",
                     "-DFLASH3_OLD=ON", ".window = 1", "other.hpp"):
            self.assertEqual(len(complaints(f"see `{name}`")), 1, name)

    def test_what_is_no_name(self):
        for text in ("`lse_i = −∞`", "`flash3 run --no-such`", "`O += P·V`", "`a / b`", "`1 − (s_ij / softcap)²`", "`snake_case`",
                     "no_backticks"):
            self.assertEqual(complaints(text), [], text)
        self.assertEqual(complaints("`gate.docs`", {"gate.docs"}), [])
        self.assertEqual(len(complaints("`gate.other`", {"gate.docs"})), 1)

    def test_examples(self):
        readme = "```cpp\n#include <x>\nint f();\n```\n```c\nint x = 1;\nf(x);\n```\n"
        check = lambda language, source, front="": list(check_docs.check_example(language, readme, source, front))
        self.assertEqual(check("cpp", "// README: begin\nint f();\n// README: end\n", "#include <x>\n"), [])
        indented = "{\n  /* README: begin */\n  int x = 1;\n  f(x);\n  /* README: end */\n}\n"
        self.assertEqual(check("c", indented), [])
        self.assertEqual(len(check("c", indented.replace("1", "2"))), 1)
        self.assertEqual(len(check("c", "int x = 1;\n")), 1)
        self.assertEqual(len(check("rust", indented)), 1)

    def test_the_project(self):
        self.assertIn("gate.docs_rules", check_docs.gates())
        blocks = "a `x`\n<!-- support:begin -->\n`y`\n<!-- support:end -->\n`z`"
        self.assertEqual(check_docs.without_generated_blocks(blocks).split(), ["a", "`x`", "`z`"])


if __name__ == "__main__":
    unittest.main()
