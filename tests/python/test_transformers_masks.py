# SPDX-License-Identifier: Apache-2.0
"""What each query sees with attn_implementation="f3", beside transformers' eager attention: whatever mask a model asks for is computed,
as options of flash3.attention. test_transformers_mask_data.py has the masks that these cannot say."""
import copy

import pytest
import torch
import transformers
from transformers import masking_utils

import flash3.integrations.transformers as integration
from test_transformers import CACHE, CONFIGS, close, dtype, pair  # noqa: F401: a fixture

REFUSES = pytest.raises(NotImplementedError, match="sdpa")


def tokens_of(*shape, device="cpu"):
    return torch.randint(3, 99, shape, device=device)


def padding(lengths, length, side, device="cpu"):
    """A padding mask of rows of these lengths."""
    slots, lengths = torch.arange(length, device=device), torch.tensor(lengths, device=device)[:, None]
    return (slots < lengths if side == "right" else slots >= length - lengths).long()


def two(kind, config, device, dtype):
    """A model of a class with eager attention, and one with flash3, of the same weights."""
    models = []
    for name in ("eager", "f3"):
        torch.manual_seed(0)
        model = kind._from_config(copy.deepcopy(config), attn_implementation=name).to(device, dtype).eval()
        for parameter in model.parameters():  # attention that is not almost uniform
            if parameter.dim() > 1:
                parameter.data.mul_(4)
        models.append(model)
    return models


def check(eager, other, device, *args, field="logits", of=None, **named):
    """The results of both models are close; of: which tokens count."""
    with torch.no_grad():
        wanted, got = (getattr(model(*args, **named), field) for model in (eager, other))
    of = torch.ones(got.shape[:2], dtype=torch.bool, device=device) if of is None else of.bool()
    torch.testing.assert_close(got[of], wanted[of], **close(device))


def check_gradients(eager, other, device, **named):
    for model in (eager, other):
        model.train()(**named).loss.backward()
    for (name, a), b in zip(other.named_parameters(), eager.parameters()):
        if b.grad is not None and not name.endswith(("k_proj.bias", "key.bias")):  # whose gradient is 0 but for rounding
            assert (a.grad - b.grad).abs().max() <= (1e-3 if device == "cpu" else 0.1) * b.grad.abs().max(), name


