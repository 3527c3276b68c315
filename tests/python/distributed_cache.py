# SPDX-License-Identifier: Apache-2.0
"""FP8 caches, appending, latent attention and trees of drafts over a cache that is dealt to ranks: against one process on the whole
cache, bit for bit what lies in it afterwards, and against the definition.

test_distributed.py makes them over gloo. On GPUs and NCCL, with the package on PYTHONPATH: torchrun --nproc-per-node 2 distributed_cache.py
"""
import contextlib
import functools
import os

import torch
import torch.distributed as dist

import flash3
import flash3.distributed as fd
import oracle
from cache_cases import descends, random_parents, rotate as embed

FP8 = torch.float8_e4m3fn
SEED = 2**64 - 3  # of rotations


@contextlib.contextmanager
def poisoned():
    """Memory that torch gives is NaN until it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def device():
    """The device of the calls; what they are compared with is on the host."""
    return torch.device("cuda" if "nccl" in dist.get_backend_config() else "cpu")


def moved(arguments):
    return {name: x.to(device()) if torch.is_tensor(x) else x for name, x in arguments.items()}


def nan(shape, dtype):
    return torch.full(shape, torch.nan).to(dtype)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Whole:
    """A cache of one process, with a page, and so a scale, for each token; and how its tokens are dealt."""

    def __init__(self, lengths, added, heads, dims, dtype, interleave, shared):
        """shared: values are the first elements of their keys."""
        self.lengths, self.batch, self.rows = lengths, len(lengths), max(lengths) + added
        self.heads, self.dtype = heads, dtype
        self.caches = {"k_cache": torch.randn(self.batch, self.rows, heads, dims[0]).to(dtype)}
        self.caches["v_cache"] = (self.caches["k_cache"][..., :dims[1]] if shared
                                  else torch.randn(self.batch, self.rows, heads, dims[1]).to(dtype))
        for b, length in enumerate(lengths):
            for x in self.caches.values():
                x[b, length:] = torch.nan
        self.owner, self.row = fd.cache_rows(torch.arange(self.rows), dist.get_world_size(), interleave)
        self.scales = {}

    def own(self, x):
        """This rank's tokens of [batch, rows, …], in its rows, and NaN after them."""
        mine = self.owner == dist.get_rank()
        made = nan((self.batch, int(mine.sum()) + 3, *x.shape[2:]), x.dtype)
        made[:, self.row[mine]] = x[:, mine]
        return made

    def arguments(self):
        """The arguments of the one process."""
        pages = {name: x.flatten(0, 1)[:, None] for name, x in self.caches.items()}
        scales = {name: x.flatten(0, 1)[..., None] for name, x in self.scales.items()}
        table = torch.arange(self.batch * self.rows, dtype=torch.int32).view(self.batch, self.rows)
        return {**pages, **scales, "page_table": table, "seqused_k": torch.tensor(self.lengths, dtype=torch.int32)}

    def numbers(self, name):
        scale = self.scales.get(f"{name[0]}_scale")
        x = self.caches[name].double()
        return x if scale is None else x * scale[..., None]


