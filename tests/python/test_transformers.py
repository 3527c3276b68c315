# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers, with small random models: attn_implementation="f3", "flash_attention_3" through the drop-in, and "sdpa"
under flash3.sdpa_override()."""
import contextlib
import copy
from unittest import mock

import pytest
import torch
import transformers

import flash3
import flash3._sdpa
import flash3.integrations.transformers as integration

from test_sdpa import in_autograds_thread

integration.register()

SMALL = dict(vocab_size=99, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)


# What a cache is called, as an argument and in a result.
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"


def configs():
    t = transformers
    yield "llama", t.LlamaConfig(**SMALL)
    yield "mistral", t.MistralConfig(**SMALL, sliding_window=8)
    yield "gemma2", t.Gemma2Config(**SMALL, head_dim=20, sliding_window=8, attn_logit_softcapping=5.0, query_pre_attn_scalar=20)
    # All experts for each token: which ones are best is a matter of rounding in 16 bits.
    yield "gpt_oss", t.GptOssConfig(**SMALL, head_dim=16, sliding_window=8, num_local_experts=2, num_experts_per_tok=2)
    yield "qwen3", t.Qwen3Config(**SMALL, head_dim=24)


CONFIGS = dict(configs())


def pair(config, device, implementation, dtype=torch.float32):
    """A model with eager attention and one with another implementation, of the same weights."""
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").to(device, dtype)
    for parameter in eager.parameters():  # attention that is not almost uniform
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    other = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").to(device, dtype)
    other.load_state_dict(eager.state_dict())
    # As from_pretrained would; "flash_attention_3" is refused there on a machine without a GPU.
    other.config._attn_implementation = implementation
    return eager.eval(), other.eval()


def implementations():
    return ["f3", "flash_attention_3"]


@pytest.fixture(params=implementations())
def implementation(request):
    return request.param


def close(device):
    return {"atol": 2e-3, "rtol": 2e-3} if device == "cpu" else {"atol": 0.25, "rtol": 0.1}


@pytest.fixture
def dtype(device):
    return torch.float32 if device == "cpu" else torch.bfloat16


@contextlib.contextmanager
def calls(implementation):
    """Counts the calls that reach flash3."""
    import flash_attn_interface
    from transformers import modeling_flash_attention_utils as utils
    if implementation == "f3":
        with mock.patch.object(integration, "attention", wraps=integration.attention) as counted:
            yield counted
        return
    utils.lazy_import_flash_attention("flash_attention_3")
    assert utils._flash_fn is flash_attn_interface.flash_attn_func
    eager, counted = flash_attn_interface.eager, mock.Mock(wraps=flash_attn_interface._forward)

    def counted_eager(*call):
        out = eager(*call)
        counted.call_count += out is not None  # otherwise _forward has it next
        return out

    with mock.patch.multiple(flash_attn_interface, _forward=counted, eager=eager and counted_eager):
        yield counted


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill(device, dtype, implementation, name):
    eager, other = pair(CONFIGS[name], device, implementation, dtype)
    tokens = torch.randint(3, 99, (2, 40), device=device)
    with torch.no_grad(), calls(implementation) as counted:
        torch.testing.assert_close(other(tokens).logits, eager(tokens).logits, **close(device))
    assert counted.call_count == 2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_padded_batch(device, dtype, implementation, name, side):
    eager, other = pair(CONFIGS[name], device, implementation, dtype)
    tokens = torch.randint(3, 99, (3, 20), device=device)
    mask = torch.ones_like(tokens)
    for row, padding in enumerate((0, 7, 19)):
        mask[row, :padding] = 0
    if side == "right":
        mask = mask.flip(1)
    with torch.no_grad(), calls(implementation) as counted:
        got, wanted = (model(tokens, attention_mask=mask).logits[mask.bool()] for model in (other, eager))
    torch.testing.assert_close(got, wanted, **close(device))
    assert counted.call_count == 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_generate(device, implementation, name, cache):
    if device == "cuda":
        pytest.skip("greedy tokens of two 16-bit implementations may differ")
    eager, other = pair(CONFIGS[name], device, implementation)
    tokens = torch.randint(3, 99, (2, 12))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    kinds = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    results = [model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, **kinds)
               for model in (eager, other)]
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_decoding_with_a_cache(device, dtype, implementation, name):
    """Logits token by token: generate() itself may take another token where two of them are as likely in 16 bits."""
    eager, other = pair(CONFIGS[name], device, implementation, dtype)
    tokens = torch.randint(3, 99, (2, 16), device=device)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    logits = []
    for model in (other, eager):
        with torch.no_grad():
            step = model(tokens[:, :12], attention_mask=mask[:, :12], use_cache=True)
            steps = [step.logits[:, -1]]
            for n in range(12, 16):
                step = model(tokens[:, n:n + 1], attention_mask=mask[:, :n + 1], **{CACHE: step[CACHE]})
                steps.append(step.logits[:, -1])
        logits.append(torch.stack(steps))
    torch.testing.assert_close(*logits, **close(device))


def test_packed_sequences_do_not_see_each_other(device, dtype, implementation):
    _, other = pair(CONFIGS["llama"], device, implementation, dtype)
    parts = [torch.randint(3, 99, (1, n), device=device) for n in (5, 12, 9)]
    positions = torch.cat([torch.arange(p.shape[1], device=device) for p in parts])[None]
    with torch.no_grad():
        together = other(torch.cat(parts, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([other(p, use_cache=False).logits for p in parts], 1)
    torch.testing.assert_close(together, alone, **close(device))


def test_gradients(device, dtype, implementation):
    eager, other = pair(CONFIGS["llama"], device, implementation, dtype)
    tokens = torch.randint(3, 99, (2, 30), device=device)
    mask = torch.ones_like(tokens)
    mask[0, 20:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    for model in (eager, other):
        model.train()(tokens, attention_mask=mask, labels=labels).loss.backward()
    for (name, a), b in zip(other.named_parameters(), eager.parameters()):
        scale = b.grad.abs().max()
        assert (a.grad - b.grad).abs().max() <= (1e-3 if device == "cpu" else 0.1) * scale, name


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_sdpa_override(device, dtype, name):
    """Models that ask for torch's attention get flash3's, with its gradients."""
    eager, other = pair(CONFIGS[name], device, "sdpa", dtype)
    tokens = torch.randint(3, 99, (2, 40), device=device)
    with flash3.sdpa_override(), mock.patch.object(flash3._sdpa, "run_forward", wraps=flash3._sdpa.run_forward) as counted:
        got = other.train()(tokens, labels=tokens)
        got.loss.backward()
    wanted = eager.train()(tokens, labels=tokens)
    wanted.loss.backward()
    assert counted.call_count == 2
    torch.testing.assert_close(got.logits, wanted.logits, **close(device))
    for (name, a), b in zip(other.named_parameters(), eager.parameters()):
        scale = b.grad.abs().max()
        assert (a.grad - b.grad).abs().max() <= (1e-3 if device == "cpu" else 0.1) * scale, name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_sdpa_override_with_activation_checkpointing(device, dtype, use_reentrant):
    """Autograd computes each layer again, in a thread of its own."""
    eager, other = pair(CONFIGS["llama"], device, "sdpa", dtype)
    tokens = torch.randint(3, 99, (2, 40), device=device)
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    with flash3.sdpa_override(), mock.patch.object(flash3._sdpa, "run_forward", wraps=flash3._sdpa.run_forward) as counted:
        loss = other.train()(tokens, labels=tokens, use_cache=False).loss
        loss.backward() if device == "cuda" else in_autograds_thread(loss.backward)
    assert counted.call_count == 4
    eager.train()(tokens, labels=tokens).loss.backward()
    for (name, a), b in zip(other.named_parameters(), eager.parameters()):
        scale = b.grad.abs().max()
        assert (a.grad - b.grad).abs().max() <= (1e-3 if device == "cpu" else 0.1) * scale, name


def test_an_encoder(device, dtype):
    config = transformers.BertConfig(vocab_size=99, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=64)
    torch.manual_seed(0)
    models = [transformers.BertModel._from_config(copy.deepcopy(config), attn_implementation=name).to(device, dtype).eval()
              for name in ("eager", "f3")]
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(3, 99, (2, 20), device=device)
    mask = torch.ones_like(tokens)
    mask[1, 11:] = 0
    with torch.no_grad():
        wanted, got = (model(tokens, attention_mask=mask).last_hidden_state[mask.bool()] for model in models)
    torch.testing.assert_close(got, wanted, atol=1e-4 if device == "cpu" else 0.1, rtol=1e-3 if device == "cpu" else 0.1)


def test_from_config_takes_the_name(device, dtype):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="f3").to(device, dtype)
    assert model.config._attn_implementation == "f3"
    assert model(torch.tensor([[3, 4, 5]], device=device)).logits.shape == (1, 3, 99)


@pytest.fixture
def installed_dropin(tmp_path, monkeypatch):
    """What the distribution of the name tells of itself, by which transformers knows it; test_package.py looks at its wheel."""
    from transformers.utils import import_utils
    info = tmp_path / "flash_attn_3-3.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn_3\nVersion: 3.0.0\n", encoding="utf-8")
    (info / "top_level.txt").write_text("flash_attn_interface\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    answers = import_utils._package_distribution_mapping, import_utils.is_flash_attn_3_available
    for answer in answers:
        answer.cache_clear()
    yield
    monkeypatch.undo()
    for answer in answers:
        answer.cache_clear()


@pytest.mark.gpu
def test_from_config_takes_flash_attention_3(installed_dropin):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="flash_attention_3",
                                                          dtype=torch.bfloat16).to("cuda")
    tokens = torch.randint(3, 99, (2, 40), device="cuda")
    with torch.no_grad(), calls("flash_attention_3") as counted:
        assert model(tokens).logits.isfinite().all()
    assert counted.call_count == 2


def test_compile(device, dtype):
    _, other = pair(CONFIGS["llama"], device, "f3", dtype)
    tokens = torch.randint(3, 99, (2, 24), device=device)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens, use_cache=False).logits, other(tokens, use_cache=False).logits,
                                   **close(device))


def test_names_that_transformers_keeps_for_itself():
    with pytest.raises(ValueError, match="must not contain 'flash'"):
        integration.register("flash3")


@pytest.mark.parametrize("padded", [False, True])
def test_attention_dropout_in_training(device, dtype, padded):
    config = copy.deepcopy(CONFIGS["llama"])
    config.attention_dropout = 0.1
    eager, other = pair(config, device, "f3", dtype)
    tokens = torch.randint(3, 99, (2, 8), device=device)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0 if padded else 1
    torch.testing.assert_close(other(tokens, attention_mask=mask).logits[:, 3:], eager(tokens, attention_mask=mask).logits[:, 3:],
                               **close(device))

    def train():
        torch.manual_seed(2)
        out = other.train()(tokens, attention_mask=mask).logits
        return out, torch.autograd.grad(out[:, 3:].square().sum(), next(iter(other.parameters())))[0]
    first, again = train(), train()
    assert torch.equal(first[0], again[0])
    largest = first[1].abs().max().item()  # a GPU sums in no fixed order
    torch.testing.assert_close(first[1], again[1], **({} if device == "cpu" else {"atol": 0.02 * largest, "rtol": 0.02}))
    assert not torch.allclose(first[0], other.eval()(tokens, attention_mask=mask).logits, atol=1e-3)


def test_attention_weights_are_refused():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, output_attentions=True)


def test_head_dims_beyond_the_kernels_are_refused():
    q, v, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 512, requires_grad=True), torch.randn(1, 2, 4, 577)
    for name, call, most in (("query", (v, v, q), "256 on cpu with gradients"), ("value", (q, q, v), "256 on cpu with gradients"),
                             ("query", (k, k, q), "576 on cpu"), ("value", (q, q, k), "512 on cpu")):
        size = dict(zip(("query", "key", "value"), call))[name].shape[-1]
        with pytest.raises(NotImplementedError, match=rf"{name}.shape\[-1\] = {size} but flash3's head dims are up to {most}; "):
            integration.attention_forward(torch.nn.Module(), *call, None)


def test_a_head_dim_of_512_on_a_cpu():
    """The head dim of Gemma 4's global layers, without gradients."""
    eager, other = pair(transformers.Qwen3Config(**SMALL, head_dim=512), "cpu", "f3")
    tokens = torch.randint(3, 99, (2, 19))
    with torch.no_grad():
        wanted, got = eager(tokens).logits, other(tokens).logits
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="512 but flash3's head dims are up to 256 on cpu with gradients"):
        other(tokens)
