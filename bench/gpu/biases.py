# SPDX-License-Identifier: Apache-2.0
"""Times ALiBi, biases by distance and by pair, and dropout beside the plain call, torch's SDPA and torch's FlexAttention.

    PYTHONPATH=build/release/python python3 -m bench.gpu.biases --json r.json [--only bias4k] [--flex]

Forward and backward are CUDA graphs, in samples of 12 ms that alternate in one process (gpu_peers.py), of data N(0, 1) in bfloat16. `ratio` is
flash3's time over that of its plain call. A point with `grad` wants the gradient of the bias or of the table too, and is a backward alone.
`rms` is how far a library's results are from flash3's, relative; with dropout each drops other weights, and no graph is made. A library that
refuses a call, or whose error exceeds 2 %, is listed with the reason.
"""
import dataclasses
import functools
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash3
from bench.gpu.gpu_peers import Sensors, measure, measure_points

SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


@dataclasses.dataclass(frozen=True)
class Point:
    """One term at a size. term: alibi, table, bias or dropout; fp8: q, k and v in e4m3, forward alone."""
    term: str
    seq: int
    batch: int = 1
    heads: int = 16
    dim: int = 128
    causal: bool = False
    grad: bool = False
    softcap: float = 0.0
    fp8: bool = False


POINTS = {
    "alibi8k": Point("alibi", 8192, causal=True), "alibi8k_d64": Point("alibi", 8192, causal=True, dim=64),
    "alibi4k": Point("alibi", 4096), "alibi8k_softcap": Point("alibi", 8192, causal=True, softcap=50.0),
    "alibi8k_fp8": Point("alibi", 8192, causal=True, fp8=True), "table4k": Point("table", 4096), "table4k_grad": Point("table", 4096, grad=True),
    "table4k_fp8": Point("table", 4096, fp8=True), "bias4k": Point("bias", 4096), "bias4k_grad": Point("bias", 4096, grad=True),
    "pair": Point("bias", 256, 64, 8, 32), "pair_grad": Point("bias", 256, 64, 8, 32, grad=True), "dropout4k": Point("dropout", 4096),
}
DROPOUT = 0.1


def term_of(point):
    """What is added: slopes [heads], a table [heads, 257] or a bias [1, heads, seq, seq]."""
    made = torch.Generator("cuda").manual_seed(9)
    if point.term == "alibi":
        return torch.tensor([2 ** (-8 * (i + 1) / point.heads) for i in range(point.heads)], device="cuda")
    if point.term == "table":
        return torch.randn(point.heads, 257, device="cuda", generator=made)
    if point.term == "bias":
        return torch.randn(1, point.heads, point.seq, point.seq, device="cuda", generator=made).bfloat16()
    return None


def options_of(point, term):
    named = {"alibi": "alibi_slopes", "table": "bias_table", "bias": "bias"}
    added = {"dropout_p": DROPOUT, "seed": 1, "offset": 2} if term is None else {named[point.term]: term}
    return {**added, **plain_options(point)}


def plain_options(point):
    return {"causal": point.causal, "softcap": point.softcap}


def flex_call(point):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, point.seq, point.seq, device="cuda") if point.causal else None

    def call(q, k, v, term):
        def score_mod(s, b, h, i, j):
            if point.softcap:
                s = point.softcap * torch.tanh(s / point.softcap)
            if point.term == "alibi":
                return s - term[h] * (i - j).abs()
            if point.term == "table":
                return s + term[h, (j - i).clamp(-128, 128) + 128]
            return s + term[0, h, i, j]
        return compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), score_mod=score_mod, block_mask=mask).transpose(1, 2)
    return call


def sdpa_call(point, backend):
    def call(q, k, v, term):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=term, is_causal=point.causal,
                dropout_p=0.0 if point.term == "bias" else DROPOUT).transpose(1, 2)
    return call


def calls_of(point, flex):
    """{library: call(q, k, v, term)}; plain: flash3 without the term."""
    calls = {"plain": lambda q, k, v, term: flash3.attention(q, k, v, **plain_options(point)),
             "flash3": lambda q, k, v, term: flash3.attention(q, k, v, **options_of(point, term))}
    if point.fp8:
        return calls
    if point.term == "bias":
        calls |= {name: sdpa_call(point, SDPA[name]) for name in ("cudnn", "efficient")}
    if point.term == "dropout":
        calls |= {name: sdpa_call(point, SDPA[name]) for name in ("cudnn", "efficient", "fa2")}
    elif flex:
        calls["flex"] = flex_call(point)
    return calls


def graphs_of(point, call, stream, with_term):
    """(forward or None, backward or None, results): graphs on a stream, on which autograd then runs too."""
    shape = (point.batch, point.seq, point.heads, point.dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(i)).bfloat16() for i in range(4))
    if point.fp8:
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    term = term_of(point)

    def graph_of(run):
        if point.term == "dropout":  # whose generator torch replays in its own way
            return run, run()
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = run()
        return functools.partial(lambda held, graph: graph.replay(), (run, result), graph), result

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with torch.no_grad():
            forward, out = graph_of(lambda: call(q, k, v, term))
        if point.fp8:
            return forward, None, [out]
        leaves = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
        if point.grad and with_term:
            leaves.append(term.requires_grad_())
        result = call(q, k, v, term)
        backward, grads = graph_of(lambda: torch.autograd.grad(result, leaves, dout, retain_graph=True))
    return None if point.grad else forward, backward, [out, *grads]


def rms(results, wanted):
    """The largest relative RMS error of a result."""
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(results, wanted))


def run(name, point, samples, flex):
    row, graphs, stream = {"point": name, **dataclasses.asdict(point), "refused": {}, "rms": {}}, {}, torch.cuda.Stream()
    for who, call in calls_of(point, flex).items():
        try:
            graphs[who] = graphs_of(point, call, stream, who != "plain")
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if who in ("plain", "flash3"):
                raise
            row["refused"][who] = str(error).splitlines()[0][:160]
    for replay in (graph for of in graphs.values() for graph in of[:2] if graph):
        replay()
    torch.cuda.synchronize()
    for who in graphs.keys() - {"plain", "flash3"}:
        if point.term == "dropout":
            continue
        error = rms(graphs[who][2], graphs["flash3"][2])
        if error < 0.02:
            row["rms"][who] = round(error, 5)
        else:  # a NaN too
            row["refused"][who] = f"a relative RMS error of {error:.3g}"
            del graphs[who]
    for i, which in enumerate(("forward", "backward")):
        calls = {who: of[i] for who, of in graphs.items() if of[i]}
        if not calls:
            continue
        with Sensors() as sensors:
            times = {who: t[0] for who, t in measure(calls, samples).items()}
        others = [t for who, t in times.items() if who not in ("plain", "flash3")]
        row[which] = {**{f"{who}_ms": round(t, 4) for who, t in times.items()}, "ratio": round(times["flash3"] / times["plain"], 4),
                      "of_best_peer": round(min(others) / times["flash3"], 3) if others else None, "sm_mhz": sensors.mhz,
                      "watts": sensors.watts}
    print(row, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    measure_points(__doc__, POINTS, run, "bias_points")
