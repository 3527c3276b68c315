# SPDX-License-Identifier: Apache-2.0
"""kv_cache_schedule: calls with a schedule that was made before have the bits of those without, and take no other's."""
import re

import numpy as np
import pytest
import torch

import flash3
from cache_cases import Case
from flash3 import Schedule, _torch_kv_cache, arrays
from test_kv_cache import CASES, OPS, given, taken, written  # noqa: F401  taken is a fixture

REFUSAL = r"schedule.key = {} but this call needs \d+; kv_cache_schedule sets it, for calls with the sizes, fields, mask, sm_margin"


def made(case, device="cpu", **options):
    """A case's arguments, which a call changes where it appends."""
    return {**given(Case(device, torch.bfloat16, **case)), **options}


def results(arguments, **options):
    """(out, lse) and both caches after the call."""
    out = flash3.attention_with_kv_cache(**arguments, **options, return_lse=True)
    return (*out, arguments["k_cache"], arguments["v_cache"])


def assert_same(a, b):
    assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def as_numpy(arguments):
    return {name: (x.float() if x.dtype == torch.bfloat16 else x).numpy() if torch.is_tensor(x) else x
            for name, x in arguments.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_bits(device, case, taken):  # noqa: F811
    schedule = flash3.kv_cache_schedule(**made(case, device))
    assert schedule.data.device.type == device and schedule.data.dtype == torch.uint8 and 0 < schedule.key < 2**63
    # A dense cache as short as this one is read by the forward's kernels, which need none.
    assert (schedule.data.numel() > 0) == (device == "cuda" and case != {})
    assert_same(results(made(case, device), schedule=schedule), results(made(case, device)))
    assert taken[0] == taken[1]  # a schedule does not change the way


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_bits_of_operators(device, case, monkeypatch):
    monkeypatch.setattr(_torch_kv_cache, "eager", None)
    schedule = flash3.kv_cache_schedule(**made(case, device))
    assert_same(results(made(case, device), schedule=schedule), results(made(case, device)))


def test_layers_share_one(device):
    """Other tensors and other pages, of the same lengths."""
    layers = [made({"page_size": 16, "new": "dense", "seed": seed, "causal": True}, device) for seed in range(3)]
    schedule = flash3.kv_cache_schedule(**layers[0])
    again = [made({"page_size": 16, "new": "dense", "seed": seed, "causal": True}, device) for seed in range(3)]
    for layer, own in zip(layers, again):
        assert_same(results(layer, schedule=schedule), results(own))


def test_arrays():
    for case in CASES.values():
        schedule = flash3.kv_cache_schedule(**as_numpy(made(case)))
        assert schedule.data is None
        out = flash3.attention_with_kv_cache(**as_numpy(made(case)), schedule=schedule)
        np.testing.assert_array_equal(out, flash3.attention_with_kv_cache(**as_numpy(made(case))))
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 20, 4, 16), dtype=np.float32)
    gaps = np.repeat(q, 2, -1)[..., ::2]
    assert flash3.kv_cache_schedule(gaps, k, v) == flash3.kv_cache_schedule(q, k, v)
    wide = flash3.kv_cache_schedule(*(x.astype(np.float16) for x in (q, k, v)), out_dtype="float32")
    flash3.attention_with_kv_cache(*(x.astype(np.float16) for x in (q, k, v)), out_dtype="float32", schedule=wide)


