#!/usr/bin/env python3
"""The benchmark scripts, as far as they go without a GPU: bench/peers.py refuses bad arguments in words before it loads
torch, asks `flash3 bench --ceiling` for the ceiling, and bench/tables.py shows what they and flash3 bench wrote."""
import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

from sources import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import peers  # noqa: E402
import tables  # noqa: E402

LIB = str(ROOT / "README.md")  # any file that is there
CEILING = {"when": "alone", "dtype": "bf16", "head_dim": 128, "tflops": 850.0, "sm_clock_mhz": 1750.0, "watts": 680.0,
           "pj_per_flop": 0.8}


class Arguments(unittest.TestCase):
    def expect_error(self, arguments, part):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), self.assertRaises(SystemExit) as left:
            peers.parse_args(arguments)
        self.assertEqual(left.exception.code, 2)
        self.assertIn(part, said.getvalue())

    def test_errors_name_the_argument_and_the_rule(self):
        good = ["--lib", LIB, "--commit", "abc"]
        self.expect_error(["--lib", LIB, "--commit", ""], "--commit is empty")
        self.expect_error(["--lib", LIB, "--commit", " "], "--commit is empty")
        self.expect_error(["--commit", "abc"], "--lib")
        self.expect_error(["--lib", "/nonexistent/lib.so", "--commit", "abc"], "there is no file /nonexistent/lib.so")
        self.expect_error([*good, "--lib", LIB], "the name 'flash3' is taken")
        self.expect_error([*good, "--lib", f"cudnn={LIB}"], "the name 'cudnn' is taken")
        self.expect_error([*good, "--peers", "cudnn,fa5"], "--peers names 'fa5'; there are cudnn, fa2, fa4")
        self.expect_error([*good, "--site", "/nonexistent"], "--site /nonexistent: there is no such folder")
        self.expect_error([*good, "--ceiling", "/nonexistent"], "--ceiling /nonexistent: there is no such program")
        self.expect_error([*good, "--samples", "1"], "--samples 1: at least 2")
        self.expect_error([*good, "--energy", "-1"], "--energy")
        self.expect_error([*good, "--dims", "64,x"], "--dims")

    def test_no_git_and_no_commit_is_an_error(self):
        root = peers.ROOT
        try:
            with tempfile.TemporaryDirectory() as folder:
                peers.ROOT = pathlib.Path(folder)
                self.expect_error(["--lib", LIB], "give --commit")
        finally:
            peers.ROOT = root

    def test_good_ones_are_taken(self):
        args = peers.parse_args(["--lib", f"old={LIB}", "--lib", f"new={LIB}", "--peers", "", "--commit", "abc", "--energy"])
        self.assertEqual((list(args.libs), args.peers, args.commit, args.energy), (["old", "new"], [], "abc", 1.0))
        self.assertEqual(args.dims, [64, 128, 256])


class Ceiling(unittest.TestCase):
    def run_program(self, script):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "flash3"
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            return peers.ceiling(program)

    def test_comes_from_the_command_line(self):
        answer = self.run_program('[ "$1 $2 $3" = "bench --ceiling --json" ] && echo \'{"ceiling": [{"tflops": 850}]}\' > "$4"')
        self.assertEqual(answer, {"tflops": 850})

    def test_its_error_is_told(self):
        with self.assertRaisesRegex(SystemExit, "needs a Hopper GPU"):
            self.run_program("echo 'flash3: --ceiling needs a Hopper GPU: none' >&2; exit 1")


class Tables(unittest.TestCase):
    def report(self, **more):
        point = {"batch": 1, "seq": 16384, "heads": 16, "dim": 128, "causal": True, "tflops": {"flash3": 700.0, "cudnn": 500.0},
                 "spread_p10_p90": {"flash3": 0.01, "cudnn": 0.02}, "sm_mhz": 1700, "watts": 690, **more}
        return {"device": "GPU", "driver": "1", "torch": "2", "cudnn": 9, "commit": "abc", "date": "2026-01-01",
                "dtype": "bf16", "sample_ms": 12.0, "samples": 11, "points": [point]}

    def test_columns_of_the_peers(self):
        path = ROOT / "bench/results/x.json"
        plain = tables.gpu_points(path, self.report())
        self.assertNotIn("ceiling", plain)
        self.assertNotIn("pJ/FLOP", plain)
        full = self.report(share_of_ceiling={"flash3": 0.8235, "cudnn": 0.588},
                           alone={"flash3": {"pj_per_flop": 0.97}, "cudnn": {"pj_per_flop": 1.31}})
        full["ceiling"] = {"before": CEILING, "after": CEILING}
        points = tables.gpu_points(path, full)
        header, rule, row = [line.split("|") for line in points.splitlines() if line.startswith("|")]
        self.assertEqual(len(header), len(rule))
        self.assertEqual(len(header), len(row))
        cells = {title.strip(): cell.strip() for title, cell in zip(header, row)}
        self.assertEqual(cells["share of the ceiling"], "0.824")
        self.assertEqual(cells["flash3 alone, pJ/FLOP"], "0.97")
        self.assertEqual(cells["cuDNN alone, pJ/FLOP"], "1.31")
        self.assertIn("before the samples 850 TFLOP/s at 1750 MHz, 680 W, 0.80 pJ/FLOP", points)
        self.assertIn("share of the ceiling, over these 1 points: 0.82", tables.gpu_summary(path, full))

    def test_flash3_alone(self):
        path = ROOT / "bench/results/x.json"
        about = {"commit": "abc", "date": "2026-01-01T00:00:00Z", "device": "GPU"}
        window = {"metadata": {**about, "suite": "window"},
                  "results": [{"case": "c", "median_ms": 1.5, "tflops": 600.0, "keys_per_query": 128.0, "us_per_key": 11.7}]}
        self.assertIn("| `c` | 1.5000 | 600.0 | 128.0 | 11.7000 |", tables.alone_table(path, window))
        sustained = {"metadata": about, "ceiling": [{**CEILING, "when": "before"}],
                     "results": [{"case": "c", "sustained_ms": 1.0, "burst_tflops": 700.0, "tflops": 650.0, "keys_per_query": 9.0}]}
        text = tables.alone_table(path, sustained)
        self.assertIn("| `c` | 700.0 | 650.0 |", text)
        self.assertIn("before the cases: 850 TFLOP/s", text)
        self.assertEqual(tables.alone_kind({"metadata": about, "results": [], "ceiling": [CEILING]}), "the ceiling")
        self.assertIsNone(tables.alone_kind({"metadata": about, "results": [{"median_ms": 1}]}))
        ablation = {"metadata": {**about, "case": "c", "how": "medians"},
                    "ablation": [{"schedule": "full", "tile": "128x128", "tflops": 650.0, "share_of_full": 1.0,
                                  "paper_tflops": 661.0, "paper_share_of_full": 1.0},
                                 {"schedule": "no ping-pong", "tile": "128x128", "tflops": 640.0, "share_of_full": 0.985}]}
        text = tables.alone_table(path, ablation)
        self.assertIn("| full | 128x128 | 650.0 | 1.000 | 661 | 1.000 |", text)
        self.assertIn("| no ping-pong | 128x128 | 640.0 | 0.985 |  |  |", text)


if __name__ == "__main__":
    unittest.main()
