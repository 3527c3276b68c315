# SPDX-License-Identifier: Apache-2.0
"""flash3's C calls with Python's arrays: the caller owns every tensor, including the results.

Tensors are torch tensors, numpy arrays, or anything with __array_interface__, __dlpack__ or __cuda_array_interface__ (ml_dtypes,
CuPy, Numba, JAX …), on the host or on a GPU. Nothing is copied. A tensor whose memory alone does not give its value, such as torch's
lazy negation or a masked array of numpy, is refused. FP8 is float8_e4m3fn of torch, ml_dtypes or DLPack, or E4M3(x) with x of
uint8. There is no autograd here; see flash3.attention for that. Errors are the same as there.

forward, backward, quantize and merge write into the results that they are given. With like= they make the results that are None, on
the device of the inputs, and return all results; on a GPU they also make the workspace. like is an array of a library, that library
as a module (numpy, cupy, torch, or any with the array API's functions), or a function that takes (shape, dtype, device), such as
((2, 8), "bfloat16", "cuda:0"), and returns a new array. A library makes arrays on its current stream, which must be the call's.
If the library has no FP8, a result is E4M3(x) with x of its uint8. Rows of no token are 0, their lse is -inf and their scale 1; in an
array that a function has made they stay as they were.

Options of forward and backward, all by keyword, as in flash3/flash3.h::

    causal=False                  query i sees keys up to i + seq_k - seq_q (aligned to the bottom right corner)
    mask_alignment="bottom_right" "top_left": up to i, and i' = i for window and chunk
    window=None                   (left, right): keys from i' - left to i' + right, with i' = i + seq_k - seq_q; None or
                                  a negative number: unbounded on that side
    softmax_scale=None            from 1e-18 to 1e18; None: 1/sqrt(head_dim)
    softcap=0.0                   from 1e-18 to 1e18: scores become softcap * tanh(score / softcap)
    chunk=0                       > 0: a query sees keys of its own chunk alone
    sink=None                     [heads_q] float32 or q's dtype: one more logit per head, without a value
    cu_seqlens_q, cu_seqlens_k    [batch + 1] int32: q (k and v) are packed, [total, heads, dim]
    seqused_q, seqused_k          [batch] int32: only the first tokens of each sequence count
    max_seqlen_q, max_seqlen_k    with cu_seqlens: no sequence is longer
    backend="auto"                "auto", "hopper" or "cpu"
    num_threads=0                 CPU; 0: one per core that the process may run on
    stream=None                   GPU: a cudaStream_t as an integer; None: the default stream
    workspace=None                GPU: a dense tensor, or (address, bytes), of at least workspace_size() bytes; made on
                                  the CPU, and on a GPU with like

Forward alone takes::

    q_scale, k_scale, v_scale     float32, with FP8 tensors: [1], [batch, heads_k] or [batch, heads, blocks]; None: 1
    compute=None                  "fp8": q, k and v become FP8 first, as by quantize() with scales for blocks and rotate
    fp8_sums="auto"               with FP8 tensors or compute: "one" or "two" levels, as in flash3.attention
    rotate=False                  q and k_new are rotated, as in flash3.attention_with_kv_cache
    rotation_seed=0               with compute or rotate: of the signs of the rotation, from 0 to 2**64 - 1
    page_table, cache_batch_idx, leftpad_k, k_new, v_new, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_offsets,
    rotary_interleaved            k and v are a cache, as in flash3.attention_with_kv_cache; with k_new they are written
    sm_margin=0                   multiprocessors left to others
    fill_padding=False            True: rows of no token become 0, and -inf of lse (also of backward); False: they stay
    tree_mask=None                [batch, seq_q] int64, packed [total_q]: which drafts a query sees, as in
                                  flash3.attention_with_kv_cache
    mask=None                     a flash3.Mask, made, of forward and backward
    schedule=None                 a Schedule that forward_schedule() has made for calls like this; None: the call's own
    qv=None                       a second part of q, of out's shape, which meets v: scores are those of q and k plus
                                  those of qv and v
"""
import ctypes
from typing import NamedTuple

from . import _fields, _library as _c
from ._fields import OPTIONS, RESULTS, TENSORS
from ._mask import as_c
from ._options import MAY_BE_NONE, int64_of, value_in_c, window_sides
from ._results import Results, check_given
from ._support import Support, UnexpectedArgument, support_of
from ._tensors import E4M3, describe, memory_of

