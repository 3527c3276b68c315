# SPDX-License-Identifier: Apache-2.0
"""bias and bias_table: what is added to the scaled and capped scores, by pair and by distance, and their gradients."""
import itertools
import math

import numpy as np
import pytest
import torch

import flash3
from flash3 import arrays
from conftest import DEVICES
from oracle import assert_close, slacks_of_scores

HEADS, HEADS_K, DIM, DIM_V = 6, 2, 40, 24
INF = math.inf


def reference(q, k, v, bias=None, table=None, *, softcap=0.0, causal=False, sink=None, mask_alignment="bottom_right", seen=None):
    """(out, lse) in q's dtype, by operations that autograd knows; rows that see nothing are 0 and -inf."""
    seq_q, seq_k, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(groups, 2)) / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(seq_q, device=q.device)[:, None] + (seq_k - seq_q if mask_alignment == "bottom_right" else 0)
    distance = torch.arange(seq_k, device=q.device)[None] - i
    if table is not None:
        most = table.shape[1] // 2
        scores = scores + table[:, distance.clamp(-most, most) + most].to(scores.dtype)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    hidden = distance > 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    scores = scores.masked_fill(hidden if seen is None else hidden | ~seen, -INF)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    largest = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0)
    weights = torch.exp(scores - largest)
    sums = weights.sum(-1, keepdim=True)
    p = (weights / sums.where(sums > 0, torch.ones_like(sums)))[..., :seq_k]
    return torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(groups, 2)), (largest + sums.log())[..., 0]


def make(dtype, batch, seq_q, seq_k, seed=0, dims=(DIM, DIM_V), device="cpu"):
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, seq_q, HEADS, dims[0]), (batch, seq_k, HEADS_K, dims[0]), (batch, seq_k, HEADS_K, dims[1]))
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]


def make_bias(dtype, *shape, seed=0, hidden=0.1, device="cpu"):
    g = torch.Generator().manual_seed(seed + 100)
    bias = torch.randn(shape, generator=g).to(dtype)
    return bias.masked_fill(torch.rand(shape, generator=g) < hidden, -INF).to(device)


def precision(device, tolerance):
    """(dtype of q, k and v, tolerance): float32 on the CPU, float16 with a tolerance of its own on a GPU."""
    return (torch.float32, 1e-5) if device == "cpu" else (torch.float16, tolerance)


def gradients(call, leaves, dout):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = call(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype)))


OPTIONS = [{}, {"causal": True, "softcap": 3.0}, {"causal": True, "mask_alignment": "top_left"}]


def check_results_and_gradients(device, dtype, of_bias, own, sizes, dims, options):
    """own: whether bias has a row of its own for each sequence, head and query."""
    batch, seq_q, seq_k = sizes
    q, k, v = make(dtype, *sizes, dims=dims, device=device)
    bias = make_bias(of_bias, *(size if has else 1 for has, size in zip(own, (batch, HEADS, seq_q))), seq_k, device=device)
    if own[2]:
        bias[:, :, 7] = -INF  # a row that sees nothing
    g = torch.Generator().manual_seed(3)
    table = torch.randn(HEADS if own[1] else 1, 2 * 30 + 1, generator=g).to(device)
    sink = torch.linspace(-1, 2, HEADS, device=device) if own[0] else None
    dout = torch.randn(batch, seq_q, HEADS, dims[1], generator=g).to(device)
    got = gradients(lambda q, k, v, b, t: flash3.attention(q, k, v, bias=b, bias_table=t, sink=sink, **options), (q, k, v, bias, table), dout)
    # A score is rounded in float32 as its parts are.
    rounding = 2**-21 * (bias.float().nan_to_num(neginf=0).abs().max() + table.abs().max()).item()
    wanted = {}
    for kind, of in (("exact", torch.float64), ("naive", dtype)):
        leaves = [x.to(of) for x in (q, k, v)] + [bias.double(), table.double()]
        wanted[kind] = gradients(lambda q, k, v, b, t: reference(q, k, v, b, t, sink=sink, **options)[0], leaves, dout)
    slacks = slacks_of_scores(lambda q, k, v: reference(q, k, v, bias, table, sink=sink, **options)[0], q, k, v, got[0], dout, rounding)
    for name, x, exact, naive in zip(("out", "dq", "dk", "dv", "dbias", "dbias_table"), got, wanted["exact"], wanted["naive"]):
        if not name.startswith("dbias"):
            assert_close(x, exact, naive, name, relative=rounding, slack=slacks.get(name, 0.0))
            continue
        # Sums of terms of both signs: of the size of the largest element. Each has a bound of its own in `flash3 verify`.
        roundoff = 2**-17 + {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(x.dtype, 0)
        assert (x.double() - exact).abs().max() <= 2 * (naive - exact).abs().max() + roundoff * exact.abs().max(), name
    assert got[4].shape == bias.shape and got[4].dtype == of_bias and (got[4][bias == -INF] == 0).all()


OWN = list(itertools.product((0, 1), (0, 1), (0, 1)))  # every pattern of dimensions of size 1, over which the gradient is a sum
ON_GPUS = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32)]
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), *ON_GPUS[:3]]


