# SPDX-License-Identifier: Apache-2.0
"""flash3._eager, the way around torch's dispatcher: which calls take it, and that no result, error or side effect differs."""
import concurrent.futures
import contextlib
import re
import subprocess
import sys
import threading
import time
import weakref

import flash_attn_interface
import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash3
from flash3 import _attention, _eager, _torch
from test_attention import make
from test_errors import WRONG

HALF = torch.bfloat16


@pytest.fixture
def taken(monkeypatch):
    """A list that gets, for each call that asks for the short way, whether it was taken."""
    answers = []

    def watched(*call):
        out = _eager.attention(*call)
        answers.append(out is not None)
        return out

    monkeypatch.setattr(_attention, "_eager", watched)
    monkeypatch.setattr(flash_attn_interface, "eager", watched)
    return answers


def leave_it(monkeypatch):
    """Has operators do all calls."""
    for module, name in ((_attention, "_eager"), (flash_attn_interface, "eager"), (_torch, "_eager_forward")):
        monkeypatch.setattr(module, name, None)


def by_operator(q, k, v, causal=False, window=None, softmax_scale=None, softcap=0.0, sm_margin=0, **more):
    left, right = (-1, -1) if window is None else window
    options = dict(softmax_scale=softmax_scale or 0.0, causal=causal, window_left=left, window_right=right, softcap=softcap)
    if sm_margin or more:
        return torch.ops.flash3.forward(q, k, v, **options, sm_margin=sm_margin, **more)[0]
    return torch.ops.flash3.inference(q, k, v, **options)