__all__ = ["forward", "backward", "quantize", "merge", "forward_workspace", "backward_workspace", "quantize_workspace",
           "merge_workspace", "forward_supported", "backward_supported", "quantize_supported", "merge_supported",
           "forward_explain", "backward_explain", "quantize_explain", "merge_explain", "forward_plan", "backward_plan",
           "quantize_plan", "merge_plan", "forward_schedule", "forward_schedule_size", "Plan", "E4M3", "Schedule", "Support"]


class Schedule(NamedTuple):
    """The list of which part of a GPU computes what, of calls on a KV cache that have the same lengths."""
    data: object  #: a dense tensor of bytes, or (address, bytes); None where no bytes are needed, as on a CPU
    key: int  #: says which calls it is for, those of the same sizes, mask and other options on the same device


def check_schedule(schedule):
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is a {type(schedule).__name__} but it must be a flash3.Schedule")
    return schedule


def _as_c(data, key):
    """A schedule as the C interface has it."""
    return _c.Schedule(*((None, 0) if data is None else memory_of("schedule.data", data)), int64_of("schedule.key", key))


_NO_OPTIONS = ("window_left", "window_right")  # but sides of the option window


class _Call:
    """A params structure, and the owners of the memory that it points to."""

    def __init__(self, call, tensors, options):
        """call: "forward" …; tensors: those that its function takes by position, by their names."""
        kinds, inputs, results = OPTIONS[call], TENSORS[call], RESULTS[call]
        params_type = getattr(_fields, f"{call.capitalize()}Params")
        self.params = params_type(struct_size=ctypes.sizeof(params_type))
        self.tensors, self._name, self._workspace = {}, f"flash3_{call}", options.get("workspace")
        self._stream = self.params.stream = options.get("stream")
        written = (*results, "k", "v") if options.get("k_new") is not None else results
        for name, x in tensors.items():
            self._set_tensor(name, x, name in written)
        for name, value in options.items():
            if name in tensors or name in _NO_OPTIONS or name not in kinds and name not in inputs and name not in results and \
                    not self._has_other(name):
                raise UnexpectedArgument(f"unexpected argument {name!r}")
            if name in inputs or name in results and name not in tensors:
                self._set_tensor(name, value, name in results)
            elif name in kinds and not (value is None and name in MAY_BE_NONE):
                setattr(self.params, name, value_in_c(name, kinds[name], value))
        self._set_others(options)

    def _has_other(self, name):
        """Whether an option is one that is no field, or not of its own alone."""
        return name in ("stream", "workspace") or hasattr(self.params, name) and name in ("window", "schedule", "mask")

    def _set_others(self, options):
        p = self.params
        if (sides := window_sides(options.get("window"))) is not None:
            p.window, p.window_left, p.window_right = 1, *sides
        if (schedule := options.get("schedule")) is not None:
            p.schedule = ctypes.pointer(_as_c(*check_schedule(schedule)))
        if (mask := options.get("mask")) is not None:
            p.mask = ctypes.pointer(as_c(mask, memory_of))

    def _set_tensor(self, name, x, writable):
        if x is not None:
            self.tensors[name] = described = describe(name, x, writable=writable, stream=self._stream)
            setattr(self.params, name, described.tensor)

    def _function(self, suffix=""):
        return getattr(_c.lib, self._name + suffix)

    def check_supported(self):
        """Raises what run() would raise before it computes anything."""
        _c.check(self._function("_supported")(self.params))

    def explain(self):
        return _c.text_of(self._function("_explain"), self.params)

    def workspace_size(self):
        size = ctypes.c_size_t()
        _c.check(self._function("_workspace")(self.params, ctypes.byref(size)))
        return size.value

    def plan(self):
        """The address of a flash3_plan of this call."""
        made = ctypes.c_void_p()
        _c.check(self._function("_plan")(self.params, ctypes.byref(made)))
        return made

    def run(self, plan=None, make_workspace=None):
        """Runs the call, or this plan of it; make_workspace(bytes) gives a GPU's: (address, bytes) and their owner."""
        memory = self._take_workspace(self.workspace_size() if plan is None else plan.workspace_size(), make_workspace)
        _c.check(self._function()(self.params) if plan is None else self._function("_run")(plan.address, self.params))
        del memory

    def _take_workspace(self, needed, make_workspace):
        """Gives the call its workspace; returns what must live until the call returns."""
        p, memory = self.params, None
        if self._workspace is not None:
            p.workspace, p.workspace_size = memory_of("workspace", self._workspace)
        elif needed and next(iter(self.tensors.values())).on_host:
            memory = ctypes.create_string_buffer(needed + _c.WORKSPACE_ALIGNMENT)
            p.workspace = -(-ctypes.addressof(memory) // _c.WORKSPACE_ALIGNMENT) * _c.WORKSPACE_ALIGNMENT
            p.workspace_size = needed
        elif needed and make_workspace is not None:
            (p.workspace, p.workspace_size), memory = make_workspace(needed)
        return memory


class Plan:
    """The plan of a call that is repeated: the kernel is chosen once.

    forward_plan(), backward_plan(), quantize_plan() and merge_plan() make one. Many threads may run it at the same time. To copy or
    pickle it raises TypeError.
    """

    def __init__(self, make_call, tensors, options):
        self._make_call, self._count, self._options = make_call, len(tensors), options
        self.address = make_call(*tensors, options).plan()

    def run(self, *tensors, **options):
        """Runs the call with other tensors, given as to the function that made the plan.

        Their shapes, strides and dtypes must be the plan's, and so must their alignment to 16 bytes, or be better. Options that are not
        given are the plan's; stream, workspace and tensors among them may change. Raises ValueError for any other difference.
        """
        if len(tensors) > self._count:
            raise TypeError(f"{len(tensors)} tensors are given but the plan's call has {self._count}")
        tensors += (None,) * (self._count - len(tensors))
        self._make_call(*tensors, {**self._options, **options}).run(self)

    def workspace_size(self):
        """The bytes of workspace that each run needs."""
        size = ctypes.c_size_t()
        _c.check(_c.lib.flash3_plan_workspace(self.address, ctypes.byref(size)))
        return size.value

    def explain(self):
        """Which kernel runs and why, as lines of "name: value"."""
        return _c.text_of(_c.lib.flash3_plan_explain, self.address)

    def _refuse_copy(self, *_):
        raise TypeError("a Plan owns memory of the C library, so that it can be neither copied nor pickled; make another one")

    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = _refuse_copy

    def __del__(self):
        if address := getattr(self, "address", None):
            _c.lib.flash3_plan_destroy(address)


def _forward(q, k, v, out, lse, options):
    return _Call("forward", {"q": q, "k": k, "v": v, "out": out, "lse": lse}, options)


def _backward(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink, options):
    return _Call("backward", {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv,
                              "dsink": dsink}, options)


def forward(q, k, v, out=None, lse=None, *, like=None, out_dtype=None, **options):
    """Writes out, and lse if given; with like, returns (out, lse).

    q [batch, seq_q, heads_q, head_dim], k [batch, seq_k, heads_k, head_dim], v [batch, seq_k, heads_k, head_dim_v] and
    out [batch, seq_q, heads_q, head_dim_v] have one dtype, float16, bfloat16 or (CPU) float32; lse is
    [batch, heads_q, seq_q] float32. With 16-bit tensors out may be float32; if q, k and v are FP8, or with compute="fp8", it may
    be any of these; with like, out_dtype says which. Packed: see flash3.attention.
    """
    check_given(like, out=out)
    if like is None:
        return _forward(q, k, v, out, lse, options).run()
    make = Results(like, "q", q, options)
    out, lse = make.forward(v, out, lse, out_dtype)
    _forward(q, k, v, out, lse, options).run(make_workspace=make.workspace)
    return out, lse


def forward_workspace(q, k, v, out, lse=None, **options):
    """The bytes of workspace that forward() needs for this call."""
    return _forward(q, k, v, out, lse, options).workspace_size()


def forward_supported(q, k, v, out, lse=None, **options):
    """A Support: whether forward() would run this call, and if not, why. Raises TypeError for an argument that forward() does not have."""
    return support_of(lambda: _forward(q, k, v, out, lse, options).check_supported())


def forward_explain(q, k, v, out, lse=None, **options):
    """Which kernel forward() would run and why, as lines of "name: value"."""
    return _forward(q, k, v, out, lse, options).explain()


def forward_plan(q, k, v, out, lse=None, **options):
    """A Plan of forward() for these tensors: plan.run(q, k, v, out, lse)."""
    return Plan(_forward, (q, k, v, out, lse), options)


def forward_schedule_size(q, k, v, out, lse=None, **options):
    """The bytes that forward_schedule() needs for this call; 0 where there is nothing to list, as on a CPU."""
    size = ctypes.c_size_t()
    _c.check(_c.lib.flash3_forward_schedule_size(_forward(q, k, v, out, lse, options).params, ctypes.byref(size)))
    return size.value


def forward_schedule(q, k, v, out, lse=None, *, data=None, key=0, **options):
    """A Schedule, made in given memory, for this forward() and those that differ from it only in addresses and strides.

    Args:
        data: GPU: a dense tensor, or (address, bytes), of at least forward_schedule_size() bytes. The stream makes the schedule
            there, from the lengths that the tensors hold at that moment.
        key: 0, or the key of a schedule in this memory, which is made again: a call that needs another one raises ValueError.
    """
    made = _as_c(data, key)
    _c.check(_c.lib.flash3_forward_schedule(_forward(q, k, v, out, lse, options).params, made))
    return Schedule(data, made.key)


def backward(dout, q, k, v, out, lse, dq=None, dk=None, dv=None, *, dlse=None, dsink=None, like=None, **options):
    """Writes dq, dk, dv, and dsink if given: the gradients for dout, the gradient of out, and dlse, that of lse (None: 0). With like,
    returns (dq, dk, dv, dsink); without a sink the last is None.

    q, k, v, out, lse and the options are those of the forward call. dq, dk and dv have q's dtype, or, with 16-bit tensors, are all
    three float32. One more option: deterministic=True gives the same bits each time.
    """
    check_given(like, dq=dq, dk=dk, dv=dv)
    if like is None:
        return _backward(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink, options).run()
    make = Results(like, "q", q, options)
    made = tuple(make.gradients(dq=(dq, q), dk=(dk, k), dv=(dv, v), dsink=(dsink, options.get("sink"))))
    _backward(dout, q, k, v, out, lse, *made[:3], dlse, made[3], options).run(make_workspace=make.workspace)
    return made


def backward_workspace(dout, q, k, v, out, lse, dq, dk, dv, *, dlse=None, dsink=None, **options):
    """The bytes of workspace that backward() needs for this call."""
    return _backward(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink, options).workspace_size()


def backward_supported(dout, q, k, v, out, lse, dq, dk, dv, *, dlse=None, dsink=None, **options):
    """A Support: whether backward() would run this call, and if not, why."""
    return support_of(lambda: _backward(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink, options).check_supported())


def backward_explain(dout, q, k, v, out, lse, dq, dk, dv, *, dlse=None, dsink=None, **options):
    """Which kernel backward() would run and why."""
    return _backward(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink, options).explain()


def backward_plan(dout, q, k, v, out, lse, dq, dk, dv, dlse=None, dsink=None, **options):
    """A Plan of backward() for these tensors: plan.run(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink)."""
    return Plan(_backward, (dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink), options)


def _quantize_tensors(q, k, v, q_out, k_out, v_out, q_scale, k_scale, v_scale, options):
    results = {"q_out": q_out, "k_out": k_out, "v_out": v_out, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    return _Call("quantize", {"q": q, "k": k, "v": v, **results}, options)


def quantize(q=None, k=None, v=None, *, q_out=None, k_out=None, v_out=None, q_scale=None, k_scale=None, v_scale=None, like=None,
             scales="blocks", heads_k=None, **options):
    """Writes q, k and v, or those of them that are given, to q_out, k_out and v_out as FP8, and their scales. With like, returns
    (q_out, k_out, v_out, q_scale, k_scale, v_scale), None for what is not given; scales and heads_k are flash3.quantize's.

    q [batch, seq_q, heads_q, head_dim], k [batch, seq_k, heads_k, head_dim] and v [batch, seq_k, heads_k, head_dim_v] are float16,
    bfloat16 or (CPU) float32, the results FP8 of the same shape; each scale is float32, and its shape says what it is for: [1],
    [batch, heads_k] or [batch, heads, blocks], with 128 tokens a block (packed [1, heads, total // 128 + batch]). Scales of no
    token are left as they are.

    Options: rotary_cos, rotary_sin, rotary_interleaved, rotary_offset_q, rotary_offset_k, rotate and rotation_seed, as
    flash3.quantize has them, and cu_seqlens, seqused, max_seqlen, backend, num_threads, stream and workspace, as above.
    """
    if like is None:
        return _quantize_tensors(q, k, v, q_out, k_out, v_out, q_scale, k_scale, v_scale, options).run()
    tensors = {"q": q, "k": k, "v": v}
    first = next((name for name, x in tensors.items() if x is not None), None)
    if first is None:
        raise ValueError("q, k and v are None; at least one of them must be given")
    make, cu_seqlens = Results(like, first, tensors[first], options), options.get("cu_seqlens_k")
    results = {"q_out": q_out, "k_out": k_out, "v_out": v_out, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    make.codes(tensors, results, scales, heads_k, {"q": options.get("cu_seqlens_q"), "k": cu_seqlens, "v": cu_seqlens})
    _Call("quantize", {**tensors, **results}, options).run(make_workspace=make.workspace)
    return tuple(results.values())


def quantize_workspace(q=None, k=None, v=None, *, q_out=None, k_out=None, v_out=None, q_scale=None, k_scale=None, v_scale=None,
                       **options):
    """The bytes of workspace that quantize() needs for this call."""
    return _quantize_tensors(q, k, v, q_out, k_out, v_out, q_scale, k_scale, v_scale, options).workspace_size()


def quantize_supported(q=None, k=None, v=None, *, q_out=None, k_out=None, v_out=None, q_scale=None, k_scale=None, v_scale=None,
                       **options):
    """A Support: whether quantize() would run this call, and if not, why."""
    return support_of(lambda: _quantize_tensors(q, k, v, q_out, k_out, v_out, q_scale, k_scale, v_scale, options).check_supported())


def quantize_explain(q=None, k=None, v=None, *, q_out=None, k_out=None, v_out=None, q_scale=None, k_scale=None, v_scale=None,
                     **options):
    """Which kernel quantize() would run and why."""
    return _quantize_tensors(q, k, v, q_out, k_out, v_out, q_scale, k_scale, v_scale, options).explain()


def quantize_plan(q, k, v, q_out, k_out, v_out, q_scale, k_scale, v_scale, **options):
    """A Plan of quantize() for these tensors, None for what is not given: plan.run() takes them in the same order."""
    return Plan(_quantize_tensors, (q, k, v, q_out, k_out, v_out, q_scale, k_scale, v_scale), options)


def _merge(out_parts, lse_parts, out, lse, options):
    return _Call("merge", {"out_parts": out_parts, "lse_parts": lse_parts, "out": out, "lse": lse}, options)


def merge(out_parts, lse_parts, out=None, lse=None, *, like=None, out_dtype=None, **options):
    """Writes out, and lse if given: attention over all keys, of the out and lse of each part of them. With like, returns
    (out, lse).

    out_parts [parts, rows, heads, head_dim_v] and lse_parts [parts, heads, rows] are float32; out [rows, heads, head_dim_v] is
    float16, bfloat16 or float32, lse [heads, rows] float32. Options: sink [heads], backend, num_threads, stream and workspace.
    """
    check_given(like, out=out)
    if like is None:
        return _merge(out_parts, lse_parts, out, lse, options).run()
    make = Results(like, "out_parts", out_parts, options)
    out, lse = make.merged(out, lse, out_dtype)
    _merge(out_parts, lse_parts, out, lse, options).run(make_workspace=make.workspace)
    return out, lse


def merge_workspace(out_parts, lse_parts, out, lse=None, **options):
    """The bytes of workspace that merge() needs for this call."""
    return _merge(out_parts, lse_parts, out, lse, options).workspace_size()


def merge_supported(out_parts, lse_parts, out, lse=None, **options):
    """A Support: whether merge() would run this call, and if not, why."""
    return support_of(lambda: _merge(out_parts, lse_parts, out, lse, options).check_supported())


def merge_explain(out_parts, lse_parts, out, lse=None, **options):
    """Which kernel merge() would run and why."""
    return _merge(out_parts, lse_parts, out, lse, options).explain()


def merge_plan(out_parts, lse_parts, out, lse=None, **options):
    """A Plan of merge() for these tensors: plan.run(out_parts, lse_parts, out, lse)."""
    return Plan(_merge, (out_parts, lse_parts, out, lse), options)
