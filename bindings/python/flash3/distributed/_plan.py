# SPDX-License-Identifier: Apache-2.0
"""plan(): how a batch's tokens are distributed to the ranks of a group, and the helpers that follow from it."""
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._options import window_sides
from ._exchange import explained
from ._layout import layout_of, make_spec


class Groups:
    """A process group, or the two of a 2-D DeviceMesh: the ring's, and that of the ranks that share heads."""

    def __init__(self, group):
        if group is None:
            group = dist.group.WORLD
        if isinstance(group, DeviceMesh):
            if group.ndim > 2:
                raise ValueError(f"group.ndim = {group.ndim} but a DeviceMesh must have 1 dimension, or 2: (ring, heads)")
            self.all = tuple(group.get_group(i) for i in range(group.ndim))
        else:
            self.all = (group,)
        self.names = tuple(one.group_name for one in self.all)
        self.sizes = tuple(one.size() for one in self.all)
        self.ranks = 1
        for size in self.sizes:
            self.ranks *= size

    @property
    def rank(self):
        rank = 0
        for group, size in zip(self.all, self.sizes):
            rank = rank * size + dist.get_rank(group)
        return rank


def boundaries(name, cu):
    """cu_seqlens as a tuple of integers. From a tensor on a GPU this waits for the device: once for a plan."""
    cu = tuple(cu.tolist() if torch.is_tensor(cu) else (int(x) for x in cu))
    if len(cu) < 2 or cu[0] != 0:
        raise ValueError(f"{name} = {cu[:4]}… but it must have at least 2 elements and begin with 0")
    for b, (start, stop) in enumerate(zip(cu, cu[1:])):
        if stop < start:
            raise ValueError(f"{name}[{b + 1}] = {stop} but {name}[{b}] = {start}; {name} must not decrease")
    return cu


class Plan:
    """Which ranks of a group have which tokens of a batch, for all of its layers; plan() makes one."""

    def __init__(self, groups, spec):
        self.groups, self.spec, self.rank = groups, spec, groups.rank
        self.layout = layout_of(spec, groups.ranks)
        self.mean_tokens = self.layout.cu_q[-1] // groups.ranks
        self.is_one_sequence = len(self.layout.documents) <= 1
        self._rows = {}

    def rows(self, method):
        """The rows of q and of k that this rank has where `method` deals out heads; 0 where it does not."""
        if method not in self._rows:
            ranks = () if method in ("ring", "all_gather") else range(self.groups.ranks)
            if method == "ulysses_ring":
                first = self.rank // self.groups.sizes[1] * self.groups.sizes[1]
                ranks = range(first, first + self.groups.sizes[1])
            self._rows[method] = tuple(self.layout.rows_of_group(side, ranks) for side in "qk")
        return self._rows[method]

    @property
    def tokens(self):
        """How many tokens this rank has."""
        return self.layout.tokens("q", self.rank)

    def positions(self, device="cpu"):
        """The positions of this rank's tokens in the batch, [tokens] int64."""
        return self.layout.positions("q", self.rank, device)

    def position_ids(self, device="cpu"):
        """The position of each of this rank's tokens in its document, [tokens] int64, for a rotary embedding."""
        positions = self.positions(device)
        starts = torch.tensor(self.layout.cu_q, device=positions.device)
        return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]

    def shard(self, x, dim=1, *, keys=False):
        """This rank's tokens of a tensor of the whole batch along a dimension, such as inputs, labels or position ids.

        keys: the tokens are those of k and v, if they have other lengths than q.
        """
        side = "k" if keys else "q"
        if x.shape[dim] != self.layout.total(side):
            raise ValueError(f"x.shape[{dim}] = {x.shape[dim]} but the plan is for {self.layout.total(side)} tokens")
        return x.index_select(dim, self.layout.positions(side, self.rank, x.device))

    def unshard(self, x, dim=1, *, keys=False):
        """The tensor of the whole batch, on every rank, from the part of each rank: reverses shard(); no gradients."""
        side = "k" if keys else "q"
        counts = [self.layout.tokens(side, rank) for rank in range(self.groups.ranks)]
        if x.shape[dim] != counts[self.rank]:
            raise ValueError(f"x.shape[{dim}] = {x.shape[dim]} but the plan has {counts[self.rank]} tokens for rank {self.rank}")
        rows = x.detach().movedim(dim, 0).contiguous()
        longest = max(counts)  # gathering takes parts of one length
        part = rows.new_zeros((longest, *rows.shape[1:]))
        part[:len(rows)] = rows
        for group, size in zip(reversed(self.groups.all), reversed(self.groups.sizes)):
            come = [torch.empty_like(part) for _ in range(size)]
            with explained("unshard", group):
                dist.all_gather(come, part, group=group)
            part = torch.cat(come)
        made = rows.new_empty((sum(counts), *rows.shape[1:]))
        for rank, count in enumerate(counts):
            made[self.layout.positions(side, rank, x.device)] = part[rank * longest:rank * longest + count]
        return made.movedim(0, dim)


