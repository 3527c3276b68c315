# SPDX-License-Identifier: Apache-2.0
"""What is wrong raises before anything runs: the right type, and a message that names the argument, both values and the rule."""
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import flash3
from flash3 import _support
from oracle import exact
from test_attention import make

INT = torch.int32


def bad(**changes):
    """The arguments of a good call, changed."""
    good = dict(zip("qkv", make("cpu", torch.float32)))
    return {**good, **{name: change(good) if callable(change) else change for name, change in changes.items()}}


WRONG = {
    "q int64": (bad(q=torch.zeros(2, 33, 4, 32, dtype=torch.int64)), TypeError, "q.dtype = int64 but it must be float16"),
    "q complex": (bad(q=torch.zeros(2, 33, 4, 32, dtype=torch.complex64)), TypeError, "q.dtype = complex64 but it must be float16"),
    "q float4": (bad(q=torch.empty(2, 33, 4, 32, dtype=torch.float4_e2m1fn_x2)), TypeError, "q.dtype = float4_e2m1fn_x2 but it must be"),
    "q float8_e5m2": (bad(q=torch.zeros(2, 33, 4, 32).to(torch.float8_e5m2)), TypeError, "q.dtype = float8_e5m2 but it must be float16"),
    "q float64": (bad(q=lambda t: t["q"].double()), TypeError, "q.dtype = float64 but it must be float16"),
    "k float16": (bad(k=lambda t: t["k"].half()), TypeError, "k.dtype = float16 but q.dtype = float32; q, k, v and out must"),
    "v bfloat16": (bad(v=lambda t: t["v"].bfloat16()), TypeError, "v.dtype = bfloat16 but q.dtype = float32"),
    "q bool": (bad(q=torch.zeros(2, 33, 4, 32, dtype=torch.bool)), TypeError, "q.dtype = bool but it must be float16"),
    "k numpy": (bad(k=lambda t: t["k"].numpy()), TypeError, "k is a ndarray but it must be a torch tensor, as q is"),
    "v None": (bad(v=None), TypeError, "v is a NoneType but it must be a torch tensor"),
    "q string": (bad(q="q"), TypeError, "q is a str but it must be a torch tensor, a numpy array"),
    "q 2-d": (bad(q=torch.zeros(33, 32)), ValueError, "q.ndim = 2 but it must be 4, [batch, seq, heads, dim], or packed 3"),
    "k 5-d": (bad(k=torch.zeros(2, 1, 50, 2, 32)), ValueError, "k.ndim = 5 but"),
    "k packed": (bad(k=torch.zeros(50, 2, 32)), ValueError, "k.ndim = 3 but it must be 4, [batch, seq_k, heads_k, head_dim]"),
    "batch": (bad(k=torch.zeros(3, 50, 2, 32)), ValueError, "k.shape[0] = 3 but q.shape[0] = 2; q and k must have the same batch"),
    "lengths": (bad(v=torch.zeros(2, 49, 2, 32)), ValueError, "v.shape[1] = 49 but k.shape[1] = 50; k and v must have the same seq_k"),
    "heads": (bad(k=torch.zeros(2, 50, 3, 32), v=torch.zeros(2, 50, 3, 32)), ValueError,
              "q.shape[2] = 4 but k.shape[2] = 3; heads_q must be a multiple of heads_k"),
    "head_dim": (bad(k=torch.zeros(2, 50, 2, 16)), ValueError, "k.shape[3] = 16 but q.shape[3] = 32; q and k must have the same head_dim"),
    "head_dim 577": (bad(q=torch.zeros(1, 3, 1, 577), k=torch.zeros(1, 3, 1, 577), v=torch.zeros(1, 3, 1, 8)), ValueError,
                     "q.shape[3] = 577 but head_dim must be from 1 to 576"),
    "scale nan": (bad(softmax_scale=float("nan")), ValueError, "softmax_scale = nan but it must be 0 (1/sqrt(head_dim)) or from 1e-18"),
    "scale 0": (bad(softmax_scale=0), ValueError, "softmax_scale = 0 but it must be greater than 0"),
    "scale < 0": (bad(softmax_scale=-1.0), ValueError, "softmax_scale = -1 but it must be 0 (1/sqrt(head_dim)) or from 1e-18 to 1e+18"),
    # float32 has 0 for the first two, which stands for the default, and infinity for the next.
    "scale 1e-46": (bad(softmax_scale=1e-46), ValueError, "softmax_scale = 1e-46 but it must be a number that float32 can hold"),
    "scale -1e-60": (bad(softmax_scale=-1e-60), ValueError, "softmax_scale = -1e-60 but it must be a number that float32 can hold"),
    "scale 1e39": (bad(softmax_scale=1e39), ValueError, "softmax_scale = 1e+39 but it must be a number that float32 can hold"),
    "scale 1e-19": (bad(softmax_scale=1e-19), ValueError, "softmax_scale = 1e-19 but it must be 0 (1/sqrt(head_dim)) or from 1e-18"),
    "softcap 1e-46": (bad(softcap=1e-46), ValueError, "softcap = 1e-46 but it must be a number that float32 can hold"),
    "softcap 1e60": (bad(softcap=1e60), ValueError, "softcap = 1e+60 but it must be a number that float32 can hold"),
    "softcap 1e-40": (bad(softcap=1e-40), ValueError, "softcap = 1e-40 but it must be 0 (none) or from 1e-18 to 1e+18"),
    "softcap 2.5e38": (bad(softcap=2.5e38), ValueError, "softcap = 2.5e+38 but it must be 0 (none) or from 1e-18 to 1e+18"),
    "scale string": (bad(softmax_scale=[]), TypeError, "softmax_scale is a list but it must be a number"),
    "scale 'a'": (bad(softmax_scale="a"), TypeError, "softmax_scale is a str but it must be a number"),
    "scale '1'": (bad(softmax_scale="1"), TypeError, "softmax_scale is a str but it must be a number"),
    "scale of two": (bad(softmax_scale=torch.ones(2)), TypeError, "softmax_scale is a Tensor but it must be a number"),
    "scale 10^400": (bad(softmax_scale=10**400), ValueError, f"softmax_scale = {10**400} but it must fit into 64 bits"),
    "softcap": (bad(softcap=-2.0), ValueError, "softcap = -2 but it must be 0 (none) or from 1e-18 to 1e+18"),
    "softcap None": (bad(softcap=None), TypeError, "softcap is a NoneType but it must be a number"),
    "softcap string": (bad(softcap="x"), TypeError, "softcap is a str but it must be a number"),
    "softcap with a gradient": (bad(softcap=torch.tensor(2.0, requires_grad=True)), TypeError,
                                "softcap.requires_grad = True but softcap is taken as a number"),
    "scale with a gradient": (bad(softmax_scale=torch.tensor(2.0, requires_grad=True)), TypeError,
                              "softmax_scale.requires_grad = True but softmax_scale is taken as a number"),
    "chunk": (bad(chunk=-1), ValueError, "chunk = -1 but it must be at least 0"),
    "chunk 2^80": (bad(chunk=2**80), ValueError, f"chunk = {2**80} but it must fit into 64 bits"),
    "chunk -2^80": (bad(chunk=-2**80), ValueError, f"chunk = {-2**80} but it must fit into 64 bits"),
    "softcap 10^400": (bad(softcap=10**400), ValueError, f"softcap = {10**400} but it must fit into 64 bits"),
    "softcap '1'": (bad(softcap="1"), TypeError, "softcap is a str but it must be a number"),
    "deterministic": (bad(deterministic=""), TypeError, "deterministic is a str but it must be of type bool"),
    "causal": (bad(causal="yes"), TypeError, "causal is a str but it must be of type bool"),
    "window": (bad(window=3), ValueError, "window = 3 but it must be a pair (left, right), or None"),
    "window of three": (bad(window=(1, 2, 3)), ValueError, "window = (1, 2, 3) but it must be a pair"),
    "window float": (bad(window=(1.5, 0)), TypeError, "window[0] is a float but it must be an integer"),
    "window 2^64": (bad(window=(2**64, 0)), ValueError, f"window[0] = {2**64} but it must fit into 64 bits"),
    "sm_margin < 0": (bad(sm_margin=-1), ValueError, "sm_margin = -1 but it must be at least 0"),
    "sm_margin 2^31": (bad(sm_margin=2**31), ValueError, "sm_margin = 2147483648 but it must fit into 32 bits"),
    "sm_margin float": (bad(sm_margin=1.5), TypeError, "sm_margin is a float but it must be of type int"),
    "fp8_sums": (bad(fp8_sums="three"), ValueError, "fp8_sums = 'three' but it must be 'auto', 'one' or 'two'"),
    "fp8_sums None": (bad(fp8_sums=None), ValueError, "fp8_sums = None but it must be 'auto', 'one' or 'two'"),
    "fp8_sums of 16 bits": (bad(fp8_sums="two"), ValueError, "fp8_sums = 'two' but q.dtype = float32 and compute = None; sums"),
    "sink shape": (bad(sink=torch.zeros(3)), ValueError, "sink.shape[0] = 3 but q.shape[2] = 4"),
    "sink dtype": (bad(sink=torch.zeros(4).half()), TypeError,
                   "sink.dtype = float16 but out.dtype = float32; a sink must be float32 or have the dtype of out, and one that is not "
                   "wanted is None"),
    "cu dtype": (bad(q=torch.zeros(9, 4, 32), cu_seqlens_q=torch.tensor([0, 4, 9])), TypeError,
                 "cu_seqlens_q.dtype = int64 but it must be int32"),
    "cu float": (bad(q=torch.zeros(9, 4, 32), cu_seqlens_q=torch.zeros(3)), TypeError,
                 "cu_seqlens_q.dtype = float32 but it must be int32; cu_seqlens_q that is not given is None"),
    "cu decreases": (bad(q=torch.zeros(9, 4, 32), cu_seqlens_q=torch.tensor([0, 9, 4], dtype=INT)), ValueError, "cu_seqlens_q[2] = 4"),
    "cu too far": (bad(q=torch.zeros(9, 4, 32), cu_seqlens_q=torch.tensor([0, 4, 10], dtype=INT)), ValueError, "cu_seqlens_q[2] = 10"),
    "used": (bad(seqused_k=torch.tensor([51, 0], dtype=INT)), ValueError, "seqused_k[0] = 51"),
    "used length": (bad(seqused_k=torch.tensor([5], dtype=INT)), ValueError, "seqused_k.shape[0] = 1 but q.shape[0] = 2"),
    "max_seqlen": (bad(q=torch.zeros(9, 4, 32), cu_seqlens_q=torch.tensor([0, 4, 9], dtype=INT), max_seqlen_q=-1), ValueError,
                   "max_seqlen_q = -1"),
    "device": (bad(k=torch.zeros(2, 50, 2, 32, device="meta")), ValueError, "k.device = meta but q.device = cpu"),
}


