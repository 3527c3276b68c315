#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What gate.version finds wrong in a small project, and what --set writes."""
import pathlib
import tempfile
import unittest

import check_version

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
