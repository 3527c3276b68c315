# SPDX-License-Identifier: Apache-2.0
"""bench/cpu/fp8_backward_study.py: its simulation without rounding is the definition, it rounds as flash3 does, it runs, and its tables are made."""
import json

import pytest
import torch

import flash3
from test_quantize import rotation


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


def test_run(script, tmp_path, monkeypatch):
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
    assert "1 − cosine" not in text and "1 − cosine" in tables.study_tables(full=True)
    assert "| N(0, 1) |" in text and "| GPT, layer 1 |" in text and "d 128, 16k: FP8 over our bf16 backward" in text


@pytest.mark.parametrize("argument,message", [(["--lengths", "100"], "--lengths has 100; each must be a multiple of 128"),
                                              (["--dims", "96"], "--dims has 96; each must be a power of two"),
                                              (["--steps", "0"], "--steps = 0 but it must be at least 1")])
def test_bad_arguments(script, capsys, argument, message):
    with pytest.raises(SystemExit):
        script("cpu.fp8_backward_study").parse_args(argument)
    assert message in capsys.readouterr().err
