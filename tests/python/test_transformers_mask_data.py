# SPDX-License-Identifier: Apache-2.0
"""Masks that no option of flash3.attention says, with attn_implementation="f3": blocks that see each other both ways, chunks, a model's
own mask functions and tensors of four dimensions. Beside transformers' eager attention, with every attention counted in flash3."""
import contextlib
import copy
from unittest import mock

import pytest
import torch
import transformers
from transformers import masking_utils

import flash3
import flash3.integrations.transformers as integration
from flash3 import _mask_make, _mask_rows
from test_transformers import CACHE, CONFIGS, SMALL, calls, close, dtype, pair  # noqa: F401: a fixture
from test_transformers_masks import check, check_gradients, compiled, padding, tokens_of, two

TEXT = dict(SMALL, num_hidden_layers=3)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
NO_TORCH = mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", side_effect=AssertionError("torch's attention ran"))


@contextlib.contextmanager
def in_flash3(layers, passes=1):
    """All that attends does so in flash3: layers calls in each of the passes."""
    with calls("f3") as counted, NO_TORCH:
        yield counted
    assert counted.call_count == layers * passes


def gemma3():
    """Layers with a window and one without, where images see themselves both ways."""
    text = transformers.Gemma3TextConfig(**TEXT, head_dim=12, sliding_window=6, query_pre_attn_scalar=12,
                                         layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    return transformers.Gemma3Config(text_config=text, vision_config=transformers.SiglipVisionConfig(**VISION), image_token_id=98,
                                     mm_tokens_per_image=4)


def spans(device):
    """token_type_ids of images in a text of 20 tokens: one longer than the window, two that touch nothing; none in the second row."""
    types = torch.zeros(2, 20, dtype=torch.long, device=device)
    types[0, 3:12], types[0, 15:18], types[1, 9:14] = 1, 1, 1
    return types


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_images_that_see_themselves_both_ways(device, dtype, side):
    eager, other = two(transformers.Gemma3ForConditionalGeneration, gemma3(), device, dtype)
    types = spans(device)
    named = {"input_ids": tokens_of(2, 20, device=device) % 90, "token_type_ids": types, "use_cache": False}
    of = torch.ones_like(types)
    if side is not None:
        named["attention_mask"] = of = padding((20, 13), 20, side, device)
    with in_flash3(3) as counted:
        check(eager, other, device, **named, of=of)
    assert all(call.kwargs["mask"] is not None for call in counted.call_args_list)
    masks = [call.kwargs["mask"] for call in counted.call_args_list]
    assert masks[0] is masks[2] and masks[1] is not masks[0]  # one for all layers of a type
    # The token after padding is not asked for: a query that sees no key gets 0, in eager attention the mean of all.
    labels = named["input_ids"].masked_fill((of == 0) | (of.roll(1, 1) == 0), -100)
    check_gradients(eager, other, device, **named, labels=labels)


def generated(models, **named):
    return [model.generate(**named, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=2) for model in models]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_after_images(cache):
    """The prompt has a mask as data; with a static cache it is one of more keys than queries. The tokens after it have none."""
    models = two(transformers.Gemma3ForConditionalGeneration, gemma3(), "cpu", torch.float32)
    kinds = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    named = {"input_ids": tokens_of(2, 20) % 90, "token_type_ids": spans("cpu"), "attention_mask": padding((20, 13), 20, "left"), **kinds}
    with in_flash3(3, passes=6) as counted:
        wanted, got = generated(models, **named)
    assert torch.equal(got, wanted)
    assert ["mask" in call.kwargs for call in counted.call_args_list] == [True] * 3 + [False] * 15


def paligemma():
    return transformers.PaliGemmaConfig(text_config=transformers.GemmaConfig(**TEXT, head_dim=12).to_dict(),
                                        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False).to_dict(),
                                        image_token_id=98, projection_dim=48, hidden_size=48)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prefix(device, dtype, side):
    """PaliGemma's: the image and the question see themselves both ways, the answer what comes before it."""
    eager, other = two(transformers.PaliGemmaForConditionalGeneration, paligemma(), device, dtype)
    seen = padding((20, 13), 20, side, device)
    types = torch.ones_like(seen)
    types[0, :8], types[1, :15 if side == "left" else 6] = 0, 0
    named = {"input_ids": tokens_of(2, 20, device=device) % 90, "token_type_ids": types, "attention_mask": seen}
    labels = named["input_ids"].masked_fill(types * seen == 0, -100)
    for model in (eager, other):
        model.train()  # the suffix is known in training alone
    with in_flash3(3) as counted:
        check(eager, other, device, **named, labels=labels, of=seen)
    assert all("mask" in call.kwargs for call in counted.call_args_list)
    check_gradients(eager, other, device, **named, labels=labels)
    if device == "cpu":
        wanted, got = generated((eager.eval(), other.eval()), **{**named, "token_type_ids": types * 0})
        assert torch.equal(got, wanted)