def heads_first(x):
    """The same numbers where heads lie before rows in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


OPTIONS = [{}, {"causal": True}, {"causal": True, "softmax_scale": 0.2, "softcap": 3.0}, {"softmax_scale": 2, "softcap": 3},
           {"window": (5, 2)}, {"window": (-1, 3)}, {"window": (0, -5), "causal": True}, {"window": (2**62, 0)},
           {"sm_margin": 3, "causal": True}, {"sm_margin": 2**31 - 1}, {"chunk": 8}, {"deterministic": True}]
TENSORS = {"lengths": lambda device: {"seqused_k": torch.tensor([3, 4], dtype=torch.int32, device=device)},
           "sink": lambda device: {"sink": torch.arange(4.0, device=device)},
           "queries": lambda device: {"seqused_q": torch.tensor([0, 7], dtype=torch.int32, device=device)},
           "padding": lambda device: {"seqused_q": torch.tensor([0, 7], dtype=torch.int32, device=device), "causal": True}}
SHAPES = {"gqa": {}, "mqa": {"heads_k": 1}, "mha": {"heads_k": 4}, "decode": {"seq_q": 1}, "long": {"seq_q": 300, "seq_k": 700},
          "head dims": {"dim": 48, "dim_v": 72}, "more queries than keys": {"seq_q": 50, "seq_k": 33}}
LAYOUTS = {"dense": lambda q, k, v: (q, k, v), "heads first": lambda q, k, v: tuple(map(heads_first, (q, k, v))),
           "one buffer": lambda q, k, v: (q, *torch.cat([k, k], -1).split(k.shape[-1], -1)),
           "every second row": lambda q, k, v: (q[:, ::2], k, k[:, :, :, :8])}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16])
def test_options_have_the_operators_bits(device, dtype, options, taken):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("the GPU takes no float32")
    q, k, v = make(device, dtype)
    out, wanted = flash3.attention(q, k, v, **options), by_operator(q, k, v, **options)
    assert taken == [True] and torch.equal(out, wanted) and out.dtype == dtype


@pytest.mark.parametrize("make_options", TENSORS.values(), ids=TENSORS)
def test_tensors_have_the_operators_bits(device, make_options, taken):
    q, k, v = make(device, HALF)
    options = make_options(device)
    (out, lse), wanted = flash3.attention(q, k, v, **options, return_lse=True), torch.ops.flash3.forward(q, k, v, **options)
    assert taken == [True] and torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert torch.equal(flash3.attention(q, k, v, **options), out)


def test_packed_sequences_have_the_operators_bits(device, taken):
    q, k, v = (x.flatten(0, 1) for x in make(device, HALF))
    cu_q, cu_k = (torch.tensor([0, 3, len(x) - 1], dtype=torch.int32, device=device) for x in (q, k))
    options = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    (out, lse), wanted = flash3.attention(q, k, v, **options, return_lse=True), torch.ops.flash3.forward(q, k, v, **options)
    assert taken == [True] and torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]) and not out[-1].any()


def test_compute_and_words(taken):
    q, k, v = make("cpu", torch.float32)
    got = flash3.attention(q, k, v, compute="fp8", fp8_sums="two", rotation_seed=5)
    assert taken == [True] and torch.equal(got, torch.ops.flash3.forward(q, k, v, compute_fp8=True, fp8_sums=2, rotation_seed=5)[0])
    name = "".join(["cau", "sal"])  # not interned
    assert torch.equal(flash3.attention(q, k, v, **{name: True}), by_operator(q, k, v, causal=True)) and taken == [True, True]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_shapes_and_layouts_have_the_operators_bits(device, shape, layout, taken):
    q, k, v = layout(*make(device, HALF, **shape))
    out, wanted = flash3.attention(q, k, v, causal=True), by_operator(q, k, v, causal=True)
    assert taken == [True] and torch.equal(out, wanted) and out.stride() == wanted.stride()


def test_result_is_a_tensor_like_any_other(device, taken):
    q, k, v = make(device, HALF)
    out = flash3.attention(q, k, v)
    assert type(out) is torch.Tensor and out.is_leaf and not out.requires_grad and out._version == 0 and out._base is None
    # Memory of torch's own: record_stream() and resize_() pass memory by that came through DLPack.
    assert out.untyped_storage().resizable()
    parameters = [torch.nn.Parameter(x) for x in (q, k, v)]
    with torch.no_grad():
        from_parameters = flash3.attention(*parameters)
    with torch.inference_mode():
        inferred = flash3.attention(q, k, v)
        made_inside = q.clone()
    assert type(from_parameters) is torch.Tensor and inferred.is_inference() and not out.is_inference()
    assert not flash3.attention(made_inside, k, v).is_inference()
    assert taken == [True] * 4 and torch.equal(out, inferred) and torch.equal(out, from_parameters)


def test_drop_in_takes_it(device, taken):
    q, k, v = make(device, HALF)
    func = flash_attn_interface.flash_attn_func
    outs = [func(q, k, v, 0.3, True, window_size=(9, 0), softcap=2.0, pack_gqa=True, num_splits=0),
            func(q, k, v, 0.3, True, window_size=(9, 0), softcap=2.0, return_attn_probs=True)[0]]
    assert taken == [True] and torch.equal(*outs)
    if device == "cpu":
        torch.manual_seed(0)
        dropped = func(q, k, v, 0.3, True, dropout_p=0.1)
        torch.manual_seed(0)
        assert torch.equal(dropped, flash3.attention(q, k, v, softmax_scale=0.3, causal=True, dropout_p=0.1))
        assert taken == [True, True] and taken.pop()
    hints = func(q, k, v, 0.3, True, window_size=(9, 0), softcap=2.0, num_splits=2, sm_margin=1)
    assert taken == [True, True] and torch.equal(hints, outs[0])


def outcome(call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("arguments", [arguments for arguments, *_ in WRONG.values()], ids=WRONG)
def test_errors_are_the_operators(arguments, monkeypatch):
    said = outcome(flash3.attention, **arguments)
    leave_it(monkeypatch)
    assert said == outcome(flash3.attention, **arguments) and isinstance(said, tuple)


def test_drop_ins_errors_are_the_operators(monkeypatch):
    q, k, v = make("cpu", HALF)
    wrong = [((q, k[:1], v), {}), ((q, k, v, 0.0), {}), ((q, k, v, -1.0), {}), ((q, k, v), {"sm_margin": -1}),
             ((q[0], k, v), {}), ((q, k.float(), v), {}), ((q, k, None), {})]
    said = [outcome(flash_attn_interface.flash_attn_func, *args, **kwargs) for args, kwargs in wrong]
    leave_it(monkeypatch)
    assert said == [outcome(flash_attn_interface.flash_attn_func, *args, **kwargs) for args, kwargs in wrong]
    assert all(isinstance(each, tuple) for each in said)


class Subclass(torch.Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


def gaps(x):
    return x.repeat_interleave(2, -1)[..., ::2]


def minus_imaginary(x):
    """x again, stored as the negated imaginary part of its negative."""
    return torch.complex(x, -x).conj().imag


# Calls that only the operator may do, for what becomes of the tensors, where they are made, and options.
LEFT = {
    "gaps": {"change": gaps}, "negated": {"change": lambda x: torch._neg_view(-x)}, "part of complex": {"change": minus_imaginary},
    "no memory": {"change": lambda x: torch._efficientzerotensor(x.shape)}, "no rows": {"change": lambda x: x[:, :0]},
    "subclass": {"change": lambda x: x.as_subclass(Subclass)}, "FP8": {"change": lambda x: x.to(torch.float8_e4m3fn)},
    "recorded": {"change": lambda x: x.clone().requires_grad_()}, "forward AD": {"context": forward_ad.dual_level},
    "autocast": {"context": lambda: torch.autocast("cpu", HALF)}, "function mode": {"context": Functions},
    "dispatch mode": {"context": Operators}, "default device": {"context": lambda: torch.device("cpu")},
    "profiler": {"context": torch.profiler.profile}, "tensor softcap": {"options": {"softcap": torch.tensor(2.0)}},
    "list": {"options": {"window": [5, 2]}}, "open side": {"options": {"window": (5, None)}}, "out_dtype": {"options": {"out_dtype": torch.float32}},
    "recorded sink": {"options": {"sink": torch.zeros(4, requires_grad=True)}}, "seed": {"options": {"compute": "fp8", "rotation_seed": 2**64 - 1}},
}


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_left_to_the_operator(case, taken, monkeypatch):
    change, context, options = case.get("change"), case.get("context", contextlib.nullcontext), case.get("options", {})
    tensors = make("cpu", torch.float32)
    if change:
        tensors = [change(x) for x in tensors]
    with context():
        got = outcome(flash3.attention, *tensors, **options)
    assert True not in taken
    leave_it(monkeypatch)
    with context():
        wanted = outcome(flash3.attention, *tensors, **options)
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype and got.grad_fn.__class__ is wanted.grad_fn.__class__
        assert torch.equal(got.detach(), wanted.detach())
    elif not torch.is_tensor(wanted[0]):
        assert got == wanted


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("change", [gaps, minus_imaginary, lambda x: x.clone().requires_grad_(), lambda x: x.as_subclass(Subclass),
                                    lambda x: x.to_sparse(), lambda x: x.to("meta"), lambda x: x[0], lambda x: x[None], lambda x: None])
def test_one_tensor_is_enough_to_leave_it(which, change):
    tensors = list(make("cpu", torch.float32))
    tensors[which] = change(tensors[which])
    assert _eager.attention(*tensors, {}) is None


def test_takes_nothing_but_four_arguments():
    with pytest.raises(TypeError, match="takes 4 arguments but 1 are given"):
        _eager.attention(None)


def test_transforms_compile_and_trace_see_the_operator(taken):
    q, k, v = make("cpu", torch.float32)
    wanted = by_operator(q, k, v, causal=True)
    mapped = torch.func.vmap(lambda x: flash3.attention(x[None], k[:1], v[:1]))(q)
    assert torch.equal(mapped[:, 0], by_operator(q, k[:1].expand_as(k), v[:1].expand_as(v)))
    torch.func.vmap(lambda x: x + flash3.attention(q, k, v).sum())(q)  # none of the call's own tensors is mapped
    torch.func.grad(lambda x: flash3.attention(x, k, v).sum())(q)
    assert True not in taken
    for attention in (flash3.attention, flash_attn_interface.flash_attn_func):
        traced = torch.jit.trace(lambda q, k, v: attention(q, k, v, causal=True), (q, k, v), check_trace=False)
        assert "flash3::inference" in str(traced.graph) and torch.equal(traced(q, k, v), wanted)
        assert True not in taken
        graphs = []

        def backend(graph, _):
            graphs.append(str(graph.code))
            return graph

        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, backend=backend)
            torch.testing.assert_close(compiled(q, k, v), wanted)
        assert len(graphs) == 1 and "torch.ops.flash" in graphs[0] and "_eager" not in graphs[0]


def test_profiler_names_the_operator():
    q, k, v = make("cpu", torch.float32)
    for call in (flash3.attention, flash_attn_interface.flash_attn_func):
        with torch.profiler.profile() as profile:
            call(q, k, v)
        assert any(event.key.startswith("flash") and "::" in event.key for event in profile.key_averages())


def test_many_threads_at_once(taken):
    q, k, v = make("cpu", HALF, seq_q=65, seq_k=129)
    wanted = by_operator(q, k, v, causal=True)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda _: flash3.attention(q, k, v, causal=True), range(200)))
    assert taken == [True] * 200 and all(torch.equal(out, wanted) for out in outs)


@contextlib.contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.fixture
def one_thread():
    with torch_threads(1) as count:
        yield count


@pytest.fixture
def threads():
    with torch_threads(4) as count:
        yield count


def test_other_threads_run_meanwhile(one_thread):  # so that it takes long on any machine
    """A computation does not hold the interpreter."""
    q, k, v = (torch.randn(1, 4096, 2, 64) for _ in range(3))
    computes, results = threading.Event(), []

    def compute():
        computes.set()
        results.append(_eager.attention(q, k, v, {}))
        computes.clear()

    worker, ticks = threading.Thread(target=compute), 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        ticks += computes.is_set()
    assert results[0] is not None and ticks > 5, ticks


def memory_bytes(resident=True):
    """What this process has in memory; without resident, with addresses that nothing has been written to."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[resident]) * 4096


