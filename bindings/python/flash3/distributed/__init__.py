# SPDX-License-Identifier: Apache-2.0
"""flash3.distributed: attention over sequences whose tokens are distributed to the ranks of torch.distributed (context parallelism).

It holds::

    plan, Plan           which rank has which tokens, once for a batch and all layers; shard, unshard, position_ids
    attention, explain   flash3.attention over all ranks' tokens, and what it does
    shard, unshard       the same helpers for whole sequences of equal length, without a plan
    context_parallel     a context in which a model's own attention is distributed
    attention_with_kv_cache, local_seqlens, cache_rows
                         decoding over a cache whose tokens are distributed to ranks in turn

docs/distributed.md says what each method sends. The same code runs over NCCL on GPUs and over gloo on CPUs.
"""
from ._attention import attention, context_parallel, explain
from ._decode import attention_with_kv_cache
from ._own_cache import cache_rows, local_seqlens
from ._plan import Plan, plan, shard, unshard

__all__ = ["attention", "explain", "plan", "Plan", "shard", "unshard", "context_parallel", "attention_with_kv_cache",
           "local_seqlens", "cache_rows"]
