#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the gates of sources find wrong: check_includes.py, check_source_size.py, check_reading_size.py and check_kernel_code.py."""
import pathlib
import tempfile
import unittest

import check_includes
import check_kernel_code
import check_reading_size
import check_source_size


class Includes(unittest.TestCase):
    def complaints(self, **files):
        """What the gate says of files below src/, by name, each with what it includes. "__" stands for "/", and "_hpp" for ".hpp"."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            paths = []
            for name, included in files.items():
                path = root / "src" / name.replace("__", "/").replace("_hpp", ".hpp").replace("_cpp", ".cpp")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(f'#include "{each}"\n' for each in included), encoding="utf-8")
                paths.append(path)
            return check_includes.complaints(root, paths)

    def test_one_way(self):
        self.assertEqual(self.complaints(core__a_hpp=["<vector>", "core/b.hpp", "not/there.hpp"], core__b_hpp=[], cpu__a_hpp=["core/a.hpp"],
                                         cuda__sm90__forward__a_hpp=["core/a.hpp", "cuda/sm90/host/a.hpp"], cuda__sm90__host__a_hpp=[],
                                         cuda__cuda_backend_cpp=["cuda/sm90/forward/a.hpp"]), [])

    def test_two_rooms_that_include_each_other(self):
        self.assertEqual(self.complaints(core__a_hpp=["cpu/b.hpp"], cpu__b_hpp=[], cpu__a_hpp=["core/a.hpp"]),
                         ["a circle: src/core/a.hpp includes cpu/b.hpp, src/cpu/a.hpp includes core/a.hpp"])

    def test_a_circle_of_three(self):
        found = self.complaints(core__a_hpp=["cpu/a.hpp"], cpu__a_hpp=["oracle/a.hpp"], oracle__a_hpp=["core/b.hpp"], core__b_hpp=[])
        self.assertEqual(found, ["a circle: src/core/a.hpp includes cpu/a.hpp, src/cpu/a.hpp includes oracle/a.hpp, "
                                 "src/oracle/a.hpp includes core/b.hpp"])

    def test_a_circle_with_the_folder_above(self):
        self.assertEqual(len(self.complaints(cuda__a_hpp=["cuda/host/a.hpp"], cuda__host__a_hpp=["cuda/b.hpp"], cuda__b_hpp=[])), 1)

    def test_a_room_has_what_lies_below_it(self):
        self.assertEqual(self.complaints(cuda__sm90__decode__a_hpp=["cuda/sm90/decode/latent/a.hpp"],
                                         cuda__sm90__decode__latent__a_hpp=["cuda/sm90/decode/b.hpp"], cuda__sm90__decode__b_hpp=[],
                                         cpu__kernels__a_hpp=["cpu/a.hpp"], cpu__a_hpp=["cpu/kernels/b.hpp"], cpu__kernels__b_hpp=[]), [])

    def test_relative_paths(self):
        self.assertEqual(len(self.complaints(core__a_hpp=["../cpu/b.hpp"], cpu__b_hpp=[], cpu__a_hpp=["core/a.hpp"])), 1)

    def test_families_apart(self):
        self.assertEqual(self.complaints(cuda__sm90__decode__latent__a_hpp=["cuda/sm90/forward/a.hpp"], cuda__sm90__forward__a_hpp=[]),
                         ["src/cuda/sm90/decode/latent/a.hpp includes cuda/sm90/forward/a.hpp: one kernel family knows nothing of another"])

    def test_an_architecture_apart(self):
        self.assertEqual(self.complaints(cuda__host__a_hpp=["cuda/sm90/select.hpp"], cuda__sm90__select_hpp=[]),
                         ["src/cuda/host/a.hpp includes cuda/sm90/select.hpp: of what lies outside only cuda/cuda_backend.cpp knows cuda/sm90"])


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


class ReadingSize(unittest.TestCase):
    FILES = {
        "cuda/a.cuh": '#include "cuda/b.hpp"\n#include "cuda/made.inc"\n#include <cstdint>\n',
        "cuda/b.hpp": '#include "core/c.hpp"\n  // #include "cuda/unused.cuh"\n',
        "core/c.hpp": '#include "cuda/b.hpp"\n',
        "cuda/unused.cuh": "\n",
    }

    def read(self, *entries):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in self.FILES.items():
                path = pathlib.Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return check_reading_size.read_for(pathlib.Path(folder), entries)

    def test_counts_each_file_once(self):
        self.assertEqual(self.read("cuda/a.cuh", "core/c.hpp"), {"cuda/a.cuh": 3, "cuda/b.hpp": 2, "core/c.hpp": 1})

    def test_what_is_not_there(self):
        with self.assertRaises(SystemExit):
            self.read("cuda/gone.cuh")

    def test_bounds(self):
        lines = self.read("cuda/a.cuh")
        self.assertEqual(check_reading_size.complaint("it", lines, 3, 6), "")
        self.assertIn("3 files and 6 lines, 2 and 6 allowed: cuda/a.cuh 3", check_reading_size.complaint("it", lines, 2, 6))
        self.assertIn("3 files and 6 lines, 3 and 5 allowed", check_reading_size.complaint("it", lines, 3, 5))


class KernelCode(unittest.TestCase):
    FILES = {"a.cu.o": [100, 300], "b.cu.o": [350], "c.cu.o": [50]}

    def expect(self, files, *expected):
        """The complaints about files whose kernels have so many instructions are as many as these, and each has its part."""
        found = list(check_kernel_code.complaints(files, check_kernel_code.count(self.FILES)))
        self.assertEqual(len(found), len(expected), found)
        for part, line in zip(expected, found):
            self.assertIn(part, line)

    def test_as_noted(self):
        self.expect(self.FILES)
        self.expect({**self.FILES, "b.cu.o": [500]})  # the longest, by a quarter exactly
        self.expect({**self.FILES, "d.cu.o": [200]})

    def test_more_than_a_quarter(self):
        self.expect({**self.FILES, "b.cu.o": [501]}, "instructions of the longest file: 501", "b.cu.o: 501 instructions in 1 kernels")
        self.expect({**self.FILES, "d.cu.o": [201]}, "instructions: 1001, but 800 are noted")
        self.expect({"a.cu.o": [1] * 800}, "instructions of the longest file: 800", "a.cu.o")

    def test_no_kernel(self):
        self.expect({"a.cu.o": []}, "no kernel in any object")


if __name__ == "__main__":
    unittest.main()
