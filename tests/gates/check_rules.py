#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the gates find wrong: those of sources (check_includes.py, check_source_size.py, check_kernels.py), check_verified.py in records and
builds, and check_version.py, whose --set writes a version."""
import contextlib
import copy
import io
import pathlib
import tempfile
import unittest


import check_includes
import check_kernels
import check_source_size
import check_verified
import check_version
from check_verified import SKIPPED, check_record, lost_kernels, release_reason


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
            return check_source_size.read_for(pathlib.Path(folder), entries)

    def test_counts_each_file_once(self):
        self.assertEqual(self.read("cuda/a.cuh", "core/c.hpp"), {"cuda/a.cuh": 3, "cuda/b.hpp": 2, "core/c.hpp": 1})

    def test_what_is_not_there(self):
        with self.assertRaises(SystemExit):
            self.read("cuda/gone.cuh")

    def test_bounds(self):
        lines = self.read("cuda/a.cuh")
        self.assertEqual(check_source_size.complaint("it", lines, 3, 6), "")
        self.assertIn("3 files and 6 lines, 2 and 6 allowed: cuda/a.cuh 3", check_source_size.complaint("it", lines, 2, 6))
        self.assertIn("3 files and 6 lines, 3 and 5 allowed", check_source_size.complaint("it", lines, 3, 5))


class KernelCode(unittest.TestCase):
    FILES = {"a.cu.o": [100, 300], "b.cu.o": [350], "c.cu.o": [50]}

    def expect(self, files, *expected):
        """The complaints about files whose kernels have so many instructions are as many as these, and each has its part."""
        found = list(check_kernels.complaints(files, check_kernels.count(self.FILES)))
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


# What check_verified.py says of records and builds.

ABOUT = {"commit": "abc1234", "date": "2026-11-23T01:02:03Z", "device": "NVIDIA H200", "driver": "580.65", "seconds": 60,
         "passed": 1000, "failed": 0}
BUILD = {"compiler": "13.0.88", "kernels": [{"name": name, "hash": hash, "function": f"_Z{name}", "source": f"src/cuda/{name}.cu"}
                                            for name, hash in (("a", "01"), ("b", "02"), ("c", "03"))]}
RECORD = {"backend": "hopper", "compiler": "13.0.88", "kernels": {"a": "01", "b": "02", "c": "03"}, "not_launched": [],
          "parts": {name: {**ABOUT, **least} for name, least in check_verified.PARTS.items()}}
RECORD["parts"]["sanitizer"]["tools"] = ["memcheck", "racecheck", "synccheck", "initcheck"]


class Record(unittest.TestCase):
    def setUp(self):
        self.record, self.build = copy.deepcopy(RECORD), copy.deepcopy(BUILD)

    def expect(self, *said, verified=False):
        """The gate passes or warns; on a release it passes or fails; and it says this."""
        text = ""
        for release, code in ((None, SKIPPED), ("HEAD is v1.2.3", 1)):
            lines, got = check_record(self.record, self.build, release)
            text = "\n".join(lines)
            self.assertEqual(got, 0 if verified else code, text)
            self.assertEqual("ERROR: HEAD is v1.2.3" in text, not verified and release is not None, text)
        for part in said:
            self.assertIn(part, text)
        return text

    def test_verified(self):
        self.expect("3 kernels as verified on NVIDIA H200, driver 580.65, 2026-11-23 (commit abc1234)", verified=True)

    def test_changed(self):
        self.build["kernels"][1]["hash"] = "ff"
        text = self.expect("2 kernels as verified on", "1 changed since:\n  b")
        self.assertNotIn("  a", text)

    def test_new_and_gone(self):
        self.record["kernels"] = {"a": "01", "b": "02", "d": "04"}
        self.expect("2 kernels as verified on", "1 new since:\n  c", "gone since: d")

    def test_never_launched(self):
        self.record["not_launched"] = ["c", "gone"]
        self.expect("2 kernels as verified on", "1 never launched by a case with checked results:\n  c")

    def test_no_record(self):
        self.record = None
        self.expect("there is no record")

    def test_each_part_is_needed(self):
        for name in check_verified.PARTS:
            self.setUp()
            del self.record["parts"][name]
            self.assertNotIn("kernels as verified on", self.expect("not complete", f"part {name} is missing"))

    def test_failures_count(self):
        self.record["parts"]["ragged"]["failed"] = 2
        self.expect("part ragged: 2 failed")

    def test_nothing_ran(self):
        self.record["parts"]["full"]["passed"] = 0
        self.expect("part full: 0 passed, 1 needed")

    def test_too_few_random_problems(self):
        self.record["parts"]["random"]["forward"] = 99_999
        self.expect("part random: 99,999 forward, 100,000 needed")
        self.setUp()
        del self.record["parts"]["random"]["backward"]
        self.expect("part random: 0 backward, 50,000 needed")

    def test_too_few_repetitions(self):
        self.record["parts"]["repeat"]["repetitions"] = 2
        self.expect("part repeat: 2 repetitions, 1,000 needed")

    def test_tools(self):
        self.record["parts"]["sanitizer"]["tools"].remove("racecheck")
        self.expect("part sanitizer: without racecheck")

    def test_changes_that_nobody_has(self):
        for commit in ("abc1234-dirty", "unknown"):
            self.record["parts"]["repeat"]["commit"] = commit
            self.expect(f"part repeat ran at commit {commit}")

    def test_cpu_record(self):
        self.record["backend"] = "cpu"
        self.expect("it is of the cpu backend")

    def test_other_compiler(self):
        self.build["compiler"] = "12.8.93"
        self.expect("the record is of nvcc 13.0.88, this build of nvcc 12.8.93", "nothing can be compared")

    def test_several_devices(self):
        self.record["parts"]["random"] |= {"device": "NVIDIA H100", "date": "2026-11-24T00:00:00Z", "commit": "def5678"}
        self.expect("NVIDIA H100, driver 580.65; NVIDIA H200, driver 580.65, 2026-11-23 … 2026-11-24 (commit abc1234, def5678)",
                    verified=True)

    def test_build_without_cuda(self):
        self.build = {"compiler": "", "kernels": []}
        for release in (None, "HEAD is v1.2.3"):
            self.assertEqual(check_record(self.record, self.build, release), (["a build without CUDA has no kernel to compare"], SKIPPED))


class Around(unittest.TestCase):
    def test_release(self):
        self.assertIsNone(release_reason({}, []))
        self.assertIsNone(release_reason({"FLASH3_RELEASE": "0"}, ["nightly", "v1.2", "v1.2.3-rc1", "xv1.2.3"]))
        self.assertEqual(release_reason({}, ["nightly", "v1.2.3"]), "HEAD is v1.2.3")
        self.assertEqual(release_reason({"FLASH3_RELEASE": "1"}, []), "FLASH3_RELEASE is set")

    def test_lost_kernels(self):
        log = "ptxas info    : Compiling entry function '{}' for 'sm_90a'\n"
        logs = [log.format("_Za") + log.format("_Zb"), log.format("_Zc")]
        self.assertEqual(lost_kernels(BUILD, logs), [])
        self.assertEqual(lost_kernels(BUILD, logs[:1]), ["_Zc"])
        self.assertEqual(lost_kernels(BUILD, [*logs, log.format("_Zd")]), ["_Zd"])

    def test_load(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            path = pathlib.Path(folder) / "record.json"
            self.assertIsNone(check_verified.load(path))
            for text, why in (("{", "Expecting property name"), ('{"backend": "hopper"}', "no compiler in it")):
                path.write_text(text, encoding="utf-8")
                with self.assertRaisesRegex(SystemExit, why):
                    check_verified.load(path)


# What gate.version finds wrong in a small project, and what --set writes.

OLD, NEW = "1.2.3", "1.3.0"
PAST = "flash3 " + "1.0.0"  # in two, so that gate.version does not take it for the version of this project


def header(version=OLD, minor=None):
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    lines = [f"#define FLASH3_VERSION_{name} {minor if minor and name == 'MINOR' else number}" for name, number in numbers]
    return "\n".join([*lines, f'#define FLASH3_VERSION_STRING "{version}"', ""])


def project(version=OLD):
    dotted, short = version, version.rpartition(".")[0]
    return {
        "include/flash3/version.h": header(version),
        "docs/install.md": f"pip install flash3-{dotted}.tar.gz and flash3_drop_in-{dotted}-py3-none-any.whl\n"
                           f"FetchContent_Declare(flash3 GIT_TAG v{dotted})\nfind_package(flash3 {short} REQUIRED)\n"
                           "jax 0.10.2 and torch==2.13.0\n",
        "examples/tour.ipynb": f'"flash3 {dotted}\\n"\n',
        "CHANGELOG.md": f"## [Unreleased]\n\n## [{dotted}] - 2026-02-03\n\nUnlike {PAST}.\n\n## [1.0.0] - 2026-01-02\n",
        f"abi/flash3-{dotted}.abi": "",
        "bench/results/a.json": '{"flash3": "%s"}\n' % PAST,
    }


class Version(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def complaints(self, files):
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return list(check_version.complaints(self.root))

    def expect(self, name, old, new, *wanted):
        files = project()
        self.assertIn(old, files[name])
        found = self.complaints({**files, name: files[name].replace(old, new, 1)})
        self.assertEqual(len(found), len(wanted), found)
        for complaint, words in zip(found, wanted):
            self.assertIn(words, complaint)

    def test_agreement(self):
        self.assertEqual(self.complaints(project()), [])

    def test_each_place(self):
        self.expect("docs/install.md", f"flash3-{OLD}", f"flash3-{NEW}", "docs/install.md:1: ")
        self.expect("docs/install.md", f"drop_in-{OLD}", f"drop_in-{NEW}", "docs/install.md:1: ")
        self.expect("docs/install.md", f"v{OLD}", f"v{NEW}", "docs/install.md:2: ")
        self.expect("docs/install.md", "1.2 REQUIRED", "1.1 REQUIRED", "docs/install.md:3: ")
        self.expect("examples/tour.ipynb", OLD, NEW, "examples/tour.ipynb:1: ")

    def test_header_that_disagrees_with_itself(self):
        files = {**project(), "include/flash3/version.h": header(minor="9")}
        self.assertEqual(self.complaints(files), ["include/flash3/version.h: the string says 1.2.3, the numbers 1.9.3"])

    def test_changelog(self):
        self.expect("CHANGELOG.md", f"[{OLD}]", f"[{NEW}]", f"the newest version is {NEW}")
        self.expect("CHANGELOG.md", " - 2026-02-03", "", "no version with a date")
        self.expect("CHANGELOG.md", "[1.0.0]", "[1.10.0]", "not in order")
        self.expect("CHANGELOG.md", "## [Unreleased]\n\n", "")
        self.expect("CHANGELOG.md", "## [1.0.0] - 2026-01-02", "## [Unreleased]", "[Unreleased] is not the first section")

    def test_no_dump(self):
        files = project()
        del files[f"abi/flash3-{OLD}.abi"]
        self.assertIn(f"abi/flash3-{OLD}.abi is not there", self.complaints(files)[0])

    def test_nothing_to_compare(self):
        files = {**project(), "docs/install.md": "", "examples/tour.ipynb": ""}
        self.assertIn("looks in the wrong place", self.complaints(files)[0])

    def test_set_writes_all_but_what_is_past(self):
        before, after = project(), project(NEW)
        self.complaints(before)
        check_version.set_version(self.root, NEW)
        for name in ("include/flash3/version.h", "docs/install.md", "examples/tour.ipynb"):
            self.assertEqual((self.root / name).read_text(encoding="utf-8"), after[name])
        for name in ("CHANGELOG.md", "bench/results/a.json"):
            self.assertEqual((self.root / name).read_text(encoding="utf-8"), before[name])


if __name__ == "__main__":
    unittest.main()
