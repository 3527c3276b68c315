# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous batching on flash3: the tokens of plain eager generation, and its calls against the definition."""
import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.23")

import oracle
import flash3.integrations.transformers as integration
from flash3.integrations import _transformers_paged
from test_transformers import CONFIGS, SMALL, pair
from transformers.generation.continuous_batching import cache as paged_cache

integration.register()

LENGTHS = (5, 17, 1, 30)  # of the prompts; the last does not fit into a batch and is read in parts
PAGES = {"pages": {}, "gathered": {"max_blocks_per_request": 0}}


@contextlib.contextmanager
def calls():
    """Counts the calls by what they read: keys in pages, and gathered ones."""
    with mock.patch.object(integration, "attention_with_kv_cache", wraps=integration.attention_with_kv_cache) as pages, \
            mock.patch.object(integration, "attention", wraps=integration.attention) as gathered:
        yield pages, gathered


def generate_batch(model, prompts, new_tokens=20, **options):
    """The tokens that continuous batching adds to each prompt."""
    batching = transformers.ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=16, **options)
    config = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=2, pad_token_id=0)
    memory = torch.device("cpu"), 4 << 30, 0, 0  # transformers asks psutil, which need not be installed
    with mock.patch.object(paged_cache, "get_device_and_memory_breakdown", return_value=memory):
        outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    outputs = sorted(outputs.values(), key=lambda output: prompts.index(list(output.prompt_ids)))
    assert len(outputs) == len(prompts) and [output.error for output in outputs] == [None] * len(prompts)
    return [list(output.generated_tokens) for output in outputs]


def generate_alone(model, prompts, new_tokens=20):
    with torch.no_grad():
        return [model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                               max_new_tokens=new_tokens, do_sample=False)[0, len(prompt):].tolist() for prompt in prompts]


def make_prompts(lengths=LENGTHS):
    return [torch.randint(3, 99, (n,)).tolist() for n in lengths]


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3"])
def test_generate_batch(name, pages):
    eager, other = pair(CONFIGS[name], "cpu", "f3")
    prompts = make_prompts()
    with calls() as (in_pages, gathered):
        got = generate_batch(other, prompts, **PAGES[pages])
    assert got == generate_alone(eager, prompts)
    # A window's keys lie in a ring, so that a model with one has no page tables.
    steps_in_pages = pages == "pages" and getattr(CONFIGS[name], "sliding_window", None) is None
    assert (in_pages.call_count > 0) == steps_in_pages and gathered.call_count > 0
    assert other.config._attn_implementation == "f3"


@pytest.mark.parametrize("layers", [["sliding_attention", "full_attention"] * 2, ["full_attention"] * 4])
def test_layers_that_take_the_keys_of_others(layers):
    """The last two layers of a Gemma 3n have no keys of their own, and are not told which of the cache's lengths is theirs."""
    config = transformers.Gemma3nTextConfig(
        **{**SMALL, "num_hidden_layers": 4, "intermediate_size": [64] * 4}, head_dim=12, sliding_window=8, num_kv_shared_layers=2,
        layer_types=layers, vocab_size_per_layer_input=99, hidden_size_per_layer_input=16, activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8)
    eager, other = pair(config, "cpu", "f3")
    prompts = make_prompts()
    with calls() as (in_pages, gathered):
        assert generate_batch(other, prompts, 12) == generate_alone(eager, prompts, 12)
    assert in_pages.call_count == 0 < gathered.call_count


@pytest.mark.filterwarnings("ignore:The `paged.` prefix is no longer needed:FutureWarning")
def test_the_name_with_a_prefix():
    eager, other = pair(CONFIGS["llama"], "cpu", "eager")
    other.set_attn_implementation("paged|f3")
    prompts = make_prompts((4, 9))
    with calls() as (in_pages, _):
        assert generate_batch(other, prompts, 8) == generate_alone(eager, prompts, 8)
    assert in_pages.call_count > 0


def test_other_implementations_stay():
    eager, other = pair(CONFIGS["llama"], "cpu", "eager")
    prompts = make_prompts((4, 9))
    with calls() as counted:
        assert generate_batch(other, prompts, 8) == generate_alone(eager, prompts, 8)
    assert [count.call_count for count in counted] == [0, 0]
    assert other.config._attn_implementation == "eager"


class Cache:
    """transformers' paged cache where the call for the attention writes: pages of 8 keys, handed on through kwargs."""

    def __init__(self, k, v, table):
        self.k, self.v, self.table = k, v, table

    def update(self, key_states, value_states, layer_idx, kwargs):
        assert layer_idx == 3
        kwargs.update(k_cache=self.k, v_cache=self.v, block_table=self.table, max_length_k=kwargs["max_length_k"]["full_attention"],
                      cu_seq_lens_k=kwargs["cu_seq_lens_k"]["full_attention"])
        return key_states, value_states


