# SPDX-License-Identifier: Apache-2.0
"""What a backward on e4m3 operands could gain over the bf16 kernel of head dim 128: cycles of one tile on one SM, counted, and what the committed
measurements say of such counts. bench/cpu/fp8_backward_study.py keeps it; python3 -m bench.cpu.fp8_backward_gain prints it.

Shared memory is counted as in docs/limits.md, "The backward's registers and cycles". A product of e4m3 reads both operands along the reduction. So dV,
dK and dQ need copies of dOut, Q and K that are transposed; those of dOut and Q are either made by a kernel before and loaded beside the
others, or in shared memory. P and dS stay in registers as operands, and dS of dQ is stored, as in bf16.
"""
import json
import sys

from bench import RESULTS

DIM, KEYS, WARPGROUPS, SMS = 128, 128, 2, 132
BF16_QUERIES = 80  # src/cuda/sm90/backward/tile_table.hpp, from 8k queries on
FP8_QUERIES = 64  # dV and dK reduce over queries, 32 a product: 96 would take 224 of 240 registers for sums and scores alone
SHARED_BYTES, MUFU, LANES = 128, 16, 128  # of an SM, a cycle
OPERATIONS = {"bf16": 4096, "fp8": 8192}
BYTES = {"bf16": 2, "fp8": 1}
# Instructions for a score that bf16 does not have. Packing: two conversions and a permute for four elements, instead of two for four.
PACKING = 2 * 0.25
# A tile's own scale of dS: its maximum, the multiplication, dK's sums of the tile multiplied and added (128 keys x 128 dims for 64 x 128 scores),
# and its dQ multiplied (64 x 128).
TILE_SCALE = {"maximum": 1, "multiply": 1, "add dK": 2, "multiply dQ": 1}
# Readings of cuDNN 9.19's FP8 backward at head dim 128, the least and the most over the lengths; no file of them is kept.
CUDNN_FP8 = {"full": [573.0, 717.0], "causal": [272.0, 359.0]}
BAR = 1.25


def shared_kib(queries, precision, transposed="loaded"):
    """What goes through shared memory for a tile, in KiB."""
    size = BYTES[precision]
    q_tile, own_keys = queries * DIM * size, KEYS // WARPGROUPS * DIM * size
    fp8 = precision == "fp8"
    parts = {
        "S": WARPGROUPS * (own_keys + q_tile),
        "dP": WARPGROUPS * (own_keys + q_tile),
        "dV": WARPGROUPS * q_tile,
        "dK": WARPGROUPS * q_tile,
        "dQ": dq_bytes(queries, size),
        "dS stored": queries * KEYS * size,
        "dQ staged, and read by the copy engine": 2 * queries * DIM * 4,
        "Q and dOut loaded": 2 * q_tile,
        "their transposed copies": (0 if not fp8 else 2 * q_tile if transposed == "loaded" else 4 * q_tile),
    }
    return {name: value / 1024 for name, value in parts.items()}