@pytest.mark.parametrize("arguments,error,message", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("differentiated", [False, True])
def test_wrong_call(arguments, error, message, differentiated):
    if differentiated and "must be from 1 to 576" in message:  # a head of this width has no gradients, which is said first
        error, message = NotImplementedError, "q.shape[3] = 577 but with gradients a head dim must be at most 256"
    if differentiated and torch.is_tensor(arguments["q"]) and arguments["q"].dtype == torch.float32:
        arguments = {**arguments, "q": arguments["q"].clone().requires_grad_()}
    with pytest.raises(error, match=re.escape(message)) as caught:
        flash3.attention(**arguments)
    assert caught.type is error


def test_an_argument_that_is_not_there():
    q, k, v = make("cpu", torch.float32)
    with pytest.raises(TypeError, match="dropout"):
        flash3.attention(q, k, v, dropout=0.1)
    with pytest.raises(TypeError):
        flash3.attention(q, k, v, True)  # options go by name


def test_backward_names_its_own_arguments():
    q, k, v = make("cpu", torch.float32)
    out, lse = flash3.attention(q, k, v, return_lse=True)
    for changes, error, message in (({"dout": out[:, :5]}, ValueError, "dout.shape[1] = 5 but out.shape[1] = 33"),
                                    ({"lse": lse.half()}, TypeError, "lse.dtype = float16 but it must be float32"),
                                    ({"lse": lse.double()}, TypeError, "lse.dtype = float64 but it must be float32"),
                                    ({"dlse": lse[:1]}, ValueError, "dlse.shape[0] = 1 but q.shape[0] = 2"),
                                    ({"out": None}, TypeError, "out.dtype is none")):
        arguments = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse, **changes}
        with pytest.raises(error, match=re.escape(message)):
            flash3.attention_backward(**arguments)