@pytest.mark.parametrize("dtype, of_bias", DTYPES, ids=str)
@pytest.mark.parametrize("own", OWN, ids=str)
def test_results_and_gradients(dtype, of_bias, own):
    options = OPTIONS[(sum(own) + DTYPES.index((dtype, of_bias))) % 3]
    check_results_and_gradients("cpu", dtype, of_bias, own, (2, 70, 150), (DIM, DIM_V), options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", [(DIM, DIM_V), (64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype, of_bias", ON_GPUS, ids=str)
@pytest.mark.parametrize("own", OWN, ids=str)
def test_results_and_gradients_on_a_gpu(dtype, of_bias, own, dims, options):
    check_results_and_gradients("cuda", dtype, of_bias, own, (3, 130, 290) if own[1] else (2, 70, 150), dims, options)


@pytest.mark.parametrize("device", DEVICES)
def test_hidden_pairs_are_hidden(device):
    """-inf hides keys whose rows are large, and on the CPU hold NaN and infinities, as a mask does, whatever the path."""
    nan, inf = (math.nan, INF) if device == "cpu" else (-300.0, 300.0)
    for seq_q in (1, 5, 90):
        q, k, v = make(precision(device, 0)[0], 2, seq_q, 150, device=device)
        bias = torch.zeros(2, 1, 1, 150, device=device)
        bias[0, ..., 100:], bias[1, ..., :20] = -INF, -INF
        dout = torch.ones(2, seq_q, HEADS, DIM_V, device=device)
        clean = gradients(lambda q, k, v, b: flash3.attention(q, k, v, bias=b), (q, k, v, bias), dout)
        k[0, 100:], v[0, 120:], k[1, :3], v[1, :20] = nan, inf, inf, nan
        dirty = gradients(lambda q, k, v, b: flash3.attention(q, k, v, bias=b), (q, k, v, bias), dout)
        for a, b in zip(dirty, clean):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_sees_nothing(device):
    q, k, v = make(precision(device, 0)[0], 1, 20, 30, device=device)
    bias = torch.zeros(1, 1, 20, 30, device=device)
    bias[..., 3, :] = -INF
    out, lse = flash3.attention(q, k, v, bias=bias, return_lse=True)
    assert (out[0, 3] == 0).all() and (lse[0, :, 3] == -INF).all()
    table = torch.full((1, 1), -INF, device=device)  # hides all
    out, lse = flash3.attention(q, k, v, bias_table=table, return_lse=True)
    assert (out == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device):
    """Broadcast by stride 0, transposed, and with gaps: nothing is copied, and gradients may lie in such memory."""
    q, k, v = make(precision(device, 0)[0], 2, 40, 70, device=device)
    whole = make_bias(torch.float32, 2, HEADS, 40, 70, device=device)
    wanted = flash3.attention(q, k, v, bias=whole)
    layouts = [whole.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0), torch.cat([whole, whole], -1)[..., :70],
               whole.repeat_interleave(3, -1)[..., ::3], whole.transpose(1, 2).contiguous().transpose(1, 2)]
    for bias in layouts:
        assert torch.equal(flash3.attention(q, k, v, bias=bias), wanted)
        arrays.forward(q, k, v, (out := torch.full_like(wanted, math.nan)), bias=bias)
        assert torch.equal(out, wanted)
        if device == "cpu":
            arrays.forward(*(x.numpy() for x in (q, k, v)), (out := np.empty(wanted.shape, np.float32)), bias=bias.numpy())
            np.testing.assert_array_equal(out, wanted.numpy())
    row = whole[:1, :1, :1].expand(2, HEADS, 40, 70)
    assert torch.equal(flash3.attention(q, k, v, bias=row), flash3.attention(q, k, v, bias=whole[:1, :1, :1]))
    out, lse = flash3.attention(q, k, v, bias=whole, return_lse=True)
    made = []
    for bias in [whole, *layouts]:
        dbias = torch.empty_strided(bias.shape, bias.stride(), device=device).fill_(math.nan)
        flash3.attention_backward(out, q, k, v, out, lse, bias=bias, dbias=dbias)
        made.append(dbias)
    for dbias in made:
        assert torch.equal(dbias, made[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["packed", "padded", "rows of one"])
def test_ragged_batches(form, device):
    """Rows of a packed bias are those of its queries; columns are keys of their sequence. What is not in use is not read."""
    lengths_q, lengths_k = [30, 1, 64, 0], [50, 90, 64, 9]
    dtype, tolerance = precision(device, 2e-2)
    parts = [make(dtype, 1, a, b, seed, device=device) for seed, (a, b) in enumerate(zip(lengths_q, lengths_k))]
    packed = form != "padded"
    biases = [make_bias(torch.float32, 1, HEADS, a, b, seed=seed, device=device) for seed, (a, b) in enumerate(zip(lengths_q, lengths_k))]
    if form == "packed":
        whole = torch.full((1, HEADS, sum(lengths_q), 100), math.nan, device=device)
        for b, bias in enumerate(biases):
            whole[0, :, sum(lengths_q[:b]):sum(lengths_q[:b + 1]), :lengths_k[b]] = bias
    elif form == "padded":
        whole = torch.full((4, HEADS, 70, 100), math.nan, device=device)
        for b, bias in enumerate(biases):
            whole[b, :, :lengths_q[b], :lengths_k[b]] = bias
    else:
        whole = make_bias(torch.float32, 1, HEADS, 1, 100, device=device)
        biases = [whole[..., :n].clone() for n in lengths_k]
    table = torch.randn(1, 41, device=device)
    if packed:
        q, k, v = (torch.cat([part[n][0] for part in parts]) for n in range(3))
        cu_q, cu_k = (torch.tensor([0, *np.cumsum(n)], dtype=torch.int32, device=device) for n in (lengths_q, lengths_k))
        options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 64, "max_seqlen_k": 90}
    else:
        q, k, v = (parts[0][n].new_full((4, 70 if n == 0 else 100, *parts[0][n].shape[2:]), math.nan) for n in range(3))
        for b, part in enumerate(parts):
            for x, own in zip((q, k, v), part):
                x[b, :own.shape[1]] = own[0]
        options = {name: torch.tensor(n, dtype=torch.int32, device=device) for name, n in (("seqused_q", lengths_q), ("seqused_k", lengths_k))}
    leaves = [x.requires_grad_() for x in (q, k, v, whole, table)]
    out = flash3.attention(q, k, v, bias=whole, bias_table=table, causal=True, **options)

    def rows(x, b, lengths):
        return x[sum(lengths[:b]):sum(lengths[:b + 1])] if packed else x[b, :lengths[b]]
    used = [rows(out, b, lengths_q) for b in range(4)]
    got = torch.autograd.grad(sum(x.square().sum() for x in used), leaves)
    wanted_whole, wanted_table = (torch.zeros(x.shape, dtype=torch.float64, device=device) for x in (whole, table))
    for b, part in enumerate(parts):
        inputs = [x.detach().double().requires_grad_() for x in (*part, biases[b], table)]
        wanted, _ = reference(*inputs, causal=True)
        torch.testing.assert_close(used[b].double(), wanted[0], atol=tolerance, rtol=tolerance)
        if not lengths_q[b]:
            continue
        *of_rows, of_bias, of_table = torch.autograd.grad(wanted.square().sum(), inputs)
        for x, y, n in zip(got, of_rows, (lengths_q, lengths_k, lengths_k)):
            torch.testing.assert_close(rows(x, b, n).double(), y[0], atol=10 * tolerance, rtol=10 * tolerance)
        first = sum(lengths_q[:b]) if form == "packed" else 0
        place = wanted_whole[0 if packed else b, :, first:first + of_bias.shape[2], :lengths_k[b]]
        place += of_bias[0]
        wanted_table += of_table
    for x, y in ((got[3], wanted_whole), (got[4], wanted_table)):
        torch.testing.assert_close(x.double(), y, atol=10 * tolerance, rtol=10 * tolerance)
    unused = torch.ones(whole.shape, dtype=torch.bool)
    for b in range(4):
        first = sum(lengths_q[:b]) if form == "packed" else 0
        if lengths_q[b]:
            rows_in_use = slice(None) if form == "rows of one" else slice(first, first + lengths_q[b])
            unused[0 if packed else b, :, rows_in_use, :lengths_k[b]] = False
    assert (got[3][unused.to(device)] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache(device):
    """Column j is key j of a sequence, wherever in the pages it lies; decoding and prefill."""
    (dtype, tolerance), used, page = precision(device, 1e-2), torch.tensor([70, 33], dtype=torch.int32, device=device), 16
    for queries in (1, 40):
        q, k, v = make(dtype, 2, queries, 96, device=device)
        bias, table = make_bias(torch.float32, 2, HEADS, queries, 96, device=device), torch.randn(HEADS, 31, device=device)
        places = torch.randperm(12, device=device).reshape(2, 6).int()
        caches = [x.new_zeros(12, page, *x.shape[2:]) for x in (k, v)]
        for b, (cache, x) in itertools.product(range(2), zip(caches, (k, v))):
            for j in range(int(used[b])):
                cache[places[b, j // page], j % page] = x[b, j]
        out = flash3.attention_with_kv_cache(q, *caches, seqused_k=used, page_table=places, bias=bias, bias_table=table)
        for b in range(2):
            n = int(used[b])
            wanted, _ = reference(*(x[b:b + 1].double() for x in (q, k[:, :n], v[:, :n])), bias[b:b + 1, ..., :n], table)
            torch.testing.assert_close(out[b].double(), wanted[0], atol=tolerance, rtol=tolerance)
        padding = torch.tensor([5, 0], dtype=torch.int32, device=device)
        shifted = flash3.attention_with_kv_cache(q, k, v, seqused_k=used, leftpad_k=padding, bias=bias)
        wanted, _ = reference(q[:1].double(), k[:1, 5:70].double(), v[:1, 5:70].double(), bias[:1, ..., :65])
        torch.testing.assert_close(shifted[0].double(), wanted[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_with_masks_and_largest_scores(device):
    dtype, tolerance = precision(device, 1e-2)
    q, k, v = make(dtype, 2, 150, 170, device=device)
    bias, dense = make_bias(torch.float32, 1, HEADS, 150, 170, device=device), torch.rand(150, 170, device=device) < 0.5
    largest = torch.full((HEADS,), math.nan, device=device)
    out = flash3.attention(q, k, v, bias=bias, max_logits=largest, mask=flash3.masks.dense(dense))
    leaves = [x.double() for x in (q, k, v, bias)]
    wanted, _ = reference(*leaves, seen=dense)
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1].repeat_interleave(3, 2)) / math.sqrt(DIM) + leaves[3]
    torch.testing.assert_close(largest.double(), scores.masked_fill(~dense, -INF).amax((0, 2, 3)), atol=1e-4, rtol=1e-5)
    dout = torch.randn_like(out)
    got = gradients(lambda q, k, v, b: flash3.attention(q, k, v, bias=b, mask=flash3.masks.dense(dense)), (q, k, v, bias), dout)
    for x, y in zip(got, gradients(lambda *x: reference(*x, seen=dense)[0], leaves, dout)):
        torch.testing.assert_close(x.double(), y, atol=10 * tolerance, rtol=10 * tolerance)


def test_fp8():
    q, k, v = make(torch.float32, 2, 150, 170)
    bias = make_bias(torch.float32, 1, HEADS, 150, 170)
    fp8 = flash3.attention(*(x.bfloat16() for x in (q, k, v)), compute="fp8", bias=bias)
    close, _ = reference(q, k, v, bias)
    assert (fp8.float() - close).norm() < 0.08 * close.norm()


def test_the_same_bits_on_any_number_of_threads():
    q, k, v = make(torch.bfloat16, 3, 300, 500)
    for shape in ((1, 1, 1, 500), (1, HEADS, 300, 500), (3, 1, 300, 500)):
        bias, table, slopes = make_bias(torch.bfloat16, *shape), torch.randn(HEADS, 65), torch.rand(HEADS)
        options = {"bias": bias, "bias_table": table, "alibi_slopes": slopes, "causal": True}
        out, lse = flash3.attention(q, k, v, return_lse=True, **options)
        made = []
        for threads in (1, 2, 3, 7):
            results = [torch.empty_like(x) for x in (q, k, v, bias, table, slopes)]
            arrays.backward(out, q, k, v, out, lse, *results[:3], num_threads=threads, dbias=results[3], dbias_table=results[4],
                            dalibi_slopes=results[5], **options)
            made.append(results)
        for results in made[1:]:
            for a, b in zip(results, made[0]):
                assert torch.equal(a, b)


def test_memory_is_of_the_size_of_the_bias():
    """A gradient that is a sum takes no memory for what it sums up."""
    batch, seq = 64, 256
    q, k, v = (np.zeros((batch, seq, 4, 32), np.float32) for _ in range(3))
    lse = np.zeros((batch, 4, seq), np.float32)
    made = [np.zeros_like(q) for _ in range(3)]
    plain = arrays.backward_workspace(q, q, k, v, q, lse, *made)
    bias = np.zeros((1, 4, seq, seq), np.float16)
    more = arrays.backward_workspace(q, q, k, v, q, lse, *made, bias=bias, dbias=bias.copy())
    assert more - plain < 4 * bias.size + 2**16  # float32 sums, and rows of scratch


def test_t5_tables():
    from_model = pytest.importorskip("transformers.models.t5.modeling_t5")
    for bidirectional, buckets, most in itertools.product((True, False), (32, 16), (128, 40)):
        embedding = torch.randn(buckets, HEADS, requires_grad=True)
        distance = 150
        table = flash3.t5_table(embedding, bidirectional=bidirectional, num_buckets=buckets, max_distance=most, D=distance)
        of = from_model.T5Attention._relative_position_bucket(torch.arange(-distance, distance + 1), bidirectional, buckets, most)
        assert table.shape == (HEADS, 2 * distance + 1) and torch.equal(table, embedding[of].T.float())
    q, k, v = make(torch.float32, 1, 60, 60)
    got, = torch.autograd.grad(flash3.attention(q, k, v, bias_table=table).square().sum(), embedding)
    exact = embedding.detach().double().requires_grad_()
    wanted, = torch.autograd.grad(reference(*(x.double() for x in (q, k, v)), None, exact[of].T)[0].square().sum(), exact)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-4)
    for wrong, message in (({"D": -1}, "D = -1 but"), ({"num_buckets": 8}, "embedding.shape"), ({"max_distance": 4}, "max_distance = 4 but")):
        with pytest.raises(ValueError, match=message):
            flash3.t5_table(embedding, **{"bidirectional": False, "num_buckets": buckets, "max_distance": most, "D": 9, **wrong})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 4, 30, 50), (4, 30, 50), (2, 1, 1, 50), (30, 50), (2, 4, 30, 1)], ids=str)
