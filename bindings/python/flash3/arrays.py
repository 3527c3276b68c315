"""flash3's C calls as they are: every tensor, also those for the results, is the caller's.

Tensors are torch tensors, numpy arrays, or anything with __array_interface__ or __dlpack__ (ml_dtypes, CuPy, JAX …), on the
host or on a GPU, and nothing is copied. There is no autograd here; see flash3.attention for that.

Options of every function, all by keyword, as in flash3/flash3.h:

    causal=False                  query i sees keys up to i + seq_k - seq_q (aligned to the bottom right corner)
    window=None                   (left, right): keys from i' - left to i' + right, with i' = i + seq_k - seq_q; None or a
                                  negative number: unbounded on that side
    softmax_scale=None            > 0; None: 1/sqrt(head_dim)
    softcap=0.0                   > 0: scores become softcap * tanh(score / softcap)
    chunk=0                       > 0: a query sees keys of its own chunk alone
    sink=None                     [heads_q] float32 or q's dtype: one more logit per head, without a value
    cu_seqlens_q, cu_seqlens_k    [batch + 1] int32: q (k and v) are packed, [total, heads, dim]
    seqused_q, seqused_k          [batch] int32: only the first tokens of each sequence count
    max_seqlen_q, max_seqlen_k    with cu_seqlens: no sequence is longer
    backend="auto"                "auto", "hopper" or "cpu"
    num_threads=0                 CPU; 0: one per core that the process may run on
    stream=None                   GPU: a cudaStream_t as an integer; None: the default stream
    workspace=None                GPU: a tensor, or (address, bytes), of at least workspace_size() bytes; on the CPU it is made
"""
import ctypes
import operator
from typing import NamedTuple

from . import _library as _c
from ._tensors import describe

__all__ = ["forward", "backward", "forward_workspace", "backward_workspace", "forward_supported", "backward_supported",
           "forward_explain", "backward_explain", "Support"]

_ALIGNMENT = 256
_OPTIONAL = ("sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


class Support(NamedTuple):
    """Whether a call would run here, and if not, why. True or false like `supported`."""
    supported: bool
    reason: str

    def __bool__(self):
        return self.supported


def _integer(name, value):
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__} but it must be an integer") from None
    if not -2**63 <= value < 2**63:  # ctypes would cut it off
        raise ValueError(f"{name} = {value} but it must fit into 64 bits")
    return value


def _number(name, value):
    try:
        return float(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__} but it must be a number") from None


def window_sides(window):
    """(left, right) of a window as the C interface has it; None: no window."""
    if window is None:
        return None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window = {window!r} but it must be a pair (left, right), or None") from None
    return tuple(-1 if side is None else _integer(f"window[{i}]", side) for i, side in enumerate((left, right)))


def scale_or_default(softmax_scale):
    """softmax_scale as the C interface has it, where 0 asks for the default."""
    if softmax_scale is None:
        return 0.0
    scale = _number("softmax_scale", softmax_scale)
    if scale == 0.0:
        raise ValueError("softmax_scale = 0 but it must be greater than 0 (None: 1/sqrt(head_dim))")
    return scale


