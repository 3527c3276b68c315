#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What check_snippets.py and tests/python/test_docs.py find on a page, and what the former complains of."""
import unittest

import check_snippets
import snippets

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
        found = list(snippets.blocks(PAGE))
        self.assertEqual([block.language for block in found], ["python", "python", "python", "", "cpp"])
        self.assertEqual(found[0], snippets.Block("python", "x = 1\n", 4, ""))
        self.assertEqual(found[1].code, "def f():\n    return x\n")
        self.assertEqual([block.not_run for block in found], ["", "", "needs a Hopper GPU", "", ""])
        self.assertEqual(PAGE.splitlines()[found[4].line - 1], "int f() { return 1; }")
        self.assertEqual(list(snippets.complaints(PAGE)), [])

    def test_fences_that_hide_code(self):
        for text in ("```\nimport flash3\n```\n", "```\nfrom flash3 import arrays\n```\n", "```\n#include <flash3/flash3.h>\n```\n",
                     "```py\nx = 1\n```\n", "<!-- not run: it is slow -->\n\n```python\nx\n```\n", "<!-- not run -->\n```python\nx\n```\n",
                     "<!-- not run: no test would -->\n```\n$ flash3\n```\n"):
            self.assertTrue(list(snippets.complaints(text)), text)

    def test_what_does_not_compile(self):
        def block(language, code):
            return snippets.Block(language, code, 7, "")
        self.assertEqual(check_snippets.error_of(block("cpp", "#include <flash3/flash3.hpp>\nflash3::Tensor t;\n"), COMPILERS, "x.md"), "")
        self.assertEqual(check_snippets.error_of(block("c", "#include <flash3/flash3.h>\nflash3_tensor t;\n"), COMPILERS, "x.md"), "")
        for language, code in (("cpp", "void f() {\n  flash3::forward({});\n}\n"), ("c", "int f(void) {\n  return q;\n}\n")):
            self.assertIn("x.md:8:", check_snippets.error_of(block(language, code), COMPILERS, "x.md"))


if __name__ == "__main__":
    unittest.main()
