# SPDX-License-Identifier: Apache-2.0
"""python -m flash3.bench: it measures, and draws the committed measurements."""
import contextlib
import io
import json
import re
import subprocess
import sys
import types
import xml.etree.ElementTree
import zipfile

import flash_attn_interface  # noqa: F401  registers torch.ops.flash_attn_3
import pytest
import torch

import flash3
from conftest import DEVICES, ROOT
from flash3.bench.__main__ import main

RESULTS = ROOT / "bench/results"


def bench(*arguments):
    """The program in this process, which has torch loaded: its return code and what it writes."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                err.write(code)
    return types.SimpleNamespace(returncode=int(code) if not isinstance(code, str) else 1, stdout=out.getvalue(),
                                 stderr=err.getvalue())


def test_is_a_module_to_run():
    done = subprocess.run([sys.executable, "-m", "flash3.bench", "plot", "nowhere.json"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "there is no file nowhere.json\n"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", [False, True])
def test_run(tmp_path, device, backward):
    done = bench("run", "--device", device, "--dims", "32,64", "--seqs", "64,128", "--samples", 2, "--sample-ms", 1, "--out",
                 tmp_path, *(["--backward"] if backward else []))
    assert done.returncode == 0, done.stderr
    stem = f"{'backward' if backward else 'forward'}_bf16_{device}"
    report = json.loads((tmp_path / f"{stem}.json").read_text(encoding="utf-8"))
    assert len(report["points"]) == 8 and report["pass"] == stem.split("_")[0]
    assert all(point["tflops"]["flash3"] > 0 for point in report["points"])
    if device == "cpu":
        assert all(point["tflops"]["torch"] > 0 for point in report["points"])
    assert all("flash3" in (tmp_path / f"{stem}_{theme}.svg").read_text(encoding="utf-8") for theme in ("light", "dark"))


@pytest.mark.parametrize("device", DEVICES)
def test_run_in_fp8(tmp_path, device):
    done = bench("run", "--device", device, "--dims", "64", "--seqs", "128", "--samples", 2, "--sample-ms", 1, "--out", tmp_path,
                 "--peers", "flash3_fp8,flash3_quantize_fp8")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / f"forward_bf16_{device}.json").read_text(encoding="utf-8"))
    assert [list(point["tflops"]) for point in report["points"]] == [["flash3", "flash3_fp8", "flash3_quantize_fp8"]] * 2, report
    backward = bench("run", "--device", device, "--backward", "--peers", "flash3_fp8", "--out", tmp_path)
    assert backward.returncode != 0 and "peer 'flash3_fp8' but on" in backward.stderr


def test_fp8_beside_peers_is_drawn(tmp_path):
    point = {"dim": 64, "seq": 1024, "causal": True, "tflops": {"flash3": 2.0, "flash3_bf16": 1.0, "cudnn_fp8": 1.5, "fp8_gemm": 9.0}}
    report = tmp_path / "fp8.json"
    report.write_text(json.dumps({"device": "a GPU", "dtype": "e4m3", "pass": "forward", "fp8_points": [point]}), encoding="utf-8")
    assert bench("plot", report, "--out", tmp_path / "out").returncode == 0
    svg = (tmp_path / "out/fp8_dark.svg").read_text(encoding="utf-8")
    assert "flash3, FP8" in svg and "cuDNN, FP8 (out in e4m3)" in svg and "gemm" not in svg


def test_plot_of_the_committed_results(tmp_path):
    done = bench("plot", RESULTS, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for stem in ("forward_h200", "backward_h200", "fp8_h200"):
        for theme in ("light", "dark"):
            xml.etree.ElementTree.parse(tmp_path / f"{stem}_{theme}.svg")
    assert "holds nothing that is drawn" in done.stderr and "cpu_zen4.json" in done.stderr


def error_report(**more):
    rmse = {"flash3": 0.0004, "torch_math": 0.0003, "another": 0.001}
    return {"device": "a CPU", "date": "2026-01-01", "error_points": [{"dtype": "bf16", "dim": 64, "seq": 512, "rmse": rmse, **more}]}


def test_error_and_memory_are_drawn(tmp_path):
    memory = [{"pass": which, "seq": seq, "bytes": {"flash3": seq << 10, "torch_math": seq << 20} if seq < 2048 else {"flash3": seq << 10}}
              for which in ("forward", "forward and backward") for seq in (1024, 2048)]
    for name, report in (("error", error_report()), ("memory", {"device": "a CPU", "memory_points": memory})):
        (tmp_path / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
    done = bench("plot", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4, done.stderr
    error, memory = ((tmp_path / f"out/{name}_light.svg").read_text(encoding="utf-8") for name in ("error", "memory"))
    assert "bf16, head_dim 64" in error and "torch SDPA, math" in error and "another" in error
    # A name for each line, drawn once in the legend and once in each panel; the point that was not measured is left out.
    flash3, math = (re.findall(rf'points="([^"]*)" class="{name} line"', memory) for name in ("flash3", "torch_math"))
    assert [len(line.split()) for line in flash3] == [2, 2, 2] and [len(line.split()) for line in math] == [2, 1, 1]


def trace(consumers):
    """What `flash3 trace` writes, of consumers whose phases are [(name, microseconds, key tile)], one after the other."""
    events = []
    for tid, phases in enumerate(consumers):
        events.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": f"consumer {tid}"}})
        at = 0.0
        for name, us, key_tile in phases:
            events.append({"ph": "X", "pid": 0, "tid": tid, "name": name, "cat": "work", "ts": at, "dur": us, "args": {"key_tile": key_tile}})
            at += us
    about = {"device": "a GPU", "case": "some case", "kernel": "some_kernel", "block": 0, "blocks": 132, "clock_mhz": 1500.0, "ms": 1.0,
             "ms_traced": 1.1, "commit": "abc", "date": "2026-01-01"}
    return {"displayTimeUnit": "ns", "otherData": about, "traceEvents": events}


def key_tile(n, first=False):
    phases = [("wait for turn", 1.0, n), ("issue products", 0.5, n), ("wait for scores", 2.0, n), ("softmax: maxima", 1.0, n),
              ("wait for output", 1.0, n), ("softmax: exponentials", 2.0, n)]
    return [phase for phase in phases if not first or phase[0] not in ("wait for turn", "wait for output")]


def test_a_timeline_of_a_trace_is_drawn(tmp_path):
    work = [*key_tile(2, first=True), *key_tile(1), *key_tile(0), ("last product", 1.0, 0), ("store", 1.0, 0)]
    path = tmp_path / "trace_x.json"
    path.write_text(json.dumps(trace([work, work])), encoding="utf-8")
    done = bench("plot", path, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    light, dark = ((tmp_path / f"trace_x_{theme}.svg").read_text(encoding="utf-8") for theme in ("light", "dark"))
    xml.etree.ElementTree.fromstring(light)
    assert light != dark and "some_kernel, one block: some case" in light and "with stamps 1.100 ms" in light
    # All of it and a part of it, for two consumers each: what is written in boxes stands in the part alone.
    assert light.count(">consumer 1<") == 2 and light.count(">exp<") == 2 and "microseconds" in light


def test_a_trace_of_something_else_is_not_drawn(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": 0, "dur": 1, "tid": 0}]}), encoding="utf-8")
    done = bench("plot", path, "--out", tmp_path)
    assert done.returncode == 1 and "holds nothing that is drawn" in done.stderr


def test_the_parts_of_a_timeline():
    from flash3.bench.timeline import share_under_way, shown_part, timeline_of, under_way
    one = [*key_tile(3, first=True), *key_tile(2), *key_tile(1), *key_tile(0), ("last product", 1.0, 0)]
    spans = timeline_of(trace([one])).lanes["consumer 0"]
    # Products are under way from where they are started until the last of them is waited for.
    assert under_way(spans) == [(0.0, 2.5), (6.5, 11.0), (14.0, 18.5), (21.5, 26.0), (28.0, 29.0)]
    later = timeline_of(trace([[("wait for work", 1.0, -1), *one]])).lanes["consumer 0"]
    assert share_under_way({"consumer 0": spans}, 0, 29) == pytest.approx((2.5 + 3 * 4.5 + 1) / 29)
    assert share_under_way({"consumer 0": spans, "consumer 1": later, "K loader": spans}, 0, 29) == pytest.approx((3.5 + 3 * 5.5 + 1) / 29)
    assert share_under_way({"consumer 0": spans}, 3, 6) == 0 and share_under_way({"consumer 0": spans}, 7, 10) == 1
    # Two key tiles of the middle, without the first one.
    assert shown_part({"consumer 0": spans}) == (6.5, 21.5)
    assert shown_part({"consumer 0": spans[:9]}) == (0.0, 6.5)
    assert shown_part({"consumer 0": spans[:4]}) is None and shown_part({"K loader": spans}) is None


def test_the_scale_of_a_chart():
    from flash3.bench.chart import Chart, Panel, TOP, HEIGHT, draw, ticks
    assert ticks([3, 750], "linear") == [0, 200, 400, 600, 800] and ticks([0.2], "linear")[-1] == pytest.approx(0.2)
    assert ticks([0.7, 8192], "log") == [0.1, 1, 10, 100, 1000, 10000] and ticks([1], "log") == [1, 10]
    svg = draw(Chart("x", "y", [Panel("p", ["a", "b"], {"flash3": [10, 1000]})], 1, scale="log"), "dark")
    _, line = re.findall(r'points="([^"]*)" class="flash3 line"', svg)
    assert [float(place.split(",")[1]) for place in line.split()] == [TOP + HEIGHT, TOP]


def test_the_same_bytes_each_time(tmp_path):
    for name in ("a", "b"):
        assert bench("plot", RESULTS / "forward_h200.json", "--out", tmp_path / name).returncode == 0
    assert (tmp_path / "a/forward_h200_dark.svg").read_bytes() == (tmp_path / "b/forward_h200_dark.svg").read_bytes()
    assert (tmp_path / "a/forward_h200_light.svg").read_bytes() != (tmp_path / "a/forward_h200_dark.svg").read_bytes()


def test_a_peer_that_refuses_does_not_stop_the_others():
    import torch
    from flash3.bench import measure

    def refuses(q, k, v, causal):
        raise NotImplementedError("not this shape")

    record = measure.measure_point({"flash3": lambda q, k, v, causal: q, "fa2": refuses}, measure.Point(1, 16, 1, 8, True),
                                   dtype=torch.float32, device="cpu", backward=False, samples=2, sample_ms=0.1)
    assert record["refused"] == {"fa2": "not this shape"} and list(record["tflops"]) == ["flash3"]


@pytest.fixture
def gpu_script(script, monkeypatch):
    """script, where pynvml need not be there."""
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))  # for clocks, which no test here reads
    return script


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_fp8_of_the_scripts(gpu_script, device, causal):
    import torch
    import oracle
    from flash3._library import FOLDER
    peers, fp8, flash3_torch = (gpu_script(name) for name in ("gpu.peers", "gpu.fp8_peers", "flash3_torch"))
    lib = flash3_torch.Flash3(str(FOLDER / "libflash3.so"))
    torch.manual_seed(1)
    qkv = [torch.randn(2, 300, 3, 64, device=device).bfloat16() for _ in range(3)]
    calls, outs = fp8.flash3(lib, qkv, causal, flash3_torch.CPU if device == "cpu" else flash3_torch.HOPPER)
    for call in calls.values():
        call()
    exact = oracle.naive(*(x.double() for x in qkv), causal=causal)[0]
    errors = {way: peers.fp8_error(out.double(), exact) for way, out in outs.items()}
    assert errors["bf16"] < 0.005 and 0.01 < errors[""] < 0.08, errors
    assert torch.equal(outs[""], outs["from_bf16"])


@pytest.mark.gpu
def test_fp8_peers_of_the_scripts(gpu_script):
    from flash3._library import FOLDER
    peers, fp8, gpu, flash3_torch = (gpu_script(name) for name in ("gpu.peers", "gpu.fp8_peers", "gpu.gpu_peers", "flash3_torch"))
    lib = flash3_torch.Flash3(str(FOLDER / "libflash3.so"))
    calls, results, reference, refused = fp8.make_calls(gpu.Shape(2, 512, 4, 128, True), {"flash3": lib}, peers.FP8_PEERS)
    assert set(refused) <= {"cudnn_fp8"}, refused
    for call in calls.values():
        call()
    errors = {name: peers.fp8_error(result(), reference) for name, result in results.items()}
    assert all(error < (0.08 if name in ("flash3", "flash3_from_bf16", "cudnn_fp8") else 0.01) for name, error in errors.items()), errors
    if "cudnn_fp8" in refused:
        assert fp8.frontend_version() is None, refused


@pytest.mark.parametrize("arguments,message", [(("plot", "nowhere.json"), "there is no file nowhere.json"),
                                               (("plot", __file__), "is not JSON"),
                                               (("run", "--device", "cpu", "--peers", "fa9"), "peer 'fa9' but on cpu there are"),
                                               ((), "required")])
def test_errors(arguments, message):
    done = bench(*arguments)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr


def test_result_files_have_a_row_on_a_line(script, tmp_path):
    report = {"seed": 7, "names": ["a", "b"], "none": [], "points": [{"x": 1, "y": [1, 2]}, {"x": 2}], "of": {"cpu": {"x": 3}}}
    script("result_file").write(tmp_path / "r.json", report)
    text = (tmp_path / "r.json").read_text(encoding="utf-8")
    assert json.loads(text) == report
    assert text.splitlines() == ['{', ' "seed": 7,', ' "names": ["a", "b"],', ' "none": [],', ' "points": [', '  {"x": 1, "y": [1, 2]},',
                                 '  {"x": 2}', ' ],', ' "of": {', '  "cpu": {"x": 3}', ' }', '}']


def committed_results():
    """{name: text} of the files in bench/results, and of those in its archive of trials."""
    with zipfile.ZipFile(RESULTS / "trials.zip") as trials:
        archived = {name: trials.read(name).decode() for name in trials.namelist()}
    return {path.name: path.read_text(encoding="utf-8") for path in RESULTS.glob("*.json")} | archived


COMMITTED = committed_results()


def test_trials_are_archived(script, tmp_path, monkeypatch, capsys):
    trials = script("report.trials")
    before, packed = trials.load(), trials.ARCHIVE.read_bytes()
    monkeypatch.setattr(trials, "ARCHIVE", tmp_path / "trials.zip")
    trials.write(before)
    assert trials.ARCHIVE.read_bytes() == packed
    (tmp_path / "a.json").write_text('{"points": [{"x": 1}], "x": 2}', encoding="utf-8")
    trials.main([str(tmp_path / "a.json")])
    assert capsys.readouterr().out.splitlines() == sorted([*before, "a.json"])
    assert trials.load() == before | {"a.json": '{\n "points": [\n  {"x": 1}\n ],\n "x": 2\n}\n'}


@pytest.mark.parametrize("name", sorted(COMMITTED))
def test_committed_results_have_that_form(script, name):
    text = COMMITTED[name]
    lines = script("result_file").text_of(json.loads(text)).count("\n")
    assert text.count("\n") == lines, f"{name}: write it by bench/result_file.py, or by flash3 bench"


# bench/gpu/decode_peers.py: its calls compute attention over the cache, its check tells wrong results from right ones, and what fails is noted.
#
# FlashAttention-3's operators are the drop-in's here, which have their schemas: never both in one process.

SMALL = [dict(batch=3, ctx=200), dict(batch=2, ctx=333, page=16), dict(batch=1, ctx=70, page=1, queries=4, heads=2, heads_k=2),
         dict(batch=4, ctx=300, kind="ragged", page=64), dict(batch=2, ctx=260, kind="chunked", queries=50),
         dict(batch=4, ctx=130, kind="mixed", queries=20), dict(batch=5, ctx=130, kind="mixed", queries=20, page=16, dim=128),
         dict(batch=6, ctx=200, dtype="e4m3"), dict(batch=2, ctx=333, page=16, queries=2, dtype="e4m3"),
         dict(batch=2, ctx=90, page=16, queries=2, heads=4, heads_k=1, dim_latent=128),
         dict(batch=3, ctx=400, page=1, heads=4, heads_k=1, dim_latent=128, kind="sparse", listed=50)]


ERROR = {"bf16": 0.005, "e4m3": 0.03}  # weights in e4m3


@pytest.fixture
def scripts(script, monkeypatch):
    """(decode_peers, decode_calls, decode_points), modules of bench/, for buffers of few bytes."""
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))  # for clocks, which no test here reads
    peers, calls, points = (script(f"gpu.decode_{name}") for name in ("peers", "calls", "points"))
    monkeypatch.setattr(points, "SPAN", 3e5)
    monkeypatch.setattr(calls, "fa3_operators", lambda point: torch.ops.flash_attn_3)
    return peers, calls, points


def small(points, sizes):
    return points.CachePoint(**{"heads": 4, "heads_k": 2, "dim": 64} | sizes)


@pytest.mark.parametrize("sizes", SMALL, ids=str)
@pytest.mark.parametrize("name", ["flash3", "fa3"])
def test_calls(scripts, device, sizes, name):
    _, calls, points = scripts
    point = small(points, sizes)
    x = calls.Inputs(point, calls.Pool([point], device))
    made = calls.MAKERS[name](point, x)
    assert len(made) == point.buffers == len({(k.data_ptr(), point.listed and table.data_ptr()) for k, table in zip(x.k, x.tables)})
    assert len({k.data_ptr() for k in x.k}) == point.caches
    outs = []
    for buffer in {0, point.buffers - 1}:
        out = made[buffer]()
        outs.append(out.clone())
        assert x.error(out, x.references(buffer)) < ERROR[point.dtype]
        # The results of other heads, and of a row that was not written.
        wrong = out.reshape(*x.packed_q.shape[:2], point.dim_v).roll(1, 1)
        assert x.error(wrong, x.references(buffer)) > 0.02
        wrong[-1] = float("nan")
        assert not x.error(wrong, x.references(buffer)) <= 0.02
    assert point.buffers == 1 or not torch.equal(*outs)


def test_reference_is_attention(scripts):
    """Against scaled_dot_product_attention of one sequence, with a causal mask at the bottom right."""
    _, calls, points = scripts
    point = small(points, dict(batch=3, ctx=150, kind="ragged", queries=5, page=16))
    x = calls.Inputs(point, calls.Pool([point], "cpu"))
    for sequence, n in enumerate(point.lengths_k):
        k, v = (torch.cat([cache[0][page] for page in x.tables[0][sequence]])[:n] for cache in (x.k, x.v))
        seen = torch.arange(n) <= torch.arange(5)[:, None] + n - 5
        q, k, v = (t.float().transpose(0, 1) for t in (x.q[sequence], k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, enable_gqa=True)[0]
        torch.testing.assert_close(x.reference(sequence, 0), wanted.transpose(0, 1), rtol=1e-4, atol=1e-5)


class FakeGpu:
    """gpu_peers without a GPU: a millisecond a replay."""
    class Sensors:
        mhz, watts = 1700, 690

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def measure(self, replays, samples, sample_ms):
        for replay in replays.values():
            replay()
        return {name: [1.0, 0.9, 1.2] for name in replays}


@pytest.fixture
def on_cpu(scripts, monkeypatch):
    """(decode_peers, decode_calls, a function that runs it on small points) without graphs."""
    peers, calls, points = scripts

    def captured(made):
        out = made[-1]()
        return lambda: out.copy_(made[-1]()), out

    pool = calls.Pool
    monkeypatch.setattr(calls, "captured", captured)
    monkeypatch.setattr(calls, "is_alive", lambda: True)
    monkeypatch.setattr(calls, "Pool", lambda todo, _: pool(todo, "cpu"))
    monkeypatch.setattr(peers, "cache_suite", lambda: [small(points, sizes) for sizes in SMALL])

    def run(result=None, *more):
        args = peers.parse_args(["--commit", "abc", "--fa3", __file__, "--fa3-build", "drop-in", "--peers", "fa3,cudnn", *more])
        result = result or {"device": "NVIDIA H200", "cache_points": [], "lost": {}, "failed": {}}
        peers.run(args, FakeGpu(), calls, result, lambda: json.dumps(result))
        return result

    return peers, calls, run


def test_decode_peers_run(on_cpu, capsys):
    peers, _, run = on_cpu
    result = run()
    assert [record["case"] for record in result["cache_points"]] == [point.case for point in peers.cache_suite()]
    for record, point in zip(result["cache_points"], peers.cache_suite()):
        assert list(record["us"]) == ["flash3", "fa3"] and record["us"]["fa3"] == round(1000 / point.calls, 2)
        assert record["share_of_peak"]["flash3"] == pytest.approx(record["kv_bytes"] * point.calls / 1e-3 / 4.8e12, abs=1e-4)
        assert list(record["refused"]) == ["cudnn"]  # without the frontend, or a GPU for it
        assert max(record["error"].values()) < ERROR[point.dtype]
    assert "/fa3 1.000" in capsys.readouterr().out
    # What is there is not measured again.
    before = list(result["cache_points"])
    assert run(result)["cache_points"] == before


def test_failures_are_noted(on_cpu, monkeypatch):
    peers, calls, run = on_cpu

    def wrong(point, x):
        return [lambda: torch.zeros_like(x.q)] * point.buffers

    monkeypatch.setitem(calls.MAKERS, "fa3", wrong)
    record = run(None, "--filter", "^decode/b3")["cache_points"][0]
    assert record["refused"]["fa3"] == "out errs by 1" and list(record["us"]) == ["flash3"] and "fa3" not in record["error"]

    def broken(point, x):
        raise RuntimeError("illegal memory access\nat a place")

    # An error that ends the context is noted with its library, which is left out when the script begins again.
    monkeypatch.setitem(calls.MAKERS, "fa3", broken)
    monkeypatch.setattr(calls, "is_alive", lambda: False)
    result = {"device": "NVIDIA H200", "cache_points": [], "lost": {}, "failed": {}}
    with pytest.raises(peers.ContextLost, match="fa3 took the CUDA context with it: illegal memory access"):
        run(result, "--peers", "fa3", "--filter", "^decode/b3")
    case = next(iter(result["lost"]))
    assert result["lost"] == {case: {"fa3": "illegal memory access"}} and not result["cache_points"]
    record = run(result, "--peers", "fa3", "--filter", "^decode/b3")["cache_points"][0]
    assert record["refused"] == {"fa3": "illegal memory access"} and list(record["us"]) == ["flash3"]

    # What fails outside of the libraries costs its own point only.
    monkeypatch.setattr(calls, "is_alive", lambda: True)
    monkeypatch.setattr(calls, "Inputs", broken)
    result = run()
    assert not result["cache_points"] and set(result["failed"].values()) == {"illegal memory access"}


def test_schedules_are_made_once(scripts, monkeypatch):
    _, calls, points = scripts
    point = small(points, dict(batch=2, ctx=100, page=16))
    x = calls.Inputs(point, calls.Pool([point], "cpu"))
    made, make = [], flash3.kv_cache_schedule
    monkeypatch.setattr(flash3, "kv_cache_schedule", lambda *args, **named: made.append(1) or make(*args, **named))
    for call in calls.flash3(point, x):
        call()
    assert point.buffers > 1 and made == [1]