def test_an_argument_of_another_dtype_is_told_its_own():
    """Which dtype is wanted depends on the argument: a page table is of no float."""
    q, cache = torch.zeros(2, 1, 4, 32), torch.zeros(3, 16, 2, 32)
    lengths, pages = torch.ones(2, dtype=INT), torch.zeros(2, 1, dtype=INT)
    for changes, message in (({"page_table": pages.long()}, "page_table.dtype = int64 but it must be int32"),
                             ({"page_table": pages.short()}, "page_table.dtype = int16 but it must be int32"),
                             ({"page_table": pages.float()},
                              "page_table.dtype = float32 but it must be int32; page_table that is not given is None"),
                             ({"seqused_k": lengths.long()}, "seqused_k.dtype = int64 but it must be int32"),
                             ({"k_scale": torch.ones(1).double()}, "k_scale.dtype = float64 but it must be float32"),
                             ({"rotary_cos": torch.ones(9, 16).double(), "rotary_sin": torch.ones(9, 16)},
                              "rotary_cos.dtype = float64 but it must be float16")):
        arguments = {"page_table": pages, "seqused_k": lengths, **changes}
        with pytest.raises(TypeError, match=re.escape(message)):
            flash3.attention_with_kv_cache(q, cache, cache, **arguments)
        if "page_table" in changes or "seqused_k" in changes:  # and what is no torch tensor
            arrays = {name: x.numpy() for name, x in arguments.items()}
            with pytest.raises(TypeError, match=re.escape(message)):
                flash3.attention_with_kv_cache(q.numpy(), cache.numpy(), cache.numpy(), **arrays)


