# SPDX-License-Identifier: Apache-2.0
"""What runs when in one call of flash3.distributed.attention, for context_parallel.py --profile: torch.profiler's events of a rank, reduced to
intervals of its streams and to what they add up to. Only record() needs torch.

A call is the last of a few that are enqueued one after the other, so that its kernels may wait for those of the calls before. Its time begins
when the compute stream has finished the work before it and ends with its last interval. The compute stream is the one with most time of attention; a gap on it has causes:

host      what comes next had not been launched yet
messages  it had been launched, and a message was on its way
device    neither: the time between two kernels of a stream

A message's kernel also runs while it waits for the other rank, and a barrier while it waits for all. On the CPU (for the tests) operators stand for
kernels, and gloo's messages for NCCL's.
"""
import contextlib
import json
import pathlib
import re
import tempfile

METHODS = ("ring", "all_gather")
TOKENS = {"8k", "16k", "64k", "256"}  # of a rank, in a point's name; the last one on the CPU
WARM = 2  # calls before the one that counts
KINDS = ("attention", "merge", "nccl", "peer", "barrier", "copy", "memset", "other")
MESSAGES = ("nccl", "peer")  # what goes from rank to rank
# The first that has a match in the name, which is a kernel's or, on the CPU, an operator's.
NAMES = (("nccl", r"nccl|gloo"), ("peer", r"PtoP"), ("barrier", r"symmetric_memory::barrier"), ("merge", r"flash3.*merge"),
         ("copy", r"flash3.*pack"), ("attention", r"flash3"), ("other", r"_add"),
         ("memset", r"[mM]emset|FillFunctor|fill_|zero_"), ("copy", r"[mM]emcpy|copy|[cC]at|[iI]ndex|gather"))
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a trace
NO_WORK = re.compile(r"view|as_strided|slice|narrow|::select$|transpose|unbind|empty|split|detach|resolve|flatten|reshape|::to$|c10d|autograd")


def profiled_points(points):
    """The points of a suite that are profiled: one causal sequence, several query heads on a KV head."""
    return [point for point in points if point.kind == "causal" and point.heads > point.heads_k and point.case.split("/")[1] in TOKENS]


def kind_of(name):
    return next((kind for kind, pattern in NAMES if re.search(pattern, name)), "other")


def union(spans):
    """Disjoint, sorted spans that cover the same."""
    made = []
    for start, stop in sorted(spans):
        if made and start <= made[-1][1]:
            made[-1][1] = max(made[-1][1], stop)
        elif stop > start:
            made.append([start, stop])
    return made


def length(spans):
    return sum(stop - start for start, stop in union(spans))


def shared(spans, others):
    """The time that both cover."""
    return length(spans) + length(others) - length([*spans, *others])


def work_of(events):
    """[(start, stop, stream, kind, name, when it was launched)] of a trace's events, in us, by start."""
    launched = {e["args"]["correlation"]: e["ts"] + e["dur"] for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}
    found = [(e, e["args"]["stream"]) for e in events if e.get("cat") in DEVICE]
    if not found:
        found = [(e, "messages" if kind_of(e["name"]) == "nccl" else "compute") for e in leaves(events)]
    made = []
    for e, stream in found:
        when = launched.get(e.get("args", {}).get("correlation"), e["ts"])
        made.append((e["ts"], e["ts"] + e["dur"], stream, kind_of(e["name"]), e["name"], when))
    return sorted(made)


def leaves(events):
    """What works on the CPU: operators that call no other one, and gloo's messages."""
    ops = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    made = [e for e, after in zip(ops, [*ops[1:], None])
            if (after is None or after["tid"] != e["tid"] or after["ts"] >= e["ts"] + e["dur"]) and not NO_WORK.search(e["name"])]
    return made + [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("gloo")]


def gaps_of(compute, messages, begin, end):
    """{cause: us} of a window of a stream's work."""
    causes = dict.fromkeys(("host", "messages", "device"), 0.0)
    busy = begin
    for start, stop, *_, when in [*compute, (end, end, None, None, None, begin)]:
        if start > busy:
            late = min(max(when, busy), start)
            waiting = shared([(late, start)], [item[:2] for item in messages])
            causes["host"] += late - busy
            causes["messages"] += waiting
            causes["device"] += start - late - waiting
        busy = max(busy, stop)
    return causes