def test_sdpa_takes_masks_of_floats(shape, device):
    g = torch.Generator().manual_seed(5)
    dtype, tolerance = precision(device, 2e-2)
    q, k, v = (torch.randn(2, 4, n, 16, generator=g).to(device, dtype) for n in (30, 50, 50))
    mask, dout = make_bias(dtype, *shape, hidden=0.0, device=device), torch.randn(2, 4, 30, 16, device=device)  # torch takes one of q's dtype
    torch_sdpa = torch.nn.functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flash3._sdpa._torch_sdpa", None)  # nothing is left to torch
        got = gradients(lambda q, k, v, m: flash3.sdpa(q, k, v, m), (q, k, v, mask), dout)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # torch's others refuse some shapes
        wanted = gradients(lambda q, k, v, m: torch_sdpa(q, k, v, m), (q, k, v, mask), dout)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, atol=2 * tolerance, rtol=10 * tolerance)
    with flash3.sdpa_override():
        compiled = torch.compile(lambda q, m: torch_sdpa(q, k, v, m), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, mask), got[0])


def test_compiled_and_recorded():
    q, k, v = make(torch.float32, 1, 50, 60)
    bias = make_bias(torch.float32, 1, HEADS, 50, 60).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(lambda bias: flash3.attention(q, k, v, bias=bias), backend="aot_eager", fullgraph=True)
    got, wanted = compiled(bias), flash3.attention(q, k, v, bias=bias)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), bias), torch.autograd.grad(wanted.sum(), bias))
    first, = torch.autograd.grad(flash3.attention(q, k, v, bias=bias).square().sum(), bias, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        first.sum().backward()
    leaf = q.clone().requires_grad_()
    out = flash3.attention(leaf, k, v, bias=bias.detach())  # no gradient of the bias is made where none is wanted
    assert torch.autograd.grad(out.sum(), leaf)[0].isfinite().all()
    with pytest.raises(NotImplementedError, match="bias.requires_grad = True but torch.func's transforms"):
        torch.func.grad(lambda b: flash3.attention(q, k, v, bias=b).sum())(bias.detach())


def test_what_is_refused():
    q, k, v = make(torch.float32, 2, 9, 12)
    good = torch.zeros(2, HEADS, 9, 12)
    for name, wrong, message in (("bias", good[..., :11], r"bias.shape\[3\] = 11 but k.shape\[1\] = 12; bias and k must have the same seq_k"),
                                 ("bias", good[:, :5], r"bias.shape\[1\] = 5 but q.shape\[2\] = 6; bias must have the heads_q of q, or 1"),
                                 ("bias", torch.zeros(3, 1, 9, 12), r"bias.shape\[0\] = 3 but q.shape\[0\] = 2; bias must have the batch size"),
                                 ("bias", good[:, :, :4], r"bias.shape\[2\] = 4 but q.shape\[1\] = 9; bias must have the seq_q of q, or 1"),
                                 ("bias", good[0], "bias.ndim = 3 but it must be 4"), ("bias", good.double(), "bias.dtype|float64"),
                                 ("bias_table", torch.zeros(6, 8), r"bias_table.shape\[1\] = 8 but it must be 2 \* D \+ 1"),
                                 ("bias_table", torch.zeros(2, 7), r"bias_table.shape\[0\] = 2 but q.shape\[2\] = 6"),
                                 ("bias_table", torch.zeros(6, 7).half(), "bias_table.dtype = float16 but it must be float32")):
        with pytest.raises((ValueError, TypeError), match=message):
            flash3.attention(q, k, v, **{name: wrong})
    out, lse = flash3.attention(q, k, v, bias=good, return_lse=True)
    for given, message in (({"dbias": good[:1].clone(), "bias": good}, r"dbias.shape\[0\] = 1 but bias.shape\[0\] = 2"),
                           ({"dbias": good.clone()}, "dbias is given but bias is None"),
                           ({"dbias": good.half(), "bias": good}, "dbias.dtype = float16 but it must be float32 or the dtype of bias"),
                           ({"dbias": good[:1].clone().expand(2, -1, -1, -1), "bias": good}, "the elements of an output must not overlap"),
                           ({"dbias": good, "bias": good}, "share memory")):
        with pytest.raises((ValueError, TypeError), match=message):
            flash3.attention_backward(out, q, k, v, out, lse, **given)
    with pytest.raises(ValueError, match="bias is given and tree_mask is given"):
        flash3.attention_with_kv_cache(q, k, v, tree_mask=torch.full((2, 9), 2**9 - 1), bias=good)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    cu = {"cu_seqlens_q": torch.tensor([0, 9, 18], dtype=torch.int32), "cu_seqlens_k": torch.tensor([0, 12, 24], dtype=torch.int32)}
    for wrong, message in ((good[:, :1, :1], r"bias.shape\[0\] = 2 but it must be 1; rows of packed queries are in the third"),
                           (good[:1, :, :, :11], r"bias.shape\[2\] = 9 but q.shape\[0\] = 18; bias must have the total_q of q, or 1"),
                           (good[:1, :, :1], r"bias.shape\[3\] = 12 but k.shape\[0\] = 24; bias must have an element for each key")):
        with pytest.raises(ValueError, match=message):
            flash3.attention(*packed, bias=wrong, **cu)
    flash3.attention(*packed, bias=good[:1, :, :1], max_seqlen_k=12, max_seqlen_q=9, **cu)


@pytest.mark.gpu
@pytest.mark.parametrize("own", OWN, ids=str)
def test_the_same_bits_each_time_on_a_gpu(own):
    q, k, v = make(torch.bfloat16, 3, 300, 500, device="cuda")
    shape = (size if has else 1 for has, size in zip(own, (3, HEADS, 300)))
    leaves = make_bias(torch.float32, *shape, 500, device="cuda"), torch.randn(HEADS, 65, device="cuda"), torch.rand(HEADS, device="cuda")
    dout = torch.randn(3, 300, HEADS, DIM_V, device="cuda")

    def call(bias, table, slopes):
        return flash3.attention(q, k, v, bias=bias, bias_table=table, alibi_slopes=slopes, causal=True)
    first = gradients(call, leaves, dout)
    for _ in range(5):
        assert all(map(torch.equal, gradients(call, leaves, dout), first))


@pytest.mark.gpu
def test_what_a_gpu_refuses():
    q, k, v = make(torch.bfloat16, 1, 90, 120, device="cuda")
    with pytest.raises(NotImplementedError, match="bias is given but k and v are FP8, or become it; the hopper backend takes it with float16 and "
                                                  "bfloat16 keys only, and alibi_slopes and bias_table with any"):
        flash3.attention(q, k, v, compute="fp8", bias=torch.zeros(1, 1, 1, 120, device="cuda"))