def test_an_operator_by_itself_says_the_same():
    q, k, v = make("cpu", torch.float32)
    with pytest.raises(RuntimeError, match="flash3: invalid argument: .*same head_dim"):
        torch.ops.flash3.forward(q, k[..., :8], v)


def test_a_wrong_shape_under_compile():
    q, k, v = make("cpu", torch.float32)
    compiled = torch.compile(lambda q, k, v: flash3.attention(q, k, v), backend="aot_eager")
    with pytest.raises(Exception, match="same head_dim"):
        compiled(q, k[..., :8], v)


@pytest.mark.gpu
def test_devices_do_not_mix():
    q, k, v = make("cuda", torch.bfloat16)
    with pytest.raises(ValueError, match="k.device = cpu but q.device = cuda:0; all tensors must be on one device"):
        flash3.attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match="seqused_k.device = cpu"):
        flash3.attention(q, k, v, seqused_k=torch.tensor([3, 4], dtype=INT))
    with pytest.raises(NotImplementedError, match="float32"):
        flash3.attention(q.float(), k.float(), v.float())


# Head dims: what the library says is what calls take, and what the documents say.

ROOT = pathlib.Path(__file__).resolve().parents[2]
FORWARD, FP8, BACKWARD = (_support.MOST["cpu"][calls] for calls in ("forward", "fp8", "backward"))


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


# Ctrl-C during a call on the CPU that takes long.

eager = pytest.mark.skipif(importlib.util.find_spec("flash3._eager") is None, reason="built without Python's headers")

# The signal comes in the call, since the thread that sends it waits until the call has written something; the call has ended early if
# rows are left. Without an end it would compute for minutes.
INTERRUPTED = """if True:
    import os, signal, threading
    import torch, flash3
    torch.set_num_threads(1)
    x = torch.randn(1, 60000, 8, 128)
    out = torch.zeros_like(x)

    def interrupt():
        while not out.any():
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        {call}
    except KeyboardInterrupt:
        assert (out == 0).all(-1).any(), "the call has run to its end"
        print("interrupted")
    y = x[:, :50]
    torch.testing.assert_close(flash3.attention(y, y, y), torch.nn.functional.scaled_dot_product_attention(
        *(y.transpose(1, 2),) * 3).transpose(1, 2))  # all is as before
"""
CALLS = {"operator": "flash3._attention._torch.operators.forward_out(x, x, x, out, None); flash3.backends()",
         "arrays": "flash3.arrays.forward(x, x, x, out, num_threads=1)",
         "gradients": "flash3._attention._torch.operators.backward_out(x, None, x, x, x, x, torch.zeros(1, 8, 60000), torch.empty_like(x), "
                      "out, torch.empty_like(x), None); flash3.backends()"}


@eager
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_interrupt_ends_a_call(call):
    code = INTERRUPTED.format(call=call if "operators" not in call else f"""try:
            {call}
        except RuntimeError as error:
            assert "flash3: cancelled" in str(error)
            flash3.backends()""")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout == "interrupted\n", ran.stdout + ran.stderr
