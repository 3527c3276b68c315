#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What check_verified.py says of records and builds."""
import contextlib
import copy
import io
import pathlib
import tempfile
import unittest

import check_verified
from check_verified import SKIPPED, check_record, lost_kernels, release_reason

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


if __name__ == "__main__":
    unittest.main()
