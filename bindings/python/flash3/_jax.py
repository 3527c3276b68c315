# SPDX-License-Identifier: Apache-2.0
"""The calls of libflash3_jax.so (bindings/jax/) as functions of JAX: registration, shapes, gradients and batching."""
import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np

from . import _jax_mask, _library as _c
from ._fields import ADDED, GRADIENTS, OPTIONS

MINIMUM_JAX = (0, 7)
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn")


class Options:
    """What a call has beside tensors, by the names of the C interface's fields, and with_lse; it is part of what jit keys its
    compilations by."""

    def __init__(self, with_lse=False, **options):
        self.with_lse, self._options = with_lse, {"window_left": -1, "window_right": -1, **options}
        self._key = with_lse, tuple(sorted(self._options.items()))

    def __eq__(self, other):
        return isinstance(other, Options) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    def fields_of(self, call):
        """Those that a call's params have, as {name: value}."""
        return {name: value for name, value in self._options.items() if name in OPTIONS[call]}

    def attributes_of(self, call):
        """The same as the attributes of its handler."""
        return {name: _ATTRIBUTES.get(OPTIONS[call][name], _int64)(value) for name, value in self.fields_of(call).items()}


def _int64(value):
    return np.uint64(value).astype(np.int64) if value >= 2**63 else np.int64(value)


_ATTRIBUTES = {"flag": bool, "number": np.float32}  # of kinds of fields; the others: _int64


def _load():
    if jax.__version_info__[:2] < MINIMUM_JAX:
        raise ImportError(f"jax is {jax.__version__} but flash3.jax needs jax >= {'.'.join(map(str, MINIMUM_JAX))}")
    path = _c.FOLDER / "libflash3_jax.so"
    if not path.exists():
        raise ImportError(f"{path} is not there: this flash3 was built without jaxlib's headers. From flash3's sources, "
                          "FLASH3_JAX=ON pip install . builds it with them")
    return ctypes.CDLL(str(path))


_library = _load()


@functools.cache
def register():
    """Makes the handlers known to XLA, once and not before a call needs them; those of a platform that is not there wait for it."""
    for call in ("forward", "backward"):
        for suffix, platform in (("cpu", "cpu"), ("cuda", "CUDA")):
            handler = jax.ffi.pycapsule(getattr(_library, f"flash3_jax_{call}_{suffix}"))
            try:
                jax.ffi.register_ffi_target(f"flash3_{call}", handler, platform=platform)
            except Exception as error:  # XLA compares the handler's version of its interface with its own
                raise ImportError(f"jax {jax.__version__} does not take the handlers of {_c.FOLDER / 'libflash3_jax.so'}, which were "
                                  f"built with another jaxlib's headers: {error}") from error


def _described(name, x):
    dtype = "uint8" if x.dtype == np.bool_ else x.dtype.name
    if not _c.takes_dtype(name, dtype):
        raise TypeError(f"{name}.dtype = {x.dtype.name} but it must be {_c.dtypes_of(name)}")
    if x.ndim > 4:
        raise ValueError(f"{name}.ndim = {x.ndim} but a tensor has at most 4 dimensions")
    strides = [int(np.prod(x.shape[d + 1:])) for d in range(x.ndim)]
    pad = [0] * (4 - x.ndim)
    return _c.Tensor(None, _c.DTYPES[dtype], x.ndim, (ctypes.c_int64 * 4)(*x.shape, *pad),
                     (ctypes.c_int64 * 4)(*strides, *pad))


def check(tensors, options):
    """The library's own validation, when a call is traced: of shapes and dtypes, by the backend that takes most."""
    out, fields = _shape_of_out(tensors), options.fields_of("forward")
    params = _c.ForwardParams(struct_size=ctypes.sizeof(_c.ForwardParams), backend=_c.BACKENDS["cpu"], window=1, **fields)
    described = {name: _described(name, x) for name, x in {**tensors, "out": out}.items()}
    source = {name: described.pop(name) for name in _jax_mask.SOURCES if name in described}
    for name, x in described.items():
        setattr(params, name, x)
    if source:
        lengths = {name: described[name] for name in _c.MASK_LENGTHS if name in described}
        params.mask = ctypes.pointer(_jax_mask.question(source, lengths, tensors["q"], tensors["k"], fields))
    _c.check(_c.lib.flash3_forward_supported(ctypes.byref(params)))


def _axes_of(x):
    """The manual axes of shard_map over which x varies; JAX has had two names for them."""
    type_of_x = jax.typeof(x)
    return type_of_x.manual_axis_type.varying if hasattr(type_of_x, "manual_axis_type") else type_of_x.vma


def _varying(x, axes):
    missing = tuple(sorted(axes - _axes_of(x))) if axes else ()
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)


