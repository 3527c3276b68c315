#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the gate of the documents (check_docs.py) and the check of the site (docs/check_site.py) find: links that lead nowhere, and names in
backticks that no code has. What check_snippets.py and tests/python/test_docs.py find on a page, and what the former complains of."""
import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

import check_docs
import check_snippets
from check_docs import Code

sys.path.append(str(check_docs.ROOT / "docs"))
import check_site

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


class Tiles(unittest.TestCase):
    def test_tiles_that_are_gone(self):
        kernels = "fwd_bf16_d128_full_128x128,97–128,128 × 128,2\n"
        row = "| {} | 87 % | 33 % |\n"
        for text, complaints in (("d 128 full, 128×128", 0), ("d 128 full, 128×144", 1), ("d 128 full, 128×144 (gone)", 0), ("d 256 full, wide 64×64", 1),
                                 ("FP8 d 64 full, 192×128", 1), ("backward d 128 full, 80×128", 1), ("d 128 causal", 0)):
            self.assertEqual(len(list(check_docs.check_tiles(row.format(text), kernels))), complaints, text)


class Links(unittest.TestCase):
    def complaints(self, text):
        """The complaints about links of a text in docs/, beside docs/figures.md, a page with headings."""
        return list(check_docs.check_links(check_docs.ROOT / "docs/x.md", text))

    def test_links_that_lead_somewhere(self):
        for text in ("[a](figures.md)", "[a](figures.md#measurements)", '[a](figures.md "a title")', "[a](<figures.md>)", "![a](images/forward.svg)",
                     "[a](../README.md)", "[a](../examples)", "[a]: figures.md", '<img src="images/forward.svg">',
                     '<source media="(x)" srcset="images/backward.svg">', "[a](https://nowhere.invalid/x)", '<a href="mailto:a@b.c">'):
            self.assertEqual(self.complaints(text), [], text)

    def test_links_that_do_not(self):
        for text in ("[a](figure.md)", "[a](figures.md#no-such)", '[a](figure.md "a title")', "[a](<figure.md>)", "![a](images/no-such.svg)",
                     "[a]: figure.md", '<img alt="x" src="images/no-such.svg">', '<source srcset="images/no-such.svg">', '<a href="figure.md">',
                     "[a](../build/docs)", "[a](conf.py#L10)"):
            self.assertEqual(len(self.complaints(text)), 1, text)

    def test_names_of_headings(self):
        text = "# A `b_c`, d!\n## Same\n## Same\n### [linked](x.md) here\n```\n# no heading\n```\n<a id=\"own\"></a>\n"
        self.assertEqual(check_docs.anchors(text), {"a-b_c-d", "same", "same-1", "linked-here", "own"})


class Site(unittest.TestCase):
    """docs/check_site.py, on a site of a few pages."""

    def complaints(self, **changes):
        index = {"docnames": ["docs/index", "docs/page"], "terms": {w: 0 for w, kind in check_site.SEARCHED.items() if kind == "word"},
                 "titleterms": {w: 0 for w, kind in check_site.SEARCHED.items() if kind == "title"},
                 "objects": {"": [[0, 0, 1, "", w] for w, kind in check_site.SEARCHED.items() if kind == "object"]}}
        code = f"<pre>{'x' * check_site.CODE_COLUMNS}\n<b>y</b> = 1</pre>"
        files = {"index": f'<a href="docs/index.html">x</a>{code}', "docs/index": '<a href="page.html#there">x</a><a href="http://nowhere.invalid/">y</a>',
                 "docs/page": '<h1 id="there">x</h1><a href="#there">x</a><img src="../picture.svg">', "picture.svg": "", **changes}
        index.update(files.pop("search", {}))
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs").mkdir()
            (root / "searchindex.js").write_text(f"Search.setIndex({json.dumps(index)})", encoding="utf-8")
            for name, text in files.items():
                (root / (name if "." in name else name + ".html")).write_text(text, encoding="utf-8")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                failed = check_site.main(folder)
        return output.getvalue().splitlines() if failed else []

    def test_a_site_in_order(self):
        self.assertEqual(self.complaints(), [])

    def test_what_is_wrong(self):
        self.assertEqual(len(self.complaints(**{"docs/page": "<h1>x</h1>"})), 1)  # no place "there"
        self.assertEqual(len(self.complaints(**{"docs/page": '<h1 id="there">x</h1><a href="none.html">x</a>'})), 1)
        self.assertEqual(len(self.complaints(**{"docs/page": '<h1 id="there">x</h1><img srcset="none.svg">'})), 1)
        self.assertEqual(len(self.complaints(**{"docs/other": "x"})), 2)  # nothing leads to it, and the search does not know it
        self.assertEqual(len(self.complaints(search={"titleterms": {}})), 1)
        self.assertEqual(len(self.complaints(search={"docnames": ["docs/index"]})), 1)
        self.assertEqual(len(self.complaints(index='<a href="docs/index.html">x</a>')), 1)  # no code
        page = '<h1 id="there">x</h1><pre>short\n<b>%s</b> = 1\n</pre>' % ("y" * (check_site.CODE_COLUMNS - 3))
        found = self.complaints(**{"docs/page": page})
        self.assertEqual(len(found), 1)
        self.assertIn(f"{check_site.CODE_COLUMNS + 1} columns of code", found[0])


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


PAGE = """# Page

```python
x = 1
```

1. A step:

   ```python
   def f():
       return x
   ```

<!-- not run: needs a Hopper GPU -->
```python
f(device="cuda")
```

```
$ flash3 info
```

```cpp
int f() { return 1; }
```
"""
COMPILERS = {"c": "cc", "cpp": "c++"}


class Blocks(unittest.TestCase):
    def test_what_a_page_holds(self):
        found = list(check_snippets.blocks(PAGE))
        self.assertEqual([block.language for block in found], ["python", "python", "python", "", "cpp"])
        self.assertEqual(found[0], check_snippets.Block("python", "x = 1\n", 4, ""))
        self.assertEqual(found[1].code, "def f():\n    return x\n")
        self.assertEqual([block.not_run for block in found], ["", "", "needs a Hopper GPU", "", ""])
        self.assertEqual(PAGE.splitlines()[found[4].line - 1], "int f() { return 1; }")
        self.assertEqual(list(check_snippets.complaints(PAGE)), [])

    def test_fences_that_hide_code(self):
        for text in ("```\nimport flash3\n```\n", "```\nfrom flash3 import arrays\n```\n", "```\n#include <flash3/flash3.h>\n```\n",
                     "```py\nx = 1\n```\n", "<!-- not run: it is slow -->\n\n```python\nx\n```\n", "<!-- not run -->\n```python\nx\n```\n",
                     "<!-- not run: no test would -->\n```\n$ flash3\n```\n"):
            self.assertTrue(list(check_snippets.complaints(text)), text)

    def test_what_does_not_compile(self):
        def block(language, code):
            return check_snippets.Block(language, code, 7, "")
        self.assertEqual(check_snippets.error_of(block("cpp", "#include <flash3/flash3.hpp>\nflash3::Tensor t;\n"), COMPILERS, "x.md"), "")
        self.assertEqual(check_snippets.error_of(block("c", "#include <flash3/flash3.h>\nflash3_tensor t;\n"), COMPILERS, "x.md"), "")
        for language, code in (("cpp", "void f() {\n  flash3::forward({});\n}\n"), ("c", "int f(void) {\n  return q;\n}\n")):
            self.assertIn("x.md:8:", check_snippets.error_of(block(language, code), COMPILERS, "x.md"))


if __name__ == "__main__":
    unittest.main()
