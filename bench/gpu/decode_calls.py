# SPDX-License-Identifier: Apache-2.0
"""The libraries that bench/gpu/decode_peers.py compares, as callables on one point of decode_points, and the check of what they compute:
everything that needs torch.

A maker takes (point, inputs) and returns one callable for each buffer, which gives out, [total_q, heads, dim] or [batch, queries, heads,
dim]. It raises where the library cannot do that. What engines make once a step for all layers is made here, outside of the calls.
"""
import functools
import math

import torch


DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


class Pool:
    """N(0, 1) keys and values, of which every point takes views."""

    def __init__(self, points, device):
        def normal(dtype):
            elements = max(point.caches * point.rows * point.heads_k * (point.dim_v + point.dim * (point.listed > 0)) for point in points
                           if point.dtype == dtype)
            return [torch.empty(elements, device=device, dtype=torch.bfloat16).normal_().to(DTYPES[dtype]) for _ in range(2)]

        self.tensors = {dtype: normal(dtype) for dtype in {point.dtype for point in points}}

    def views(self, point):
        """[k, v], each a list with one tensor a buffer: [batch, ctx, heads_k, dim] or [pages, page, heads_k, dim]."""
        layout = (-1, point.page) if point.page else (point.batch, point.ctx)

        def of(x, dim):
            elements = point.rows * point.heads_k * dim
            return [x[i * elements:(i + 1) * elements].view(*layout, point.heads_k, dim) for i in range(point.caches)]

        if point.listed:  # a row is v and then k
            both = of(self.tensors[point.dtype][0], point.dim_v + point.dim)
            both = [both[i % len(both)] for i in range(point.buffers)]
            return [x[..., point.dim_v:] for x in both], [x[..., :point.dim_v] for x in both]
        return [of(x, dim) for x, dim in zip(self.tensors[point.dtype], (point.dim, point.dim_v))]


