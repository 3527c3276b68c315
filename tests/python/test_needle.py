# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/needle.py: it runs, its exact sums are the definition's, and its figures tell a good out from a bad one."""
import contextlib
import io
import json
import math

import pytest
import torch

import oracle
from conftest import DEVICES
from flash3._library import FOLDER

LIB = str(FOLDER / "libflash3.so")


@pytest.fixture
def scripts(script):
    """(needle, haystack), modules of bench/."""
    return script("gpu.needle"), script("gpu.haystack")


@pytest.mark.parametrize("device", DEVICES)
def test_run(scripts, device, tmp_path):
    if device == "cuda":
        pytest.importorskip("pynvml")
    needle, haystack = scripts
    file = tmp_path / "needle.json"
    with contextlib.redirect_stdout(io.StringIO()):
        assert needle.main(["--lib", LIB, "--device", device, "--keys", "300,1000", "--dims", "64,128", "--rows", "40", "--peers", "",
                            "--commit", "abc", "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["commit"] == "abc" and report["seed"] >= 0
    points = report["needle_points"]
    assert len(points) == 2 * 2 * (len(haystack.DATA) * len(haystack.LEVELS) + len(haystack.FLAT))
    for point in points:
        assert list(point["libraries"]) == ["flash3_bf16", "flash3_fp8", "exact_sums"] and not point["refused"], point
        bf16, fp8, exact = point["libraries"].values()
        assert bf16["found"] == 1 and bf16["error"] < 0.004, point
        # Weights rounded to e4m3 are all that FP8 adds to the exact result of its tensors; on a GPU the largest is rounded too.
        assert fp8["error"] < 2.5 * exact["error"] + (0.03 if device == "cuda" else 0.001), point
        assert fp8["error_unquantised"] < 0.2 and abs(fp8["gain"] - 1) < 0.03, point
        if point["data"] == "one sign":
            assert "retrieved" not in fp8
        else:
            assert bf16["retrieved"] == 1 and fp8["retrieved"] > 0.95, point
            if point["level"] != "noise":
                assert abs(point["weight"] - float(point["level"])) < 0.03, point


@pytest.mark.parametrize("chunk", [None, 1, 700])
def test_exact_sums_are_those_of_a_naive_computation(scripts, monkeypatch, device, chunk):
    _, haystack = scripts
    if chunk:
        monkeypatch.setattr(haystack, "CHUNK", chunk)
    q, k, v = (torch.randn(1, n, 3, 48, device=device, dtype=torch.float64) for n in (70, 330, 330))
    out, largest = haystack.exact(q, k, v)
    wanted, lse = oracle.naive(q, k, v)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(48)
    torch.testing.assert_close(largest, torch.exp(scores.amax(-1) - lse)[0], rtol=1e-12, atol=1e-12)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    codes = (256 * weights).float().to(torch.float8_e4m3fn).double() / 256
    rounded = torch.einsum("bhij,bjhd->bihd", codes / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(haystack.exact(q, k, v, rounded=True)[0], rounded, rtol=1e-12, atol=1e-12)
    assert (rounded - wanted).abs().max() > 1e-4  # the rounding is there


def test_what_fp8_tensors_stand_for(scripts):
    """Both kinds of scales; the rotation leaves q·k as it is."""
    from bench.flash3_torch import CPU, Flash3
    _, haystack = scripts
    torch.manual_seed(7)
    q, k, v = (10 ** torch.rand(1, 1, 2, 1) * torch.randn(1, n, 2, 64).bfloat16() for n in (50, 290, 290))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    for scales, shape in (("blocks", (1, 2, 3)), ("heads", (1, 2))):
        call, made = Flash3(LIB).to_fp8(q, k, v, scales=scales, backend=CPU)
        call()
        assert made["k_scale"].shape == shape
        values = haystack.standing_for(made)
        assert haystack.error_of(values[2], v.double()) < 0.03
        products = [torch.einsum("bihd,bjhd->bhij", a.double(), b.double()) for a, b in ((q, k), values[:2])]
        assert 0.005 < haystack.error_of(products[1], products[0]) < 0.06


def test_figures_tell_good_from_bad(scripts):
    _, haystack = scripts
    torch.manual_seed(3)
    stack, directions = haystack.spread("model", 500, 60, 2, 64, "cpu")
    stack = haystack.aimed(stack, directions, "0.9")
    exact, weight = haystack.exact(stack.q, stack.k, stack.v)
    assert (weight - 0.9).abs().max() < 0.05
    good = haystack.agreement(exact, exact, exact, stack)
    assert good == {"found": 1, "found_unquantised": 1, "near_unquantised": 1, "error": 0, "error_unquantised": 0, "gain": 1, "retrieved": 1}
    # Other rows' needles, and no needle at all.
    assert haystack.agreement(exact.roll(1, 1), exact, exact, stack)["retrieved"] == 0
    lost = haystack.exact(torch.zeros_like(stack.q), stack.k, stack.v)[0]
    bad = haystack.agreement(lost, exact, exact, stack)
    assert bad["retrieved"] < 0.2 and bad["found"] == 0 and bad["error"] > 0.5
    # Sums that lose 2 %.
    shrunk = haystack.agreement(0.98 * exact, exact, exact, stack)
    assert shrunk["found"] == 0 and shrunk["near_unquantised"] == 1 and abs(shrunk["gain"] - 0.98) < 1e-6
    exact[0, 5, 1, 3] = math.nan
    with pytest.raises(ArithmeticError, match="not finite in 1 rows"):
        haystack.agreement(exact, lost, lost, stack)


def test_a_library_that_fails_is_a_result(scripts, monkeypatch):
    needle, haystack = scripts
    from bench.flash3_torch import CPU, Flash3

    def fails(lib, stack, backend):
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setattr(needle, "run_fa3_fp8", fails)
    point = needle.measure(Flash3(LIB), haystack.flat("near equal", 200, 10, 2, 64, "cpu"), CPU, ["fa3_fp8"])
    assert point["refused"] == {"fa3_fp8": "no kernel for this"} and list(point["libraries"]) == ["flash3_bf16", "flash3_fp8", "exact_sums"]
    text = needle.line({"keys": 200, "dim": 64, "data": "one sign", "level": "near equal", **point})
    assert text.endswith("no fa3_fp8: no kernel for this")


@pytest.mark.parametrize("arguments,message", [
    (("--device", "cpu", "--peers", "fa3_fp8"), "--peers names 'fa3_fp8', which runs on a GPU; --device is cpu"),
    (("--peers", "fa9"), "--peers names 'fa9'; there is fa3_fp8"),
    (("--site", "/nonexistent"), "--site /nonexistent: there is no such folder"),
    (("--keys", "0"), "--keys has 0; at least 1"),
    (("--keys", "128,4096", "--rows", "200"), "--rows 200 but --keys has 128"),
    (("--lib", "/nonexistent"), "--lib /nonexistent: there is no such file")])
def test_errors(scripts, capsys, arguments, message):
    needle, _ = scripts
    with pytest.raises(SystemExit) as left:
        needle.parse_args(["--lib", LIB, "--commit", "abc", *arguments])
    assert left.value.code == 2 and message in capsys.readouterr().err