def test_c_calls():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 20, 4, 16), dtype=np.float32)
    out, wanted = np.zeros_like(q), flash3.attention_with_kv_cache(q, k, v, causal=True)
    assert arrays.forward_schedule_size(q, k, v, out, causal=True) == 0
    schedule = arrays.forward_schedule(q, k, v, out, causal=True)
    assert schedule == flash3.kv_cache_schedule(q, k, v, causal=True)
    assert arrays.forward_schedule(q, k, v, out, causal=True, key=schedule.key) == schedule
    arrays.forward(q, k, v, out, causal=True, schedule=schedule)
    np.testing.assert_array_equal(out, wanted)
    plan = arrays.forward_plan(q, k, v, out, causal=True)
    plan.run(q[::-1].copy(), k, v, out, schedule=schedule)
    plan.run(q, k, v, out, schedule=schedule)
    np.testing.assert_array_equal(out, wanted)
    other = arrays.forward_schedule(q, k, v, out)
    for call in (lambda: arrays.forward(q, k, v, out, causal=True, schedule=other),
                 lambda: plan.run(q, k, v, out, schedule=other),
                 lambda: arrays.forward_schedule(q, k, v, out, causal=True, key=other.key)):
        with pytest.raises(ValueError, match=f"schedule->key = {other.key} but this call needs {schedule.key}"):
            call()
    for wrong, error, message in ((schedule.key, TypeError, "schedule is a int but it must be a flash3.Schedule"),
                                  (Schedule([], 1), TypeError, "schedule.data is a list but it must be a tensor or"),
                                  (Schedule(None, 2**63), ValueError, "schedule.key = 9223372036854775808 but it must fit into 64"),
                                  (Schedule(None, "1"), TypeError, "schedule.key is a str but it must be an integer")):
        with pytest.raises(error, match=re.escape(message)):
            arrays.forward(q, k, v, out, schedule=wrong)


# Each makes another schedule necessary.
CHANGES = {
    "causal": {"causal": True}, "window": {"window": (9, 0)}, "chunk": {"chunk": 8}, "softcap": {"softcap": 3.0},
    "sm_margin": {"sm_margin": 4}, "queries": {"q": lambda x: x[:, :1]}, "heads": {"q": lambda x: x[:, :, :2]},
    "head dims": {"q": lambda x: x[..., :16], "k_cache": lambda x: x[..., :16].contiguous()},
    "head_dim_v": {"v_cache": lambda x: x[..., :8].contiguous()},
    "batch": {"q": lambda x: x[:3], "k_cache": lambda x: x[:3], "v_cache": lambda x: x[:3], "seqused_k": lambda x: x[:3]},
    "rows": {"k_cache": lambda x: x[:, :48], "v_cache": lambda x: x[:, :48]}, "no lengths": {"seqused_k": None},
    "leftpad": {"leftpad_k": torch.zeros(4, dtype=torch.int32)}, "elements": {"cache_batch_idx": torch.arange(4, dtype=torch.int32)},
    "pages": {"page_table": torch.arange(4, dtype=torch.int32)[:, None]},
    "tree_mask": {"tree_mask": torch.zeros(4, 2, dtype=torch.int64)},
    "append": {"k_new": torch.zeros(4, 2, 2, 32).bfloat16(), "v_new": torch.zeros(4, 2, 2, 24).bfloat16()},
}


def changed(arguments, changes):
    arguments = dict(arguments)
    for name, change in changes.items():
        device = arguments["q"].device
        arguments[name] = change(arguments[name]) if callable(change) else change.to(device) if torch.is_tensor(change) else change
    return arguments


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_another_calls_is_refused(device, changes, monkeypatch):
    schedule = flash3.kv_cache_schedule(**made({}, device))
    before = schedule.data.clone()
    arguments = changed(made({}, device), changes)
    untouched = arguments["k_cache"].clone()
    refusal = REFUSAL.format(schedule.key)
    with pytest.raises(ValueError, match=refusal):
        flash3.attention_with_kv_cache(**arguments, schedule=schedule)
    with pytest.raises(ValueError, match=refusal):
        flash3.kv_cache_schedule(**arguments, out=schedule)
    monkeypatch.setattr(_torch_kv_cache, "eager", None)
    with pytest.raises(ValueError, match=refusal):
        flash3.attention_with_kv_cache(**arguments, schedule=schedule)
    if device == "cpu":
        with pytest.raises(ValueError, match="schedule.key = "):
            flash3.attention_with_kv_cache(**as_numpy(arguments), schedule=Schedule(None, schedule.key))
    assert torch.equal(arguments["k_cache"], untouched) and torch.equal(schedule.data, before)
    own = flash3.kv_cache_schedule(**arguments)
    flash3.attention_with_kv_cache(**arguments, schedule=own)