class Inputs:
    """The tensors of a point."""

    def __init__(self, point, pool):
        self.point = point
        self.k, self.v = pool.views(point)
        device = self.k[0].device

        def int32(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        def queries(dim):
            return torch.randn(sum(point.lengths_q), point.heads, dim, device=device).to(DTYPES[point.dtype])

        def in_batch(q):
            return q if point.is_packed else q.view(point.batch, point.queries, point.heads, -1)

        self.packed_q, self.scale = queries(point.dim), 1 / math.sqrt(point.score_dim)
        self.q = in_batch(self.packed_q)
        self.packed_qv = queries(point.dim_latent) if point.dim_latent else None
        self.qv = in_batch(self.packed_qv) if point.dim_latent else None
        self.lengths_k, self.cu_seqlens_q, self.max_q = int32(point.lengths_k), int32(point.cu_seqlens_q), max(point.lengths_q)
        self.tables = [None] * point.buffers
        if point.listed:
            self.tables = [torch.stack([torch.randperm(point.ctx, device=device)[:point.listed] for _ in range(point.batch)]).to(torch.int32)
                           for _ in range(point.buffers)]
        elif point.page:
            pages = torch.randperm(point.batch * point.pages_per_sequence, device=device)
            self.tables = [pages.view(point.batch, -1).to(torch.int32)] * point.buffers

    @property
    def most_keys(self):
        """That the tensors have room for, in a sequence."""
        return self.point.pages_per_sequence * self.point.page if self.point.page else self.point.ctx

    def keys_and_values(self, sequence, buffer):
        """[keys, heads_k, dim] each, of those that count."""
        n = self.point.lengths_k[sequence]
        if self.tables[buffer] is None:
            return self.k[buffer][sequence, :n], self.v[buffer][sequence, :n]
        pages = self.tables[buffer][sequence].long()
        return [x[buffer].view(torch.uint8)[pages].view(x[buffer].dtype).flatten(0, 1)[:n] for x in (self.k, self.v)]

    def reference(self, sequence, buffer):
        """[queries, heads, dim] in float32."""
        point = self.point
        k, v = self.keys_and_values(sequence, buffer)
        begin, end = point.cu_seqlens_q[sequence:sequence + 2]
        q, group, hidden = self.packed_q[begin:end].float(), point.heads // point.heads_k, k.shape[0] - (end - begin)
        if point.dim_latent:
            q, k = torch.cat([q, self.packed_qv[begin:end].float()], -1), torch.cat([k.float(), v.float()], -1)
        seen = torch.ones(end - begin, k.shape[0], dtype=torch.bool, device=q.device).tril_(hidden)
        out = q.new_empty(*q.shape[:2], point.dim_v)
        for head in range(point.heads_k):
            of_q = slice(head * group, (head + 1) * group)
            scores = torch.einsum("qgd,kd->gqk", q[:, of_q], k[:, head].float()) * self.scale
            weights = scores.masked_fill_(~seen, -math.inf).softmax(-1)
            out[:, of_q] = torch.einsum("gqk,kd->qgd", weights, v[:, head].float())
        return out

    def references(self, buffer):
        """The references of two sequences, by their numbers."""
        return {sequence: self.reference(sequence, buffer) for sequence in sorted({0, self.point.batch - 1})}

    def error(self, out, references):
        """RMS of the difference of these sequences, of the references' RMS."""
        out, cu = out.reshape(*self.packed_q.shape[:2], self.point.dim_v), self.point.cu_seqlens_q
        got = torch.cat([out[cu[sequence]:cu[sequence + 1]].float() for sequence in references])
        wanted = torch.cat(list(references.values()))
        return ((got - wanted).norm() / wanted.norm()).item()


def flash3(point, x):
    import flash3
    options = {"seqused_k": x.lengths_k, "causal": True, "qv": x.qv, "softmax_scale": x.scale}
    if point.is_packed:
        options |= {"cu_seqlens_q": x.cu_seqlens_q, "max_seqlen_q": x.max_q}
    schedule = flash3.kv_cache_schedule(x.q, x.k[0], x.v[0], page_table=x.tables[0], **options)

    def on(k, v, table):
        return lambda: flash3.attention_with_kv_cache(x.q, k, v, page_table=table, schedule=schedule, **options)

    return [on(*buffer) for buffer in zip(x.k, x.v, x.tables)]


def fa3_operators(point):
    if point.dtype == "bf16":
        return torch.ops.flash_attn_3
    import fa3_fwd._C  # noqa: F401  registers torch.ops.fa3_fwd
    return torch.ops.fa3_fwd


def fa3(point, x):
    """FlashAttention-3's operators; it chooses in how many parts it splits the keys. Of e4m3 scales are 1, as N(0, 1) data allow."""
    operators = fa3_operators(point)
    out = torch.full((*x.q.shape[:-1], point.dim_v), float("nan"), dtype=torch.bfloat16, device=x.q.device)
    packed = {"cu_seqlens_q": x.cu_seqlens_q} if point.is_packed else {}
    metadata = None
    if hasattr(operators, "get_scheduler_metadata"):
        metadata = operators.get_scheduler_metadata(
            point.batch, x.max_q, x.most_keys, point.heads, point.heads_k, point.dim, point.dim_v, x.q.dtype, x.lengths_k,
            page_size=point.page or None, is_causal=True, num_splits=0, **packed)
    if point.is_packed:
        packed["max_seqlen_q"] = x.max_q

    def on(k, v, table):
        def call():
            operators.fwd(x.q, k, v, out=out, seqused_k=x.lengths_k, page_table=table, is_causal=True,
                          scheduler_metadata=metadata, num_splits=0, q_v=x.qv, softmax_scale=x.scale, **packed)
            return out

        return call

    return [on(*buffer) for buffer in zip(x.k, x.v, x.tables)]


@functools.cache
def cudnn_handle():
    import cudnn as frontend
    return frontend.create_handle()


def cudnn(point, x):
    """cuDNN's attention through its frontend, on padded tensors with lengths."""
    if point.is_packed:
        raise NotImplementedError("sequences with different numbers of queries are not measured through cuDNN's frontend")
    if point.dtype != "bf16" or point.dim_latent:
        raise NotImplementedError("FP8 caches and latent attention are not measured through cuDNN's frontend")
    import cudnn as frontend
    f32, bf16 = frontend.data_type.FLOAT, frontend.data_type.BFLOAT16
    handle = cudnn_handle()
    graph = frontend.pygraph(io_data_type=bf16, intermediate_data_type=f32, compute_data_type=f32, handle=handle)
    q, out = x.q.transpose(1, 2), torch.full_like(x.q, float("nan"))
    lengths_k = x.lengths_k.view(-1, 1, 1, 1)
    given = {"q": q, "k": x.k[0].transpose(1, 2), "v": x.v[0].transpose(1, 2), "seq_len_q": torch.full_like(lengths_k, point.queries),
             "seq_len_kv": lengths_k}
    options = {"use_padding_mask": True, "attn_scale": 1 / math.sqrt(point.dim), "compute_data_type": f32}
    if point.page:
        table = x.tables[0].view(point.batch, 1, -1, 1)
        given |= {"paged_attention_k_table": table, "paged_attention_v_table": table}
        options["paged_attention_max_seq_len_kv"] = x.most_keys
    if point.queries > 1:
        options["use_causal_mask_bottom_right"] = True
    nodes = {name: graph.tensor_like(tensor) for name, tensor in given.items()}
    made, _ = graph.sdpa(name="decode", generate_stats=False, **nodes, **options)
    like = out.transpose(1, 2)
    made.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride())).set_data_type(bf16)
    graph.build([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), device=out.device, dtype=torch.uint8)
    fixed = {nodes[name]: tensor for name, tensor in given.items()} | {made: like}

    def on(k, v):
        memory = fixed | {nodes["k"]: k.transpose(1, 2), nodes["v"]: v.transpose(1, 2)}

        def call():
            frontend.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute(memory, workspace, handle=handle)
            return out

        return call

    return [on(k, v) for k, v in zip(x.k, x.v)]


MAKERS = {"flash3": flash3, "fa3": fa3, "cudnn": cudnn}


def captured(calls):
    """(a callable that replays a CUDA graph of these calls in a row, what the last one gives)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what libraries make at their first call is not for a graph
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            out = call()

    def replay(keep=calls):  # their tensors are not the graph's
        graph.replay()

    return replay, out


def is_alive():
    """Whether the GPU still answers, and torch draws numbers: an error inside a kernel ends everything in this process, one inside a
    capture leaves torch's generator behind, in a graph that is none."""
    try:
        torch.randn((), device="cuda")
        torch.cuda.synchronize()
        return True
    except RuntimeError:
        return False
