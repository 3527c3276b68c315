# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/needle.py: it runs, its exact sums are the definition's, and its figures tell a good out from a bad one."""
import contextlib
import io
import json
import math

import pytest
import torch

import flash3
import oracle
from conftest import DEVICES
from flash3._library import FOLDER
from test_quantize import rotation

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


# bench/gpu/cache_needle.py: decoding finds its needles in FP8 caches, and what its figures are compared with is what the caches hold.


@pytest.fixture
def cache_needle_scripts(script):
    """(cache_needle, haystack), modules of bench/."""
    return script("gpu.cache_needle"), script("gpu.haystack")


@pytest.mark.parametrize("device", DEVICES)
def test_cache_needle_run(cache_needle_scripts, device, tmp_path):
    if device == "cuda":
        pytest.importorskip("pynvml")
    cache_needle, _ = cache_needle_scripts
    file = tmp_path / "cache_needle.json"
    with contextlib.redirect_stdout(io.StringIO()):
        assert cache_needle.main(["--device", device, "--keys", "400", "--dims", "64,256", "--levels", "0.9", "--rows", "16", "--seed", "5",
                                  "--commit", "abc", "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    points = report["cache_needle_points"]
    assert report["commit"] == "abc" and len(points) == 2 * len(cache_needle.DATA) * len(cache_needle.LAYOUTS)
    for point in points:
        assert tuple(point["libraries"]) == cache_needle.CACHES, point
        for name, got in point["libraries"].items():
            # Products and sums are exact but for weights and out, which keep eleven bits or eight: what is lost, e4m3 has lost before.
            assert got["found"] == 1 and got["error"] < 0.005, (name, point)
            assert got["error_unquantised"] < (0.005 if name == "bf16" else 0.2), (name, point)
            # A query along an outlier may have louder keys than its own.
            assert got["retrieved"] > (0.8 if point["data"] == "outliers" else 0.95), (name, point)
        assert point["libraries"]["bf16"]["found_unquantised"] == 1, point


def test_a_cache_stands_for_its_keys(cache_needle_scripts, device):
    """In every form: pages and scales in their places, and the rotation leaves q·k as it is."""
    cache_needle, haystack = cache_needle_scripts
    torch.manual_seed(1)
    stack, directions = haystack.spread("normal", 500, 8, 2, 80, device)
    stack.k *= 10 ** torch.linspace(-1, 1, 500, device=device)[None, :, None, None]  # scales of pages differ
    stack.q = directions.transpose(0, 1)[None].bfloat16()
    products = torch.einsum("bihd,bjhd->bhij", stack.q.double(), stack.k.double())
    for layout in cache_needle.LAYOUTS:
        for name in cache_needle.CACHES:
            q, k, v = cache_needle.Cache(stack, name, layout, 128).stands_for(stack.q, 500)
            assert k.shape == v.shape == stack.k.shape
            assert haystack.error_of(v, stack.v.double()) < (1e-9 if name == "bf16" else 0.03)
            error = haystack.error_of(torch.einsum("bihd,bjhd->bhij", q, k), products)
            assert error < (1e-9 if name == "bf16" else 0.06), (layout, name)


@pytest.mark.parametrize("dim", (1, 7, 64, 96, 200))
def test_the_rotation_is_the_librarys(cache_needle_scripts, dim):
    cache_needle, _ = cache_needle_scripts
    matrix = cache_needle.rotation(dim, 2**64 - 5, "cpu")
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-12)
    k = torch.randn(1, 40, 2, dim)
    cache, used = torch.zeros(1, 40, 2, dim), torch.zeros(1, dtype=torch.int32)
    flash3.attention_with_kv_cache(k[:, :1], cache, cache.clone(), seqused_k=used, k_new=k, v_new=k, rotate=True, rotation_seed=2**64 - 5)
    torch.testing.assert_close(cache.double(), k.double() @ matrix, rtol=0, atol=1e-5)


@pytest.mark.parametrize("arguments,message", [
    (("--levels", "0.3"), "--levels names '0.3'; there is noise, 0.5, 0.9, 0.99"),
    (("--data", "text"), "--data names 'text'; there is normal, model, outliers"),
    (("--page-size", "64"), "--page-size 64 but it must be a multiple of 128"),
    (("--rows", "30", "--queries", "4"), "--rows 30 but --queries 4"),
    (("--dims", "0"), "--dims has 0; at least 1"),
    (("--keys", "128,4096", "--rows", "200"), "--rows 200 but --keys has 128")])
def test_cache_needle_errors(cache_needle_scripts, capsys, arguments, message):
    cache_needle, _ = cache_needle_scripts
    with pytest.raises(SystemExit) as left:
        cache_needle.parse_args(["--commit", "abc", *arguments])
    assert left.value.code == 2 and message in capsys.readouterr().err


# bench/cpu/fp8_backward_study.py: its simulation without rounding is the definition, it rounds as flash3 does, it runs, and its tables are made.


def inputs(seq, dim, heads=2):
    generator = torch.Generator().manual_seed(seq)
    return [torch.randn(1, heads, seq, dim, generator=generator).bfloat16().float() for _ in range(4)]


@pytest.mark.parametrize("causal", [False, True])
def test_without_rounding_it_is_autograd(script, causal):
    sim = script("cpu.fp8_backward_sim")
    *leaves, dout = (x.double() for x in inputs(640, 32))
    leaves = [x.requires_grad_() for x in leaves]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    out.backward(dout)
    made = sim.backward(*(x.detach() for x in leaves), dout, causal, sim.Recipe())
    for x, wanted in zip(made, [*(leaf.grad for leaf in leaves), out.detach()]):
        torch.testing.assert_close(x, wanted, rtol=1e-9, atol=1e-9)


def test_forward_is_that_of_flash3(script):
    """Of the same e4m3 tensors both have the same out, but for weights that round the other way and the bfloat16 of out."""
    sim, study = script("cpu.fp8_backward_sim"), script("cpu.fp8_backward_study")
    q, k, v, dout = inputs(384, 64)
    out = flash3.attention(*(x.transpose(1, 2).bfloat16() for x in (q, k, v)), causal=True, compute="fp8").transpose(1, 2).float()
    made = sim.backward(q, k, v, dout, True, study.RECIPES["fp8"])[3]
    assert float((made - out).norm() / out.norm()) < 0.005
    plain = sim.backward(q, k, v, dout, True, study.RECIPES["bf16"])[3]
    assert float((plain - out).norm() / out.norm()) > 0.02


def test_rotation_and_scales(script):
    sim = script("cpu.fp8_backward_sim")
    assert torch.allclose(sim.rotation(128, 5).double(), rotation(128, 5), atol=1e-7)
    with pytest.raises(ValueError, match="dim = 96 but it must be a power of two"):
        sim.rotation(96)
    x = inputs(256, 32)[0] * torch.logspace(-6, 3, 256)[:, None]
    own = sim.scaled(x, "e4m3", (sim.BLOCK, 32))
    assert torch.equal(own, sim.quantised(x, "e4m3")) and not torch.equal(own, x)


def test_short_sums(script):
    """Kept bits: of a large term and small ones those are lost that are below 13 bits of it."""
    product = script("cpu.fp8_backward_sim").tensor_core_product
    a = torch.zeros(1, 64)
    a[0, 0], a[0, 1], a[0, 2], a[0, 40] = 1, 2.0**-13, 2.0**-14, 2.0**-14
    assert product(a, torch.ones(64, 1)).item() == 1 + 2.0**-13
    assert product(a[:, 1:], torch.ones(63, 1)).item() == 2.0**-13 + 2.0**-13


def test_counts_are_those_of_the_docs(script):
    """docs/limits.md: shared memory and tensor cores of the bf16 tiles."""
    gain = script("cpu.fp8_backward_gain")
    low, tall = gain.tile("bf16", 64), gain.tile("bf16", 80)
    assert (low["shared_kib_in_all"], low["shared"], low["tensor"], low["mufu"]) == (368, 2944, 2560, 512)
    assert (tall["shared_kib_in_all"], round(tall["shared"])) == (436, 2790)
    assert gain.tile("fp8", 64)["tensor"] == 1280


def test_fp8_backward_study_run(script, tmp_path, monkeypatch):
    study, tables = script("cpu.fp8_backward_study"), script("report.fp8_backward_table")
    threads = torch.get_num_threads()
    monkeypatch.setattr(study, "CAPTURE", dict(layers=2, dim=32, heads=1, length=128, batch=1))
    monkeypatch.setattr(study, "SIZE", dict(layers=1, dim=32, heads=1, length=128, batch=1))
    monkeypatch.setattr(study.train, "__defaults__", (study.SIZE, study.ARMS))
    monkeypatch.setattr(study.captured, "__defaults__", (study.CAPTURE,))
    file = tmp_path / "fp8_backward_study_cpu.json"
    try:
        assert study.main(["--json", str(file), "--lengths", "128", "--dims", "32", "--steps", "2", "--capture-steps", "2", "--seeds", "1",
                           "--commit", "abc"]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["commit"] == "abc" and len(report["training"]["runs"]) == len(study.ARMS)
    points = {(p["data"], p["causal"]): p["errors"] for p in report["error_points"]}
    assert len(points) == 2 * len(study.DATA) + 2 + 2
    normal = points["normal", False]
    assert set(normal) == {*study.RECIPES, *study.KERNELS}
    for what in ("dq", "dk", "dv"):
        bf16, fp8 = normal["kernel_bf16"][what][0], normal["fp8"][what][0]
        assert bf16 < 0.004 and 0.03 < fp8 < 0.12 and normal["inputs"][what][0] < fp8
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "source", lambda path, report, up: path.name)
    text = tables.study_tables()
    everything = tables.study_tables(full=True)
    assert "| N(0, 1) |" in text and "| GPT, layer 1 |" in text
    for more in ("1 − cosine", "d 128, 16k: FP8 over our bf16 backward"):
        assert more in everything and more not in text


@pytest.mark.parametrize("argument,message", [(["--lengths", "100"], "--lengths has 100; each must be a multiple of 128"),
                                              (["--dims", "96"], "--dims has 96; each must be a power of two"),
                                              (["--steps", "0"], "--steps = 0 but it must be at least 1")])
def test_bad_arguments(script, capsys, argument, message):
    with pytest.raises(SystemExit):
        script("cpu.fp8_backward_study").parse_args(argument)
    assert message in capsys.readouterr().err
