# SPDX-License-Identifier: Apache-2.0
"""bench/distributed/context_parallel.py: it runs, over gloo; its yardstick has the work of the ranks; its check refuses what is wrong; it never
hangs; and the model and the table read what it writes."""
import contextlib
import io
import json
import os
import subprocess
import sys
import time
import types

import pytest
import torch
import torch.distributed as dist

import flash3.distributed
from conftest import ROOT
from flash3.distributed import _cost, _layout, _plan


def run_python(*arguments):
    """A process that finds bench and what this one has in PYTHONPATH."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


def run_bench(*arguments):
    return run_python("-m", "bench.distributed.context_parallel", "--device", "cpu", "--commit", "abc", *arguments)


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """(what a run of two processes prints, the file that it writes)."""
    file = tmp_path_factory.mktemp("run") / "context.json"
    run = run_bench("--points", "/h8x2/", "--samples", "2", "--json", file, "--timeout", "1000")
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout, file


def test_run(measured):
    text, file = measured
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["ranks"], report["group"], report["commit"], report["failed"], report["lost"]) == (2, "gloo", "abc", {}, {})
    assert report["link"]["gbps"] > 0 and report["link"]["message_us"] > 0
    causal, documents = report["context_points"]
    assert [causal["case"], documents["case"]] == ["causal/256/h8x2/d128", "documents/256/h8x2/d128"] and documents["documents"] > 2
    ours = ["alone", "ring", "all_gather", "ulysses"]
    for point, names in ((causal, [*ours, "plain_ring"]), (documents, ours)):
        assert list(point["ms"]) == list(point["tflops"]) == list(point["memory"])[:len(names)] == names
        assert list(point["of_alone"]) == names[1:] and set(point["taken"]) == {*names, "computing", "copies"}
        for name, passes in point["ms"].items():
            for what, ms in passes.items():
                assert point["tflops"][name][what] == pytest.approx(point["flops"][what] / ms / 1e9, abs=0.01)
        assert set(point["error"]) == set(names[1:]) and max(point["error"].values()) < 0.01
        assert set(point["error_at_size"]) == set(ours[1:]) and max(point["error_at_size"].values()) < 0.01
        assert point["auto"] in ours and len(point["sm_mhz"]) == len(point["watts"]) == 2
        ring = point["ring"]
        for what in ("forward", "backward"):
            shown = point["ms"]["ring"][what] - ring["computing_ms"][what]
            assert ring["hidden"][what] == pytest.approx(1 - shown / ring["copies_ms"][what], abs=0.01)
    # Rank 0, which has the first and the last quarter, sees all keys of rank 1.
    assert causal["ring"]["bytes"] == causal["two_blocks_bytes"] // 2 == 256 * 2 * 2 * 128 * 2
    # What torch says of its context_parallel on the CPU, and of documents.
    assert list(causal["refused"]) == ["torch_allgather", "torch_alltoall"] and all(causal["refused"].values())
    assert documents["refused"] == dict.fromkeys(("torch_allgather", "torch_alltoall", "plain_ring"), "takes one sequence, not packed documents")
    assert causal["notes"] == {"plain_ring": "K and V expanded to all heads"}
    said = [line for line in text.splitlines() if not line.startswith("[Gloo]")]  # as torch 2.10's prints
    assert text.count("no torch_alltoall: ") == 2 and said[0].startswith("causal/256/h8x2/d128 ")


def test_model_and_table_read_it(measured, script, capsys):
    _, file = measured
    assert script("distributed.context_parallel_model").main([str(file)]) == 0
    text = capsys.readouterr().out
    assert "| causal/256/h8x2/d128 | ulysses |" in text and "documents/" not in text and text.count("predicted less measured") == 2
    text = script("report.context_table").context_points(ROOT / "bench/results/x.json", json.loads(file.read_text(encoding="utf-8")))
    assert "| `documents/256/h8x2/d128`, backward |" in text and "torch, all-gather: takes one sequence" in text
    assert len({row.count("|") for row in text.splitlines() if row.startswith("|")}) == 1


@pytest.fixture(scope="session")
def profiled(tmp_path_factory):
    """The file that a profile of two processes writes."""
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    run = run_bench("--profile", file)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("causal/256/h8x2/d128 ring") == 2
    return file


def test_profile(profiled, script):
    report = json.loads(profiled.read_text(encoding="utf-8"))
    assert (report["ranks"], report["group"], report["commit"], report["high_priority"]) == (2, "gloo", "abc", False)
    calls = report["context_profile"]
    assert [(call["method"], call["pass"]) for call in calls] == [(m, p) for m in ("ring", "all_gather") for p in ("forward", "backward")]
    for call in calls:
        spans = {kind: [i[:2] for i in call["intervals"] if i[3] == kind] for kind in script("distributed.context_profile").KINDS}
        names = [name for *_, kind, name in call["intervals"] if kind == "attention"]
        # The ring of two ranks has two calls, and all-gather one or two for each quarter, of two KV heads.
        assert set(names) == {f"flash3::{call['pass']}_out"} and (len(names) == 2 if call["method"] == "ring" else len(names) >= 2)
        # In all-gather the first heads have two parts, as in a ring, and gloo's messages are its barriers.
        assert len(spans["merge"]) == (call["pass"] == "forward") and spans["nccl"]
        assert call["busy_us"]["attention"] == pytest.approx(sum(b - a for a, b in spans["attention"]), abs=1)
        assert 0 <= call["messages_under_attention_us"] <= call["messages_under_compute_us"] <= call["messages_us"] + 0.1
        compute = sum(b - a for a, b, stream, *_ in call["intervals"] if stream == 0)
        assert compute + sum(call["idle_us"].values()) == pytest.approx(call["span_us"], abs=2) and call["host_us"] > 0


def event(category, name, ts, dur, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def kernel(name, ts, dur, stream, launched, number):
    """A kernel, and the call on the host that has launched it."""
    return [event("kernel", name, ts, dur, stream=stream, correlation=number),
            event("cuda_runtime", "cudaLaunchKernelExC", launched - 2, 2, correlation=number)]


FORWARD = "void flash3::cuda::sm90::forward_kernel<flash3::cuda::sm90::Traits<(flash3::cuda::Element)1, 128> >(flash3::ForwardParams)"


def made_up_trace():
    """A forward of a ring: the first call hides half of the message, the second waits for it, and merging is launched late."""
    return [event("user_annotation", "pass forward", 100, 90),
            *kernel(FORWARD, 50, 60, 7, 20, 1),  # of the call before
            *kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 112, 40, 20, 104, 2),
            *kernel(FORWARD, 112, 20, 7, 106, 3), *kernel(FORWARD, 155, 20, 7, 108, 4),
            *kernel("void flash3::cuda::(anonymous namespace)::merge_kernel<float>(MergeParams)", 186, 5, 7, 183, 5),
            event("gpu_memset", "Memset (Device)", 191, 1, stream=7, correlation=6), event("cuda_runtime", "cudaMemsetAsync", 183, 1, correlation=6),
            event("gpu_user_annotation", "pass forward", 112, 80, stream=7)]


def test_reduction(script):
    profile = script("distributed.context_profile")
    call = profile.reduced(made_up_trace())["forward"]
    assert call["intervals"] == [[2, 22, 0, "attention", "flash3::cuda::sm90::forward_kernel"], [2, 42, 1, "nccl", "ncclDevKernel_SendRecv"],
                                 [45, 65, 0, "attention", "flash3::cuda::sm90::forward_kernel"],
                                 [76, 81, 0, "merge", "flash3::cuda::merge_kernel"], [81, 82, 0, "memset", "Memset"]]
    assert (call["span_us"], call["host_us"], call["host"]) == (82, 90, [-10, 80])
    assert call["busy_us"] == {"attention": 40, "merge": 5, "nccl": 40, "peer": 0, "barrier": 0, "copy": 0, "memset": 1, "other": 0}
    assert call["messages_under_attention_us"] == call["messages_under_compute_us"] == 20
    # From the call before to the first kernel 2; the message's last 20, and 3 until the next kernel; 8 to the launch of merging, and 3 more.
    assert call["idle_us"] == {"host": 8, "messages": 20, "device": 8}
    kinds = {"void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)": "memset",
             "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)": "other",
             "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>(float*)": "copy", "Memcpy DtoD (Device -> Device)": "copy",
             "void at::native::(anonymous namespace)::indexSelectLargeIndex<float>(int)": "copy", "aten::index_select": "copy",
             "void flash3::cuda::pack_kernel<2>(TensorView)": "copy", "flash3::cuda::sm90::convert_kernel": "attention", "ampere_sgemm": "other"}
    assert {name: profile.kind_of(name) for name in kinds} == kinds
    with pytest.raises(ValueError, match="no kernel of attention in pass forward"):
        profile.reduced(made_up_trace()[:1])


def test_drawing(script, profiled, monkeypatch):
    from xml.etree import ElementTree
    draw, about = script("report.draw"), json.loads(profiled.read_text(encoding="utf-8"))
    monkeypatch.setattr(draw.trials, "load", dict)
    assert "context_profile" not in draw.figures()
    monkeypatch.setattr(draw.trials, "load", lambda: {"context_profile_x.json": profiled.read_text(encoding="utf-8")})
    file, drawn = draw.figures()["context_profile"]
    assert file == "context_profile_x.json"
    call = {"case": "causal/8k/h64x8/d128", "tokens": 8192, "method": "ring", "pass": "forward",
            **script("distributed.context_profile").reduced(made_up_trace())["forward"]}
    for theme in ("light", "dark"):
        # The whole panel is 82 us, and its lanes 808 wide.
        found = list(ElementTree.fromstring(drawn({**about, "context_profile": [call]})[theme]).iter("{http://www.w3.org/2000/svg}rect"))
        bars = [(x.get("class"), float(x.get("width"))) for x in found if x.get("class") and x.get("height") == "13" and float(x.get("y")) > 80]
        assert bars[:3] == [("lane", 808)] * 3 and bars[3] == ("host", pytest.approx(808 * 80 / 82, abs=0.01))
        assert bars[5] == ("nccl", pytest.approx(808 * 40 / 82, abs=0.01)) and len(bars) == 9
        text = drawn({**about, "context_profile": [call, *about["context_profile"]]})[theme]
        assert "messages 0.04 ms, 50 % under attention" in text and "idle: host 10 %, messages 24 %, device 10 %" in text
        assert "all-gather, backward, 256 tokens" in text and "commit abc" in text


def test_host_time(script, tmp_path, capsys):
    bench, threads = script("distributed.context_host_time"), torch.get_num_threads()
    try:
        bench.main(["--rounds", "1", "--calls", "2", "--ranks", "4", "--commit", "abc", "--json", str(tmp_path / "a.json")])
        assert "| us of the host, 4 ranks | inference | forward | backward |" in capsys.readouterr().out
        bench.main(["--calls", "3", "--hot", "all_gather", "--pass", "backward", "--commit", "abc"])
    finally:
        torch.set_num_threads(threads)
    assert "_methods.py" in capsys.readouterr().out and not dist.is_initialized()
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["context_host_us"]
    assert list(found) == ["alone", "ring", "all_gather", "ulysses"]
    assert all(found["alone"][what] < us for name, passes in found.items() for what, us in passes.items() if name != "alone")


def test_nothing_without_a_file(script, monkeypatch, tmp_path):
    tables = script("report.tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    *_, context, _, other = tables.load()
    assert context == [] and other == []
    (tmp_path / "a.json").write_text(json.dumps({"context_points": [{}], "date": "2026-11-01"}), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps({"context_points": [], "date": "2026-11-02"}), encoding="utf-8")
    *_, context, _, other = tables.load()
    assert [path.name for path, _ in context] == ["a.json"] and [path.name for path in other] == ["b.json"]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_alone_has_all_work(script, kind, ranks):
    points, ways = script("distributed.context_points"), script("distributed.context_ways")
    point = points.ContextPoint(kind, 3000, 4, 2, ranks, mean=700)
    assert sum(point.lengths) == 3000 * ranks and point.cu_seqlens[-1] == 3000 * ranks
    pairs = 0
    for rank in range(ranks):
        plan = _plan.Plan(types.SimpleNamespace(ranks=ranks, rank=rank), _layout.make_spec(point.cu_seqlens, point.cu_seqlens, True, None, 0))
        found = ways.rectangles(plan)
        assert sum(q for q, _ in found) == plan.tokens and (kind == "documents" or len(found) <= 2)
        pairs += sum(q * k - q * (q - 1) // 2 for q, k in found)
    assert pairs == point.pairs


def test_points(script):
    points = script("distributed.context_points")
    suite = points.context_suite(2)
    assert len({point.case for point in suite}) == len(suite) == 14 and suite[-1].case == "causal/128k/h64x8/d128"
    documents = next(point for point in suite if point.kind == "documents" and point.tokens == 2**16)
    assert sum(documents.lengths) == 2**17 and 2048 < 2**17 / len(documents.lengths) < 8192
    assert suite[-1].flops["forward"] == pytest.approx(4 * 131072**2 * 64 * 128, rel=1e-4)
    assert suite[-1].own_bytes == 4 * 131072 * 72 * 256 and suite[-1].block_bytes == 131072 * 8 * 2 * 256


@pytest.fixture
def rank(script, tmp_path):
    """context_ranks.Rank of a world of one process."""
    config = types.SimpleNamespace(device="cpu", ranks=1, backends=["cudnn", "fa2"], samples=3)
    threads = torch.get_num_threads()
    yield script("distributed.context_ranks").Rank(config, tmp_path, 0)
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def test_wrong_ways_are_refused(rank, script, monkeypatch, tmp_path):
    ranks, ways, points = script("distributed.context_ranks"), script("distributed.context_ways"), script("distributed.context_points")
    point = points.ContextPoint("causal", 64, 4, 2, 1)
    right = ways.flash3_way("ring")

    def with_wrong(forward=lambda out: out, backward=lambda gradients: gradients):
        def make(own):
            way = right(own)
            return ways.Way(lambda: forward(way.forward()), backward=lambda outs: backward(way.backward(outs)))
        return make

    def raising(own):
        raise NotImplementedError("no such call\nat a place")

    wrong = {"other heads": with_wrong(forward=lambda out: out.roll(1, 2)),
             "no number": with_wrong(forward=lambda out: out * torch.where(torch.arange(out.shape[1]) == 3, torch.nan, 1.)[:, None, None]),
             "other keys": with_wrong(backward=lambda gradients: (gradients[0], gradients[1].roll(1, 1), gradients[2])),
             "half a gradient": with_wrong(backward=lambda gradients: (gradients[0] / 2, *gradients[1:])), "raises": raising, "good": right}
    for name, make in wrong.items():
        monkeypatch.setitem(ways.MAKERS, name, make)
    chosen, notes, errors, refused = ranks.checked_ways(rank, point, [*wrong, "all_gather", "plain_ring", "alone"])
    assert list(chosen) == ["good", "all_gather", "plain_ring", "alone"] and list(errors) == ["good", "all_gather", "plain_ring"]
    assert refused.pop("raises") == "no such call" and refused.pop("no number") == "errs by inf" and refused.pop("half a gradient") == "errs by 0.5"
    assert list(refused) == ["other heads", "other keys"] and all(why.startswith("errs by 1.") for why in refused.values())
    assert json.loads((tmp_path / "working.json").read_text(encoding="utf-8")) == {"case": point.case, "way": "plain_ring"}

    # A way that is right at the small size and wrong at the point's own.
    monkeypatch.setitem(ways.MAKERS, "good", with_wrong(forward=lambda out: out * 0 if out.shape[1] > 64 else out))
    larger = points.ContextPoint("causal", 200, 4, 2, 1)
    plan = flash3.distributed.plan(cu_seqlens=larger.cu_seqlens)
    made, *_, errors = ranks.warm_ways(rank, ways.Own(larger, plan, "cpu"), {"good": {}, "all_gather": {}, "alone": {}}, refused)
    assert list(made) == ["all_gather", "alone"] and refused["good"] == "at this size: errs by 1" and errors["all_gather"] < 0.01


def test_kept_messages_are_those_of_the_ring(rank, script):
    """computing() takes the place of Swap: what it takes must be what Swap takes."""
    import inspect
    ways, methods = script("distributed.context_ways"), flash3.distributed._methods
    point, plan = script("distributed.context_points").ContextPoint("causal", 64, 4, 2, 1), flash3.distributed.plan(seqlen=64)
    with ways.computing(ways.Own(point, plan, "cpu")).around():
        kept = methods.Swap
    assert kept is not methods.Swap
    assert list(inspect.signature(kept.__init__).parameters) == list(inspect.signature(methods.Swap.__init__).parameters)


def children(*programs):
    return [subprocess.Popen([sys.executable, "-c", program]) for program in programs]


def test_all_end_when_one_does(script, tmp_path, monkeypatch):
    bench = script("distributed.context_parallel")
    monkeypatch.setattr(bench, "GRACE", 0.3)
    said = tmp_path / "errors0"
    said.write_text("Traceback\nRuntimeError: no memory\n", encoding="utf-8")
    sleeping, long = "import time; time.sleep(3600)", time.monotonic() + 3000
    group = children("import sys; sys.exit(3)", sleeping)
    why = bench.watch(group, long, [said])
    assert why == "rank 0 ended with 3\n  rank 0: Traceback\n  rank 0: RuntimeError: no memory"
    late = children("", sleeping)
    late[0].wait()
    assert bench.watch(late, time.monotonic() + 0.5, []) == "rank 1 has not ended in time (--timeout)"
    assert bench.watch(children("", ""), long, []) is None
    assert all(child.returncode is not None for child in group + late)
    assert group[1].returncode < 0 and late[1].returncode < 0  # by a signal


def test_what_takes_processes_along_is_left_out(script, tmp_path, monkeypatch, capsys):
    bench = script("distributed.context_parallel")
    monkeypatch.setattr(bench, "GRACE", 0.1)
    file, starts = tmp_path / "out.json", []
    args = bench.parse_args(["--device", "cpu", "--commit", "abc", "--ranks", "2", "--json", str(file)])
    ends = [("causal/256/h8x2/d128", "torch_alltoall"), ("causal/256/h4x4/d128", None), None]

    def start(args, folder):
        end = ends[len(starts)]
        starts.append(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None)
        if end is None:
            return children("", ""), []
        if not file.is_file():
            file.write_text(json.dumps({"lost": {}, "failed": {}, "context_points": []}), encoding="utf-8")
        (tmp_path / folder / "working.json").write_text(json.dumps({"case": end[0], "way": end[1]}), encoding="utf-8")
        return children("import sys; sys.exit(1)", ""), []

    monkeypatch.setattr(bench, "start", start)
    assert bench.run(args) is None and starts[0] is None
    assert starts[2] == {"lost": {"torch_alltoall": "it took its processes along at causal/256/h8x2/d128: rank 0 ended with 1"},
                         "failed": {"causal/256/h4x4/d128": "rank 0 ended with 1"}, "context_points": []}
    # What ends before the first point ends all.
    ends[:] = [("the link", None)] * 2
    starts.clear()
    assert bench.run(args) == "rank 0 ended with 1" and len(starts) == 1
    assert "the link, None: rank 0 ended with 1" in capsys.readouterr().err


def test_samples(script):
    bench, points = script("distributed.context_parallel"), script("distributed.context_points")
    assert bench.sample_counts({"ring": 0.02, "alone": 0.02, "plain_ring": 0.04}, 5) == {"ring": 5, "alone": 5, "plain_ring": 5}
    assert bench.sample_counts({"ring": 0.5, "alone": 0.5, "ulysses": 0.5, "copies": 0.1, "plain_ring": 2.0}, 9) == {
        "ring": 7, "alone": 7, "ulysses": 7, "copies": 7, "plain_ring": 1}
    assert bench.sample_counts({"ring": 3.5, "alone": 3.5, "ulysses": 3.5, "copies": 0.1}, 5) == {"ring": 3, "alone": 3, "ulysses": 1, "copies": 5}
    assert set(bench.sample_counts({"ring": 3.5, "copies": 0.1}, 1).values()) == {1}
    point, before = points.ContextPoint("causal", 4096, 16, 4, 2), points.ContextPoint("causal", 2048, 16, 4, 2)
    record = {"heads": 16, "heads_k": 4, "flops": before.flops, "ms": {"plain_ring": {"forward": 500, "backward": 1500}}}
    assert bench.too_long([record], "plain_ring", point) == "a step would take about 8 s"
    assert bench.too_long([record], "plain_ring", before) is None and bench.too_long([record], "torch_alltoall", point) is None
    assert bench.too_long([record | {"heads_k": 16}], "plain_ring", point) is None


def test_figures(script):
    times = {"alone": [[9, 20], [10, 20], [12, 20]], "ring": [[10, 25]], "computing": [[9.5, 24]], "copies": [[2, 5]]}
    made = script("distributed.context_parallel").figures(times, {"forward": 1e12, "backward": 2.5e12}, 4e8)
    assert made["ms"] == {"alone": {"forward": 10, "backward": 20}, "ring": {"forward": 10, "backward": 25}}
    assert made["tflops"]["ring"] == {"forward": 100, "backward": 100} and made["of_alone"] == {"ring": {"forward": 1, "backward": 0.8}}
    assert made["spread"]["alone"] == {"forward": 0.3, "backward": 0} and made["taken"]["alone"] == 3 and made["ring"]["gbps"] == 200
    assert made["ring"]["hidden"] == {"forward": 0.75, "backward": 0.8} and made["ring"]["overlap"] == {"forward": 1, "backward": 0}
    assert "ring" not in script("distributed.context_parallel").figures({"alone": [[1, 2]]}, {"forward": 1, "backward": 1}, 0)


def made_up(tokens, heads, heads_k, ms, computing, of_alone):
    flops = 4 * tokens**2 * heads * 128
    return {"case": f"causal/{tokens}/h{heads}x{heads_k}/d128", "kind": "causal", "tokens": tokens, "heads": heads, "heads_k": heads_k, "dim": 128,
            "ranks": 2, "ms": {"alone": ms}, "of_alone": {"ring": of_alone}, "ring": {"computing_ms": computing},
            "tflops": {"alone": {"forward": flops / ms["forward"] / 1e9, "backward": 2.5 * flops / ms["backward"] / 1e9}}}


def test_model(script):
    model = script("distributed.context_parallel_model")
    args = model.parse_args([__file__])
    point = made_up(65536, 64, 8, {"forward": 200., "backward": 600.}, {"forward": 204., "backward": 610.}, {"forward": 0.97, "backward": 0.97})
    report = {"device": "NVIDIA H200", "ranks": 2, "link": {"gbps": 300., "message_us": 50.}, "context_points": [point]}

    def share(method, what, ranks, point=point):
        return model.share(_cost, report, point, method, what, ranks, args)
    # The work is what was measured alone, and grows with the ranks; 268 MB of keys in each step are under it.
    assert share("ring", "forward", 2) == pytest.approx(200 / (200 + 4 + 0.05), rel=1e-3)
    assert share("ring", "forward", 8) == pytest.approx(800 / (800 + 7 * 4.05), rel=1e-3)
    keys = 65536 * 8 * 256
    assert share("ring", "backward", 2) == pytest.approx(600 / (600 + 10 + 0.05 + 4e3 * keys / 300e9), rel=1e-3)
    assert share("ulysses", "forward", 2) == pytest.approx(200 / (200 + 1e3 * 65536 * 72 * 256 * 2 / 2 / 300e9 + 0.17), rel=1e-3)
    assert share("all_gather", "backward", 2) < share("all_gather", "forward", 2) < 1
    # Between hosts: 45 GB/s a GPU, the link's 300 to the seven in the own host.
    assert model.link_rates(report, 8, args) == (300e9, 300e9)
    ring, of_all = model.link_rates(report, 64, args)
    assert ring == pytest.approx(45e9) and 1 / of_all == pytest.approx((56 / 45e9 + 7 / 300e9) / 63)
    assert share("ring", "forward", 64) == pytest.approx(6400 / (6400 + 63 * 4.05), rel=1e-3)
    short = made_up(2048, 64, 8, {"forward": 0.2, "backward": 0.6}, {"forward": 0.25, "backward": 0.7}, {"forward": 0.8, "backward": 0.8})
    assert share("ring", "forward", 64, short) < share("ring", "forward", 8, short)
    few = made_up(65536, 16, 16, {"forward": 50., "backward": 150.}, {"forward": 51., "backward": 153.}, {"forward": 0.97, "backward": 0.97})
    assert share("ulysses", "forward", 64, few) is None and share("ulysses", "forward", 8, few) < 1
    report["context_points"].append({"kind": "documents", "ms": {"alone": {}}})
    text = model.text_of(_cost, report, args)
    assert "| causal/65536/h64x8/d128 | ring | 97.0 / 97.0 | 98.0 / 98.1 |" in text
    assert "forward, 2 ranks, predicted less measured: +1.0 percentage points in the mean, off by 1.0 in the median and 1.0 at most, of 1" in text
    report["context_points"] = []
    assert "no causal point" in model.text_of(_cost, report, args)


@pytest.mark.parametrize("ranks", (2, 4))
def test_auto_on_what_was_measured(ranks):
    """At the committed points: by the forward alone auto takes the fastest forward; in training it never takes longer than that choice would, and on
    four ranks as long as the fastest method."""
    report = json.loads((ROOT / f"bench/results/context_parallel_{ranks}_h200.json").read_text(encoding="utf-8"))
    points = [point for point in report["context_points"] if point["kind"] == "causal"]
    assert len(points) == 6
    for point in points:
        shape = _cost.Shape(1, point["tokens"], point["heads"], point["heads_k"], 2 * point["dim"], 2, 0.5)
        by_forward, by_both = (_cost.times(shape, (ranks,), "cuda", gradients) for gradients in (False, True))
        forward, both = ({method: sum(point["ms"][method][name] for name in passes) for method in by_forward}
                         for passes in (("forward",), ("forward", "backward")))
        first, trained = _cost.cheapest(by_forward), _cost.cheapest(by_both)
        assert forward[first] <= 1.01 * min(forward.values()), point["case"]
        assert both[trained] <= both[first] and both[trained] <= (1.002 if ranks == 4 else 1.1) * min(both.values()), point["case"]


@pytest.mark.parametrize("arguments, part", [
    (["--commit", ""], "--commit is empty"), (["--points", "("], "--points (:"), (["--points", "zzz"], "--points zzz: no point's name has a match"),
    (["--peers", "fa3"], "--peers names 'fa3'; there are torch_allgather, torch_alltoall, plain_ring"),
    (["--backends", "math"], "--backends names 'math'; there are cudnn, fa2"), (["--backends", ""], "--backends names none"),
    (["--samples", "0"], "--samples 0: at least 1"), (["--seconds", "-1"], "--seconds -1: not below 0"), (["--timeout", "0"], "--timeout 0: above 0"),
    (["--ranks", "1"], "--ranks 1: at least 2"), (["--sm-margin", "-1"], "--sm-margin -1: not below 0")])
def test_errors_name_the_argument(script, arguments, part):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as left:
        script("distributed.context_parallel").main(["--commit", "abc", *arguments])
    assert left.value.code == 2 and part in said.getvalue()


def test_list_needs_no_torch():
    program = "import sys; sys.modules['torch'] = None; from bench.distributed import context_parallel as c; sys.exit(c.main(['--list']))"
    run = run_python("-c", program)
    assert run.returncode == 0 and len(run.stdout.splitlines()) == 14, run.stderr
