#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which files the gate of lengths (check_source_size.py) finds too long."""
import pathlib
import tempfile
import unittest

import check_source_size


class Lengths(unittest.TestCase):
    def complaints(self, **lines):
        """What the gate says of files of so many lines: a source, the front page, a kernel's README and its page of another name."""
        paths = {"source": "src/a.hpp", "front": "README.md", "kernel": "src/cuda/sm90/forward/README.md",
                 "page": "src/cuda/sm90/decode/README_X.md"}
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, path in paths.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text("line\n" * lines.get(name, 1), encoding="utf-8")
            return check_source_size.too_long(root, [root / paths["source"]])

    def test_as_long_as_allowed(self):
        self.assertEqual(self.complaints(source=450, front=120, kernel=150, page=150), [])

    def test_one_line_more(self):
        self.assertEqual(self.complaints(source=451), ["src/a.hpp: 451 lines, 450 allowed"])
        self.assertEqual(self.complaints(front=121), ["README.md: 121 lines, 120 allowed"])
        self.assertEqual(self.complaints(kernel=151), ["src/cuda/sm90/forward/README.md: 151 lines, 150 allowed"])
        self.assertEqual(self.complaints(page=151), ["src/cuda/sm90/decode/README_X.md: 151 lines, 150 allowed"])

    def test_nothing_to_look_at(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(SystemExit):
            check_source_size.too_long(pathlib.Path(folder), [])


if __name__ == "__main__":
    unittest.main()
