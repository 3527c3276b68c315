#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The benchmark scripts, as far as they go without a GPU: bench/gpu/peers.py refuses bad arguments in words before it loads
torch, asks `flash3 bench --ceiling` for the ceiling, and bench/report/tables.py shows what it wrote of FP8.

--flash3 PROGRAM: the ragged points are also compared with those that this program lists."""
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from sources import ROOT

sys.path.insert(0, str(ROOT))
from bench import result_file  # noqa: E402
from bench.gpu import decode_peers, decode_points, peers, ragged_points  # noqa: E402
from bench.report import tables  # noqa: E402

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
        self.expect_error([*good, "--peers", "cudnn,fa5"], "--peers names 'fa5'; there are cudnn, fa2, fa3, fa4")
        self.expect_error([*good, "--site", "/nonexistent"], "--site /nonexistent: there is no such folder")
        self.expect_error([*good, "--fa3", "/nonexistent"], "--fa3 /nonexistent: there is no such file")
        self.expect_error([*good, "--fa3", LIB], "--fa3 needs --fa3-build")
        self.expect_error([*good, "--peers", "fa3"], "--peers names fa3: give --fa3")
        self.expect_error([*good, "--ceiling", "/nonexistent"], "--ceiling /nonexistent: there is no such program")
        self.expect_error([*good, "--samples", "1"], "--samples 1: at least 2")
        self.expect_error([*good, "--energy", "-1"], "--energy")
        self.expect_error([*good, "--dims", "64,x"], "--dims")
        self.expect_error([*good, "--deterministic"], "--deterministic is for --backward")
        self.expect_error([*good, "--peers", "flex"], "--peers names 'flex'; there are cudnn, fa2, fa3, fa4")
        self.expect_error([*good, "--ragged", "--peers", "cudnn"], "--peers names 'cudnn'; there are fa2, fa4, flex")
        self.expect_error([*good, "--ragged", "--energy"], "not for --ragged")
        self.expect_error([*good, "--filter", "/d64/"], "--filter is for --ragged")
        self.expect_error(["--lib", f"flex={LIB}", "--commit", "abc"], "the name 'flex' is taken")
        self.expect_error(["--lib", f"fp8_gemm={LIB}", "--commit", "abc"], "the name 'fp8_gemm' is taken")
        self.expect_error([*good, "--fp8", "--peers", "fa2"], "--peers names 'fa2'; there are cudnn, cudnn_fp8, fa3_fp8, fp8_gemm")
        for other in ("--ragged", "--backward", "--energy"):
            self.expect_error([*good, "--fp8", other], "--fp8 is by itself: not with --ragged, --backward or --energy")

    def test_no_git_and_no_commit_is_an_error(self):
        root = result_file.ROOT
        try:
            with tempfile.TemporaryDirectory() as folder:
                result_file.ROOT = pathlib.Path(folder)
                self.expect_error(["--lib", LIB], "give --commit")
        finally:
            result_file.ROOT = root

    def test_good_ones_are_taken(self):
        args = peers.parse_args(["--lib", f"old={LIB}", "--lib", f"new={LIB}", "--peers", "", "--commit", "abc", "--energy"])
        self.assertEqual((list(args.libs), args.peers, args.commit, args.energy), (["old", "new"], [], "abc", 1.0))
        self.assertEqual(args.dims, [64, 128, 256])
        self.assertEqual((args.backward, args.deterministic), (False, False))
        args = peers.parse_args(["--lib", LIB, "--commit", "abc", "--backward", "--deterministic"])
        self.assertEqual((args.backward, args.deterministic), (True, True))
        self.assertEqual(args.peers, ["cudnn", "fa2"])
        args = peers.parse_args(["--lib", LIB, "--commit", "abc", "--ragged", "--dims", "64", "--filter", "/sink/"])
        self.assertEqual(args.peers, ["fa2", "fa4", "flex"])
        self.assertEqual([point.case for point in peers.ragged_points(args)], ["bf16/b1/q16384/k16384/h32/d64/causal/sink"])
        self.assertEqual(peers.parse_args(["--lib", LIB, "--commit", "abc", "--fp8"]).peers, ["cudnn", "cudnn_fp8", "fa3_fp8", "fp8_gemm"])
        args.filter = ["/d96/"]
        with self.assertRaisesRegex(SystemExit, "no case matches the filter"):
            peers.ragged_points(args)
        args = peers.parse_args(["--lib", LIB, "--commit", "abc", "--peers", "fa3", "--fa3", LIB, "--fa3-build", "a wheel"])
        self.assertEqual((args.peers, args.fa3_build), (["fa3"], "a wheel"))


class CachePoints(unittest.TestCase):
    def said(self, arguments):
        """(exit code, what is written) of decode_peers."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            try:
                code = decode_peers.main(arguments)
            except SystemExit as left:
                code = left.code
        return code, text.getvalue()

    def test_list_names_each_once(self):
        code, text = self.said(["--list"])
        names = [line.split()[0] for line in text.splitlines()]
        self.assertEqual((code, len(set(names))), (0, len(decode_points.cache_suite())))
        for name in ("decode/b1/128k/h32x8/d128/dense", "decode/b64/4k/h32x8/d128/p1", "decode/b16/16k/q4/h32x8/d128/p64",
                     "ragged/b256/8k/h32x8/d128/dense", "chunked/b4/16k/q512/h32x8/d128/p64", "mixed/b16/16k/q512/h32x8/d128/dense",
                     "decode/b1/16k/h8x1/d128/p64", "decode/b16/16k/h32x8/d256/dense", "sparse/b128/128k/list2048/h128x1/d64x512/p1"):
            self.assertIn(name, names)
        some = self.said(["--list", "--filter", "^mixed.*p64$"])[1].splitlines()
        self.assertEqual(len(some), 3)
        self.assertTrue(all("mixed/" in line and "/p64" in line for line in some))

    def test_counts(self):
        point = decode_points.CachePoint(3, 100, 8, 2, 64, queries=5, page=16, kind="mixed")
        self.assertEqual((point.lengths_q, point.cu_seqlens_q, point.pages_per_sequence, point.rows), ([1, 5, 5], [0, 1, 6, 11], 7, 3 * 112))
        seen = sum(sum(1 for j in range(100) if j <= i + 100 - q) for q in point.lengths_q for i in range(q))
        self.assertEqual(point.flops, 4 * 8 * 64 * seen)
        self.assertEqual(point.kv_bytes, 3 * 100 * 2 * 2 * 64 * 2)
        for point in decode_points.cache_suite():
            self.assertGreaterEqual(point.buffers * point.kv_bytes, 640e6)
            self.assertLessEqual(point.caches * point.rows * point.row_bytes, 18e9)
            self.assertTrue(point.calls >= 4 and point.calls % point.buffers == 0)

    def test_ragged_lengths(self):
        for point in decode_points.cache_suite():
            lengths = point.lengths_k
            longest = point.listed or point.ctx
            self.assertEqual((len(lengths), max(lengths), lengths[0]), (point.batch, longest, longest))
            if point.kind == "ragged":
                self.assertGreaterEqual(min(lengths), point.ctx // 64)
                below = sum(n < point.ctx / 8 for n in lengths) / len(lengths)  # half of them, by their logarithms
                self.assertTrue(0.25 < below < 0.75, below)
                self.assertEqual(lengths, point.lengths_k)

    def test_errors(self):
        good = ["--commit", "abc"]
        for arguments, part in ((["--commit", ""], "--commit is empty"), ([*good, "--filter", "("], "--filter (:"),
                                ([*good, "--filter", "zzz"], "--filter zzz: no point's name has a match"),
                                ([*good, "--peers", "fa9"], "--peers names 'fa9'; there are fa3, cudnn"),
                                ([*good, "--peers", "fa3"], "--peers names fa3: give --fa3"),
                                ([*good, "--fa3", "/nonexistent", "--fa3-build", "x"], "there is no such file"),
                                ([*good, "--fa3", LIB], "--fa3 needs --fa3-build"), ([*good, "--site", "/nonexistent"], "no such folder"),
                                ([*good, "--samples", "1"], "--samples 1: at least 2"), ([*good, "--seconds", "-1"], "--seconds -1: not below 0"),
                                ([*good, "--resume"], "--resume: there is no file of --json to go on with")):
            code, text = self.said(arguments)
            self.assertEqual(code, 2, arguments)
            self.assertIn(part, text)
        self.assertEqual(decode_peers.parse_args(good).peers, ["cudnn"])
        self.assertEqual(decode_peers.parse_args([*good, "--fa3", LIB, "--fa3-build", "x"]).peers, ["fa3", "cudnn"])

    def test_figures_are_of_a_call(self):
        point = decode_points.CachePoint(1, 1024)
        record = decode_peers.figures(point, {"flash3": [1.0, 0.9, 1.2]}, 4800)
        self.assertEqual(record["us"], {"flash3": round(1000 / point.calls, 2)})
        self.assertEqual(record["gbps"], {"flash3": round(point.kv_bytes * point.calls / 1e-3 / 1e9, 1)})
        self.assertEqual(record["share_of_peak"], {"flash3": round(record["gbps"]["flash3"] / 4800, 4)})
        self.assertAlmostEqual(record["spread_p10_p90"]["flash3"], 0.3)
        self.assertNotIn("share_of_peak", decode_peers.figures(point, {}, None))


class FakeTensor:
    """As much of a tensor as peers.py touches: a number."""
    def __init__(self, value=0.0):
        self.value = value

    def float(self):
        return self

    def __sub__(self, other):
        return FakeTensor(self.value - other.value)

    def abs(self):
        return FakeTensor(abs(self.value))

    max = float

    def item(self):
        return self.value

    def square(self):
        return FakeTensor(self.value**2)

    def mean(self):
        return self

    def __truediv__(self, other):
        return FakeTensor(self.value / other.value)

    def sqrt(self):
        return FakeTensor(self.value**0.5)


class FakeGpu:
    """gpu_peers without a GPU: every call of a library takes the milliseconds that its name stands for."""
    MS = {"flash3": [1.0, 0.9, 1.1], "flash3_default": [0.5, 0.5, 0.5], "cudnn": [2.0, 2.0, 2.0], "fa2": [4.0, 4.0, 4.0]}

    class Sensors:
        mhz, watts = 1700, 690

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    class Call:
        workspace_bytes = 1 << 20

    def flash3_backward(self, libs, qkv, dout, causal, deterministic):
        names = ["flash3", "flash3_default"] if deterministic else ["flash3"]
        return {name: self.Call() for name in names}, {name: [FakeTensor(1.0), FakeTensor(2.0), FakeTensor(3.5)] for name in names}

    def backward_peers(self, qkv, dout, causal, names, deterministic):
        return ({name: self.Call() for name in names if name != "fa4"},
                {"fa4": "head_dim 256 has no deterministic mode"} if "fa4" in names else {})

    def fa2_backward(self, qkv, dout, causal):
        return lambda: [FakeTensor(1.0), FakeTensor(2.0), FakeTensor(3.0)]

    def measure(self, calls, samples):
        return {name: self.MS[name] for name in calls}


@dataclasses.dataclass(frozen=True)
class FakeShape:
    batch: int = 2
    seq: int = 1024
    heads: int = 8
    dim: int = 256
    causal: bool = False
    flops = 4_000_000_000
    backward_flops = 10_000_000_000

    def tensors(self, count=3):
        return [FakeTensor()] * count


class BackwardPoint(unittest.TestCase):
    def point(self, *more):
        args = peers.parse_args(["--lib", LIB, "--commit", "abc", "--backward", "--peers", "cudnn,fa2,fa4", *more])
        return peers.measure_point(FakeGpu(), FakeShape(), {"flash3": None}, args, None)

    def test_counts_the_backwards_operations_and_bytes(self):
        point = self.point()
        self.assertEqual(point["tflops"], {"flash3": 10.0, "cudnn": 5.0, "fa2": 2.5})
        self.assertEqual(point["workspace_bytes"], {"flash3": 1 << 20})
        self.assertEqual(point["score_matrix_bytes"], 2 * 2 * 8 * 1024 * 1024)
        self.assertEqual(point["max_abs_diff_to_fa2"], 0.5)

    def test_tells_who_refuses_and_why(self):
        point = self.point("--deterministic")
        self.assertEqual(list(point["tflops"]), ["flash3", "flash3_default", "cudnn", "fa2"])
        self.assertIn("no fa4: head_dim 256 has no deterministic mode", peers.line(point, "flash3"))
        self.assertIn("/cudnn 2.000", peers.line(point, "flash3"))


class RaggedPoints(unittest.TestCase):
    def test_draws_are_committed(self):
        self.assertEqual(ragged_points.log_normal_lengths(65536, 2)[:6], [508, 576, 179, 479, 386, 100])
        for draw in ragged_points.DRAWS:
            lengths = ragged_points.log_normal_lengths(65536, draw)
            self.assertEqual(sum(lengths), 65536)
            self.assertGreaterEqual(min(lengths), 1)

    def test_counts_what_the_mask_leaves(self):
        def pairs(n, window, causal):
            return sum(1 for i in range(n) for j in range(n) if (not causal or j <= i) and (window < 0 or i - j <= window))

        for window in (0, 3, 8, 100):
            point = ragged_points.RaggedPoint("x", (1, 4, 9), 2, 1, 8, True, window=window)
            self.assertEqual(point.pairs, sum(pairs(n, window, True) for n in point.lengths))
        point = ragged_points.RaggedPoint("x", (1, 4, 9), 2, 1, 8, False)
        self.assertEqual(point.pairs, sum(pairs(n, -1, False) for n in point.lengths))
        self.assertEqual(point.flops, 4 * 8 * 2 * (1 + 16 + 81))
        self.assertEqual(dataclasses.replace(point, causal=True, backward=True).flops, 10 * 8 * 2 * (1 + 16 + 81) / 2)
        self.assertEqual(point.bytes, 14 * (2 * 2 * 8 * (2 + 1) + 4 * 2))  # q and out have 2 heads, k and v 1
        self.assertEqual(point.cu_seqlens, [0, 1, 5, 14])

    def test_are_those_of_the_command_line(self):
        program = os.environ.get("FLASH3_PROGRAM")
        if not program:
            self.skipTest("no --flash3 PROGRAM")
        for backward in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                file = pathlib.Path(folder) / "list.json"
                command = [program, "bench", "--suite", "ragged", "--backend", "hopper", "--list", "--json", file]
                subprocess.run(command + ["--backward"] * backward, check=True, capture_output=True)
                cases = {case["case"]: case for case in json.loads(file.read_text(encoding="utf-8"))["cases"]}
            points = ragged_points.ragged_suite(backward)
            # The others are equal lengths beside their dense calls: flash3 against itself.
            self.assertEqual(len(cases), len(points) + 36)
            for point in points:
                listed, beside = cases[point.case], ragged_points.beside_of(point)
                self.assertEqual((listed["sequences"], listed["tokens"], listed["flops"], listed["bytes"]),
                                 (len(point.lengths), point.tokens, point.flops, point.bytes), point.case)
                self.assertAlmostEqual(listed["cost_per_token"], point.cost_per_token)
                self.assertEqual(listed.get("beside", {}).get("case"), beside and beside.case, point.case)
                if beside:
                    self.assertEqual(listed["beside"]["flops"], beside.flops, point.case)


class FakeRagged:
    """ragged_peers without a GPU: fa2 refuses sinks, and the tensors differ by what the name stands for."""
    VALUES = {"flash3": 1.0, "fa2": 1.25, "flex": 1.5}

    def make_calls(self, point, libs, names):
        found = [name for name in [*libs, *names] if not (name == "fa2" and point.sink)]
        results = {name: lambda value=self.VALUES[name]: [FakeTensor(value)] for name in found}
        return {name: FakeGpu.Call() for name in found}, results, {"fa2": "no sink"} if point.sink and "fa2" in names else {}


class RaggedMeasurement(unittest.TestCase):
    def measure(self, point):
        gpu = FakeGpu()
        gpu.MS = {"flash3": [1.0, 0.9, 1.1], "flash3 beside": [0.5, 0.5, 0.5], "fa2": [4.0, 4.0, 4.0], "flex": [2.0, 2.0, 2.0]}
        args = peers.parse_args(["--lib", LIB, "--commit", "abc", "--ragged", "--peers", "fa2,flex"])
        return peers.measure_ragged_point(gpu, FakeRagged(), point, {"flash3": None}, args, None)

    def test_ratios_to_the_dense_call_and_to_peers(self):
        point = next(p for p in ragged_points.ragged_suite() if p.group == "log-normal")
        record = self.measure(point)
        beside = ragged_points.beside_of(point)
        self.assertEqual(record["tflops"]["flash3"], round(point.flops / 1e9, 1))
        self.assertEqual(record["gbps"]["flex"], round(point.bytes / 2e6, 1))
        self.assertAlmostEqual(record["ratio_to_beside"]["flash3"], point.flops / beside.flops / 2, places=3)
        self.assertEqual(record["max_abs_diff"], {"fa2": 0.25, "flex": 0.5})
        text = peers.ragged_line(record, "flash3")
        self.assertIn(f"to {beside.case} ", text)
        self.assertIn("/fa2 4.000  /flex 2.000", text)

    def test_who_refuses_is_told(self):
        record = self.measure(next(p for p in ragged_points.ragged_suite() if p.sink))
        self.assertEqual(record["refused"], {"fa2": "no sink"})
        self.assertEqual(record["beside"]["case"], "bf16/b1/q16384/k16384/h32/d64/causal")
        self.assertAlmostEqual(record["ratio_to_beside"]["flash3"], 0.5)
        self.assertIn("no fa2: no sink", peers.ragged_line(record, "flash3"))

    def test_short_sequences_have_nothing_beside(self):
        record = self.measure(next(p for p in ragged_points.ragged_suite() if p.group == "short"))
        self.assertEqual((record["sequences"], record["cost_per_token"]), (4096, 16))
        self.assertNotIn("beside", record)


class FakeFp8:
    """fp8_peers without a GPU; cuDNN's FP8 is missing if a test says so."""
    GEMM_FLOPS = 16_000_000_000

    def make_calls(self, shape, libs, names):
        found = [name for name in names if name != "cudnn_fp8" or not self.missing]
        values = {"flash3": 2.2, "flash3_bf16": 2.0, "flash3_from_bf16": 2.2, "cudnn": 2.0, "cudnn_fp8": 1.0, "fa3_fp8": 2.1}
        results = {name: lambda value=value: FakeTensor(value) for name, value in values.items()
                   if name.startswith("flash3") or name in found}
        calls = dict.fromkeys(["flash3", "flash3_bf16", "flash3_from_bf16", "flash3_quantize", *found])
        return calls, results, FakeTensor(2.0), {"cudnn_fp8": "No module named 'cudnn'"} if self.missing else {}


class Fp8Point(unittest.TestCase):
    def point(self, top=None, missing=False):
        gpu, fp8 = FakeGpu(), FakeFp8()
        gpu.MS = {"flash3": [1.0, 0.9, 1.1], "flash3_bf16": [2.0, 2.0, 2.0], "flash3_from_bf16": [1.25, 1.25, 1.25],
                  "flash3_quantize": [0.2, 0.2, 0.2], "cudnn": [2.5, 2.5, 2.5], "cudnn_fp8": [1.6, 1.6, 1.6],
                  "fa3_fp8": [1.25, 1.25, 1.25], "fp8_gemm": [2.0, 2.0, 2.0]}
        fp8.missing = missing
        args = peers.parse_args(["--lib", LIB, "--commit", "abc", "--fp8"])
        return peers.measure_fp8_point(gpu, fp8, FakeShape(), {"flash3": None}, args, top)

    def report(self, *points):
        return {"device": "GPU", "driver": "1", "torch": "2", "cudnn": 9, "cudnn_frontend": "1.32", "commit": "abc",
                "date": "2026-01-01", "dtype": "e4m3", "pass": "forward", "sample_ms": 12.0, "samples": 11, "fp8_points": list(points)}

    def cells(self, report):
        text = tables.fp8_points(ROOT / "bench/results/x.json", report)
        header, _, row = [line.split("|") for line in text.splitlines() if line.startswith("|")][:3]
        self.assertEqual(len(header), len(row))
        return text, {title.strip(): cell.strip() for title, cell in zip(header, row)}

    def test_counts_attention_and_the_gemm_each_by_its_own_operations(self):
        point = self.point(top=16)
        self.assertEqual(point["tflops"], {"flash3": 4.0, "flash3_bf16": 2.0, "flash3_from_bf16": 3.2, "cudnn": 1.6, "cudnn_fp8": 2.5,
                                           "fa3_fp8": 3.2, "fp8_gemm": 8.0})
        self.assertEqual(point["ms"]["flash3_quantize"], 0.2)
        self.assertEqual(point["share_of_ceiling"], {"flash3": 0.25, "cudnn_fp8": 0.1562, "fa3_fp8": 0.2, "fp8_gemm": 0.5})
        self.assertEqual(point["error_to_fa2"]["flash3"], 0.1)
        self.assertEqual(point["error_to_fa2"]["cudnn_fp8"], 0.5)
        line = peers.fp8_line(point, "flash3")
        self.assertIn("/flash3_bf16 2.000  /cudnn_fp8 1.600  /fa3_fp8 1.250  /fp8_gemm 0.500  /ceiling 0.250  quantize 0.2000 ms", line)

    def test_table(self):
        text, cells = self.cells(self.report(self.point()))
        self.assertEqual((cells["flash3, FP8 TFLOP/s"], cells["cuDNN, FP8 (out in e4m3) TFLOP/s"], cells["quantise ms"]), ("4.0", "2.5", "0.2000"))
        self.assertEqual((cells["/ flash3, bf16"], cells["/ cuDNN, FP8 (out in e4m3)"], cells["with quantise / flash3, bf16"]),
                         ("2.000", "1.600", "1.600"))
        self.assertEqual((cells["flash3, FP8: error"], cells["cuDNN, bf16: error"]), ("10.00 %", "0.00 %"))
        self.assertNotIn("ceiling", text)
        self.assertIn("cuDNN 9, its frontend 1.32", text)
        self.assertIn("- flash3, FP8 / FP8 GEMM, over these 1 points: 0.50", text)

    def test_ceiling_and_a_library_that_is_not_there(self):
        report = self.report(self.point(top=16, missing=True), self.point(top=16))
        report["ceiling"] = {"before": {**CEILING, "dtype": "e4m3"}}
        text, cells = self.cells(report)
        self.assertEqual((cells["share of the ceiling"], cells["cuDNN, FP8 (out in e4m3) TFLOP/s"], cells["/ cuDNN, FP8 (out in e4m3)"]),
                         ("0.250", "", ""))
        self.assertIn("cuDNN, FP8 (out in e4m3): No module named 'cudnn'.", text)
        self.assertIn("no cudnn_fp8: No module named 'cudnn'", peers.fp8_line(report["fp8_points"][0], "flash3"))


class Ceiling(unittest.TestCase):
    def run_program(self, script):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "flash3"
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            return peers.ceiling(program)

    def test_comes_from_the_command_line(self):
        answer = self.run_program('[ "$1 $2 $3 $5 $6" = "bench --ceiling --json --dtype bf16" ] && '
                                  'echo \'{"ceiling": [{"tflops": 850}]}\' > "$4"')
        self.assertEqual(answer, {"tflops": 850})

    def test_its_error_is_told(self):
        with self.assertRaisesRegex(SystemExit, "needs a Hopper GPU"):
            self.run_program("echo 'flash3: --ceiling needs a Hopper GPU: none' >&2; exit 1")


if __name__ == "__main__":
    if "--flash3" in sys.argv:
        place = sys.argv.index("--flash3")
        os.environ["FLASH3_PROGRAM"] = sys.argv[place + 1]
        del sys.argv[place : place + 2]
    unittest.main()