BART = transformers.BartConfig(vocab_size=99, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                               decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
                               dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("target", [7, 12])
def test_cross_attention_to_a_padded_encoder(device, dtype, side, target):
    """Also where there are as many queries as keys: those that the encoder's padding would hit are tokens all the same."""
    eager, other = two(transformers.BartForConditionalGeneration, BART, device, dtype)
    named = {"input_ids": tokens_of(3, 12, device=device), "attention_mask": padding((12, 5, 1), 12, side, device)}
    labels = tokens_of(3, target, device=device)
    seen = padding((target, 3, 5), target, "right", device)
    check(eager, other, device, **named, decoder_input_ids=labels, decoder_attention_mask=seen, of=seen)
    check(eager, other, device, **named, labels=labels)
    check_gradients(eager, other, device, **named, labels=labels)


@pytest.mark.parametrize("side", ["left", "right"])
def test_position_biases(device, dtype, side):
    """T5's, which are learnt; of tokens in the order that padding leaves, and with a cache."""
    config = transformers.T5Config(vocab_size=99, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0,
                                   decoder_start_token_id=0, dropout_rate=0.0, initializer_factor=0.3)
    eager, other = two(transformers.T5ForConditionalGeneration, config, device, dtype)
    named = {"input_ids": tokens_of(3, 12, device=device), "attention_mask": padding((12, 5, 1), 12, side, device)}
    labels = tokens_of(3, 9, device=device)
    check(eager, other, device, **named, labels=labels)
    check_gradients(eager, other, device, **named, labels=labels)
    assert other.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.abs().max() > 0
    eager.eval(), other.eval()
    if dtype == torch.float32:
        made = [model.generate(**named, max_new_tokens=6, min_new_tokens=6, do_sample=False) for model in (eager, other)]
        assert torch.equal(*made)


def test_position_biases_that_are_refused():
    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    attend = lambda bias, **named: integration.attention_forward(torch.nn.Module(), q, k, k, None, position_bias=bias, **named)
    with pytest.raises(NotImplementedError, match=r"position_bias.shape = \(1, 4, 6, 5\)"):
        attend(torch.zeros(1, 4, 6, 5))
    with pytest.raises(NotImplementedError, match="a bias is given and sequences are packed"):
        attend(torch.zeros(1, 4, 6, 6), cu_seq_lens_q=torch.tensor([0, 2, 6]), cu_seq_lens_k=torch.tensor([0, 2, 6]))


def packed(device):
    """Two rows of several sequences, cut at different places."""
    lengths = ((5, 12, 3), (1, 8, 11))
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(device)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences(device, dtype, name, rows):
    eager, other = pair(CONFIGS[name], device, "f3", dtype)
    tokens, positions = tokens_of(rows, 20, device=device), packed(device)[:rows]
    check(eager, other, device, tokens, position_ids=positions, use_cache=False)
    check_gradients(eager, other, device, input_ids=tokens, position_ids=positions, use_cache=False, labels=tokens)


@pytest.mark.parametrize("positions", [[8, 9, 9, 10], [8, 8, 8, 8], [30, 31, 32, 33], [8, 9, 20, 21]])
def test_positions_that_are_not_consecutive_with_a_cache(device, dtype, positions):
    eager, other = pair(CONFIGS["llama"], device, "f3", dtype)
    prompt, more = tokens_of(1, 8, device=device), tokens_of(1, 4, device=device)
    with torch.no_grad():
        logits = [model(more, position_ids=torch.tensor([positions], device=device),
                        **{CACHE: model(prompt, use_cache=True)[CACHE]}).logits for model in (other, eager)]
    torch.testing.assert_close(*logits, **close(device))


@pytest.mark.parametrize("name,side", [("llama", None), ("llama", "left"), ("llama", "right"), ("mistral", None), ("mistral", "left"),
                                       ("gemma2", None), ("gemma2", "left")])
def test_a_static_cache(device, dtype, name, side):
    """Without a mask nothing but the cache's own count says which slots are empty. The prompt comes in two parts."""
    eager, other = pair(CONFIGS[name], device, "f3", dtype)
    tokens = tokens_of(2, 16, device=device)
    mask = None if side is None else padding((16, 11), 16, "left", device)
    if side == "right":
        mask[1] = torch.tensor([1] * 6 + [0] * 4 + [1] * 6)
    logits = []
    for model in (other, eager):
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        steps = [model(tokens[:, a:b], attention_mask=None if mask is None else mask[:, :b], **{CACHE: cache}).logits
                 for a, b in ((0, 6), (6, 10), (10, 11), (11, 14), (14, 15), (15, 16))]
        logits.append(torch.cat(steps, 1))
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(*(x[real] for x in logits), **close(device))


@pytest.mark.parametrize("side", ["left", "right"])
def test_holes_in_a_mask(device, dtype, side):
    """Tokens on both sides of padding: their order is all that counts, but not for a window, which counts slots."""
    mask = padding((20, 9), 20, side, device)
    mask[0, 6:9] = 0
    tokens = tokens_of(2, 20, device=device)
    eager, other = pair(CONFIGS["llama"], device, "f3", dtype)
    check(eager, other, device, tokens, attention_mask=mask, of=mask)
    eager, other = pair(CONFIGS["mistral"], device, "f3", dtype)
    check(eager, other, device, tokens, attention_mask=mask, of=mask)


def test_a_mask_that_is_shorter_than_the_tokens(device, dtype):
    eager, other = pair(CONFIGS["llama"], device, "f3", dtype)
    tokens, mask, logits = tokens_of(2, 12, device=device), padding((8, 5), 8, "left", device), []
    for model in (other, eager):
        with torch.no_grad():
            cache = model(tokens[:, :8], attention_mask=mask, use_cache=True)[CACHE]
            logits.append(model(tokens[:, 8:9], attention_mask=mask, **{CACHE: cache}).logits)
            logits.append(model(tokens[:, 9:], attention_mask=mask, **{CACHE: cache}).logits)
    for got, wanted in zip(logits[:2], logits[2:]):
        torch.testing.assert_close(got, wanted, **close(device))


@pytest.mark.parametrize("side", ["left", "right"])
def test_windows_to_both_sides(device, dtype, side):
    """They are the config's to each side, whatever a layer tells the attention function."""
    config = transformers.ModernBertConfig(vocab_size=99, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
                                           num_attention_heads=4, local_attention=6, global_attn_every_n_layers=3, pad_token_id=0,
                                           bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    eager, other = two(transformers.ModernBertForMaskedLM, config, device, dtype)
    tokens, mask = tokens_of(3, 20, device=device), padding((20, 13, 4), 20, side, device)
    check(eager, other, device, tokens)
    check(eager, other, device, tokens, attention_mask=mask, of=mask)
    check_gradients(eager, other, device, input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
    config = copy.deepcopy(CONFIGS["mistral"])  # whose layers give the number of a causal window
    config.is_causal = False
    eager, other = pair(config, device, "f3", dtype)
    check(eager, other, device, tokens, attention_mask=mask, use_cache=False, of=mask)


def test_an_encoders_padding_sees_what_it_does_in_eager_attention(device, dtype):
    config = transformers.BertConfig(vocab_size=99, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    eager, other = two(transformers.BertModel, config, device, dtype)
    for side in ("left", "right"):
        check(eager, other, device, tokens_of(2, 12, device=device), field="last_hidden_state",
              attention_mask=padding((12, 5), 12, side, device))


def test_calls_that_do_not_fit_their_mask_are_refused():
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    with pytest.raises(NotImplementedError, match="query.shape.2. = 4 but key.shape.2. = 6"):
        integration.attention_forward(torch.nn.Module(), q, k, k, None)
    mask = integration.make_mask(1, 4, 4, mask_function=masking_utils.causal_mask_function)
    with pytest.raises(NotImplementedError, match="key.shape.2. = 6 but attention_mask was made for 4"):
        integration.attention_forward(torch.nn.Module(), q, k, k, mask)
    with pytest.raises(NotImplementedError, match="sliding_window = 3 and no mask"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, is_causal=False, sliding_window=3)


def one_layer(name):
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = 1
    return config


def compiled(model, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.parametrize("name,rows", [("llama", 1), ("mistral", 2)])
def test_compiled_without_a_mask(device, dtype, name, rows):
    """One graph, whether sequences are packed or not."""
    eager, other = pair(one_layer(name), device, "f3", dtype)
    graph, tokens = compiled(other), tokens_of(rows, 20, device=device)
    for positions in (torch.arange(20, device=device).repeat(rows, 1), packed(device)[:rows]):
        check(eager, graph, device, tokens, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_with_padding(device, dtype, name):
    eager, other = pair(one_layer(name), device, "f3", dtype)
    graph, tokens = compiled(other), tokens_of(2, 20, device=device)
    for mask in (padding((20, 20), 20, "left", device), padding((20, 9), 20, "left", device), padding((20, 9), 20, "right", device)):
        check(eager, graph, device, tokens, attention_mask=mask, use_cache=False, of=mask)
    if name == "mistral" and device == "cpu":  # on a GPU the assertion ends the process's use of it
        mask[0, 3:5] = 0
        with pytest.raises(RuntimeError, match="holes within a window"):
            graph(tokens, attention_mask=mask, use_cache=False)


def test_compiled_decoding(device, dtype):
    """As generate() does it: masks are made outside of the graph."""
    eager, other = pair(CONFIGS["gemma2"], device, "f3", dtype)
    graph, logits = compiled(other, "eager"), []
    tokens, mask = tokens_of(2, 16, device=device), padding((16, 11), 16, "left", device)
    for model, step in ((eager, eager), (other, graph)):
        cache, steps = transformers.StaticCache(config=model.config, max_cache_len=24), []
        for a, b in ((0, 12), (12, 13), (13, 14)):
            with torch.no_grad():
                inputs = model.prepare_inputs_for_generation(tokens[:, :b], next_sequence_length=b - a, use_cache=True,
                                                             attention_mask=mask[:, :b], **{CACHE: cache})
                steps.append((model if a == 0 else step)(**inputs).logits[:, -1])
        logits.append(torch.stack(steps))
    assert all(isinstance(made, integration.Mask) for made in inputs["attention_mask"].values())
    torch.testing.assert_close(*logits, **close(device))


def test_plain_calls_do_not_wait_for_the_device(device, dtype):
    """Whatever reads a value is seen by a mode for tensors, and without a padding mask there is nothing to read."""
    from torch.utils._python_dispatch import TorchDispatchMode
    reads = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default,
                            torch.ops.aten.equal.default):
                reads.append(function)
            return function(*args, **(kwargs or {}))

    config = copy.deepcopy(CONFIGS["llama"])
    config._attn_implementation = "f3"
    make = lambda **more: masking_utils.create_causal_mask(config=config, inputs_embeds=torch.zeros(2, 6, 48, device=device),
                                                           **{"attention_mask": None, CACHE: None, **more})
    with Reads():
        make()
        make(**{CACHE: transformers.StaticCache(config=config, max_cache_len=24)})
        assert not reads
        make(attention_mask=padding((6, 6), 6, "left", device))
        assert len(reads) == 1