def plan(group=None, *, seqlen=None, cu_seqlens=None, seqlen_k=None, cu_seqlens_k=None, causal=True, window=None, chunk=0):
    """Distributes the tokens of a batch to ranks. A plan is made once for a batch, and all layers and helpers use it.

    Each rank gets equally many tokens, in a few runs of consecutive tokens, so that all ranks have equal work under the mask that is
    given here. For one causal sequence these are two runs, zigzag: rank r of n has the parts r and 2n - 1 - r of 2n. Layers may have
    other masks. All ranks must pass the same arguments; nothing is sent.

    Args:
        group: a ProcessGroup, a DeviceMesh of one dimension, or of two, (ring, heads). None: all ranks.
        seqlen: the tokens of a sequence of the batch.
        cu_seqlens: instead of seqlen, for the documents of a packed batch: [documents + 1] integers, on the host or on a device.
        seqlen_k, cu_seqlens_k: those of k and v, if they differ from q's.
        causal, window, chunk: the mask for which ranks get equal work, as in flash3.attention.

    Returns:
        The Plan, with tokens, rank, shard(x, dim), unshard(x, dim), positions(device) and position_ids(device).
    """
    if (seqlen is None) == (cu_seqlens is None):
        raise ValueError(f"seqlen = {seqlen} and cu_seqlens = {cu_seqlens} but one of them must be given, and one only")
    if seqlen_k is not None and cu_seqlens_k is not None:
        raise ValueError(f"seqlen_k = {seqlen_k} and cu_seqlens_k = {cu_seqlens_k} but only one of them may be given")
    cu_q = boundaries("cu_seqlens", (0, seqlen) if cu_seqlens is None else cu_seqlens)
    cu_k = cu_q
    if seqlen_k is not None or cu_seqlens_k is not None:
        cu_k = boundaries("cu_seqlens_k", (0, seqlen_k) if cu_seqlens_k is None else cu_seqlens_k)
    if len(cu_k) != len(cu_q):
        raise ValueError(f"cu_seqlens_k has {len(cu_k)} elements but cu_seqlens has {len(cu_q)}; both must have one for each "
                         "document, and one more")
    return Plan(Groups(group), make_spec(cu_q, cu_k, causal, window_sides(window), chunk))


def shard(x, group=None, dim=1):
    """This rank's tokens of a tensor of whole sequences, in the zigzag order that attention() without a plan takes."""
    return plan(group, seqlen=x.shape[dim]).shard(x, dim)


def unshard(x, group=None, dim=1):
    """The tensor of whole sequences, on every rank, from what shard() returned, if all ranks have equally many tokens; no gradients."""
    return plan(group, seqlen=x.shape[dim] * Groups(group).ranks).unshard(x, dim)
