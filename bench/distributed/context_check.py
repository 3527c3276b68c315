# SPDX-License-Identifier: Apache-2.0
"""What the results of bench/distributed/context_parallel.py are checked against: attention over all tokens in float32, by plain products."""
import torch
import torch.distributed as dist

LARGEST_ERROR = 0.02  # RMS of the difference, of the reference's own RMS
SPOTS = 16


def whole_tensors(point, device):
    """q, k, v and dout of all tokens, [1, tokens, heads, dim] in bf16; the same on each rank."""
    made, heads = torch.Generator().manual_seed(1), (point.heads, point.heads_k, point.heads_k, point.heads)
    return [torch.randn((1, sum(point.lengths), n, point.dim), generator=made).to(device, torch.bfloat16) for n in heads]


def documents_of(point, positions):
    """The number of each position's document."""
    return torch.searchsorted(torch.tensor(point.cu_seqlens[1:], device=positions.device), positions, right=True)


def causal_scores(q, k, seen):
    """[heads, queries, keys] of one KV head: of q [queries, heads, dim] and k [keys, dim]."""
    scores = torch.einsum("qhd,kd->hqk", q, k) * k.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf)


def reference(point, whole):
    """out, dq, dk and dv of all tokens in float32, as whole_tensors."""
    positions = torch.arange(whole[0].shape[1], device=whole[0].device)
    document = documents_of(point, positions)
    seen, group = (positions <= positions[:, None]) & (document == document[:, None]), point.heads // point.heads_k
    made = [torch.empty(x.shape, device=x.device) for x in (whole[0], *whole[:3])]
    for head in range(point.heads_k):  # one after the other: scores take memory
        mine = slice(head * group, (head + 1) * group)
        q, k, v = (x[0, :, part].float().requires_grad_() for x, part in zip(whole, (mine, head, head)))
        out = torch.einsum("hqk,kd->qhd", causal_scores(q, k, seen).softmax(-1), v)
        made[0][0, :, mine] = out.detach()
        for total, part, x in zip(made[1:], (mine, head, head), torch.autograd.grad(out, (q, k, v), whole[3][0, :, mine].float())):
            total[0, :, part] = x
    return made


def error_of(mine, wanted):
    """RMS of the difference, of the reference's own RMS; not a number where a result is none."""
    return ((mine.float() - wanted).norm() / wanted.norm()).item()


def largest_error(way, rows, wanted):
    """The largest error of a way's result and gradients at these rows of reference()."""
    with way.around():
        outs = way.forward()
        made = [outs, *way.backward(outs)]
    made = [(x.transpose(1, 2) if way.heads_first else x).detach() for x in made]
    errors = [error_of(mine, all_rows.index_select(1, rows)) for mine, all_rows in zip(made, wanted)]
    return max(errors, key=lambda error: (error != error, error))  # NaN before all


def refusal(error):
    """Why a way with this error has no time, or None."""
    return None if error <= LARGEST_ERROR else f"errs by {error:.2g}"  # NaN too


def spot_reference(own):
    """(a few of this rank's rows, their results in float32 [rows, heads, dim]) at the point's own size: the keys of all ranks come."""
    point, plan = own.point, own.plan
    rows = torch.linspace(0, plan.tokens - 1, SPOTS, device=own.device).long()
    k, v = (plan.unshard(x, 1)[0] for x in (own.k, own.v))
    positions, keys = plan.positions(own.device)[rows], torch.arange(k.shape[0], device=own.device)
    seen = (keys <= positions[:, None]) & (documents_of(point, keys) == documents_of(point, positions)[:, None])
    q, group = own.q.detach()[0, rows], point.heads // point.heads_k
    outs = []
    for head in range(point.heads_k):
        weights = causal_scores(q[:, head * group:(head + 1) * group].float(), k[:, head].float(), seen).softmax(-1)
        outs.append(torch.einsum("hqk,kd->qhd", weights, v[:, head].float()))
    return rows, torch.cat(outs, 1)


def agreed(reason):
    """The first rank's reason that has one; None: all ranks are well. All ranks must ask."""
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((one for one in reasons if one is not None), None)


def largest(values, device):
    """These numbers, each the largest of all ranks."""
    table = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table.tolist()
