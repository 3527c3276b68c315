# SPDX-License-Identifier: Apache-2.0
"""What `bench/gpu/peers.py --fp8` compares, as callables on one shape: everything that needs torch and a GPU.

Each library has its own way to FP8. flash3: e4m3 with scales for blocks from flash3_quantize, rotated, out in bf16. cuDNN: e4m3 with
a scale for each tensor, and out in e4m3, the only one that it has on Hopper; all of its scales are powers of two that the
caller must choose beforehand, and making its tensors is not timed. FlashAttention-3: e4m3 without scales, out in bf16.
"""
import importlib.metadata
import math

import torch

from bench.flash3_torch import AUTO
from bench.gpu import fa3_peers, gpu_peers

GEMM = 8192  # rows, columns and reduction
GEMM_FLOPS = 2 * GEMM**3
LARGEST = 448  # of e4m3


def flash3(lib, qkv, causal, backend=AUTO):
    """(calls, outs): "", FP8; "bf16", the same tensors as they are; "from_bf16", one call that makes FP8 of them first. And
    "quantize", only that, which has no out."""
    tensors = dict(zip("qkv", qkv))
    quantize, fp8 = lib.to_fp8(*qkv, backend=backend)
    quantize()
    outs = {way: torch.full_like(qkv[0], float("nan")) for way in ("", "bf16", "from_bf16")}
    options = {"causal": int(causal), "backend": backend}
    calls = {"": lib.fp8_forward(fp8 | {"out": outs[""]}, **options),
             "bf16": lib.forward(*qkv, outs["bf16"], causal, backend),
             "from_bf16": lib.fp8_forward(tensors | {"out": outs["from_bf16"]}, **options, compute=lib.COMPUTE_FP8),
             "quantize": quantize}
    return calls, outs


def scale_to_fill(x):
    """The largest power of two by which x may be multiplied in e4m3."""
    return 2.0 ** math.floor(math.log2(LARGEST / x.float().abs().max().item()))


def cudnn_fp8(qkv, causal, out_like):
    """(call, a function that gives out as it is meant); out_like: what out will be about, for its scale."""
    import cudnn
    e4m3, f32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT

    def number(value):
        return torch.full((1, 1, 1, 1), value, device=qkv[0].device)

    by = [scale_to_fill(x) for x in qkv]
    q, k, v = [(x.float() * scale).to(torch.float8_e4m3fn).transpose(1, 2) for x, scale in zip(qkv, by)]
    of_s, of_out = 256.0, scale_to_fill(out_like)  # weights lie between 0 and 1
    # As sdpa_fp8 takes them.
    scales = [number(x) for x in (*(1 / scale for scale in by), 1 / of_s, of_s, of_out)]
    out = torch.empty_like(qkv[0], dtype=torch.float8_e4m3fn).transpose(1, 2)
    largest = [number(0.0), number(0.0)]  # of the weights and of out: cuDNN always writes them

    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=f32, compute_data_type=f32, handle=handle)

    def node(x, dtype):
        return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=dtype)

    inputs = [node(x, e4m3) for x in (q, k, v)] + [node(x, f32) for x in scales]
    made, _, *made_largest = graph.sdpa_fp8(*inputs, is_inference=True, attn_scale=1 / math.sqrt(q.shape[-1]),
                                            use_causal_mask=causal)
    for tensor, like, dtype in ((made, out, e4m3), *((m, x, f32) for m, x in zip(made_largest, largest))):
        tensor.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride())).set_data_type(dtype)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), device=out.device, dtype=torch.uint8)
    memory = dict(zip([*inputs, made, *made_largest], [q, k, v, *scales, out, *largest]))
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    return lambda: graph.execute(memory, workspace, handle=handle), lambda: out.transpose(1, 2).float() / of_out


def gemm():
    """torch's FP8 GEMM, e4m3 to bf16, on N(0, 1) data: what a large product alone reaches in FP8."""
    a, b = (torch.randn(GEMM, GEMM, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def frontend_version():
    """The version of the package through which cuDNN's FP8 is reached; None without it."""
    try:
        return importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        return None


def make_calls(shape, libs, peers):
    """(calls, functions that give out, FA2's out in float32, why the others refuse this shape), all but the third by name.

    A library NAME is there as NAME, NAME_bf16, NAME_from_bf16 and NAME_quantize.
    """
    qkv = shape.tensors()
    reference = gpu_peers.fa2(qkv, shape.causal)().transpose(1, 2).float()
    calls, results, refused = {}, {}, {}
    for name, lib in libs.items():
        ways, outs = flash3(lib, qkv, shape.causal)
        calls |= {f"{name}_{way}" if way else name: call for way, call in ways.items()}
        results |= {f"{name}_{way}" if way else name: out.float for way, out in outs.items()}

    def cudnn():
        call = gpu_peers.sdpa(gpu_peers.SDPBackend.CUDNN_ATTENTION, qkv, shape.causal)
        return call, lambda: call().transpose(1, 2).float()

    makers = {"cudnn": cudnn, "cudnn_fp8": lambda: cudnn_fp8(qkv, shape.causal, reference),
              "fa3_fp8": lambda: fa3_peers.fp8_forward(qkv, shape.causal), "fp8_gemm": lambda: (gemm(), None)}
    for name in peers:
        try:
            call, result = makers[name]()
            call()
            torch.cuda.synchronize()
        except Exception as error:  # every library has its own kinds, and what it says is the result
            refused[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        calls[name] = call
        if result:
            results[name] = result
    return calls, results, reference, refused