class _Call:
    """A params structure, and the owners of the memory that it points to."""

    def __init__(self, params_type, tensors, *, causal=False, window=None, softmax_scale=None, softcap=0.0, chunk=0,
                 max_seqlen_q=None, max_seqlen_k=None, backend="auto", num_threads=0, stream=None, workspace=None,
                 deterministic=None, **optional):
        unknown = set(optional) - set(_OPTIONAL)
        if deterministic is not None and params_type is _c.ForwardParams:
            unknown.add("deterministic")  # nothing in a forward call could differ
        if unknown:
            raise TypeError(f"unexpected argument {sorted(unknown)[0]!r}")
        self.params = p = params_type(struct_size=ctypes.sizeof(params_type))
        outputs = ("out", "lse") if params_type is _c.ForwardParams else ("dq", "dk", "dv", "dsink")
        self.tensors = {}
        for name, x in {**tensors, **optional}.items():
            if x is not None:
                self.tensors[name] = described = describe(name, x, writable=name in outputs, stream=stream)
                setattr(p, name, described.tensor)
        p.causal = bool(causal)
        sides = window_sides(window)
        if sides is not None:
            p.window, p.window_left, p.window_right = 1, *sides
        p.softmax_scale, p.softcap = scale_or_default(softmax_scale), _number("softcap", softcap)
        p.chunk = _integer("chunk", chunk or 0)
        p.max_seqlen_q = _integer("max_seqlen_q", max_seqlen_q or 0)
        p.max_seqlen_k = _integer("max_seqlen_k", max_seqlen_k or 0)
        p.backend = _c.backend_id(backend)
        p.num_threads = min(_integer("num_threads", num_threads), 2**31 - 1)
        p.stream = stream
        if deterministic is not None:
            p.deterministic = bool(deterministic)
        self._name = "flash3_forward" if params_type is _c.ForwardParams else "flash3_backward"
        self._workspace = workspace

    def _function(self, suffix=""):
        return getattr(_c.lib, self._name + suffix)

    def supported(self):
        status = self._function("_supported")(self.params)
        if status == _c.OK:
            return Support(True, "")
        if status == _c.UNSUPPORTED:
            return Support(False, _c.last_error())
        raise _c.exception(status, _c.last_error())

    def explain(self):
        return _c.text_of(self._function("_explain"), self.params)

    def workspace_size(self):
        size = ctypes.c_size_t()
        _c.check(self._function("_workspace")(self.params, ctypes.byref(size)))
        return size.value

    def run(self):
        p, needed = self.params, self.workspace_size()
        memory = None  # lives until the call returns
        if self._workspace is not None:
            p.workspace, p.workspace_size = self._given_workspace()
        elif needed and self.tensors["q"].on_host:
            memory = ctypes.create_string_buffer(needed + _ALIGNMENT)
            p.workspace = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
            p.workspace_size = needed
        _c.check(self._function()(p))
        del memory

    def _given_workspace(self):
        given = self._workspace
        if isinstance(given, tuple):
            return given
        if hasattr(given, "data_ptr"):
            return given.data_ptr(), given.numel() * given.element_size()
        raise TypeError(f"workspace is a {type(given).__name__} but it must be a torch tensor or (address, bytes)")


def _forward(q, k, v, out, lse, options):
    return _Call(_c.ForwardParams, {"q": q, "k": k, "v": v, "out": out, "lse": lse}, **options)


def _backward(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink, options):
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dlse": dlse,
               "dsink": dsink}
    return _Call(_c.BackwardParams, tensors, **options)


def forward(q, k, v, out, lse=None, **options):
    """Writes out, and lse if given.

    q [batch, seq_q, heads_q, head_dim], k [batch, seq_k, heads_k, head_dim], v [batch, seq_k, heads_k, head_dim_v] and
    out [batch, seq_q, heads_q, head_dim_v] have one dtype, float16, bfloat16 or (CPU) float32; lse is
    [batch, heads_q, seq_q] float32. Packed: see flash3.attention.
    """
    _forward(q, k, v, out, lse, options).run()


def forward_workspace(q, k, v, out, lse=None, **options):
    """The bytes of workspace that forward() needs for this call."""
    return _forward(q, k, v, out, lse, options).workspace_size()


def forward_supported(q, k, v, out, lse=None, **options):
    """A Support: whether forward() would run this call. Raises what forward() would if the call is wrong in itself."""
    return _forward(q, k, v, out, lse, options).supported()


def forward_explain(q, k, v, out, lse=None, **options):
    """Which kernel forward() would run and why, as lines of "name: value"."""
    return _forward(q, k, v, out, lse, options).explain()


def backward(dout, q, k, v, out, lse, dq, dk, dv, *, dlse=None, dsink=None, **options):
    """Writes dq, dk, dv, and dsink if given: the gradients for dout, that of out, and dlse, that of lse (None: 0).

    q, k, v, out, lse and the options are those of the forward call. One more option: deterministic=False; True: the same
    bits each time.
    """
    _backward(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink, options).run()


def backward_workspace(dout, q, k, v, out, lse, dq, dk, dv, *, dlse=None, dsink=None, **options):
    """The bytes of workspace that backward() needs for this call."""
    return _backward(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink, options).workspace_size()


def backward_supported(dout, q, k, v, out, lse, dq, dk, dv, *, dlse=None, dsink=None, **options):
    """A Support: whether backward() would run this call."""
    return _backward(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink, options).supported()


def backward_explain(dout, q, k, v, out, lse, dq, dk, dv, *, dlse=None, dsink=None, **options):
    """Which kernel backward() would run and why."""
    return _backward(dout, q, k, v, out, lse, dq, dk, dv, dlse, dsink, options).explain()