def test_packed_images_by_a_tensor(device, dtype):
    """Pixtral's, whose layers all get one tensor of floats: it becomes one mask."""
    config = transformers.PixtralVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32,
                                              patch_size=4)
    eager, other = two(transformers.PixtralVisionModel, config, device, dtype)
    images = torch.randn(3, 3, 32, 32, device=device, dtype=dtype)
    named = {"pixel_values": images, "image_sizes": torch.tensor([[32, 32], [8, 20], [16, 4]], device=device)}
    with in_flash3(2) as counted, mock.patch.object(_mask_make, "_make", wraps=_mask_make._make) as made:
        check(eager, other, device, field="last_hidden_state", **named)
    assert made.call_count == 1 and counted.call_args.kwargs["mask"].fields[3] == 64 + 10 + 4
    for model in (eager, other):
        model.train()(**named).last_hidden_state.square().sum().backward()
    for a, b in zip(other.parameters(), eager.parameters()):
        assert (a.grad - b.grad).abs().max() <= (1e-3 if device == "cpu" else 0.1) * b.grad.abs().max()


def test_packed_images_one_by_one(device, dtype):
    """Qwen2-VL's: a call of each image, none of which needs a mask."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
    config = Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=48, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2,
                                 temporal_patch_size=2)
    eager, other = two(Qwen2VisionTransformerPretrainedModel, config, device, dtype)
    grid = torch.tensor([[1, 4, 6], [2, 2, 4], [1, 8, 2]], device=device)  # 24, 2 times 8, and 16 patches
    pixels = torch.randn(56, 3 * 2 * 4 * 4, device=device, dtype=dtype)
    with in_flash3(2 * 4), torch.no_grad():
        wanted, got = (model(pixels, grid_thw=grid) for model in (eager, other))
    wanted, got = (getattr(x, "pooler_output", x) for x in (wanted, got))
    torch.testing.assert_close(got, wanted, **close(device))


def llama4():
    return transformers.Llama4TextConfig(**{**TEXT, "num_key_value_heads": 2}, head_dim=12, intermediate_size_mlp=64, num_local_experts=1,
                                         num_experts_per_tok=1, attention_chunk_size=6, interleave_moe_layer_step=1,
                                         layer_types=["chunked_attention", "full_attention", "chunked_attention"])


@pytest.mark.parametrize("side", [None, "left"])
def test_chunks(device, dtype, side):
    """Llama 4's, which count from each row's first token."""
    eager, other = two(transformers.Llama4ForCausalLM, llama4(), device, dtype)
    seen = None if side is None else padding((20, 13), 20, side, device)
    tokens = tokens_of(2, 20, device=device)
    with in_flash3(3):
        check(eager, other, device, tokens, attention_mask=seen, use_cache=False, of=seen)
    if device == "cpu":
        wanted, got = generated((eager, other), input_ids=tokens, attention_mask=padding((20, 13), 20, "left"))
        assert torch.equal(got, wanted)


def test_an_encoder_with_padding_has_gradients(device, dtype):
    config = transformers.BertConfig(vocab_size=99, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    eager, other = two(transformers.BertForMaskedLM, config, device, dtype)
    tokens, seen = tokens_of(2, 20, device=device), padding((20, 11), 20, "left", device)
    with in_flash3(2):
        check(eager, other, device, tokens, attention_mask=seen, of=seen)
    check_gradients(eager, other, device, input_ids=tokens, attention_mask=seen, labels=tokens.masked_fill(seen == 0, -100))


def test_a_mask_that_a_model_computes_with(device, dtype):
    """T5Gemma 2 joins the masks of its own tokens and of the encoder's, and attends to both at once."""
    text = dict(TEXT, num_hidden_layers=2, head_dim=12, sliding_window=6, query_pre_attn_scalar=12,
                layer_types=["sliding_attention", "full_attention"], dropout_rate=0.0, attention_dropout=0.0)
    config = transformers.T5Gemma2Config(encoder={"text_config": dict(text), "vision_config": dict(VISION, model_type="siglip_vision_model")},
                                         decoder=dict(text), image_token_index=98, dropout_rate=0.0, attention_dropout=0.0)
    eager, other = two(transformers.T5Gemma2ForConditionalGeneration, config, device, dtype)
    named = {"input_ids": tokens_of(2, 12, device=device) % 90, "attention_mask": padding((12, 7), 12, "right", device),
             "decoder_input_ids": tokens_of(2, 9, device=device) % 90}
    with in_flash3(4):
        check(eager, other, device, **named)
    if device == "cpu":
        del named["decoder_input_ids"]
        wanted, got = generated((eager, other), **named, decoder_start_token_id=1)
        assert torch.equal(got, wanted)


