# SPDX-License-Identifier: Apache-2.0
"""Head dims: what the library says is what calls take, and what the documents say."""
import pathlib
import re

import pytest
import torch

import flash3
from flash3 import _limits
from oracle import exact

ROOT = pathlib.Path(__file__).resolve().parents[2]
FORWARD, FP8, BACKWARD = (_limits.MOST["cpu"][calls] for calls in ("forward", "fp8", "backward"))


def tensors(dim, dim_v, **options):
    return (*(torch.randn(1, 9, 2, dim, **options) for _ in "qk"), torch.randn(1, 9, 2, dim_v, **options))


def test_forward_at_its_limit():
    q, k, v = tensors(*FORWARD)
    torch.testing.assert_close(flash3.attention(q, k, v, causal=True).double(), exact(q.double(), k.double(), v.double(), causal=True)[0],
                               atol=1e-5, rtol=1e-5)
    for dims, field in (((FORWARD[0] + 1, 8), "head_dim"), ((8, FORWARD[1] + 1), "head_dim_v")):
        with pytest.raises(ValueError, match=rf"{max(dims)} but {field} must be from 1 to {max(dims) - 1}$"):
            flash3.attention(*tensors(*dims))


@pytest.mark.parametrize("most, options", [(BACKWARD, {"backward": True}), (FP8, {"compute": "fp8"})], ids=["backward", "fp8"])
def test_the_others_at_their_limits(most, options):
    assert flash3.supported(*tensors(*most), **options)
    for dims in ((most[0] + 1, 8), (8, most[1] + 1)):
        assert f"{max(dims)} but head_dim" in flash3.supported(*tensors(*dims), **options).reason


def test_gradients_are_refused_before_anything_is_computed():
    for dims, where in (((BACKWARD[0] + 1, 8), r"q.shape\[3\]"), ((8, BACKWARD[1] + 1), r"v.shape\[3\]")):
        wide = tensors(*dims, requires_grad=True)
        with pytest.raises(NotImplementedError, match=rf"{where} = {max(dims)} but with gradients a head dim must be at most {max(dims) - 1}; "):
            flash3.attention(*wide)
        with torch.no_grad():
            assert flash3.attention(*wide).any()


def test_sdpa_leaves_to_torch_what_has_no_gradients(monkeypatch):
    from flash3 import _sdpa
    assert _sdpa._MOST == min(BACKWARD)
    for dim, theirs in ((_sdpa._MOST, False), (_sdpa._MOST + 1, True)):
        called = []
        monkeypatch.setattr(_sdpa, "_torch_sdpa", lambda *given, **options: called.append(given))
        monkeypatch.setattr(_sdpa, "say_once", lambda reason: None)
        flash3.sdpa(*(torch.randn(1, 2, 5, dim) for _ in range(3)))
        assert bool(called) == theirs


def said(file, pattern):
    """The numbers in the one place of a document that the pattern finds."""
    text = (ROOT / file).read_text(encoding="utf-8") if file.endswith(".md") else file
    found = re.findall(pattern, re.sub(r"\s+", " ", text))
    assert len(found) == 1, pattern
    return tuple(map(int, found[0]))


def test_documents_say_what_the_library_does():
    every = BACKWARD[0], *FORWARD
    assert len({*BACKWARD, *FP8}) == 1
    for file, pattern in (
            ("README.md", r"\| head dims \| each 1 … (\d+); CPU, forward: (\d+) with (\d+) \|"),
            ("docs/support.md", r"Head dims are from 1 to (\d+)\. On the CPU a forward call without FP8 takes head_dim to (\d+) and head_dim_v to (\d+)"),
            (flash3.attention.__doc__, r"from 1 to (\d+), and on the CPU, without gradients and FP8, head_dim to (\d+) and head_dim_v to (\d+)\.")):
        assert said(file, pattern) == every, file
    assert said("docs/python.md", r"head dims above (\d+) \(on a CPU without gradients (\d+), of values (\d+)\)") == every
    assert said("docs/support.md", r"\| head_dim 1 … (\d+) with head_dim_v 1 … (\d+), one of them above (\d+) \| – \| fp16, bf16, fp32 \|") == (
        *FORWARD, BACKWARD[0])
