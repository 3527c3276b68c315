# SPDX-License-Identifier: Apache-2.0
"""Every call that allocates results, in memory that is not zero: rows that belong to no token are 0 and their lse -inf.

Run by test_unseen.py, on a CPU under MALLOC_PERTURB_, which makes glibc fill what it hands out. With the argument cuda on a
GPU, where torch fills what it allocates. Prints a line for each result: its name and "right" or "wrong".
"""
import contextlib
import sys

import flash3
import numpy as np
import torch

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
BATCH, TOTAL, HEADS, HEADS_K, DIM = 2, 96, 4, 2, 64
STARTS = torch.tensor([7, 40, 80], dtype=torch.int32, device=DEVICE)
NONE = np.r_[0:7, 80:96]  # rows before the first sequence, and after the last one
KEYS = torch.tensor([64, 60], dtype=torch.int32, device=DEVICE)
PAGES = torch.arange(8, dtype=torch.int32, device=DEVICE).view(BATCH, 4)


def check(name, x, dim=0, value=0.0, rows=NONE):
    x = x.detach().float().cpu() if isinstance(x, torch.Tensor) else torch.from_numpy(np.array(x, np.float32))
    print(name, "right" if (x.index_select(dim, torch.from_numpy(rows)) == value).all() else "wrong")


def check_pair(name, results, **where):
    out, lse = results[:2]
    check(f"{name}.out", out, **where)
    check(f"{name}.lse", lse, 1, -np.inf, **where)


def check_gradients(name, gradients):
    for of, x in zip(("dq", "dk", "dv"), gradients):
        check(f"{name}.{of}", x)


def packed(dtype, heads_k=HEADS_K, grad=False):
    return [torch.randn(TOTAL, heads, DIM, dtype=dtype, device=DEVICE).requires_grad_(grad) for heads in (HEADS, heads_k, heads_k)]


def cache(dtype, *rows, heads=HEADS_K):
    return [torch.randn(*rows, heads, DIM, dtype=dtype, device=DEVICE) for _ in range(2)]


def attention(dtype):
    both = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "return_lse": True}
    q, k, v = inputs = packed(dtype, grad=True)
    out, lse = flash3.attention(q, k, v, **both)
    check_pair("attention", (out, lse))
    check_gradients("attention", torch.autograd.grad(out, inputs, torch.ones_like(out)))
    q, k, v, out, lse = (x.detach() for x in (q, k, v, out, lse))
    check_gradients("attention_backward", flash3.attention_backward(torch.ones_like(out), q, k, v, out, lse, cu_seqlens_q=STARTS,
                                                                    cu_seqlens_k=STARTS)[:3])
    if DEVICE == "cpu":  # on a GPU qv has 512 elements
        check_pair("attention.qv", flash3.attention(q, k, v, qv=torch.randn_like(q), **both))
    check_pair("attention.out_dtype", flash3.attention(q, k, v, out_dtype=torch.float32, **both))
    if dtype != torch.float32:
        check_pair("attention.fp8", flash3.attention(q, k, v, compute="fp8", **both))
    used = torch.tensor([5, 6], dtype=torch.int32, device=DEVICE)
    check_pair("attention.seqused", flash3.attention(q, k, v, seqused_q=used, **both), rows=np.r_[0:7, 12:40, 46:96])


def kv_cache(dtype):
    q, k, v = packed(dtype)
    options = {"cu_seqlens_q": STARTS, "max_seqlen_q": 40, "return_lse": True}
    rows, pages = cache(dtype, BATCH, 64), cache(dtype, 8, 16)
    check_pair("kv_cache", flash3.attention_with_kv_cache(q, *rows, seqused_k=KEYS, **options))
    check_pair("kv_cache.out_dtype", flash3.attention_with_kv_cache(q, *rows, seqused_k=KEYS, out_dtype=torch.float32, **options))
    check_pair("kv_cache.paged", flash3.attention_with_kv_cache(q, *pages, seqused_k=KEYS, page_table=PAGES, **options))
    check_pair("kv_cache.append", flash3.attention_with_kv_cache(
        q, *pages, seqused_k=torch.tensor([3, 4], dtype=torch.int32, device=DEVICE), page_table=PAGES, k_new=k, v_new=v, cu_seqlens_k_new=STARTS,
        **options))