def _axes(tensors):
    return frozenset().union(*(_axes_of(x) for x in tensors))


def one_vma(tensors):
    """These named tensors, varying over the same manual axes of shard_map: a handler's result varies over all of them."""
    axes = _axes(tensors.values())
    return {name: _varying(x, axes) for name, x in tensors.items()}


def _fold(name, x, is_mapped, size, batch):
    """A tensor of calls under vmap, with the mapped axis in the batch."""
    if name in _jax_mask.SOURCES:
        return _jax_mask.folded(x, is_mapped, size, batch)
    x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * batch, *x.shape[2:])


def _call(target, names, results, attributes):
    """A function of tensors with these names that runs a handler; results: {name: function of the tensors' shapes}.

    Under vmap the mapped axis joins the batch, so that one call does all. A sink has no batch, nor have its gradient, some
    scales of FP8 and some tensors that the C headers have gained: such calls are made one after the other, and so are those of which one could not take the masks without copies.
    """
    @jax.custom_batching.custom_vmap
    def run(*tensors):
        register()
        named = dict(zip(names, tensors))
        shapes = [shape(named) for shape in results.values()]
        return tuple(jax.ffi.ffi_call(target, shapes)(*tensors, tensors=" ".join([*names, *results]), **attributes))

    @run.def_vmap
    def rule(size, batched, *tensors):
        of_q = names.index("q")
        batch = tensors[of_q].shape[1 if batched[of_q] else 0]
        if any(name == "sink" or name in ADDED["forward"] or name.endswith("_scale") or _jax_mask.is_copied(name, x, b, batch)
               for name, x, b in zip(names, tensors, batched)):
            mapped = [x for x, b in zip(tensors, batched) if b]

            def one(mapped):
                rest = iter(mapped)
                return run(*(next(rest) if b else x for x, b in zip(tensors, batched)))
            return jax.lax.map(one, mapped), (True,) * len(results)
        made = run(*(_fold(name, x, b, size, batch) for name, x, b in zip(names, tensors, batched)))
        return tuple(x.reshape(size, batch, *x.shape[1:]) for x in made), (True,) * len(results)

    def typed(*tensors):  # what a handler makes is typed as varying over no axis
        axes = _axes(tensors)
        return tuple(_varying(x, axes) for x in run(*(_varying(x, axes) for x in tensors)))
    return typed


def is_fp8(x):
    return x.dtype.name == "float8_e4m3fn"


def _shape_of_out(t):
    return jax.ShapeDtypeStruct((*t["q"].shape[:-1], t["v"].shape[-1]), jnp.bfloat16 if is_fp8(t["q"]) else t["q"].dtype)


def _shape_of_lse(t):
    batch, rows, heads, _ = t["q"].shape
    return jax.ShapeDtypeStruct((batch, heads, rows), np.float32)


def _shape_like(name):
    return lambda t: jax.ShapeDtypeStruct(t[name].shape, t[name].dtype)


def given(**tensors):
    return {name: x for name, x in tensors.items() if x is not None}


def _run_forward(inputs, options, with_lse):
    """out, lse."""
    results = {"out": _shape_of_out, **({"lse": _shape_of_lse} if with_lse else {})}
    attributes = options.attributes_of("forward")
    made = _call("flash3_forward", tuple(inputs), results, attributes)(*inputs.values())
    return made if with_lse else (*made, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(options, inputs):
    """(out, lse), or (out, None) without options.with_lse; inputs: {the C interface's name: tensor}."""
    return _run_forward(inputs, options, options.with_lse)


def _attention_forward(options, inputs):
    differentiated = {name: None for name in GRADIENTS if name in inputs and inputs[name].perturbed}  # its keys are kept, as a structure
    inputs = {name: x.value for name, x in inputs.items()}
    if is_fp8(inputs["q"]):
        raise NotImplementedError('FP8 has no gradients; compute="fp8" takes 16-bit tensors and has theirs')
    out, lse = _run_forward(inputs, options, True)
    return (out, lse if options.with_lse else None), (inputs, out, lse, differentiated)


def _attention_backward(options, saved, cotangents):
    inputs, out, lse, differentiated = saved
    dout, dlse = (None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents)
    tensors = {**given(dout=jnp.zeros_like(out) if dout is None else dout, dlse=dlse), **inputs, "out": out, "lse": lse}
    wanted = [name for name in ("q", "k", "v", "sink") if name in inputs] + list(differentiated)
    results = {f"d{name}": _shape_like(name) for name in wanted}
    attributes = options.attributes_of("backward")
    made = dict(zip(wanted, _call("flash3_backward", tuple(tensors), results, attributes)(*tensors.values())))
    return ({name: made.get(name) for name in inputs},)


attention.defvjp(_attention_forward, _attention_backward, symbolic_zeros=True)
