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

import pytest

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
    for stem in ("forward_h200", "backward_h200", "fp8_h200_alone"):
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