SMALL = {"batch": 1, "seq_q": 64, "seq_k": 64, "dim": 64}  # a result of 64 KiB
SPLIT = {"batch": 1, "seq_q": 16, "seq_k": 4096, "heads_q": 1, "heads_k": 1, "dim": 128}  # parts of the keys meet in a workspace


def test_workspace_is_allocated(threads, taken):
    tensors = make("cpu", torch.float32, **SPLIT)
    assert "\nworkspace: 0 bytes" not in flash3.explain(*tensors, num_threads=threads)
    assert torch.equal(flash3.attention(*tensors), by_operator(*tensors)) and taken == [True]


def grown(call, count, resident):
    """Bytes by which this process grows in so many calls, and what the last call gave."""
    call()
    before = memory_bytes(resident)
    for _ in range(count):
        out = call()
    return memory_bytes(resident) - before, out


@pytest.mark.parametrize("change", [None, lambda x: x[..., :8], gaps, lambda x: x.to("meta")],
                         ids=["taken", "refused by the library", "gaps", "meta"])
def test_nothing_leaks(change):
    q, k, v = make("cpu", torch.float32, **SMALL)
    k = change(k) if change else k
    window, keep = (400, 300), (q, k, v, torch.empty_like, torch.contiguous_format, torch._C.is_grad_enabled)
    references, shared = [sys.getrefcount(x) for x in (*keep, window)], sys.getrefcount(False)
    count = 100 if k.is_meta else 10_000  # torch takes milliseconds to say that it cannot export a tensor
    growth, out = grown(lambda: _eager.attention(q, k, v, {"causal": True, "window": window, "softmax_scale": 0.5, "softcap": 1.0}), count, resident=False)
    assert [sys.getrefcount(x) for x in (*keep, window)] == references
    assert abs(sys.getrefcount(False) - shared) < count // 2  # the answer to what a call asks of torch
    assert growth < 256 << 20  # a leaked result each time: 640 MiB
    assert (out is None) == (change is not None)
    if out is not None:
        assert sys.getrefcount(out) == 2
        gone = weakref.ref(out)
        del out
        assert gone() is None


