# SPDX-License-Identifier: Apache-2.0
"""docs/figures.md's table of ALiBi, biases and dropout, of what bench/gpu/biases.py wrote."""
import json

from bench import RESULTS
from bench.report.parts import NAMES, NOT_MEASURED, source, table

OTHERS = {**NAMES, "efficient": "torch's efficient attention"}


def load_biases():
    """(path, report), newest first."""
    reports = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(RESULTS.glob("biases_*.json"))]
    return sorted(reports, key=lambda item: item[1]["date"], reverse=True)


def title(point):
    what = {"alibi": "ALiBi", "table": "bias by distance", "bias": "bias by pair", "dropout": "dropout 0.1"}[point["term"]]
    size = f"{point['batch']} × {point['seq']} tokens, {point['heads']} heads of {point['dim']}, {'causal' if point['causal'] else 'full'}"
    more = [text for field, text in (("grad", "with its gradient"), ("softcap", "softcap 50"), ("fp8", "FP8")) if point[field]]
    return ", ".join([what, *more, size])


def cells(times):
    """Milliseconds, the time over that of the plain call, and the fastest other library's time over flash3's."""
    if times is None:
        return ["", "", ""]
    others = {name: times[f"{name}_ms"] for name in OTHERS if f"{name}_ms" in times}
    best = min(others, key=others.get) if others else None
    return [f"{times['flash3_ms']:.3f}", f"{times['flash3_ms'] / times['plain_ms']:.2f}",
            f"{others[best] / times['flash3_ms']:.2f} ({OTHERS[best]})" if best else ""]


def bias_table(path, report, up="../"):
    rows = [[title(point), *cells(point.get("forward")), *cells(point.get("backward"))] for point in report["bias_points"]]
    header = ["call"]
    for which in ("forward", "backward"):
        header += [f"{which}, ms", "/ plain", "fastest other / flash3"]
    refused = [f"{OTHERS[name]}, {title(point)}: {why}" for point in report["bias_points"] for name, why in point["refused"].items()]
    lines = [f"{report['device']}, torch {report['torch']}, bf16; median of {report['samples']} samples of 12 ms, interleaved in one process; plain: "
             "flash3 without the term.", table(header, rows)]
    if refused:
        lines.append(f"Without a time: {'; '.join(refused)}.")
    return "\n\n".join([*lines, f"From {source(path, report, up)}."])


def bias_summary():
    return "\n\n".join(bias_table(*item) for item in load_biases()) or NOT_MEASURED
