#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What bench/report/tables.py and bench/report/draw.py show of what the benchmark scripts, flash3 bench and the training example wrote."""
import csv
import pathlib
import re
import tempfile
import unittest
import xml.etree.ElementTree

from check_bench_scripts import CEILING
from sources import ROOT

from bench.report import bias_table, draw, draw_speed, needle_table, parts, suite_tables, summary_tables, tables  # noqa: E402


class Tables(unittest.TestCase):
    def report(self, **more):
        point = {"batch": 1, "seq": 16384, "heads": 16, "dim": 128, "causal": True, "tflops": {"flash3": 700.0, "cudnn": 500.0},
                 "spread_p10_p90": {"flash3": 0.01, "cudnn": 0.02}, "sm_mhz": 1700, "watts": 690, **more}
        return {"device": "GPU", "driver": "1", "torch": "2", "cudnn": 91900, "commit": "abc", "date": "2026-01-01",
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
        self.assertIn("share of the ceiling: 0.82", tables.gpu_summary(path, full))

    def test_speed_over_peers(self):
        path = ROOT / "bench/results/x.json"
        report = self.report()
        report["points"].append({**report["points"][0], "tflops": {"flash3": 600.0, "cudnn": 600.0, "fa4": 800.0}})
        cpu = {"device": "CPU", "instructions": "X, 2 threads", "geometric_mean_speedup": 2.78, "results": [{}, {}]}
        text = summary_tables.speed_over_peers([(path, report)], [], [], [(path, cpu)])
        self.assertIn("| forward, GPU, 2 points | 1.20 (1.00 … 1.40) | 0.75 (0.75 … 0.75) | 1 of 2 |", text)
        self.assertIn("On a CPU (CPU, X, 2 threads) flash3 is 2.8 times as fast as torch (the geometric mean of 2 cases)", text)
        self.assertNotIn("backward", text)
        self.assertNotIn("FP8", text)
        # At each point the fastest of the others counts.
        summary = tables.gpu_summary(path, {**report, "fa3": "a wheel"})
        self.assertIn("the fastest of the other libraries: 0.75 … 1.40, median 1.07; flash3 leads at 1 of 2", summary)
        self.assertIn("cuDNN 91900, FlashAttention-3 of a wheel; 1700 to 1700 MHz, 690 to 690 W", summary)

    def test_speed_of_each_pass_and_card(self):
        def of(device, commit, flash3, peers, field="points"):
            points = [{"tflops": {"flash3": value, **peers}} for value in flash3]
            return ROOT / "bench/results/x.json", {"device": device, "commit": commit, field: points}

        h100, h200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
        forward = [of(h100, "c", [90.0], {"cudnn": 100.0, "fa3": 80.0}), of(h200, "b", [300.0], {"fa3": 100.0}), of(h200, "b", [100.0], {"fa3": 200.0}),
                   of(h200, "a", [900.0], {"fa3": 100.0})]
        # flash3 in bf16 and a GEMM are no FP8 attention; a row for each card is there, one after the card with more passes.
        peers = {"flash3_bf16": 999.0, "cudnn": 999.0, "fp8_gemm": 999.0, "cudnn_fp8": 100.0, "fa3_fp8": 200.0}
        text = summary_tables.speed_over_peers(forward, [of(h200, "b", [100.0], {"fa3": 50.0})], [of(h200, "b", [100.0, 240.0], peers, "fp8_points")], [])
        self.assertEqual([line for line in text.splitlines() if line.startswith("|")], [
            "| flash3's speed divided by | cuDNN | FlashAttention-3 | fastest at |", "|---|---:|---:|---:|",
            "| forward, H200, 2 points | – | 1.75 (0.50 … 3.00) | 1 of 2 |", "| backward, H200, 1 points | – | 2.00 (2.00 … 2.00) | 1 of 1 |",
            "| FP8 forward, H200, 2 points | 1.70 (1.00 … 2.40) | 0.85 (0.50 … 1.20) | 1 of 2 |",
            "| forward, H100, 1 points | 0.90 (0.90 … 0.90) | 1.12 (1.12 … 1.12) | 0 of 1 |"])

    def test_backward(self):
        path = ROOT / "bench/results/x.json"
        report = self.report(workspace_bytes={"flash3": 3 << 20}, score_matrix_bytes=8 << 30)
        report |= {"pass": "backward", "deterministic": False}
        # A library that refuses a point has no cell there.
        report["points"].append({**report["points"][0], "seq": 8192, "tflops": {"flash3": 600.0, "fa4": 400.0}})
        points = tables.gpu_points(path, report)
        self.assertIn("bf16, backward, batch · seq", points)
        header, _, row, other = [line.split("|") for line in points.splitlines() if line.startswith("|")]
        cells = {title.strip(): cell.strip() for title, cell in zip(header, row)}
        self.assertEqual((cells["workspace, MiB"], cells["score matrix (not stored), MiB"]), ("3.0", "8192"))
        self.assertEqual(cells["FlashAttention-4 TFLOP/s"], "")
        cells = {title.strip(): cell.strip() for title, cell in zip(header, other)}
        self.assertEqual((cells["cuDNN TFLOP/s"], cells["/ FlashAttention-4"]), ("", "1.500"))
        self.assertIn("Workspace: at most 3.0 MiB", tables.gpu_summary(path, report))
        self.assertIn("deterministic backward", tables.gpu_heading({**report, "deterministic": True}))

    def test_ragged(self):
        path = ROOT / "bench/results/x.json"
        point = {"case": "c", "sequences": 47, "cost_per_token": 4760.3, "ms": {"flash3": 2.0, "fa4": 2.5},
                 "tflops": {"flash3": 600.0, "fa4": 480.0}, "gbps": {"flash3": 500.0, "fa4": 400.0},
                 "ratio_to_beside": {"flash3": 0.95}, "beside": {"case": "d"}, "spread_p10_p90": {"flash3": 0.01},
                 "sm_mhz": 1700, "watts": 690, "refused": {"fa2": "no sink"}}
        report = {**self.report(), "pass": "backward", "ragged_points": [point]}
        del report["points"]
        text = tables.ragged_points(path, report)
        header, _, row = [line.split("|") for line in text.splitlines() if line.startswith("|")]
        self.assertEqual(len(header), len(row))
        cells = {title.strip(): cell.strip() for title, cell in zip(header, row)}
        self.assertEqual(cells["FlashAttention-4 ms (TFLOP/s, GB/s)"], "2.500 (480, 400)")
        self.assertEqual(cells["/ FlashAttention-4"], "1.250")
        self.assertEqual(cells["of the dense or plain call's TFLOP/s"], "0.950 of `d`")
        self.assertIn("FlashAttention-2: no sink", text)
        alone = {"metadata": {"commit": "abc", "date": "2026-01-01T00:00:00Z", "device": "GPU", "suite": "ragged"},
                 "results": [{"case": "c", "median_ms": 2.0, "tflops": 600.0, "gbps": 500.2, "sequences": 47,
                              "cost_per_token": 4760.3, "beside": "d", "ratio": 0.95}]}
        text = tables.alone_table(path, alone)
        self.assertIn("| `c` | 2.0000 | 600.0 | 500 | 47 | 4760 | d | 0.950 |", text)

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

    def test_calls_and_trainings(self):
        path = ROOT / "bench/results/x.json"
        about = {"device": "NVIDIA H200", "torch": "2.11", "date": "2026-11-22", "commit": "abc"}
        text = tables.call_table(path, {**about, "rounds": 21, "calls": 500, "call_overhead_us": {
            "C function": 9.0, "torch.ops.flash3.forward_out": 15.0, "flash3.sdpa": 20.5, "flash3.sdpa, recorded by autograd": 30.0,
            "torch scaled_dot_product_attention": 19.0, "torch's, recorded by autograd": 25.25}})
        for line in ("takes 9.0;", "| `torch.ops.flash3.forward_out` | 6.0 |  |", "| `flash3.sdpa` | 11.5 | 21.0 |",
                     "| `scaled_dot_product_attention` of torch | 10.0 | 16.2 |", "commit abc, 2026-11-22"):
            self.assertIn(line, text)
        losses = {"flash3": [5.0] * 10 + [3.0] * 15, "torch SDPA": [5.0] * 10 + [2.0] * 15}
        size = {"layers": 2, "dim": 128, "heads": 4, "batch": 8, "length": 128}
        text = tables.training_table(path, {**about, "size": size, "seed": 0, "loss": losses,
                                            "tokens_per_second": {"flash3": 12345, "torch SDPA": 9999}})
        for line in ("| 0 … 9 | 5.0000 | 5.0000 |", "| 10 … 19 | 3.0000 | 2.0000 |", "| 15 … 24 | 3.0000 | 2.0000 |",
                     "| tokens/s | 12,345 | 9,999 |"):
            self.assertIn(line, text)

    def test_needles(self):
        path = ROOT / "bench/results/x.json"

        def point(data, level, dim, found, gain):
            got = {"found": found, "found_unquantised": 0.0, "near_unquantised": 0.75, "error": 0.03 - found / 100, "error_unquantised": 0.05,
                   "gain": gain} | ({"retrieved": 1.0} if data != "one sign" else {})
            libraries = {"flash3_bf16": got, "flash3_fp8": got} | ({"fa3_fp8": got} if dim == 64 else {})
            return {"keys": 131072, "dim": dim, "data": data, "level": level, "weight": 0.5, "libraries": libraries,
                    "refused": {} if dim == 64 else {"fa3_fp8": "no such head dim"}}

        report = {"device": "NVIDIA H200", "torch": "2.11", "date": "2026-11-22", "commit": "abc", "fa3": "a wheel", "rows": 256, "heads": 2,
                  "seed": 1, "needle_points": [point("normal", "noise", 64, 1.0, 1.0), point("normal", "noise", 128, 0.5, 1.0),
                                               point("one sign", "equal", 64, 1.0, 0.85), point("one sign", "equal", 128, 1.0, 0.9)]}
        text = needle_table.needle_tables((path, report), full=True)
        # The worst of the head dims counts; bf16 is not compared with itself.
        for line in ("| normal, just above noise | 131,072 | 100 %, 50 %, 2.5 % | 100 %, 50 %, 2.5 % | 100 %, 100 %, 2.0 % | 75 %, 5.0 % | 75 %, 5.0 % |",
                     "| equal weights | 131,072 | 85.00 %, 2.00 % | 85.00 %, 2.00 % | 85.00 %, 2.00 % |", "512 rows a point", "head dims 64, 128.",
                     "FlashAttention-3 of a wheel", "FlashAttention-3, FP8 at 131,072 keys, d 128: no such head dim", "commit abc, 2026-11-22"):
            self.assertIn(line, text)
        for table in text.split("\n\n")[1:3]:
            self.assertEqual(len({row.count("|") for row in table.splitlines()}), 1)
        self.assertEqual(needle_table.needle_tables(None), tables.NOT_MEASURED)
        report["needle_points"].append({**report["needle_points"][0], "keys": 8192})
        self.assertNotIn("| 8,192 |", needle_table.needle_tables((path, report)))
        self.assertIn("| normal, just above noise | 8,192 |", needle_table.needle_tables((path, report), full=True))

    def test_needles_in_caches(self):
        path = ROOT / "bench/results/x.json"

        def point(layout, dim, near):
            got = {"found": 1.0, "found_unquantised": 0.5, "near_unquantised": near, "error": 0.002, "error_unquantised": 0.1 - near / 20,
                   "gain": 1.0, "retrieved": 1.0}
            return {"keys": 131072, "dim": dim, "data": "model", "level": "noise", "layout": layout, "weight": 0.1,
                    "libraries": {"bf16": got, "page_rotated": got}}

        report = {"device": "NVIDIA H200", "torch": "2.11", "date": "2026-11-25", "commit": "abc", "rows": 256, "heads": 2, "queries": 4,
                  "page_size": 128, "seed": 1, "cache_needle_points": [point("dense", 64, 1.0), point("paged", 128, 0.75)]}
        text = needle_table.cache_needle_tables((path, report))
        for line in ("| data, needle's weight | keys | bf16 | scales of pages, rotated |",
                     "| model, just above noise | 131,072 | 100 %, 100 %, 0.20 % | 100 %, 100 %, 0.20 % |",
                     "| model, just above noise | 131,072 | 50 %, 75 %, 6.2 % | 50 %, 75 %, 6.2 % |", "512 rows a point, 4 queries a sequence",
                     "head dims 64, 128 and of dense and paged caches", "commit abc, 2026-11-25"):
            self.assertIn(line, text)
        self.assertEqual(needle_table.cache_needle_tables(None), tables.NOT_MEASURED)

    def test_what_kernels_have_passed(self):
        part = {"commit": "abc", "date": "2026-11-27T01:04:21Z", "device": "NVIDIA H100 80GB HBM3, 132 SMs", "passed": 1000, "failed": 0}
        record = {"kernels": {"a": "1", "b": "2", "c": "3"}, "not_launched": ["b"], "parts": {"full": part, "decode": {**part, "passed": 234}}}
        text = suite_tables.verified_text(record)
        for words in ("2 of 3 GPU kernels have passed", "have passed\n1,234 cases of the tables,\nand failed none (NVIDIA H100 80GB HBM3, 2026-11-27 at abc)."):
            self.assertIn(words, text)
        record["parts"] |= {"random": {**part, "forward": 130000, "backward": 60000}, "repeat": {**part, "passed": 64, "repetitions": 1000},
                            "sanitizer": {**part, "passed": 137, "failed": 2, "commit": "def"}}
        text = suite_tables.verified_text(record)
        for words in ("1,234 cases of the tables, 130,000 random forward and 60,000 random backward problems, 64 cases 1,000 times over",
                      " and 137 cases under compute-sanitizer's", "and failed 2 (", "2026-11-27 at abc, 2026-11-27 at def"):
            self.assertIn(words, text)

    def test_biases(self):
        point = {"term": "bias", "seq": 4096, "batch": 1, "heads": 16, "dim": 128, "causal": False, "grad": False, "softcap": 0.0, "fp8": False,
                 "refused": {"efficient": "a relative RMS error of nan"},
                 "forward": {"plain_ms": 0.2, "flash3_ms": 0.25, "cudnn_ms": 0.5, "flex_ms": 0.4}}
        alone = {**point, "refused": {}, "grad": True, "backward": {"plain_ms": 0.5, "flash3_ms": 0.6}}
        del alone["forward"]
        text = bias_table.bias_table(ROOT / "bench/results/x.json", {"device": "GPU", "torch": "2", "samples": 9, "date": "2026-01-01",
                                                                     "bias_points": [point, alone]})
        for line in ("| bias by pair, 1 × 4096 tokens, 16 heads of 128, full | 0.250 | 1.25 | 1.60 (FlexAttention) |  |  |  |",
                     "| bias by pair, with its gradient, 1 × 4096 tokens, 16 heads of 128, full |  |  |  | 0.600 | 1.20 |  |",
                     "Without a time: torch's efficient attention, bias by pair, 1 × 4096 tokens, 16 heads of 128, full: a relative RMS error of nan."):
            self.assertIn(line, text)

    def test_calls_on_a_cache(self):
        path = ROOT / "bench/results/x.json"
        about = {"kv_bytes": 1073741824, "sm_mhz": 1980, "watts": 400, "refused": {}, "kind": "decode", "tflops": {"flash3": 18.0, "fa3": 17.0},
                 "spread_p10_p90": {"flash3": 0.004, "fa3": 0.011}}
        points = [{**about, "case": "a", "us": {"flash3": 240.0, "fa3": 252.0, "cudnn": 228.0},
                   "share_of_peak": {"flash3": 0.932, "fa3": 0.888, "cudnn": 0.981}},
                  {**about, "case": "b", "kind": "mixed", "us": {"flash3": 500.04, "fa3": 450.0}, "tflops": {"flash3": 512.4, "fa3": 570.0},
                   "refused": {"cudnn": "no such call"}},
                  {**about, "case": "c", "us": {"fa3": 10.0}, "share_of_peak": {"fa3": 0.5}, "refused": {"flash3": "out errs by 1", "cudnn": "no such call"}}]
        report = {"device": "NVIDIA H200", "driver": "1", "torch": "2.11", "cudnn": 91900, "cudnn_frontend": "1.32", "fa3": "a wheel", "commit": "abc",
                  "date": "2026-11-24", "dtype": "bf16", "sample_ms": 5.0, "samples": 11, "missing": {}, "lost": {}, "failed": {"d": "no memory"},
                  "cache_points": points}
        text = suite_tables.decode_points(path, report)
        for line in ("| case | K and V, MB | flash3 µs | cuDNN µs | FlashAttention-3 µs | / cuDNN | / FlashAttention-3 | / the fastest | widest",
                     "| `a` | 1074 | 240.0 (93 %) | 228.0 (98 %) | 252.0 (89 %) | 0.950 | 1.050 | 0.950 | 1.1 % | 1980 | 400 |",
                     "| `b` | 1074 | 500.0 (512 TFLOP/s) |  | 450.0 (570 TFLOP/s) |  | 0.900 | 0.900 | 1.1 % | 1980 | 400 |",
                     "| `c` | 1074 |  |  | 10.0 (50 %) |  |  |  | 1.1 %", "- flash3 / FlashAttention-3, over these 2 points: 0.90 … 1.05, median 0.97",
                     "- flash3 / the fastest peer, decode: 0.95 … 0.95, median 0.95; flash3 leads at 0 of 1", "FlashAttention-3 of a wheel; bf16",
                     "cuDNN: no such call (`b` and 1 more); flash3: out errs by 1 (`c`); `d`: no memory.", "commit abc, 2026-11-24"):
            self.assertIn(line, text)
        rows = [line for line in text.splitlines() if line.startswith("|")]
        self.assertEqual(len({row.count("|") for row in rows}), 1)

    def test_summaries(self):
        path = ROOT / "bench/results/x.json"
        about = {"device": "NVIDIA H200", "commit": "abc", "date": "2026-11-24"}
        ragged = {**about, "pass": "backward", "ragged_points": [
            {"ms": {"flash3": 2.0, "fa4": 3.0}, "ratio_to_beside": {"flash3": 0.9}}, {"ms": {"flash3": 2.0, "fa4": 1.0}, "ratio_to_beside": {}}]}
        self.assertIn("| backward, H200, 2 points | 1.00 (0.50 … 1.50) | 1 of 2 | 0.90 (0.90 … 0.90) |", summary_tables.ragged_summary([(path, ragged)]))
        fp8 = {**about, "fp8_points": [{"tflops": {"flash3": 900.0, "flash3_bf16": 600.0, "flash3_from_bf16": 450.0, "fp8_gemm": 1800.0}}]}
        self.assertIn("| H200, 1 points | 1.50 (1.50 … 1.50) | – | 0.50 (0.50 … 0.50) | 0.75 (0.75 … 0.75) |", summary_tables.fp8_summary([(path, fp8)]))
        cache = {**about, "cache_points": [{"kind": "decode", "us": {"flash3": 10.0, "fa3": 11.0, "cudnn": 8.0}}, {"kind": "decode", "us": {"fa3": 9.0}},
                                           {"kind": "mixed", "us": {"flash3": 10.0, "fa3": 20.0}}]}
        text = summary_tables.cache_summary([(path, cache)])
        self.assertIn("| decode, H200, 2 points | 0.80 (0.80 … 0.80) | 1.10 (1.10 … 1.10) | 0 of 1 |", text)
        self.assertIn("| mixed, H200, 1 points | – | 2.00 (2.00 … 2.00) | 1 of 1 |", text)
        point = {"kind": "causal", "of_alone": {"ring": {"forward": 0.9, "backward": 0.8}, "all_gather": {"forward": 0.95, "backward": 0.7}},
                 "tflops": {"ring": {"forward": 90, "backward": 80}, "torch_allgather": {"forward": 60, "backward": 0}}}
        text = summary_tables.context_summary([(path, {**about, "ranks": 2, "context_points": [point]})])
        self.assertIn("| causal, forward, 2 × H200, 1 points | 95 % (95 … 95) | 1.50 (1.50 … 1.50) |", text)
        self.assertIn("| causal, backward, 2 × H200, 1 points | 80 % (80 … 80) | – |", text)
        for summary in (summary_tables.ragged_summary, summary_tables.fp8_summary, summary_tables.cache_summary, summary_tables.context_summary):
            self.assertEqual(summary([]), tables.NOT_MEASURED)

    def test_every_point_as_csv(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            alone = {"metadata": {"commit": "abc", "date": "2026-01-01", "device": "GPU"}, "results": [], "ceiling": [{**CEILING, "when": "alone"}]}
            tables.write_csv(folder / "new", [(ROOT / "bench/results/x.json", tables.gpu_points(ROOT / "bench/results/x.json", self.report())),
                                              (ROOT / "bench/results/c.json", tables.alone_table(ROOT / "bench/results/c.json", alone))])
            self.assertEqual({path.name for path in (folder / "new").iterdir()}, {"x.csv", "x.txt", "c.txt"})
            with open(folder / "new/x.csv", encoding="utf-8", newline="") as file:
                header, row = csv.reader(file)
            cells = dict(zip(header, row, strict=True))
            tables.write_csv(folder / "two", [(ROOT / "bench/results/x.json", "| a |\n| --- |\n| `b\\|c` |\n\nand\n\n| d | e |\n| --- | ---: |\n| f | 1,024 |")])
            self.assertEqual([(folder / f"two/{name}").read_text(encoding="utf-8") for name in ("x.csv", "x_2.csv", "x.txt")],
                             ["a\nb|c\n", 'd,e\nf,"1,024"\n', "and\n"])
            self.assertEqual((cells["head_dim, mask, seq"], cells["cuDNN TFLOP/s"], cells["/ cuDNN"]), ("128 causal 16384", "500.0", "1.400"))
            self.assertIn("median of 11 samples of 12 ms", (folder / "new/x.txt").read_text(encoding="utf-8"))
            self.assertIn("850 TFLOP/s", (folder / "new/c.txt").read_text(encoding="utf-8"))

    def test_drawing_of_speed(self):
        forward = {**self.report(), "device": "NVIDIA H200", "pass": "forward"}
        forward["points"] = [{"tflops": {"flash3": flash3, "cudnn": 100.0}} for flash3 in (90.0, 110.0, 150.0)]
        fp8 = {"device": "NVIDIA H200", "commit": "abc", "fp8_points": [{"tflops": {"flash3": 50.0, "fa3_fp8": 100.0, "cudnn_fp8": 25.0}}]}
        svg = draw_speed.draw([forward, fp8], "light")
        xml.etree.ElementTree.fromstring(svg)
        for words in ("forward, H200", "fastest at 2 of 3", "FP8 forward, H200", "fastest at 0 of 1", "FlashAttention-3<"):
            self.assertIn(words, svg)
        self.assertNotIn("FlashAttention-4", svg)
        # The bar ends at the least and the most, and the mark is at the median; what is beyond the axis ends there.
        self.assertRegex(svg, rf'd="M{draw_speed.place(0.9):.1f} [\d.]+H{draw_speed.place(1.5):.1f}" class="bar cudnn"')
        self.assertIn(f'<circle cx="{draw_speed.place(1.1):.1f}"', svg)
        self.assertEqual(draw_speed.place(0.5), draw_speed.LEFT)
        self.assertNotEqual(svg, draw_speed.draw([forward, fp8], "dark"))

    def test_drawing(self):
        report = self.report()
        report["points"] = [{**report["points"][0], "seq": seq, "tflops": {"flash3": flash3, "fa4": 100.0, "fp8_gemm": 900.0}}
                            for seq, flash3 in ((1024, 450.0), (512, 300.0))]
        svg = draw.draw(report, "light")
        xml.etree.ElementTree.fromstring(svg)
        self.assertIn("head_dim 128, causal", svg)
        self.assertNotIn("fp8_gemm", svg)
        self.assertNotIn("cuDNN<", svg)  # no line, no legend
        # Shortest first; the axis ends at the next 200, so 300 of 600 is half way up.
        legend, line = re.findall(r'points="([^"]*)" class="flash3 line"', svg)
        places = [tuple(map(float, place.split(","))) for place in line.split()]
        self.assertLess(places[0][0], places[1][0])
        self.assertEqual([y for _, y in places], [draw.TOP + draw.PANEL_HEIGHT / 2, draw.TOP + draw.PANEL_HEIGHT / 4])
        self.assertNotEqual(svg, draw.draw(report, "dark"))


class Themes(unittest.TestCase):
    LIGHT = '<svg><style>.text{fill:#111}</style><rect width="9" height="9" fill="#ffffff"/><path/></svg>'

    def test_one_picture_of_two(self):
        dark = self.LIGHT.replace("#111", "#eee").replace("#ffffff", "#000000")
        self.assertEqual(parts.for_both_themes(self.LIGHT, dark),
                         "<svg><style>.text{fill:#111}.page{fill:#ffffff}@media (prefers-color-scheme:dark){.text{fill:#eee}.page{fill:#000000}}"
                         '</style><rect width="9" height="9" class="page"/><path/></svg>')

    def test_pictures_that_differ(self):
        with self.assertRaises(ValueError):
            parts.for_both_themes(self.LIGHT, self.LIGHT.replace("<path/>", '<path d="M0 0"/>'))


if __name__ == "__main__":
    unittest.main()
