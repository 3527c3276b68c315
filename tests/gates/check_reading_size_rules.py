#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the gate of reading size (check_reading_size.py) counts, and what it finds too much."""
import pathlib
import tempfile
import unittest

from check_reading_size import complaint, read_for

FILES = {
    "cuda/a.cuh": '#include "cuda/b.hpp"\n#include "cuda/made.inc"\n#include <cstdint>\n',
    "cuda/b.hpp": '#include "core/c.hpp"\n  // #include "cuda/unused.cuh"\n',
    "core/c.hpp": '#include "cuda/b.hpp"\n',
    "cuda/unused.cuh": "\n",
}


class ReadingSize(unittest.TestCase):
    def read(self, *entries):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in FILES.items():
                path = pathlib.Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return read_for(pathlib.Path(folder), entries)

    def test_counts_each_file_once(self):
        self.assertEqual(self.read("cuda/a.cuh", "core/c.hpp"), {"cuda/a.cuh": 3, "cuda/b.hpp": 2, "core/c.hpp": 1})

    def test_what_is_not_there(self):
        with self.assertRaises(SystemExit):
            self.read("cuda/gone.cuh")

    def test_bounds(self):
        lines = self.read("cuda/a.cuh")
        self.assertEqual(complaint("it", lines, 3, 6), "")
        self.assertIn("3 files and 6 lines, 2 and 6 allowed: cuda/a.cuh 3", complaint("it", lines, 2, 6))
        self.assertIn("3 files and 6 lines, 3 and 5 allowed", complaint("it", lines, 3, 5))


if __name__ == "__main__":
    unittest.main()