def four(device, seed=0):
    """A mask of pairs, others in each row, and of a row that sees nothing."""
    seen = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(seed)) < 0.4
    seen |= torch.eye(20, dtype=torch.bool)
    return seen.to(device)


def added(seen, dtype, hidden=None):
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min if hidden is None else hidden)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_a_callers_own_mask(device, dtype, name):
    """As of a tree of candidates: bool, or floats that are added. A model hands it to all layers, whatever windows they have."""
    eager, other = pair(CONFIGS[name], device, "f3", dtype)
    tokens, seen = tokens_of(2, 20, device=device), four(device)
    with torch.no_grad():
        wanted = eager(tokens, attention_mask=added(seen, dtype), use_cache=False).logits
    for mask in (seen, added(seen, dtype), added(seen, dtype, -float("inf")), added(seen, torch.float32)):
        with in_flash3(2), mock.patch.object(_mask_make, "_make", wraps=_mask_make._make) as made, torch.no_grad():
            got = other(tokens, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(got, wanted, **close(device))
        assert made.call_count == 1
    check_gradients(eager, other, device, input_ids=tokens, attention_mask=added(seen, dtype), use_cache=False, labels=tokens)


def test_a_mask_that_is_changed_is_made_again(device, dtype):
    eager, other = pair(CONFIGS["llama"], device, "f3", dtype)
    tokens, mask = tokens_of(2, 20, device=device), added(four(device), dtype)
    for seed in (1, 2):
        mask.copy_(added(four(device, seed), dtype))
        check(eager, other, device, tokens, attention_mask=mask, use_cache=False)


def test_a_callers_mask_with_a_cache(device, dtype):
    eager, other = pair(CONFIGS["llama"], device, "f3", dtype)
    tokens, seen = tokens_of(2, 20, device=device), four(device)
    logits = []
    for model in (eager, other):
        with torch.no_grad():
            cache = model(tokens[:, :15], use_cache=True)[CACHE]
            logits.append(model(tokens[:, 15:], attention_mask=added(seen[:, :, 15:], dtype), **{CACHE: cache}).logits)
    torch.testing.assert_close(*logits[::-1], **close(device))


@pytest.mark.parametrize("chosen", ["or", "and"])
def test_mask_functions_of_a_models_own(device, chosen):
    """transformers evaluates them pair by pair: flash3 too, and a band that they turn out to be is a band."""
    function = (lambda b, h, q, k: (q % 3 == 0) & (k < 9)) if chosen == "or" else masking_utils.sliding_window_overlay(5)
    seen, made = padding((20, 13), 20, "left", device), []
    for name in ("sdpa", "f3"):
        config = copy.deepcopy(CONFIGS["llama"])
        config._attn_implementation = name
        made.append(masking_utils.create_causal_mask(config=config, inputs_embeds=torch.zeros(2, 20, 48, device=device), attention_mask=seen,
                                                     **{f"{chosen}_mask_function": function, CACHE: None}))
    wanted, mask = made
    assert (mask.data is not None) == (chosen == "or") and (mask.window is not None) == (chosen == "and")
    q, k, v = (torch.randn(2, 4, 20, 16, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16) for _ in range(3))
    got, _ = integration.attention_forward(torch.nn.Module(), q, k, v, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=wanted).transpose(1, 2)
    of = seen.bool()
    torch.testing.assert_close(got[of], expected[of], **close(device))


def test_many_pairs_are_evaluated_in_parts(device, dtype, monkeypatch):
    """As those of a long prompt are: never more of them at once than _mask_rows has in memory, with the rows of one block."""
    eager, other = two(transformers.Gemma3ForConditionalGeneration, gemma3(), device, dtype)
    tokens = tokens_of(3, 300, device=device) % 90
    types = torch.zeros_like(tokens)
    types[0, 100:250], types[1, 5:20], types[1, 21:40], types[2, 290:] = 1, 1, 1, 1
    seen = padding((300, 290, 20), 300, "left", device)
    largest, evaluate = [], masking_utils.sdpa_mask

    def counted(*args, **named):
        mask = evaluate(*args, **named)
        largest.append(mask.numel())
        return mask

    monkeypatch.setattr(_mask_rows, "AT_ONCE", 60_000)
    monkeypatch.setattr(masking_utils, "sdpa_mask", counted)
    with torch.no_grad():
        got = other(tokens, token_type_ids=types, attention_mask=seen, use_cache=False).logits
    assert 0 < max(largest) <= 60_000
    with torch.no_grad():
        wanted = eager(tokens, token_type_ids=types, attention_mask=seen, use_cache=False).logits
    torch.testing.assert_close(got[seen.bool()], wanted[seen.bool()], **close(device))


def test_masks_of_other_floats_are_biases(device):
    """With their gradients, beside a bias of positions; that they are is read anew once they are changed."""
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(2, 4, n, 16, device=device, dtype=kind, requires_grad=True) for n in (6, 8, 8))
    mask = torch.zeros(2, 1, 6, 8, device=device, dtype=kind)
    positions = torch.randn(1, 4, 6, 8, device=device, dtype=kind, requires_grad=True)

    def compare(mask, leaves, **named):
        added = mask if not named else mask + positions
        got, _ = integration.attention_forward(torch.nn.Module(), q, k, v, mask, **named)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added).transpose(1, 2)
        dout = torch.randn_like(got)
        for x, y in zip((got, *torch.autograd.grad(got, leaves, dout)), (wanted, *torch.autograd.grad(wanted, leaves, dout))):
            torch.testing.assert_close(x, y, **close(device))
    compare(mask, (q, k, v))
    compare(mask, (q, k, v, positions), position_bias=positions)
    mask.copy_(torch.randn_like(mask))
    compare(mask, (q, k, v))
    compare(mask, (q, k, v, positions), position_bias=positions)
    leaf = mask.clone().requires_grad_()
    compare(leaf, (q, k, v, leaf))