def test_what_is_no_schedule(device):
    arguments = made({}, device)
    schedule = flash3.kv_cache_schedule(**arguments)
    data, key = schedule
    of_bytes = "schedule.data is no contiguous uint8 tensor of 1 dimension but it must be as kv_cache_schedule gives it"
    for wrong, error, message in (
            (key, TypeError, "schedule is a int but it must be a flash3.Schedule"),
            ((data, key), TypeError, "schedule is a tuple but it must be a flash3.Schedule"),
            (Schedule(None, key), TypeError, "schedule.data is a NoneType but it must be a torch tensor, as q is"),
            (Schedule(data, 0), ValueError, "schedule.key = 0 but this call needs"),
            (Schedule(data, None), TypeError, "schedule_key is a None"),
            (Schedule(data.to("meta"), key), ValueError, "schedule.device = meta but q.device = "),
            (Schedule(data.int(), key), ValueError, of_bytes), (Schedule(data[None], key), ValueError, of_bytes),
            (Schedule(torch.zeros(8, dtype=torch.uint8, device=device)[::2], key), ValueError, of_bytes)):
        with pytest.raises(error, match=re.escape(message)):
            flash3.attention_with_kv_cache(**arguments, schedule=wrong)
    for wrong in (key, data):
        with pytest.raises(TypeError, match="out is a .* but it must be a flash3.Schedule"):
            flash3.kv_cache_schedule(**arguments, out=wrong)
    for unknown in ("schedule", "return_lse", "temperature"):
        with pytest.raises(TypeError, match=f"unexpected argument '{unknown}'"):
            flash3.kv_cache_schedule(**arguments, **{unknown: None})
    with pytest.raises(ValueError, match=r"k_cache.shape\[2\] = 1"):
        flash3.kv_cache_schedule(**{**arguments, "k_cache": arguments["k_cache"][:, :, :1]})
    with pytest.raises(ValueError, match="v_cache.ndim = 3 but it must be 4"):
        flash3.kv_cache_schedule(**{**arguments, "v_cache": arguments["v_cache"][0]})
    with pytest.raises(TypeError, match="k_cache is a ndarray but it must be a torch tensor, as q is"):
        flash3.kv_cache_schedule(**{**arguments, "k_cache": np.zeros((4, 64, 2, 32), np.float32)})