def test_no_workspace_leaks(threads):
    tensors = make("cpu", torch.float32, **SPLIT)
    text = flash3.explain(*tensors, num_threads=threads)
    size = int(re.search(r"\nworkspace: (\d+) bytes", text)[1])
    growth, _ = grown(lambda: _eager.attention(*tensors, {}), (24 << 20) // size, resident=True)
    assert growth < 12 << 20


def test_package_does_without_it():
    code = """
import sys
sys.modules["flash3._eager"] = None
import flash3, flash_attn_interface, torch
assert flash3._torch.eager is None is flash3._torch._eager_forward
x = torch.randn(1, 5, 2, 16)
assert torch.equal(flash3.attention(x, x, x), torch.ops.flash3.inference(x, x, x))
assert torch.equal(flash_attn_interface.flash_attn_func(x, x, x), flash3.attention(x, x, x))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_runs_on_the_current_stream(taken):
    q, k, v = make("cuda", HALF, seq_q=1024, seq_k=1024)
    wanted, stream = by_operator(q * 1, k, v), torch.cuda.Stream()  # all kernels are loaded then, for which the device may be waited for
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = q * 1  # only a call on this stream comes after it
        out = flash3.attention(late, k, v)
        assert not stream.query()
    stream.synchronize()
    assert taken == [True] and torch.equal(out, wanted)


@pytest.mark.gpu
def test_can_be_captured(taken):
    q, k, v = make("cuda", HALF)
    flash3.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash3.attention(q, k, v)
    q.copy_(q.flip(1))
    graph.replay()
    assert taken == [True, True] and torch.equal(out, by_operator(q, k, v))


@pytest.mark.gpu
def test_device_memory_is_freed(taken):
    q, k, v = make("cuda", HALF)
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        flash3.attention(q, k, v)
    assert torch.cuda.memory_allocated() == before and taken == [True] * 1000


@pytest.mark.gpu
@pytest.mark.parametrize("which", range(3))
def test_mixed_devices_are_left_to_the_operator(which):
    tensors = list(make("cuda", HALF))
    tensors[which] = tensors[which].cpu()
    assert _eager.attention(*tensors, {}) is None


@pytest.mark.gpu
def test_another_device_than_the_current_one_is_left_to_the_operator(taken):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    tensors = make("cuda:1", HALF)
    out = flash3.attention(*tensors)
    assert taken == [False] and out.device.index == 1 and torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.equal(flash3.attention(*tensors), out)
    assert taken == [False, True]
