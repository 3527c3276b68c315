# SPDX-License-Identifier: Apache-2.0
"""Tensors that mean something else than the numbers in their memory, and handles that must not be copied: both are refused, with the reason."""
import copy
import ctypes
import pickle
import re

import numpy as np
import pytest
import torch

import flash3
from flash3 import arrays


def make():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 9, 2, 8, generator=g) for _ in range(3)]


def negated(x):
    """x as torch's lazy negation of what lies in memory."""
    view = torch.view_as_complex(torch.stack((torch.zeros_like(x), -x), -1)).conj().imag
    assert view.is_neg() and torch.equal(view, x)
    return view


class Scaled(torch.Tensor):
    """A tensor whose numbers are not those of its memory."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


class Interface:
    def __init__(self, array, **changes):
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


def masked(x):
    return np.ma.array(x.numpy(), mask=x.numpy() > 1)


MEANINGS = {
    "negative bit": (negated, ValueError, "has torch's negative bit, which its memory does not show; {name}.resolve_neg() is"),
    "zero tensor": (lambda x: torch._efficientzerotensor(x.shape), TypeError, "is a zero tensor, which has more or less than memory"),
    "subclass": (Scaled, TypeError, "is a Scaled, which has more or less than memory; it must be a plain tensor"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[0, :3]]), TypeError, "is a nested tensor but a tensor must have one shape"),
    "sparse": (lambda x: x.to_sparse(), TypeError, ".layout = torch.sparse_coo but a tensor must be strided"),
    "masked": (masked, TypeError, "has a mask, which its memory does not show; {name}.filled(value) is an array without one"),
    "interface with a mask": (lambda x: Interface(x.numpy(), mask=np.ones(1)), TypeError, "has a mask, which its memory does not show"),
    "interface without an address": (lambda x: Interface(x.numpy(), data=memoryview(x.numpy())), TypeError,
                                     "has an array interface without an address"),
    "other byte order": (lambda x: x.numpy().astype(">f4"), TypeError, ".dtype = >f4 but it must be one of float16"),
    "objects": (lambda x: x.numpy().astype(object), TypeError, ".dtype = object but it must be one of float16"),
    "fields": (lambda x: x.numpy().view([("a", "<f4")]), TypeError, ".dtype = [('a', '<f4')] but it must be one of float16"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("change,error,sentence", MEANINGS.values(), ids=MEANINGS.keys())
def test_meaning_beyond_memory(change, error, sentence, name):
    call = dict(zip("qkv", make()), out=torch.full((1, 9, 2, 8), 7.0))
    call[name] = change(call[name])
    with pytest.raises(error, match=re.escape(name) + ".*" + re.escape(sentence.format(name=name))):
        arrays.forward(**call)
    if name != "out":
        assert (call["out"] == 7).all()


def test_sinks_and_lengths_too():
    q, k, v = make()
    out = torch.empty_like(q)
    with pytest.raises(ValueError, match="sink has torch's negative bit"):
        arrays.forward(q, k, v, out, sink=negated(torch.ones(2)))
    with pytest.raises(TypeError, match="seqused_k has a mask"):
        arrays.forward(q, k, v, out, seqused_k=np.ma.array(np.array([3], np.int32)))
    with pytest.raises(TypeError, match="seen has a mask"):
        flash3.tree_mask(seen=np.ma.array(np.eye(3)))


def test_attention_sees_lazy_negation_and_refuses_masks():
    q, k, v = make()
    wanted = flash3.attention(q, k, v)
    for changed in ((negated(q), k, v), (q, negated(k), v), (q, k, negated(v))):
        assert torch.equal(flash3.attention(*changed), wanted)
    with pytest.raises(TypeError, match="v has a mask"):
        flash3.attention(q.numpy(), k.numpy(), masked(v))


def test_a_function_transform():
    q, k, v = make()

    def loss(q):
        arrays.forward(q, k, v, torch.empty_like(k))
        return q.sum()

    with pytest.raises(TypeError, match="q is a tensor inside of a transform"):
        torch.func.grad(loss)(q)


class DLPackCopy:
    """An exporter that says that it has copied its memory."""

    def __init__(self, array):
        self.array, self.copied = array, False

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        capsule = self.array.__dlpack__(max_version=(1, 0))
        name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
        name.argtypes, name.restype = [ctypes.py_object], ctypes.c_char_p
        pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
        if name(capsule) != b"dltensor_versioned":
            pytest.skip("numpy knows no versions of DLPack")
        flags = ctypes.c_uint64.from_address(pointer(capsule, name(capsule)) + 24)
        flags.value |= 2
        return capsule


def test_an_output_that_is_a_copy():
    q, k, v = (x.numpy() for x in make())
    out = np.empty_like(q)
    arrays.forward(DLPackCopy(q), k, v, out)  # whose numbers are right
    with pytest.raises(ValueError, match="out is a copy that DLPack has made, which an output cannot be"):
        arrays.forward(q, k, v, DLPackCopy(out))


def test_a_workspace_with_gaps():
    q, k, v = make()
    for workspace in (torch.empty(1, dtype=torch.uint8).expand(1 << 20), torch.empty(1 << 20, 2, dtype=torch.uint8)[:, 0]):
        with pytest.raises(ValueError, match=re.escape("workspace.stride() = ") + ".* but it must have no gaps"):
            arrays.backward(q, q, k, v, q, torch.zeros(1, 2, 9), *(torch.empty_like(x) for x in (q, k, v)), workspace=workspace)


@pytest.mark.parametrize("operation", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_a_plan_is_not_copied(operation):
    q, k, v = make()
    out = torch.empty_like(q)
    plan = arrays.forward_plan(q, k, v, out)
    with pytest.raises(TypeError, match="a Plan owns memory of the C library, so that it can be neither copied nor pickled"):
        operation(plan)
    plan.run(q, k, v, out)
    assert torch.equal(out, flash3.attention(q, k, v))


def test_outputs_share_no_memory():
    q, k, v = make()
    for name, x in zip("qkv", (q, k, v)):
        before = x.clone()
        with pytest.raises(ValueError, match=f"out at 0x[0-9a-f]+ and {name} at 0x[0-9a-f]+ share memory"):
            arrays.forward(q, k, v, x)
        assert torch.equal(x, before)
    packed = torch.empty(1, 9, 3, 2, 8)
    out, lse = torch.empty_like(q), torch.empty(1, 2, 9)
    arrays.forward(q, k, v, out, lse)
    arrays.backward(out, q, k, v, out, lse, *packed.unbind(2))
    for got, wanted in zip(packed.unbind(2), flash3.attention_backward(out, q, k, v, out, lse)):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("option", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("value", [1e-46, -1e-300, 1e39])
def test_numbers_that_float32_cannot_hold(option, value):
    """0 stands for the default scale, and for no cap: what becomes 0 is refused, by arrays and by each operator."""
    q, k, v = make()
    sentence = re.escape(f"{option} = {value} but it must be a number that float32 can hold")
    with pytest.raises(ValueError, match=sentence):
        arrays.forward(q, k, v, torch.empty_like(q), **{option: value})
    for call in (lambda: torch.ops.flash3.forward(q, k, v, **{option: value}),
                 lambda: torch.ops.flash3.attention_with_kv_cache(q, k, v, **{option: value})):
        with pytest.raises(RuntimeError, match=sentence):
            call()
    with pytest.raises(ValueError, match=sentence):
        flash3.attention_with_kv_cache(q, k, v, seqused_k=torch.tensor([9], dtype=torch.int32), **{option: value})


@pytest.mark.parametrize("value", [1e-18, 1e18])
def test_the_ends_of_scale_and_softcap(value):
    q, k, v = make()
    for option in ({"softmax_scale": value}, {"softcap": value}):
        naive = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * option.get("softmax_scale", 8**-0.5)
        if "softcap" in option:
            naive = value * torch.tanh(naive / value)
        wanted = torch.einsum("bhij,bjhd->bihd", naive.softmax(-1), v.double())
        torch.testing.assert_close(flash3.attention(q, k, v, **option), wanted.float(), atol=1e-5, rtol=1e-5)