def reduced(events):
    """{pass: the JSON of a call} of a trace in which annotations "pass NAME" follow one another."""
    work = work_of(events)
    marks = sorted((e["ts"], e["ts"] + e["dur"], e["name"].removeprefix("pass ")) for e in events
                   if e.get("cat") == "user_annotation" and e["name"].startswith("pass "))
    made = {}
    for first, last, name in marks:
        own = [item for item in work if first <= item[5] < last]
        spent = {}
        for start, stop, stream, kind, *_ in own:
            spent[stream] = spent.get(stream, 0) + (stop - start) * (kind == "attention")
        if not own or not max(spent.values()):
            raise ValueError(f"the trace has no kernel of attention in pass {name}")
        stream = max(spent, key=spent.get)
        before = [item[1] for item in work if item[2] == stream and item[5] < first]
        begin, end = max(before, default=own[0][0]), max(item[1] for item in own)
        begin = min(begin, min(item[0] for item in own if item[2] == stream))
        made[name] = summary(own, stream, begin, end, (first, last))
    return made


def summary(own, stream, begin, end, host):
    """The JSON of one call: the intervals, and what they add up to."""
    spans = {kind: [item[:2] for item in own if item[3] == kind] for kind in KINDS}
    compute = [item for item in own if item[2] == stream]
    messages = [item for item in own if item[3] in MESSAGES]
    sent, others = [item[:2] for item in messages], [item[:2] for item in compute if item[3] != "nccl"]
    idle = gaps_of([item for item in compute if item[3] != "nccl"], messages, begin, end)
    streams = [stream, *dict.fromkeys(item[2] for item in own if item[2] != stream)]
    return {"span_us": round(end - begin, 1), "host_us": round(host[1] - host[0], 1), "host": [round(x - begin, 1) for x in host],
            "busy_us": {kind: round(length(spans[kind]), 1) for kind in KINDS},
            "messages_us": round(length(sent), 1), "messages_under_attention_us": round(shared(sent, spans["attention"]), 1),
            "messages_under_compute_us": round(shared(sent, others), 1),
            "idle_us": {cause: round(us, 1) for cause, us in idle.items()},
            "streams": ["compute", *(f"stream {i}" for i in range(1, len(streams)))],
            "intervals": [[round(start - begin, 1), round(stop - begin, 1), streams.index(of), kind, short(name)]
                          for start, stop, of, kind, name, _ in own]}


def short(name):
    """A kernel's name without its arguments and template arguments."""
    return re.sub(r"^void |\(anonymous namespace\)::", "", name).split("(")[0].split("<")[0].strip()[-60:]


def trace_of(rank, way):
    """The events of a step after others, on the first rank; the other ranks only make it."""
    from torch.profiler import ProfilerActivity, profile, record_function
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if rank.device == "cuda" else [])]

    def steps():
        rank.meet()
        for around in (contextlib.nullcontext,) * WARM + (record_function,):
            with around("pass forward"):
                outs = way.forward()
            with around("pass backward"):
                way.backward(outs)
            del outs
        rank.synchronize()

    with way.around():
        steps()  # the first calls of a shape take longer
        if rank.rank:
            steps()
            return []
        with profile(activities=activities) as trace:
            steps()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        return [e for e in json.loads(file.read_text(encoding="utf-8"))["traceEvents"] if e.get("ph") == "X"]


def record(rank, point, own, makers):
    """[the JSON of each pass of each method at a point]; empty on other ranks than the first."""
    made = []
    for method in METHODS:
        events = trace_of(rank, makers[method](own))
        if rank.rank == 0:
            made += [{"case": point.case, "tokens": point.tokens, "method": method, "pass": name, **about} for name, about in reduced(events).items()]
    return made


def line(call):
    """A call in words."""
    idle = ", ".join(f"{cause} {us:.0f}" for cause, us in call["idle_us"].items())
    return (f"{call['case']} {call['method']} {call['pass']}: {call['span_us']:.0f} us, host {call['host_us']:.0f}; attention "
            f"{call['busy_us']['attention']:.0f}, messages {call['messages_us']:.0f}, {call['messages_under_attention_us']:.0f} of it under attention; idle: {idle}")