def dq_bytes(queries, size):
    """dS and K: a half of either from each warpgroup, the other whole; of queries that are no multiple of 64 the columns are halved."""
    ds, k = queries * KEYS * size, KEYS * DIM * size
    return (2 * ds + k) if queries % 64 else 2 * (ds + k // 2)


def tile(precision, queries, transposed="loaded"):
    """Cycles of the units for 64 x 128 pairs, from a tile of so many queries."""
    shared = shared_kib(queries, precision, transposed)
    share = 64 / queries
    return {"queries": queries, "shared_kib": shared, "shared_kib_in_all": sum(shared.values()),
            "shared": share * sum(shared.values()) * 1024 / SHARED_BYTES,
            "tensor": share * 5 * 2 * queries * KEYS * DIM / OPERATIONS[precision], "mufu": share * queries * KEYS / MUFU}


def binding(units):
    return max(units[name] for name in ("shared", "tensor", "mufu"))


def measured_cycles(tflops, mhz, products=5):
    """Cycles of an SM for 64 x 128 pairs at that speed."""
    return products * 2 * 64 * KEYS * DIM / (tflops * 1e12 / SMS / (mhz * 1e6))


def load(name, points):
    report = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return {(p["seq"], "causal" if p["causal"] else "full"): p for p in report[points] if p["dim"] == DIM}


def instructions(count):
    """Issue cycles for 64 x 128 pairs of so many instructions a score."""
    return count * 64 * KEYS / LANES


def bounds(point, bf16, fp8, in_kernel):
    """Speed-ups over bf16 as it is measured at a point, by what is assumed of all that a unit's count does not hold."""
    now = measured_cycles(point["tflops"]["flash3"], point["sm_mhz"])
    beyond = now - binding(bf16)
    return {"bf16_cycles": now, "beyond_units": beyond,
            "nothing beyond units": now / binding(fp8),
            "as far from units as bf16": binding(bf16) / binding(fp8),
            "same cycles beyond units": now / (binding(fp8) + beyond),
            "the same, packing": now / (binding(fp8) + beyond + instructions(PACKING)),
            "the same, transposed in the kernel": now / (binding(in_kernel) + beyond + instructions(PACKING)),
            "the same, a scale for each tile": now / (binding(fp8) + beyond + instructions(PACKING + sum(TILE_SCALE.values())))}


def forward_check(fp8_points, forward_points, seq, mask):
    """The count that is kept above, "same cycles beyond units", of forwards, for each library beside what it really gained."""
    point, found = fp8_points[seq, mask], {}
    bf16 = {"flash3": (point["tflops"]["flash3_bf16"], point["sm_mhz"]), "cudnn": (point["tflops"]["cudnn"], point["sm_mhz"]),
            "fa3": (forward_points[seq, mask]["tflops"]["fa3"], forward_points[seq, mask]["sm_mhz"])}
    fp8 = {"flash3": "flash3", "cudnn": "cudnn_fp8", "fa3": "fa3_fp8"}
    for name, (tflops, mhz) in bf16.items():
        tensor = 2 * 2 * 64 * KEYS * DIM / OPERATIONS["bf16"]
        now = measured_cycles(tflops, mhz, products=2)
        expected = now / (max(tensor / 2, 64 * KEYS / MUFU) + max(0.0, now - tensor))
        found[name] = {"expected": expected, "measured": point["tflops"][fp8[name]] / tflops}
        found[name]["measured_over_expected"] = found[name]["measured"] / expected
    return found


def quantise_share(fp8_points, backward_points):
    """dOut to e4m3, and transposed copies of Q, K and dOut, over the bf16 backward's time: by bytes, from what quantise takes for q, k and v, of which
    it reads two and writes one an element; a transposed copy reads and writes one."""
    shares = {}
    for (seq, mask), point in backward_points.items():
        ms = fp8_points[seq, mask]["ms"]["flash3_quantize"] * (3 + 3 * 2) / 9
        pairs = point["batch"] * point["heads"] * seq * seq / (2 if mask == "causal" else 1)
        backward_ms = 5 * 2 * pairs * DIM / point["tflops"]["flash3"] / 1e9
        shares[f"{seq} {mask}"] = {"ms": ms, "backward_ms": backward_ms, "share": ms / backward_ms}
    return shares


def gain(seq=16384):
    """All of it, for the JSON."""
    backward, fp8, forward = load("backward_h200.json", "points"), load("fp8_h200.json", "fp8_points"), load("forward_h200.json", "points")
    units = {"bf16": tile("bf16", BF16_QUERIES), "bf16_64": tile("bf16", 64), "fp8": tile("fp8", FP8_QUERIES),
             "fp8_transposed_in_kernel": tile("fp8", FP8_QUERIES, "in kernel")}
    preparing = quantise_share(fp8, backward)
    found = {"bar": BAR, "seq": seq, "units": units, "instructions": {"packing": PACKING, "tile_scale": TILE_SCALE}, "masks": {}, "preparing": preparing}
    for mask in ("full", "causal"):
        point = backward[seq, mask]
        check = forward_check(fp8, forward, seq, mask)
        made = bounds(point, units["bf16"], units["fp8"], units["fp8_transposed_in_kernel"])
        counted = made["the same, packing"]
        realised = sorted(one["measured_over_expected"] for one in check.values())
        net = lambda ratio: 1 / (1 / ratio + preparing[f"{seq} {mask}"]["share"])
        found["masks"][mask] = {
            "flash3_bf16": point["tflops"]["flash3"], "cudnn_bf16": point["tflops"]["cudnn"], "sm_mhz": point["sm_mhz"], "bounds": made,
            "forward_check": check, "expected": [net(counted * realised[0]), net(counted * realised[-1])],
            "cudnn_fp8": CUDNN_FP8[mask], "cudnn_fp8_over_flash3_bf16": [x / point["tflops"]["flash3"] for x in CUDNN_FP8[mask]],
            "cudnn_fp8_over_cudnn_bf16": [x / point["tflops"]["cudnn"] for x in CUDNN_FP8[mask]]}
    return found


if __name__ == "__main__":
    json.dump(gain(), sys.stdout, indent=2)
    print()
