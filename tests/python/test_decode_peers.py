# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/decode_peers.py: its calls compute attention over the cache, its check tells wrong results from right ones, and what fails is noted.

FlashAttention-3's operators are the drop-in's here, which have their schemas: never both in one process."""
import json
import sys
import types

import pytest
import torch

import flash3
import flash_attn_interface  # noqa: F401  registers torch.ops.flash_attn_3

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


def test_run(on_cpu, capsys):
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