def test_masks_that_are_refused():
    """What is no mask of the call; the message says what is wrong."""
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 8, 16)
    attend = lambda mask: integration.attention_forward(torch.nn.Module(), q, k, k, mask)
    zeros = torch.zeros(2, 1, 6, 8)
    attend(zeros)
    for bad, match in ((zeros.long(), r"dtype torch.int64 but it must be one of bool or floats"),
                       (zeros[0], r"shape \(1, 6, 8\) and dtype torch.float32"),
                       (zeros[..., :7], r"attention_mask.shape = \(2, 1, 6, 7\)"),
                       (zeros.expand(2, 4, 6, 8)[:, :3], r"attention_mask.shape = \(2, 3, 6, 8\)"),
                       ([], "attention_mask is a list")):
        with pytest.raises(NotImplementedError, match=match):
            attend(bad)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q is given and so is"):
        starts = torch.tensor([0, 6])
        integration.attention_forward(torch.nn.Module(), q, k, k, zeros, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    with pytest.raises(NotImplementedError, match="attention_mask.ndim = 3 but it must be 2"):
        integration.make_mask(2, 6, 6, mask_function=masking_utils.causal_mask_function, attention_mask=torch.ones(2, 6, 6))


def test_compiled(device, dtype):
    """The mask is made between two graphs; where there must be one graph, torch says which function it cannot trace."""
    eager, other = two(transformers.Gemma3ForConditionalGeneration, gemma3(), device, dtype)
    named = {"input_ids": tokens_of(2, 20, device=device) % 90, "token_type_ids": spans(device), "use_cache": False}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_as_data"), torch.no_grad():
        compiled(other)(**named)
    torch._dynamo.reset()
    check(eager, torch.compile(other, backend="aot_eager"), device, **named)
    torch._dynamo.reset()
    eager, other = pair(CONFIGS["llama"], device, "f3", dtype)
    mask = added(four(device), dtype)
    check(eager, torch.compile(other, backend="aot_eager"), device, named["input_ids"], attention_mask=mask, use_cache=False)
