# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/cache_needle.py: decoding finds its needles in FP8 caches, and what its figures are compared with is what the caches hold."""
import contextlib
import io
import json

import pytest
import torch

import flash3
from conftest import DEVICES


@pytest.fixture
def scripts(script):
    """(cache_needle, haystack), modules of bench/."""
    return script("gpu.cache_needle"), script("gpu.haystack")


@pytest.mark.parametrize("device", DEVICES)
def test_run(scripts, device, tmp_path):
    if device == "cuda":
        pytest.importorskip("pynvml")
    cache_needle, _ = scripts
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


def test_a_cache_stands_for_its_keys(scripts, device):
    """In every form: pages and scales in their places, and the rotation leaves q·k as it is."""
    cache_needle, haystack = scripts
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
def test_the_rotation_is_the_librarys(scripts, dim):
    cache_needle, _ = scripts
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
def test_errors(scripts, capsys, arguments, message):
    cache_needle, _ = scripts
    with pytest.raises(SystemExit) as left:
        cache_needle.parse_args(["--commit", "abc", *arguments])
    assert left.value.code == 2 and message in capsys.readouterr().err