def test_made_again(device):
    """In its memory, for other lengths."""
    arguments = made({}, device)
    schedule = flash3.kv_cache_schedule(**arguments)
    for lengths in ((64, 1, 0, 33), (2, 64, 64, 64)):
        arguments["seqused_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        assert flash3.kv_cache_schedule(**arguments, out=schedule) is schedule
        assert_same(results(arguments, schedule=schedule), results(arguments))


def test_of_unrounded_results():
    arguments = made({}, out_dtype=torch.float32)
    schedule = flash3.kv_cache_schedule(**arguments)
    assert flash3.attention_with_kv_cache(**arguments, schedule=schedule).dtype == torch.float32
    del arguments["out_dtype"]
    with pytest.raises(ValueError, match=REFUSAL.format(schedule.key)):
        flash3.attention_with_kv_cache(**arguments, schedule=schedule)


def test_schemas():
    assert written("kv_cache_schedule") == [] and written("kv_cache_schedule_out") == ["schedule"]
    for name in ("attention_with_kv_cache", "attention_with_kv_cache_append", "attention_with_kv_cache_out"):
        names = [a.name for a in getattr(OPS, name).default._schema.arguments if a.name != "fill_padding"]  # of given memory
        assert names[names.index("schedule"):][:6] == ["schedule", "schedule_key", "qv", "tree_mask", "rotate", "rotation_seed"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_opcheck(device, case):
    arguments = made(case, device)
    tensors = tuple(arguments.pop(name, None) for name in ("q", "k_cache", "v_cache"))
    new = tuple(arguments.pop(name, None) for name in ("k_new", "v_new"))
    arguments["window_left"], arguments["window_right"] = arguments.pop("window", (-1, -1))
    data, key = OPS.kv_cache_schedule(*tensors, *new, **arguments)
    torch.library.opcheck(OPS.kv_cache_schedule_out.default, (*tensors, data, key, *new), arguments)
    # What a new one holds after its lists is not written, so that values cannot be compared.
    torch.library.opcheck(OPS.kv_cache_schedule.default, (*tensors, *new), arguments, test_utils=("test_schema", "test_faketensor"))
    name, new = ("attention_with_kv_cache", ()) if new == (None, None) else ("attention_with_kv_cache_append", new)
    torch.library.opcheck(getattr(OPS, name).default, (*tensors, *new), {**arguments, "schedule": data, "schedule_key": key})


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("case", ({"page_size": 16, "causal": True}, {"new": "dense"}), ids=("pages", "append"))
def test_compile(device, case, backend):
    """A schedule that is given, one that is made again, and one that is made inside."""
    def given_one(arguments, schedule):
        return flash3.attention_with_kv_cache(**arguments, schedule=schedule, return_lse=True)

    def again(arguments, schedule):
        return given_one(arguments, flash3.kv_cache_schedule(**arguments, out=schedule))

    def inside(arguments, schedule):
        return given_one(arguments, flash3.kv_cache_schedule(**arguments))

    schedule = flash3.kv_cache_schedule(**made(case, device))
    wanted = results(made(case, device))
    for step in (given_one, again, inside):
        torch._dynamo.reset()
        arguments = made(case, device)
        out = torch.compile(step, fullgraph=True, backend=backend)(arguments, schedule)
        assert_same((*out, arguments["k_cache"], arguments["v_cache"]), wanted)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"schedule->key = \d+ but this call needs"):
        torch.compile(given_one, backend=backend)(made({**case, "softcap": 2.0}, device), schedule)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("is_inside", (True, False), ids=("made in the graph", "made before each replay"))
def test_a_graph_replays_with_other_lengths(is_inside):
    layers = [made({"page_size": 16, "causal": True, "seed": seed}, "cuda") for seed in range(3)]
    for layer in layers:
        layer["seqused_k"] = layers[0]["seqused_k"]
    schedule = flash3.kv_cache_schedule(**layers[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if is_inside:
            flash3.kv_cache_schedule(**layers[0], out=schedule)
        outs = [flash3.attention_with_kv_cache(**layer, schedule=schedule) for layer in layers]
    for lengths in ((37, 0, 1, 16), (1, 0, 1, 9), (30, 0, 0, 16)):
        layers[0]["seqused_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        if not is_inside:
            flash3.kv_cache_schedule(**layers[0], out=schedule)
        graph.replay()
        assert_same(outs, [flash3.attention_with_kv_cache(**layer) for layer in layers])


@pytest.mark.gpu
def test_rules_of_its_memory():
    arguments = made({"page_size": 16}, "cuda")
    data, key = flash3.kv_cache_schedule(**arguments)
    size = data.numel()
    wide = torch.zeros(size + 512, dtype=torch.uint8, device="cuda")
    moved = wide[-wide.data_ptr() % 256 + 16:][:size]
    for wrong, message in ((data[:-1], f"schedule.data.numel() = {size - 1} but this call needs {size} bytes"),
                           (data[:0], f"schedule.data is null but this call needs {size} bytes"),
                           (moved, "but it must be a multiple of 256")):
        for call in (lambda: flash3.attention_with_kv_cache(**arguments, schedule=Schedule(wrong, key)),
                     lambda: flash3.kv_cache_schedule(**arguments, out=Schedule(wrong, key))):
            with pytest.raises(ValueError, match=re.escape(message)):
                call()
    with pytest.raises(ValueError, match="schedule.data.device = cpu but q.device = cuda:0; all tensors must be on one device"):
        flash3.attention_with_kv_cache(**arguments, schedule=Schedule(data.cpu(), key))


@pytest.mark.gpu
def test_calls_do_not_list_again():
    arguments = made({"page_size": 16}, "cuda")
    schedule = flash3.kv_cache_schedule(**arguments)

    def kernels(**options):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            flash3.attention_with_kv_cache(**arguments, **options)
            torch.cuda.synchronize()
        return sum(event.count for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)

    assert kernels() == kernels(schedule=schedule) + 1