class Own:
    """This rank's part of a Whole: in elements of a larger cache, in pages, or in elements in their order."""

    def __init__(self, whole, page_size, elements, scales):
        """scales: what shares one, which is "tensor", "heads" or "rows"; None: no FP8."""
        self.whole, self.arguments = whole, {}
        shape = whole.own(whole.caches["k_cache"]).shape
        per_element = -(-shape[1] // page_size) if page_size else 1
        rows = page_size or shape[1]
        count = whole.batch * per_element + (3 if page_size or elements else 0)
        order = torch.randperm(count)[:whole.batch * per_element] if page_size or elements else torch.arange(whole.batch)
        self.place = order.view(whole.batch, per_element)
        if page_size:
            self.arguments["page_table"] = self.place.int()
        elif elements:
            self.arguments["cache_batch_idx"] = self.place[:, 0].int()
        self.caches = {name: nan((count, rows, *x.shape[2:]), whole.dtype).to(device()) for name, x in whole.caches.items()}
        if whole.caches["v_cache"].data_ptr() == whole.caches["k_cache"].data_ptr():
            self.caches["v_cache"] = self.caches["k_cache"][..., :whole.caches["v_cache"].shape[3]]
        for name, x in self.caches.items():
            self.put(x, whole.own(whole.caches[name]))
        for name in ("k_scale", "v_scale") if scales else ():
            self._deal_scales(name, scales, count, rows)

    def put(self, x, sequences):
        """Writes [batch, rows, …] where they are."""
        size = x.shape[1]
        for b, places in enumerate(self.place):
            for i, place in enumerate(places):
                part = sequences[b, i * size:(i + 1) * size]
                x[place, :len(part)] = part

    def _deal_scales(self, name, scales, count, rows):
        """Each rank has its own; the whole's follow from all."""
        whole, ranks = self.whole, dist.get_world_size()
        shape = {"tensor": (1,), "heads": (whole.batch, whole.heads), "rows": (count, whole.heads, -(-rows // 128))}[scales]
        mine = torch.rand(shape, generator=torch.Generator().manual_seed(dist.get_rank() + ord(name[0]))) + 0.5
        self.arguments[name] = mine
        if scales == "rows":
            places = torch.arange(self.place.shape[1] * rows)
            of_rows = mine[self.place[:, places // rows], :, (places % rows // 128)[None]]
        else:
            of_rows = mine.view(-1, 1, mine.shape[-1]).expand(whole.batch, self.place.shape[1] * rows, whole.heads)
        tokens = torch.zeros(whole.batch, whole.rows, whole.heads)
        tokens[:, whole.owner == dist.get_rank()] = of_rows[:, whole.row[whole.owner == dist.get_rank()]]
        parts = [torch.empty_like(tokens) for _ in range(ranks)]
        dist.all_gather(parts, tokens)
        whole.scales[name] = sum(parts)

    def check(self):
        """What the whole cache holds now is in these rows, and nothing else is."""
        for name, x in self.caches.items():
            wanted = nan(x.shape, x.dtype)
            self.put(wanted, self.whole.own(self.whole.caches[name]))
            assert same_bits(x.cpu(), wanted), f"{name} holds other bits"


def queries(shape, dtype, scales, heads_k):
    """(q, q_scale or None, the numbers)."""
    q = torch.randn(shape).to(dtype)
    if dtype != FP8:
        return q, None, q.double()
    batch, _, heads, _ = shape
    made = torch.rand({"tensor": (1,), "heads": (batch, heads_k), "rows": (batch, heads, 1)}[scales]) + 0.5
    each = made.repeat_interleave(heads // heads_k, 1) if scales == "heads" else made.squeeze(-1)
    return q, made, q.double() * (each[:, None, :, None] if scales != "tensor" else made)


def rounding_weights(q, k, v, *, seen=None, **mask):
    """The plain way in FP8: float32, and weights in e4m3 (docs/fp8.md)."""
    q, k, v = q.float(), *(x.float().repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    seen = oracle.visible(q.shape[1], k.shape[1], **mask) if seen is None else seen
    scores = scores.masked_fill(~seen, -torch.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-1e30))
    total = p.sum(-1, keepdim=True)
    weights = (256 * p).to(FP8).float() / (256 * total).masked_fill(total == 0, 1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).bfloat16(), torch.logsumexp(scores, -1)


def rotation_of(dim, seed):
    """The matrix of `rotate`, from what an append makes of the unit vectors; they are exact in float32 but for its factor."""
    cache = torch.zeros(1, dim, 1, dim)
    unit = torch.eye(dim)[None, :, None]
    flash3.attention_with_kv_cache(unit[:, :1], cache, cache.clone(), k_new=unit, v_new=unit, rotate=True, rotation_seed=seed,
                                   seqused_k=torch.zeros(1, dtype=torch.int32))
    return cache[0, :, 0].double()


class Positions:
    """Tables of a rotary embedding, and q with it and with the rotation."""

    def __init__(self, kind, offsets, lengths):
        self.arguments, self.kind = {}, kind
        self.first = [3 * b + 1 for b in range(len(lengths))] if offsets else lengths
        if kind:
            angles = torch.arange(max(self.first) + 70)[:, None] / 10 ** (torch.arange(8) / 4)[None]
            self.arguments = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": kind == "interleaved"}
        if offsets:
            self.arguments["rotary_offsets"] = torch.tensor(self.first, dtype=torch.int32)

    def embedded(self, q, b, masked):
        """The queries of sequence b, [seq_q, heads, dim]."""
        if not self.kind:
            return q
        steps = torch.arange(len(q)) if masked else torch.zeros(len(q), dtype=torch.long)
        tables = (self.arguments[name] for name in ("rotary_cos", "rotary_sin", "rotary_interleaved"))
        return embed(q, self.first[b] + steps, *tables)


def dealt(*, lengths, seq_q=1, added=None, heads=(4, 2), dims=(32, 24), dtype=torch.bfloat16, cache_dtype=None, new_dtype=None,
          scales=None, q_scales="heads", page_size=None, elements=False, interleave=1, of="all", rotary=None, offsets=False,
          rotate=False, latent=None, tree=False, sink=False, out_dtype=None, **mask):
    """A call of all ranks. added: tokens that it appends, None: seq_q; latent: "shared" values, or a "split" query."""
    rank, ranks, batch = dist.get_rank(), dist.get_world_size(), len(lengths)
    added, heads_q, heads_k = seq_q if added is None else added, heads[0] * ranks, heads[1]
    whole = Whole(lengths, added, heads_k, dims, cache_dtype or dtype, interleave, latent == "shared")
    own, positions = Own(whole, page_size, elements, scales), Positions(rotary, offsets, lengths)
    q, q_scale, numbers = queries((batch, seq_q, heads_q, dims[0]), dtype, q_scales, heads_k)
    qv = torch.randn(batch, seq_q, heads_q, dims[1]).to(dtype) if latent == "split" else None
    same = {**positions.arguments, **mask, "rotate": rotate, "rotation_seed": SEED, "out_dtype": out_dtype}
    if added:
        same["k_new"] = torch.randn(batch, added, heads_k, dims[0]).to(new_dtype or dtype)
    if added and latent != "shared":
        same["v_new"] = torch.randn(batch, added, heads_k, dims[1]).to(new_dtype or dtype)
    trees = [descends(random_parents(torch.default_generator, seq_q)) for _ in range(batch)]
    if tree:
        same["tree_mask"] = flash3.tree_mask(seen=torch.stack(trees))
    own_sink = torch.randn(heads_q) if sink else None
    part = slice(rank * heads[0], (rank + 1) * heads[0]) if of == "dealt" else slice(None)

    def heads_of(x, dim=2):
        return None if x is None else x.movedim(dim, 0)[part].movedim(0, dim)
    with poisoned():
        out, lse = fd.attention_with_kv_cache(**own.caches, interleave=interleave, heads=of, return_lse=True, **moved(
            {"q": heads_of(q), "qv": heads_of(qv), "seqlens": torch.tensor(lengths), "sink": heads_of(own_sink, 0),
             "q_scale": heads_of(q_scale, 1) if q_scales == "rows" else q_scale, **own.arguments, **same}))
    out, lse = out.cpu(), lse.cpu()
    alone, alone_lse = flash3.attention_with_kv_cache(q, **whole.arguments(), **same, qv=qv, q_scale=q_scale, sink=own_sink,
                                                      return_lse=True)
    own.check()
    assert out.dtype == alone.dtype and lse.dtype == torch.float32
    if out_dtype == torch.float32 and device().type == "cpu":  # nothing is rounded on the way
        torch.testing.assert_close(out, heads_of(alone), rtol=1e-5, atol=1e-5)
    for b in range(batch):
        embedded = positions.embedded(numbers[b] if rotate or dtype == FP8 else q[b], b, bool(mask))[None]
        k, v = (whole.numbers(name)[b:b + 1, :lengths[b] + added] for name in ("k_cache", "v_cache"))
        options = {"seen": with_keys_in_front(trees[b], k.shape[1])} if tree else mask
        wanted = expected(embedded, k, v, None if qv is None else qv[b:b + 1], dtype, rotate, own_sink, options)
        for what, got, of_one, (exact, naive) in (("out", out, alone, wanted[0]), ("lse", lse, alone_lse, wanted[1])):
            dim = 2 if what == "out" else 1
            exact, naive, one = (heads_of(x.double(), dim) for x in (exact, naive, of_one[b:b + 1]))
            farther = torch.where((one - exact).abs() > (naive - exact).abs(), one, naive)
            oracle.assert_close(got[b:b + 1], exact, farther, f"{what} of sequence {b}, of {lengths[b]} keys")


def with_keys_in_front(seen, keys):
    """[seq_q, keys] of a tree's [seq_q, seq_q]: its drafts are the last keys, as far as there are so many."""
    drafts = len(seen)
    return torch.cat([torch.ones(drafts, max(0, keys - drafts), dtype=torch.bool), seen[:, max(0, drafts - keys):]], -1)


def expected(q, k, v, qv, dtype, rotate, sink, options):
    """((exact, naive) of out, of lse) of one sequence, for numbers of its q with their embedding."""
    if rotate:
        q = q @ rotation_of(q.shape[-1], SEED)
    own = q if dtype == FP8 else q.to(dtype)
    if qv is not None:
        q, own, k = torch.cat([qv.double(), q.double()], -1), torch.cat([qv, own], -1), torch.cat([v, k], -1)
    exact = oracle.exact(q, k, v, sink=sink, **options)
    if dtype == FP8:
        return tuple(zip(exact, rounding_weights(own, k, v, **options)))
    return tuple(zip(exact, oracle.naive(own, k.to(dtype), v.to(dtype), sink=sink, **options)))


def cases(ranks):
    if ranks == 4:
        return {}
    short, edges = (0, 1, ranks - 1, ranks, 2 * ranks + 1), tuple(8 * ranks + i for i in (-1, 0, 1)) + (0, 1)
    blocks = tuple(160 * ranks + i for i in (-1, 0, 1)) + (128 * ranks - 1, 0)
    fp8 = {"cache_dtype": FP8, "scales": "rows"}
    made = {
        "fp8_tensor": {"lengths": short, "cache_dtype": FP8, "scales": "tensor", "of": "dealt"},
        "fp8_heads": {"lengths": short, "cache_dtype": FP8, "scales": "heads", "seq_q": 3, "causal": True, "interleave": 4,
                      "elements": True, "dtype": torch.float16, "sink": True},
        "fp8_heads_full": {"lengths": edges, "cache_dtype": FP8, "scales": "heads", "seq_q": 2, "added": 5, "interleave": 2},
        "fp8_rows": {"lengths": blocks, **fp8, "seq_q": 2, "of": "dealt", "rotary": "halves", "causal": True},
        "fp8_pages": {"lengths": blocks, **fp8, "seq_q": 2, "added": 3, "page_size": 160, "causal": True, "window": (150, None),
                      "rotary": "interleaved", "offsets": True},
        "fp8_read": {"lengths": edges[:3], **fp8, "added": 0, "page_size": 8, "of": "dealt", "out_dtype": torch.float32},
        "fp8_query": {"lengths": edges, **fp8, "dtype": FP8, "new_dtype": torch.bfloat16, "seq_q": 2, "page_size": 8,
                      "of": "dealt", "heads": (1, ranks)},
        "fp8_query_rows": {"lengths": edges, "cache_dtype": FP8, "scales": "heads", "dtype": FP8, "q_scales": "rows", "seq_q": 3,
                           "causal": True, "of": "dealt", "out_dtype": torch.float16},
        "fp8_query_heads": {"lengths": short, **fp8, "dtype": FP8, "seq_q": 2, "causal": True, "interleave": 2},
        "fp8_query_tensor": {"lengths": short, **fp8, "dtype": FP8, "q_scales": "tensor", "of": "dealt", "elements": True},
        "fp8_rotated": {"lengths": edges, **fp8, "seq_q": 2, "page_size": 8, "rotate": True, "causal": True, "rotary": "halves",
                        "of": "dealt"},
        "fp8_rotated_full": {"lengths": short, "cache_dtype": FP8, "scales": "heads", "seq_q": 2, "rotate": True},
        "appended": {"lengths": edges, "seq_q": 2, "page_size": 8, "rotary": "interleaved", "of": "dealt", "interleave": 8},
        "latent_shared": {"lengths": edges, "seq_q": 2, "heads": (4, 1), "dims": (576, 512), "latent": "shared", "page_size": 8,
                          "causal": True, "of": "dealt"},
        "latent_split": {"lengths": short, "seq_q": 2, "heads": (4, 1), "dims": (64, 512), "latent": "split", "rotary": "halves",
                         "causal": True, "of": "dealt", "dtype": torch.float16},
        "latent_drafts": {"lengths": edges, "seq_q": 5, "heads": (4, 1), "dims": (576, 512), "latent": "shared", "tree": True},
        "drafts": {"lengths": short, "seq_q": 7, "tree": True, "of": "dealt", "interleave": 2, "sink": True},
        "drafts_that_are_there": {"lengths": (64, 65, 70, 129), "seq_q": 64, "added": 0, "tree": True, "interleave": 3,
                                  "elements": True},
        "drafts_fp8": {"lengths": edges, **fp8, "seq_q": 6, "tree": True, "page_size": 8, "rotate": True, "of": "dealt"}}
    found = {f"cache_{name}": functools.partial(dealt, **options) for name, options in made.items()}
    return {**found, "cache_refused": refused}


def refused():
    """What breaks a rule is told on all ranks, in the words of the call, and nothing has been written then."""
    last = dist.get_world_size() - 1
    odd = dist.get_rank() == last
    q, cache, new = torch.randn(2, 3, 4, 32).bfloat16(), torch.zeros(2, 8, 2, 32, dtype=FP8), torch.randn(2, 3, 2, 32).bfloat16()
    base = {"q": q, "k_cache": cache, "v_cache": cache.clone(), "seqlens": torch.tensor([3, 0]), "k_new": new, "v_new": new}
    tables, wide = dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(9, 8)), torch.randn(2, 3, 4, 576).bfloat16()
    tree = flash3.tree_mask(torch.tensor([[-1, 0, 0]] * 2))
    q8, latent = q.to(FP8), torch.randn(2, 8, 1, 576).bfloat16()
    for error, message, changes in (
            (ValueError, f"k_new is None on rank {last} but given on rank 0", {"k_new": None if odd else new}),
            (ValueError, f"k_new.shape[1] is 2 on rank {last} but 3 on rank 0", {"k_new": new[:, :2] if odd else new}),
            (ValueError, f"k_cache.dtype is torch.bfloat16 on rank {last}", {"k_cache": cache.bfloat16() if odd else cache}),
            (ValueError, f"rotate is 1 on rank {last} but 0 on rank 0", {"rotate": odd}),
            (ValueError, f"the mask's right is 0 on rank {last} but None on rank 0", {"causal": odd}),
            (ValueError, "k_new.shape[2] = 1 but k_cache.shape[2] = 2; k_new must be [batch, seq_new, heads_k, head_dim]",
             {"k_new": new[:, :, :1]}),
            (ValueError, "v_new.shape[1] = 2 but k_new.shape[1] = 3", {"v_new": new[:, :2]}),
            (ValueError, "v_new is given but k_new is None", {"k_new": None}),
            (ValueError, "rotary_cos is given but k_new is None", {**tables, "k_new": None, "v_new": None}),
            (ValueError, "rotary_offsets.shape[0] = 3 but q.shape[0] = 2", {**tables, "rotary_offsets": torch.zeros(3).int()}),
            (ValueError, "k_scale.shape[0] = 3 but q.shape[0] = 2; k_scale must be [batch, heads_k]", {"k_scale": torch.ones(3, 2)}),
            (ValueError, "k_scale.shape[2] = 2 but k_cache.shape[1] = 8", {"k_scale": torch.ones(2, 2, 2)}),
            (ValueError, "q_scale is given but q.dtype = bfloat16", {"q_scale": torch.ones(1)}),
            (ValueError, "q_scale.shape[2] = 2 but q.shape[1] / 128, rounded up, = 1", {"q": q8, "q_scale": torch.ones(2, 4, 2)}),
            (NotImplementedError, "rotate = True but q.dtype = float8_e4m3fn", {"q": q8, "rotate": True}),
            (NotImplementedError, "rotary_cos is given but q.dtype = float8_e4m3fn", {"q": q8, **tables}),
            (NotImplementedError, "qv is given but k_cache.dtype = float8_e4m3fn; with qv nothing may be FP8", {"qv": q}),
            (ValueError, "qv.shape[3] = 576 but v_cache.shape[3] = 32", {"qv": wide}),
            (ValueError, "must be from 1 to 256", {"q": wide, "k_cache": latent.to(FP8), "v_cache": latent[..., :512].to(FP8),
                                                   "k_new": None, "v_new": None}),
            (ValueError, "tree_mask.shape[1] = 2 but q.shape[1] = 3", {"tree_mask": tree[:, :2]}),
            (TypeError, "tree_mask.dtype = int32 but it must be int64", {"tree_mask": tree.int()}),
            (ValueError, "tree_mask is given and so is causal, window or chunk", {"tree_mask": tree, "causal": True}),
            (ValueError, "tree_mask is given and rotary_cos is given", {"tree_mask": tree, **tables}),
            (ValueError, "out_dtype = float16 but q.dtype = bfloat16", {"out_dtype": torch.float16}),
            (ValueError, "k_cache.shape[0] = 1 but q.shape[0] = 2", {"k_cache": cache[:1], "v_cache": cache[:1]}),
            (NotImplementedError, "q.requires_grad is True", {"q": q.clone().requires_grad_(), "heads": "dealt"}),
            (ValueError, "all query heads, which are 3, must be a multiple of heads_k", {"q": q[:, :, :3]})):
        try:
            fd.attention_with_kv_cache(**{**base, **changes})
        except error as raised:
            assert message in str(raised), raised
        else:
            raise AssertionError(f"no {error.__name__} with {message}")
        assert not cache.view(torch.uint8).any() and not base["v_cache"].view(torch.uint8).any()
    fd.attention_with_kv_cache(**base)  # and then they can go on


def main():
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    for name, case in cases(ranks).items():
        if case is refused:  # of the host alone
            continue
        torch.manual_seed(len(name))
        case()
        if rank == 0:
            print(name, "passed", flush=True)
    dist.destroy_process_group()



# Decoding over a cache that is dealt to ranks, against the definition on the whole one.


def dealt_cache(whole, lengths, interleave, page_size):
    """This rank's rows of [batch, rows, heads, dim] as (cache, page table or None); what holds no key is NaN."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch, rows = whole.shape[:2]
    most = -(-rows // (ranks * interleave)) * interleave + 5
    cache = torch.full((batch, -(-most // (page_size or 1)) * (page_size or 1), *whole.shape[2:]), torch.nan).to(whole.dtype)
    for b, length in enumerate(lengths):
        positions = torch.arange(length)
        owner, row = fd.cache_rows(positions, ranks, interleave)
        cache[b, row[owner == rank]] = whole[b, positions[owner == rank]]
        assert (owner == rank).sum() == fd.local_seqlens(length, rank, ranks, interleave)
    if not page_size:
        return cache, None
    pages = cache.unflatten(1, (-1, page_size))
    table = torch.randperm(pages.shape[0] * pages.shape[1]).int()
    shuffled = torch.empty_like(pages.flatten(0, 1))
    shuffled[table.long()] = pages.flatten(0, 1)
    return shuffled, table.view(batch, -1)


def decoded(*, heads="all", seq_q=1, lengths=(37, 1, 0, 64), interleave=1, page_size=None, dtype=torch.bfloat16, sink=False,
            group=4, **options):
    """group: query heads of a KV head."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    heads_k, heads_q = ranks, ranks * group
    q = torch.randn(len(lengths), seq_q, heads_q, 32).to(dtype)
    k, v = torch.randn(len(lengths), 64, heads_k, 32).to(dtype), torch.randn(len(lengths), 64, heads_k, 16).to(dtype)
    own_sink = torch.randn(heads_q) if sink else None
    state = torch.random.get_rng_state()
    k_cache, table = dealt_cache(k, lengths, interleave, page_size)
    torch.random.set_rng_state(state)  # the same pages
    v_cache, table_v = dealt_cache(v, lengths, interleave, page_size)
    assert table is None or torch.equal(table, table_v)
    dealt = slice(rank * group, (rank + 1) * group) if heads == "dealt" else slice(None)
    out, lse = fd.attention_with_kv_cache(q[:, :, dealt], k_cache, v_cache, torch.tensor(lengths), interleave=interleave,
                                          heads=heads, page_table=table, sink=own_sink[dealt] if sink else None, return_lse=True,
                                          **options)
    for b, length in enumerate(lengths):
        given = q[b:b + 1], k[b:b + 1, :length], v[b:b + 1, :length]
        (exact, exact_lse), (naive, naive_lse) = (f(*given, sink=own_sink, **options) for f in (oracle.exact, oracle.naive))
        oracle.assert_close(out[b:b + 1], exact[:, :, dealt], naive[:, :, dealt], f"out of sequence {b}")
        oracle.assert_close(lse[b:b + 1], exact_lse[:, dealt], naive_lse[:, dealt], f"lse of sequence {b}")


def other_heads():
    """Ranks that give other heads are told, all of them."""
    q = torch.randn(1, 1, 2 if dist.get_rank() else 4, 16)
    cache = torch.randn(1, 8, 2, 16)
    try:
        fd.attention_with_kv_cache(q, cache, cache, torch.tensor([3]))
    except ValueError as error:
        assert "q.shape[2] is 2 on rank 1 but 4 on rank 0" in str(error), error
    else:
        raise AssertionError("no error")


def serving_cases(ranks):
    made = {"one_query": {}, "paged": {"page_size": 8, "heads": "dealt"}, "interleave": {"interleave": 4, "causal": True},
            "several_queries": {"seq_q": 3, "causal": True, "heads": "dealt", "sink": True}, "float32": {"dtype": torch.float32},
            "window": {"seq_q": 2, "causal": True, "window": (9, None), "page_size": 4, "sink": True},
            "chunks": {"seq_q": 4, "causal": True, "chunk": 16, "dtype": torch.float16},
            "all_see_all": {"seq_q": 5, "heads": "dealt", "softcap": 3.0, "softmax_scale": 0.3},
            "band": {"seq_q": 6, "window": (4, 2), "dtype": torch.float32, "interleave": 3}}
    found = {f"decode_{name}": functools.partial(decoded, **options) for name, options in made.items()}
    return {**found, "decode_other_heads": other_heads}


if __name__ == "__main__":
    main()
