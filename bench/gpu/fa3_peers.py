# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 as a peer: operators of torch that PyPI's wheels bring, called directly.

The 16-bit ones are `torch.ops.flash_attn_3` of the library that the wheel xformers has as xformers/flash_attn_3/_C.so (--fa3). It
wants the runtime of CUDA 12; where torch's is another, put libcudart.so.12 beside the file. The drop-in's operators have the same
names: never load both. The FP8 ones are in the package fa3_fwd (--site).
"""
import ctypes
import pathlib

import torch


def load(file):
    runtime = pathlib.Path(file).with_name("libcudart.so.12")
    if runtime.is_file():
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(file)


def forward(qkv, causal):
    return lambda: torch.ops.flash_attn_3.fwd(*qkv, is_causal=causal)


def backward(qkv, dout, causal, deterministic):
    """Gives (dq, dk, dv)."""
    out, lse = torch.ops.flash_attn_3.fwd(*qkv, is_causal=causal)[:2]
    gradients = [torch.empty_like(x) for x in qkv]

    def call():
        torch.ops.flash_attn_3.bwd(dout, *qkv, out, lse, *gradients, is_causal=causal, deterministic=deterministic)
        return gradients

    return call


def fp8_forward(qkv, causal):
    """(call, a function that gives out): e4m3 with scales of 1, as N(0, 1) data allow; out in bf16."""
    import fa3_fwd._C  # noqa: F401  registers torch.ops.fa3_fwd
    tensors = [x.to(torch.float8_e4m3fn) for x in qkv]

    def call():
        return torch.ops.fa3_fwd.fwd(*tensors, is_causal=causal)[0]

    return call, lambda: call().float()


def fp8_scaled(made):
    """out in bf16 of e4m3 tensors with scales for KV heads, [batch, heads_k], by the names of flash3_forward_params; its keys are not split."""
    import fa3_fwd._C  # noqa: F401
    scales = {f"{name}_descale": made[f"{name}_scale"] for name in "qkv"}
    return torch.ops.fa3_fwd.fwd(made["q"], made["k"], made["v"], num_splits=1, **scales)[0]
