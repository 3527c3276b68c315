# SPDX-License-Identifier: Apache-2.0
"""The tables of what bench/cpu/cpu_vs_torch.py measures."""
import statistics

from bench.report.parts import source, table


def cpu_heading(report):
    return (f"{report['device']}, {report['instructions']}; torch {report['torch']}, scaled_dot_product_attention on "
            f"the CPU with as many threads; calls interleaved in one process, medians. Load average of the machine at the end: "
            f"{report['load_average']:.1f}.")


def group_of(result):
    """Many queries, or one, or their gradients."""
    dtype, _, seq_q = result["case"].split("/")[:3]
    what = "backward" if result["case"].endswith("/bwd") else "one query" if seq_q == "q1" else "as many queries as keys"
    return f"{dtype}, {what}"


def cpu_summary(path, report, up="../"):
    groups = {}
    for r in report["results"]:
        groups.setdefault(group_of(r), []).append(r)
    rows = []
    for name, results in groups.items():
        speedups = [r["speedup"] for r in results]
        best = max(r["flash3"]["gflops"] for r in results)
        rows.append([name, len(results), f"{statistics.geometric_mean(speedups):.2f}", f"{min(speedups):.2f}",
                     f"{max(speedups):.2f}", f"{best:.0f}"])
    header = ["", "cases", "speed-up over torch, geometric mean", "least", "most", "flash3's highest GFLOP/s"]
    return "\n\n".join([cpu_heading(report), table(header, rows),
                        f"Over all {len(report['results'])} cases: geometric mean {report['geometric_mean_speedup']:.2f}. "
                        f"From {source(path, report, up)}."])


def cpu_points(path, report, up="../"):
    rows = [[f"`{r['case']}`", f"{r['flash3']['median_ms']:.3f}", f"{r['torch']['median_ms']:.3f}",
             f"{r['flash3']['gflops']:.0f}", f"{r['flash3']['kv_gb_per_s']:.1f}", f"{r['speedup']:.2f}"]
            for r in report["results"]]
    header = ["case", "flash3 ms", "torch ms", "flash3 GFLOP/s", "GB/s of K and V", "speed-up"]
    return "\n\n".join([cpu_heading(report), table(header, rows), f"From {source(path, report, up)}."])
