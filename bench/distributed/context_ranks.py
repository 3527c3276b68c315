# SPDX-License-Identifier: Apache-2.0
"""What each process of bench/distributed/context_parallel.py does: it makes its part of every call, and measures."""
import contextlib
import datetime
import gc
import json
import math
import os
import pathlib
import random
import time
import traceback
import types

import torch
import torch.distributed as dist

import flash3
import flash3.distributed
from flash3.distributed._peers import Peers, peers_of
from bench import result_file
from bench.distributed import context_profile
from bench.distributed.context_check import agreed, error_of, largest, largest_error, reference, refusal, spot_reference, whole_tensors
from bench.distributed.context_parallel import SAMPLE_MS, figures, line, sample_counts, too_long
from bench.distributed.context_points import PARTS, PEERS, context_suite, methods, ways
from bench.distributed.context_ways import MAKERS, NEIGHBOURS, Own, UNCHECKED, exchange, maker, ring_rows, variants

GROUP_TIMEOUT = datetime.timedelta(seconds=60)
SMALL = {"cuda": 512, "cpu": 64}  # tokens of a rank where a result is checked
LINK = {"cuda": (1 << 28, 21), "cpu": (1 << 20, 5)}  # bytes of a message, and how often


def says(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Rank:
    """One process, its device, and how it tells time."""

    def __init__(self, config, folder, rank):
        self.config, self.folder, self.rank = config, folder, rank
        self.device = config.device
        if self.device == "cuda":
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(1)
        options = {}
        if self.device == "cuda":
            options = {"device_id": torch.device("cuda", rank),
                       "pg_options": dist.ProcessGroupNCCL.Options(is_high_priority_stream=config.high_priority)}
        dist.init_process_group("nccl" if self.device == "cuda" else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank,
                                world_size=config.ranks, timeout=GROUP_TIMEOUT, **options)
        self.one = torch.ones(1, device=self.device)

    def note(self, case=None, way=None):
        """What the process that started this one reads if it must end it."""
        if self.rank == 0:
            (self.folder / "working.json").write_text(json.dumps({"case": case, "way": way}), encoding="utf-8")

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def mark(self):
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def meet(self):
        """All ranks begin at once, and the host is ahead of the device then."""
        dist.all_reduce(self.one)
        self.one.fill_(1)
        if self.device == "cuda":
            torch.cuda._sleep(2_000_000)  # cycles: a millisecond

    def between(self, marks):
        """Milliseconds from each mark to the next."""
        self.synchronize()
        return [1e3 * (b - a) if self.device == "cpu" else a.elapsed_time(b) for a, b in zip(marks, marks[1:])]

    def memory(self, peak=False):
        if self.device == "cpu":
            return 0
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()

    def sensors(self):
        if self.device == "cuda":
            from bench.gpu.gpu_peers import Sensors
            return Sensors()
        return contextlib.nullcontext(types.SimpleNamespace(mhz=0, watts=0))

    def of_all(self, value):
        values = [None] * self.config.ranks
        dist.all_gather_object(values, value)
        return values


def step(way):
    """The results of a forward, after its backward too."""
    outs = way.forward()
    way.backward(outs)
    return outs


def sample(rank, way, iterations):
    """Milliseconds of a forward and of a backward on this rank, of steps one after the other."""
    with way.around():
        rank.meet()
        marks = [rank.mark()]
        for _ in range(iterations):
            outs = way.forward()
            marks.append(rank.mark())
            way.backward(outs)
            del outs
            marks.append(rank.mark())
        spans = rank.between(marks)
    return [sum(spans[i::2]) / iterations for i in range(2)]


def attempt(make):
    """(what it gives, None), or (None, why it gives nothing), on all ranks alike."""
    made, reason = None, None
    try:
        made = make()
    except Exception as error:  # each library has its own kinds, and what it says is the result
        reason = says(error)
    reason = agreed(reason)
    return (made if reason is None else None), reason


def checked_ways(rank, point, names):
    """({way: options of its maker}, {way: what is said of it}, {way: error}, {way: why it has no time}), by results at a small size."""
    small = point.small(SMALL[rank.device])
    whole = whole_tensors(small, rank.device)
    plan, wanted = flash3.distributed.plan(cu_seqlens=small.cu_seqlens), reference(small, whole)
    dealt = plan.positions(rank.device)
    first = small.tokens * rank.rank
    chosen, notes, errors, refused = {}, {}, {}, {}
    for name in names:
        if name in UNCHECKED:
            chosen[name] = {}
            continue
        reasons = []
        for said, options in variants(name, small, rank.device, rank.config.backends):
            rank.note(point.case, name)
            rows = torch.arange(first, first + small.tokens, device=rank.device) if name in NEIGHBOURS else dealt
            error, reason = attempt(lambda: largest_error(maker(name)(Own(small, plan, rank.device, whole, rows), **options), rows, wanted))
            if reason is None:
                # NaN is larger than all.
                error, = largest([math.inf if error != error else error], rank.device)
                reason = refusal(error)
            if reason is None:
                chosen[name], errors[name] = options, float(f"{error:.3g}")
                if said:
                    notes[name] = said
                break
            reasons.append((said, reason))
        else:
            same = len({reason for _, reason in reasons}) == 1
            refused[name] = reasons[0][1] if same else "; ".join(f"{said}: {reason}" for said, reason in reasons)
    return chosen, notes, errors, refused


def warm_up(rank, way, spot):
    """(seconds of a step, its peak of memory, the error at a few rows or None); the step is made twice if it is short."""
    gc.collect()
    rank.synchronize()
    before = rank.memory()
    if rank.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with way.around():
        error = None
        for _ in range(2):
            rank.meet()
            rank.synchronize()
            began = time.perf_counter()
            outs = step(way)
            rank.synchronize()
            seconds = time.perf_counter() - began
            if spot is not None and error is None:
                rows, wanted = spot
                out = (outs.transpose(1, 2) if way.heads_first else outs).detach()
                error = error_of(out[0, rows], wanted)
            del outs
            if largest([seconds], rank.device)[0] > 0.5:
                break
    return seconds, rank.memory(peak=True) - before, error


def warm_ways(rank, own, chosen, refused):
    """({way: Way}, {way: seconds}, {way: bytes}, {way: error at a few rows}) of those that run at this size; the others go to refused."""
    ways, costs, memory, errors = {}, {}, {}, {}
    spot, reason = attempt(lambda: spot_reference(own))
    if reason:
        refused["check at this size"] = reason
    for name, options in chosen.items():
        rank.note(own.point.case, name)
        is_checked = name not in UNCHECKED and name not in NEIGHBOURS

        def make():
            way = maker(name)(own, **options)
            return way, *warm_up(rank, way, spot if is_checked else None)
        made, reason = attempt(make)
        if reason is None:
            way, *numbers = made
            if numbers[2] is None:
                numbers[2] = 0.0
            seconds, peak, error = largest([math.inf if x != x else x for x in numbers], rank.device)
            reason = refusal(error)
        if reason is not None:
            refused[name] = f"at this size: {reason}"
            continue
        ways[name], costs[name], memory[name] = way, seconds, round(peak)
        if is_checked and spot is not None:
            errors[name] = float(f"{error:.3g}")
    return ways, costs, memory, errors


def measured(rank, case, ways, costs, samples):
    """{way: [[forward, backward] of each sample, of the slowest rank in ms]}; samples of all rotate."""
    iterations = {name: max(1, math.ceil(SAMPLE_MS[rank.device] / 1e3 / cost)) for name, cost in costs.items()}
    counts = sample_counts({name: cost * iterations[name] for name, cost in costs.items()}, samples)
    times, names = {name: [] for name in ways}, list(ways)
    for i in range(max(counts.values())):
        # Not in one order: a GPU at its power limit is faster after a way that leaves it idle.
        random.Random(i).shuffle(names)
        for name in names:
            if i < counts[name]:
                rank.note(case, name)
                times[name].append(sample(rank, ways[name], iterations[name]))
    for name, pairs in times.items():
        flat = largest([ms for pair in pairs for ms in pair], rank.device)
        times[name] = [flat[i:i + 2] for i in range(0, len(flat), 2)]
    return times


def explained_method(own):
    """What method="auto" takes."""
    text = flash3.distributed.explain(own.q, own.k, own.v, own.plan, causal=True)
    return text.split("\n", 1)[0].removeprefix("method: ")


def measure_point(rank, point, lost, records):
    """One point as the JSON has it; lost: ways that are left out; records: of points before."""
    config = rank.config
    all_ways = ways(config.ranks)
    names = [name for name in (*all_ways, *PARTS) if name not in lost and (name not in PEERS or name in config.peers)]
    refused = {name: why for name, why in lost.items() if name in all_ways}
    for name in PEERS:
        if name in names and (why := too_long(records, name, point)):
            refused[name] = why
            names.remove(name)
    chosen, notes, errors, more = checked_ways(rank, point, names)
    refused |= more
    if "ring" not in chosen:
        chosen = {name: options for name, options in chosen.items() if name not in PARTS}
    rank.note(point.case)
    plan = flash3.distributed.plan(cu_seqlens=point.cu_seqlens)
    own = Own(point, plan, rank.device, sm_margin=config.sm_margin)
    made, costs, memory, errors_at_size = warm_ways(rank, own, chosen, refused)
    if not any(name in made for name in ("alone", *methods(config.ranks))):
        raise RuntimeError("; ".join(f"{name}: {why}" for name, why in refused.items()))
    with rank.sensors() as sensors:
        times = measured(rank, point.case, made, costs, config.samples)
    bytes_of_row = point.block_bytes // point.tokens
    copied = largest([ring_rows(plan) * bytes_of_row], rank.device)[0] if "copies" in made else 0
    record = {"case": point.case, "kind": point.kind, "tokens": point.tokens, "heads": point.heads, "heads_k": point.heads_k, "dim": point.dim,
              "ranks": point.ranks, "documents": len(point.lengths), "pairs": point.pairs, "flops": point.flops, "auto": explained_method(own),
              **figures(times, point.flops, copied), "memory": memory, "own_bytes": point.own_bytes, "two_blocks_bytes": 2 * point.block_bytes,
              "error": errors, "error_at_size": errors_at_size, "notes": notes, "refused": refused,
              "sm_mhz": rank.of_all(sensors.mhz), "watts": rank.of_all(sensors.watts)}
    return record


def measure_link(rank):
    """What a rank sends while as much comes, without anything beside it, and what the shortest message takes; and what it copies out of another's
    memory while that one copies too, or why it cannot."""
    size, count = LINK[rank.device]
    after, before = (rank.rank + 1) % rank.config.ranks, (rank.rank - 1) % rank.config.ranks

    def milliseconds(call, repeat=1):
        for _ in range(2):
            call()
        spans = []
        for _ in range(count):
            rank.meet()
            marks = [rank.mark()]
            for _ in range(repeat):
                call()
            marks.append(rank.mark())
            spans.append(rank.between(marks)[0] / repeat)
        return sorted(largest(spans, rank.device))[count // 2]

    def swap(bytes_):
        sent = torch.zeros(bytes_, dtype=torch.uint8, device=rank.device)
        come = torch.empty_like(sent)
        return lambda: exchange(sent, come, after, before)
    made = {"gbps": round(size / milliseconds(swap(size)) / 1e6, 2), "message_us": round(1e3 * milliseconds(swap(8), 20), 2), "message_bytes": size}
    peers = peers_of(dist.group.WORLD, rank.device)
    if not isinstance(peers, Peers):
        return made | {"no_copies": peers}
    peers.reserve(size)
    theirs, come = peers.part(after, 0, torch.uint8, (size,)), torch.empty(size, dtype=torch.uint8, device=rank.device)
    return made | {"copy_gbps": round(size / milliseconds(lambda: come.copy_(theirs)) / 1e6, 2)}


def about(rank):
    """What a result must tell about the machine and what runs on it."""
    if rank.device == "cuda":
        from bench.gpu.gpu_peers import describe
        made = {**describe(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    else:
        made = {"device": "CPU", "torch": torch.__version__}
    config = rank.config
    return {**made, "flash3": flash3.__version__, "commit": config.commit, "date": time.strftime("%Y-%m-%d"), "dtype": "bf16",
            "ranks": config.ranks, "group": dist.get_backend(), "samples": config.samples, "sample_ms": SAMPLE_MS[rank.device],
            "sm_margin": config.sm_margin, "high_priority": config.high_priority}


def run(rank):
    """Measures what the file lacks; rank 0 writes it."""
    config, file = rank.config, pathlib.Path(rank.config.json)
    result, = rank.of_all(json.loads(file.read_text(encoding="utf-8")) if rank.rank == 0 and file.is_file() else None)[:1]
    rank.note("the link")
    if result is None:
        result = {**about(rank), "lost": {}, "failed": {}, "link": measure_link(rank), "context_points": []}
    done = {record["case"] for record in result["context_points"]} | set(result["failed"])

    def write():
        if rank.rank == 0:
            result_file.write(file, result)

    write()
    for point in context_suite(config.ranks, rank.device):
        if point.case not in config.cases or point.case in done:
            continue
        rank.note(point.case)
        late = time.time() - config.began > config.seconds
        if config.seconds and rank.of_all(late)[0]:
            if rank.rank == 0:
                print(f"{config.seconds:g} s are over: {point.case} and what follows is left out", flush=True)
            return
        record, reason = attempt(lambda: measure_point(rank, point, result["lost"], result["context_points"]))
        if reason is None:
            result["context_points"].append(record)
        else:
            result["failed"][point.case] = reason
        write()
        if rank.rank == 0:
            print(line(record) if reason is None else f"{point.case} failed: {reason}", flush=True)
        gc.collect()
        if rank.device == "cuda":
            torch.cuda.empty_cache()


def profile(rank):
    """Writes the timelines of some calls, after each point."""
    config, result = rank.config, {**about(rank), "context_profile": []}
    points = [point for point in context_suite(config.ranks, rank.device) if point.case in config.cases]
    for point in context_profile.profiled_points(points):
        late = time.time() - config.began > config.seconds
        if config.seconds and rank.of_all(late)[0]:
            if rank.rank == 0:
                print(f"{config.seconds:g} s are over: {point.case} and what follows is left out", flush=True)
            return
        own = Own(point, flash3.distributed.plan(cu_seqlens=point.cu_seqlens), rank.device, sm_margin=config.sm_margin)
        made = context_profile.record(rank, point, own, MAKERS)
        if rank.rank == 0:
            result["context_profile"] += made
            pathlib.Path(config.profile).write_text(json.dumps(result) + "\n", encoding="utf-8")
            print("\n".join(map(context_profile.line, made)), flush=True)


def main(folder, number):
    folder = pathlib.Path(folder)
    config = types.SimpleNamespace(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    try:
        rank = Rank(config, folder, number)
        (profile if config.profile else run)(rank)
        rank.note("done")
        dist.barrier()
        rank.synchronize()
        time.sleep(0.2)  # others may still read this one's memory
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # not by way of a group of which a member may be gone
    os._exit(0)
