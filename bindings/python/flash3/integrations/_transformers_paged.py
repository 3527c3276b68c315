# SPDX-License-Identifier: Apache-2.0
"""The way into transformers' continuous batching.

Its manager takes attention implementations by their names, "sdpa" and those with "flash" in them, and lets a step of decoding use
page tables for the latter alone. accept() has it take flash3 too: as it switches a model from "eager" to "paged|eager" while it
runs, it switches from a name to the one that stands for flash3 over a paged cache, for which transformers makes no masks.
"""
import functools

from transformers.generation.continuous_batching import continuous_api, initialization

_paged = {}  # the name of an implementation: the one over a paged cache


def accept(name, paged_name):
    """Lets continuous batching run a model whose attention is called name, as paged_name."""
    if not _paged:
        manager = continuous_api.ContinuousBatchingManager
        manager.switch_to_cb_friendly_attn = _switching(manager.switch_to_cb_friendly_attn)
        initialization.ensure_decode_fast_path_is_available = _ensuring(initialization.ensure_decode_fast_path_is_available)
    _paged[name] = paged_name


def _switching(switch):
    @functools.wraps(switch)
    def switched(manager, model, *args, **kwargs):
        name = model.config._attn_implementation
        if name in _paged:
            model.set_attn_implementation(_paged[name])
            manager._original_attn_impl = name  # what the manager sets it back to at its end
        elif name not in _paged.values():
            switch(manager, model, *args, **kwargs)

    return switched


def _ensuring(ensure):
    @functools.wraps(ensure)
    def ensured(config, batching, *args, **kwargs):
        if config._attn_implementation not in _paged.values():  # the cache itself knows which layers have pages
            ensure(config, batching, *args, **kwargs)
        elif "reuse" in getattr(config, "kv_sharing_modes", ()):  # a layer that takes another's keys is not told where its pages are
            batching.max_blocks_per_request = 0

    return ensured