@pytest.mark.parametrize("updated", ["here", "by the layer"])  # as in transformers 5.23, and from 5.24 on
@pytest.mark.parametrize("window", [None, 6])
def test_a_step_with_padding(device, window, updated):
    """A captured graph has a number of sequences; those after the last real one have neither queries nor keys."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    g = torch.Generator().manual_seed(20)
    k_cache, v_cache = torch.randn(2, 12, 8, 2, 16, generator=g).to(device, dtype)
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    q, k, v = (torch.randn(1, heads, 4, 16, generator=g).to(device, dtype) for heads in (4, 2, 2))
    lengths = (9, 17, 1)  # with the new token
    table = torch.tensor([[5, 0, -1], [7, 2, 11], [3, -1, -1], [-1, -1, -1]], dtype=torch.int32, device=device)
    ints = dict(dtype=torch.int32, device=device)
    sinks = torch.randn(4, generator=g).to(device, dtype)
    given = dict(cu_seq_lens_q=torch.tensor([0, 1, 2, 3, 3], **ints), max_length_q=1, max_length_k={"full_attention": 1},
                 cu_seq_lens_k={"full_attention": torch.tensor([0, 9, 26, 27, 27], **ints)}, read_index=[], write_index=[],
                 block_table=table[None])
    cache = Cache(k_cache, v_cache, table)
    if updated == "here":
        given["cache"] = cache
    else:
        k, v = cache.update(k, v, 3, kwargs=given)
    out, _ = integration.paged_attention_forward(SimpleNamespace(layer_idx=3), q, k, v, None, scaling=0.2, sliding_window=window,
                                                 softcap=0.5, is_causal=True, s_aux=sinks, **given)
    assert out.shape == (1, 4, 4, 16)
    for b, n in enumerate(lengths):
        keys, values = (x[table[b].clamp(min=0).long()].flatten(0, 1)[:n] for x in (k_cache, v_cache))
        assert torch.equal(keys[-1], k[0, :, b]) and torch.equal(values[-1], v[0, :, b])
        call = q[:, :, b:b + 1].transpose(1, 2), keys[None], values[None]
        options = dict(causal=True, softmax_scale=0.2, softcap=0.5, sink=sinks, window=window and (window - 1, None))
        oracle.assert_close(out[:, b], oracle.exact(*call, **options)[0][:, 0], oracle.naive(*call, **options)[0][:, 0])


def test_what_it_does_not_do_is_refused_by_name():
    call = [SimpleNamespace(layer_idx=3), *(torch.zeros(1, 2, 4, 8) for _ in range(3))]
    cache = Cache(*torch.zeros(2, 1, 8, 2, 8), None)
    for error, message, mask, options in (
            (ValueError, "neither cache nor read_index is given", None, {}),
            (NotImplementedError, "attention_mask is given and is_causal = True", torch.zeros(1, 1, 4, 4), {"cache": cache}),
            (NotImplementedError, "attention_mask is not given and is_causal = False", None, {"cache": cache, "is_causal": False}),
            (NotImplementedError, "dropout = 0.1", None, {"cache": cache, "dropout": 0.1}),
            (NotImplementedError, "output_attentions = True", None, {"cache": cache, "output_attentions": True}),
            (NotImplementedError, "position_bias is given", None, {"cache": cache, "position_bias": 1})):
        with pytest.raises(error, match=message):
            integration.paged_attention_forward(*call, mask, **options)
    with pytest.raises(NotImplementedError, match="module.layer_type = None but the cache has layers of the types a, b"):
        lengths = torch.zeros(2, dtype=torch.int32)
        integration.paged_attention_forward(*call, None, read_index=[], cu_seq_lens_q=lengths, max_length_q=4,
                                            cu_seq_lens_k={"a": lengths, "b": lengths})
    with pytest.raises(NotImplementedError, match="cache is given but this attention is not over a paged cache"):
        integration.attention_forward(*call, None, cache=cache)


def test_earlier_versions_of_transformers_stay_as_they_are():
    now = sys.modules["transformers"]  # transformers replaces it as models are imported
    with mock.patch.object(now, "__version__", "5.22.1"), mock.patch.object(_transformers_paged, "accept") as accept:
        integration.register("early")
    assert accept.call_count == 0
    _, other = pair(transformers.LlamaConfig(**SMALL), "cpu", "early")
    with pytest.raises(ValueError, match="early is not supported for continuous batching"):
        generate_batch(other, make_prompts((4,)))