def quantize(dtype):
    if dtype == torch.float32 or DEVICE == "cuda":  # there these rows of FP8 tensors, which no call reads, stay as they are
        return
    q, k, v = packed(dtype)
    made = flash3.quantize(q=q, k=k, v=v, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS)
    for name in "qkv":
        check(f"quantize.{name}", getattr(made, name))


def dropin(dtype):
    import flash_attn_interface as upstream
    q, k, v = inputs = packed(dtype, grad=True)
    out, lse = upstream.flash_attn_varlen_func(q, k, v, STARTS, STARTS, 40, 40, return_attn_probs=True)
    check_pair("dropin", (out, lse))
    check_gradients("dropin", torch.autograd.grad(out, inputs, torch.ones_like(out)))
    q, k, v = (x.detach() for x in inputs)
    fwd, bwd = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd
    out, lse, *_ = fwd(q, k, v, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, max_seqlen_q=40, max_seqlen_k=40)
    check_pair("dropin.fwd", (out, lse))
    check_gradients("dropin.bwd", bwd(torch.ones_like(q), q, k, v, out, lse, None, None, None, STARTS, STARTS, None, None, 40, 40))
    check_pair("dropin.kvcache", upstream.flash_attn_with_kvcache(
        q, *cache(dtype, 8, 16), cache_seqlens=KEYS, page_table=PAGES, cu_seqlens_q=STARTS, max_seqlen_q=40, return_softmax_lse=True))


def torch_impl(dtype):
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        return
    import inspect

    import flash3.integrations.torch  # noqa: F401
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
    torch.nn.attention.activate_flash_attention_impl("FLASH3")
    q, k, v = inputs = packed(dtype, HEADS, grad=True)
    out, lse = varlen_attn(q, k, v, STARTS, STARTS, 40, 40, return_aux=AuxRequest(lse=True))
    check_pair("varlen_attn", (out, lse))
    check_gradients("varlen_attn", torch.autograd.grad(out, inputs, torch.ones_like(out)))
    if "block_table" in inspect.signature(varlen_attn).parameters:
        with torch.no_grad():
            check_pair("varlen_attn.paged", varlen_attn(q, *cache(dtype, 8, 16, heads=HEADS), STARTS, None, 40, 64, seqused_k=KEYS,
                                                        block_table=PAGES, return_aux=AuxRequest(lse=True)))
    # Rows with gaps, which flash3 writes elsewhere first.
    gaps = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*gaps, STARTS, STARTS, 40, 40, 0.0, False, False)
    check_pair("aten.gaps", (out, lse))
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


def arrays():
    q, k, v = (x.numpy() for x in packed(torch.float32))
    both = {"cu_seqlens_q": STARTS.numpy(), "cu_seqlens_k": STARTS.numpy()}
    out, lse = flash3.attention(q, k, v, return_lse=True, **both)
    check_pair("numpy", (out, lse))
    check_gradients("numpy", flash3.attention_backward(np.ones_like(out), q, k, v, out, lse, **both)[:3])
    rows = [x.numpy() for x in cache(torch.float32, BATCH, 64)]
    check_pair("numpy.kv_cache", flash3.attention_with_kv_cache(q, *rows, cu_seqlens_q=STARTS.numpy(), max_seqlen_q=40,
                                                                return_lse=True))
    for like in (np, torch):
        check_pair(f"arrays.{like.__name__}", flash3.arrays.forward(q, k, v, like=like, **both))
        check_gradients(f"arrays.{like.__name__}", flash3.arrays.backward(np.ones_like(out), q, k, v, out, lse, like=like, **both)[:3])


def jax():
    with contextlib.suppress(ImportError):
        import flash3.jax
        from jax import numpy as jnp
        shape = (BATCH, 48, HEADS, DIM)
        x, used = jnp.ones(shape), jnp.array([5, 5], jnp.int32)
        out, lse = flash3.jax.dot_product_attention(x, x, x, query_seq_lengths=used, return_residual=True)
        check("jax.out", out, 1, rows=np.r_[5:48])
        check("jax.lse", lse, 1, -np.inf, rows=np.r_[5:48])


if DEVICE == "cuda":
    torch.use_deterministic_algorithms(True, warn_only=True)
assert (torch.empty(1 << 20, device=DEVICE) != 0).all(), "allocations are not filled"
torch.manual_seed(0)
for each in (torch.float32 if DEVICE == "cpu" else torch.float16, torch.bfloat16):
    for section in (attention, kv_cache, quantize, dropin, torch_impl):
        section(each)
if DEVICE == "cpu":
    arrays()
    jax()
