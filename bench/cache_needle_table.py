# SPDX-License-Identifier: Apache-2.0
"""The tables of bench/tables.py --csv from what bench/cache_needle.py wrote."""
from needle_table import LEVELS, cell
from table_parts import NOT_MEASURED, source, table

CACHES = {"bf16": "bf16", "tensor": "one scale", "tensor_rotated": "one scale, rotated", "heads": "scales of heads",
          "heads_rotated": "scales of heads, rotated", "page": "scales of pages", "page_rotated": "scales of pages, rotated"}
OWN = ("retrieved", 0), ("found", 0), ("error", 2)
OF_16_BITS = ("found_unquantised", 0), ("near_unquantised", 0), ("error_unquantised", 1)


def grouped(points):
    """Points that differ in their head dim and layout alone, together: {(data, level, keys): points}."""
    groups = {}
    for point in points:
        groups.setdefault((point["data"], point["level"], point["keys"]), []).append(point)
    return groups


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
