# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/fp8.md, from what bench/gpu/needle.py wrote, and those of `tables.py --csv`, from what bench/gpu/cache_needle.py wrote."""
from bench.report.parts import NOT_MEASURED, source, table

LIBRARIES = {"flash3_bf16": "flash3, bf16", "flash3_fp8": "flash3, FP8", "fa3_fp8": "FlashAttention-3, FP8",
             "exact_sums": "exact sums of FP8"}
WITHOUT_FP8 = ("flash3_bf16",)
LEVELS = {"noise": "just above noise"}
HARDEST = ("noise", "0.5", "equal")

CACHES = {"bf16": "bf16", "tensor": "one scale", "tensor_rotated": "one scale, rotated", "heads": "scales of heads",
          "heads_rotated": "scales of heads, rotated", "page": "scales of pages", "page_rotated": "scales of pages, rotated"}
OWN = ("retrieved", 0), ("found", 0), ("error", 2)
OF_16_BITS = ("found_unquantised", 0), ("near_unquantised", 0), ("error_unquantised", 1)


def percent(value, digits=0):
    return f"{100 * value:.{digits}f} %"


def worst(points, name, field):
    """The worst of the head dims: the least share or gain, the largest error. None where the library has no result at any."""
    values = [point["libraries"][name][field] for point in points if field in point["libraries"].get(name, {})]
    if not values:
        return None
    return max(values) if field.startswith("error") else min(values)


def cell(points, name, fields):
    """fields: (field, digits of its percentage)."""
    values = [(worst(points, name, field), digits) for field, digits in fields]
    return ", ".join(percent(value, digits) for value, digits in values if value is not None)


def grouped(points):
    """Points that differ in their head dim and layout alone, together: {(data, level, keys): points}."""
    groups = {}
    for point in points:
        groups.setdefault((point["data"], point["level"], point["keys"]), []).append(point)
    return groups


def needles(points, names, full):
    columns = [(f"{LIBRARIES[name]}: retrieved, found, error", name, (("retrieved", 0), ("found", 0), ("error", 1))) for name in names]
    columns += [(f"{LIBRARIES[name]}, of 16 bits: near, error", name, (("near_unquantised", 0), ("error_unquantised", 1)))
                for name in names if full and name not in WITHOUT_FP8]
    rows = [[f"{data}, {LEVELS.get(level, level)}", f"{keys:,}", *(cell(of, name, fields) for _, name, fields in columns)]
            for (data, level, keys), of in grouped(points).items()]
    return table(["data, needle's weight", "keys", *(title for title, *_ in columns)], rows)


def long_sums(points, names):
    fields = ("gain", 2), ("error", 2)
    rows = [[f"{level} weights", f"{keys:,}", *(cell(of, name, fields) for name in names)]
            for (_, level, keys), of in grouped(points).items()]
    return table(["values of one sign", "keys", *(f"{LIBRARIES[name]}: gain, error" for name in names)], rows)


def needle_tables(found, up="../", full=False):
    """found: (path, report), or None. full: every length, weight and column, and not the hardest alone."""
    if found is None:
        return NOT_MEASURED
    path, report = found
    points = [point for point in report["needle_points"] if full or point["level"] in HARDEST]
    names = [name for name in LIBRARIES if any(name in point["libraries"] for point in points)]
    dims = sorted({point["dim"] for point in points})
    with_needle = [point for point in points if point["data"] != "one sign"]
    if not full:
        longest = max((point["keys"] for point in with_needle), default=0)
        with_needle = [point for point in with_needle if point["keys"] == longest]
    without = [point for point in points if point["data"] == "one sign"]
    fa3 = f", FlashAttention-3 of {report['fa3']}" if report.get("fa3") else ""
    lines = [f"{report['device']}, torch {report['torch']}{fa3}; {report['rows'] * report['heads']} rows a point, seed {report['seed']}. Each figure is "
             f"the worst of head dims {', '.join(map(str, dims))}."]
    lines += [needles(with_needle, names, full)] if with_needle else []
    lines += [long_sums(without, names)] if without else []
    refusals = dict.fromkeys(f"{LIBRARIES.get(name, name)} at {point['keys']:,} keys, d {point['dim']}: {why}" for point in points
                             for name, why in point["refused"].items())
    if refusals:
        lines.append("Without a result, in the libraries' own words: " + "; ".join(refusals) + ".")
    return "\n\n".join([*lines, f"From {source(path, report, up)}."])


def of_caches(points, names, fields):
    rows = [[f"{data}, {LEVELS.get(level, level)}", f"{keys:,}", *(cell(of, name, fields) for name in names)]
            for (data, level, keys), of in grouped(points).items()]
    return table(["data, needle's weight", "keys", *(CACHES[name] for name in names)], rows)


def cache_needle_tables(found, up=""):
    """found: (path, report), or None."""
    if found is None:
        return NOT_MEASURED
    path, report = found
    points = report["cache_needle_points"]
    names = [name for name in CACHES if any(name in point["libraries"] for point in points)]
    dims, layouts = (sorted({point[field] for point in points}) for field in ("dim", "layout"))
    return "\n\n".join([
        f"{report['device']}, torch {report['torch']}; {report['rows'] * report['heads']} rows a point, {report['queries']} queries a sequence, pages "
        f"of {report['page_size']}, seed {report['seed']}. Each figure is the worst of head dims {', '.join(map(str, dims))} and of "
        f"{' and '.join(layouts)} caches.",
        "Of what the cache holds: retrieved, found, error.", of_caches(points, names, OWN),
        "Of the 16-bit tensors: within 1 %, within 10 %, error.", of_caches(points, names, OF_16_BITS), f"From {source(path, report, up)}."])
