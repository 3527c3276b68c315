#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which includes the gate of includes (check_includes.py) finds wrong."""
import pathlib
import tempfile
import unittest

import check_includes


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


if __name__ == "__main__":
    unittest.main()
