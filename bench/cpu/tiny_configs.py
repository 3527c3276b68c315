# SPDX-License-Identifier: Apache-2.0
"""Small random models of transformers' classes, made by rules for the names that its configurations share, and inputs for them."""
import inspect
import re

import torch
import torch.nn.functional as F
import transformers

HIDDEN, HEADS, HEAD_DIM, VOCAB, SEQ, IMAGE = 64, 4, 16, 128, 20, 64
FIRST_TOKEN = 40  # smaller ones are left to special tokens
MOST_PARAMETERS = 40_000_000

# What a field of a whole number becomes where it is larger: the first rule whose pattern is its whole name.
_RULES = [(re.compile(pattern), value) for pattern, value in (
    (r"num_nextn_predict_layers|num_mtp_layers|mtp_num_layers|.*mtp_num_hidden_layers", 0),
    (r"num_kv_shared_layers|num_hash_layers|first_k_dense_replace|num_dense_layers", 1),
    (r".*vocab_size(_per_layer_input)?", VOCAB),
    (r"(linear_)?(num_)?(n_)?(mamba_n|mamba_num|linear_num_value)_?heads|linear_num_value_heads", 8),
    (r"linear_num_key_heads", 4),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim|ssm_head_dim", 16),
    (r"mamba_d_state|ssm_state_size|mamba_dt_rank|time_step_rank", 16),
    (r"mamba_n_groups|n_groups|mamba_ngroups|mamba_num_groups", 1),
    (r"num_mem_blocks|num_codebooks|.*num_code_groups", 2),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|layers|num_blocks|depth)", 2),
    (r"(.*_)?(num_attention_heads|num_heads|n_heads?|attention_heads|nhead)", HEADS),
    (r"n_group|topk_group|n_groups_moe", 1),
    (r"(.*_)?(n_routed_experts|num_experts|num_local_experts|moe_num_experts|num_expert)", 4),
    (r"(.*_)?(num_experts_per_tok|num_experts_per_token|moe_top_?k|moe_k|top_k_experts|moe_topk|num_selected_experts)", 2),
    (r"(.*_)?(n_shared_experts|num_shared_experts|moe_num_shared_experts)", 1),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"(.*_)?(q_lora_rank|kv_lora_rank|qk_nope_head_dim|qk_rope_head_dim|v_head_dim|head_dim|head_size|d_kv|kv_channels|"
     r"attention_head_size|linear_key_head_dim|linear_value_head_dim|lora_rank.*|.*low_rank_dim)", HEAD_DIM),
    (r"rotary_dim", 8),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|feed_forward_size|intermediate_dim|mlp_dim|dff|.*ff_size|"
     r"hidden_dim_ffn|ffn_size|intermediate_size_mlp|inner_dim)", HIDDEN),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|projection_dim|proj_dim|out_hidden_size|embedding_dim|"
     r"bottleneck_size|lru_width|output_hidden_size|text_embed_dim|output_dim|projector_dim|decoder_hidden_size|"
     r"per_layer_input|decoder_start_dim|dim|classifier_proj_size|state_size)", HIDDEN),
    (r"(.*_)?(sliding_window|window_size_attention|local_attention|attention_window_size|sliding_window_size)", 8),
    (r"attention_chunk_size", 8),
    (r"attn_layer_period|attention_layer_period|full_attention_interval|global_attn_every_n_layers", 2),
    (r"attn_layer_offset", 1),
    (r"hybrid_block_size|chunk_size|mamba_chunk_size", 16),
    (r"max_source_positions", 64),
    (r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_target_positions|max_sequence_length|max_seq_len|seq_length|"
     r"max_seq_length)", 256),
    (r"(.*_)?image_size", IMAGE), (r"(.*_)?patch_size", 8),
    (r"num_conv_pos_embeddings", 16), (r"num_conv_pos_embedding_groups", 4),
    (r"num_queries|num_query_tokens", 8), (r"num_latents|.*num_latents", 8),
)]
# Where a configuration leaves to the model's repository what it is.
_NONE = [(re.compile(pattern), value) for pattern, value in (
    (r"head_dim", HEAD_DIM), (r"num_key_value_heads", HEADS // 2), (r"n_routed_experts|num_experts|num_local_experts", 4),
    (r"num_experts_per_tok", 2), (r"vocab_size", VOCAB),
    (r"moe_intermediate_size|intermediate_size", HIDDEN), (r"n_shared_experts|n_group|topk_group", 1), (r"num_attention_heads", HEADS))]
# What no rule finds, by the configuration's class.
_MORE = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "CohereCompassTextConfig": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4}
                                                    for kind in ("full_attention", "sliding_attention")}},
    "DbrxAttentionConfig": {"rope_theta": 1e4},
    "EmbeddingGemma2TextConfig": {"global_head_dim": 32},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "Gemma4TextConfig": {"global_head_dim": 32},  # of the real ones 512, which is more than flash3 has
    "Gemma4UnifiedTextConfig": {"global_head_dim": 32},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "MimiConfig": {"upsample_groups": HIDDEN},
    "PocketTTSAudioTokenizerConfig": {"upsample_groups": HIDDEN},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ZambaConfig": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "XmodConfig": {"default_language": "en_XX"},
}
_KV_HEADS = re.compile(r"(.*_)?(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|kv_n_heads|n_kv_heads|"
                       r"num_query_groups|attention_kv_heads)")
_HEADS_OF = re.compile(r"num_attention_heads|num_heads|n_heads?|.*_attention_heads")


def _small(name, value, config):
    """The value of a field of whole numbers."""
    if _KV_HEADS.fullmatch(name):
        heads = max([n for field, n in vars(config).items() if _HEADS_OF.fullmatch(field) and isinstance(n, int)], default=value)
        return HEADS if value >= heads else min(value, HEADS // 2)
    for pattern, small in _RULES:
        if pattern.fullmatch(name):
            return min(value, small)
    return value


def _layers(config, fields):
    """The layers to keep: of each kind the first, and two at least. None: there is no list of kinds."""
    count = next((fields[n] for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if isinstance(fields.get(n), int)), None)
    lists = [v for v in fields.values() if isinstance(v, (list, tuple)) and len(v) == count and count > 2]
    if not lists:
        return None
    kinds, kept = set(), []
    for n, kind in enumerate(zip(*(map(repr, x) for x in lists if len(set(map(repr, x))) <= 4))):
        if kind not in kinds and len(kept) < 6:
            kinds.add(kind)
            kept.append(n)
    for n in range(count):
        if len(kept) < 2 and n not in kept:
            kept.append(n)
    return sorted(kept)


def _rope(parameters, has_sections):
    """Parameters of rotary embeddings whose lists belong to the head dim."""
    small = {}
    pairs = int(HEAD_DIM // 2 * (parameters.get("partial_rotary_factor") or 1.0))
    for name, value in parameters.items():
        if isinstance(value, dict):
            small[name] = _rope(value, has_sections)
        elif name in ("short_factor", "long_factor"):
            small[name] = list(value[:pairs])
        elif name == "original_max_position_embeddings":
            small[name] = 256
        else:
            small[name] = value
    if has_sections and "rope_type" in parameters:
        third = pairs * 3 // 8
        small["mrope_section"] = [pairs - 2 * third, third, third]
    return small


def shrunk(config, tokens=None):
    """A small configuration of config's class. tokens: an iterator over numbers for special tokens."""
    tokens = tokens or iter(range(3, FIRST_TOKEN))
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    made, kept = {}, _layers(config, fields)
    count = next((fields[n] for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if isinstance(fields.get(n), int)), None)
    for name, value in fields.items():
        if isinstance(value, transformers.PreTrainedConfig):
            made[name] = shrunk(value, tokens)
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            made[name] = None if value is None and name == "bos_token_id" else ("pad_token_id", "bos_token_id", "eos_token_id").index(name)
        elif re.fullmatch(r".*token_(id|index)|.*_token", name) and isinstance(value, int) and not isinstance(value, bool):
            made[name] = next(tokens) if value >= FIRST_TOKEN else value
        elif value is None:
            made.update((name, small) for pattern, small in _NONE if pattern.fullmatch(name))
        elif isinstance(value, dict) and "rope" in name:
            has_sections = "mrope_section" in value or "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ())
            made[name] = _rope(value, has_sections)
        elif isinstance(value, int) and not isinstance(value, bool):
            small = _small(name, value, config)
            if kept and value == count and name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
                small = len(kept)
            if small != value:
                made[name] = small
        elif isinstance(value, (list, tuple)) and value:
            if kept and len(value) == count:
                made[name] = [value[n] for n in kept]
            elif name == "conv_dim" and all(isinstance(n, int) for n in value):
                made[name] = [32] * len(value)
            elif name in ("image_size",):
                made[name] = [IMAGE] * len(value)
    accepted = inspect.signature(type(config).__init__).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    made = {name: value for name, value in made.items() if everything or name in accepted}
    return type(config)(**{**made, **_MORE.get(type(config).__name__, {})})


class TooLarge(Exception):
    pass


def tiny_config(model_class):
    config = shrunk(model_class.config_class())
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_class(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise TooLarge(f"{parameters / 1e6:.0f} million parameters after shrinking")
    return config


def _sizes(config, *names):
    """The first of these fields in config or one of its parts."""
    for part in (config, *(v for v in vars(config).values() if isinstance(v, transformers.PreTrainedConfig))):
        for name in names:
            if (value := getattr(part, name, None)) is not None:
                return value
    return None


def _patches(model, config):
    """Images of vision models that take them as patches in one row, with the numbers of patches in each direction."""
    names = [p for p in inspect.signature(model.forward).parameters if p not in ("args", "kwargs")]
    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in names), None)
    if grid is None or names[0] == "input_ids":
        return []
    channels, patch = _sizes(config, "in_channels", "in_chans", "num_channels") or 3, _sizes(config, "patch_size")
    width = channels * (_sizes(config, "temporal_patch_size") or 1) * patch * patch
    thw = torch.tensor([[1, 4, 4], [1, 4, 8]])
    return [{names[0]: torch.randn(int(thw.prod(1).sum()), width, generator=torch.Generator().manual_seed(1)), grid: thw}]


def inputs(model):
    """Candidates for a call of the model, the likeliest first: dicts of tensors."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    vocab = min(VOCAB, _sizes(config, "vocab_size") or VOCAB)
    rows = 2 * (getattr(config, "num_codebooks", None) or 1) if "Musicgen" in type(model).__name__ else 2
    first = FIRST_TOKEN if vocab > 2 * FIRST_TOKEN else 3
    ids = lambda: F.pad(torch.randint(first, vocab, (rows, SEQ - 1), generator=generator), (0, 1), value=2)  # what ends a text
    noise = lambda *shape: torch.randn(shape, generator=generator)
    size = _sizes(config, "image_size") or IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels, bins = _sizes(config, "num_channels") or 3, _sizes(config, "num_mel_bins") or 80
    frames = 2 * (_sizes(config, "max_source_positions") or 64)
    text, decoder = {"input_ids": ids()}, {"decoder_input_ids": ids()}
    pixels = {"pixel_values": noise(2, channels, height, width)}
    several = _sizes(config, "num_frames", "frames_per_clip") or 2
    waves = {"input_values": noise(2, 4000)}
    spectra = {"input_features": noise(2, bins, frames)}
    kinds = {
        "input_ids": [text, text | decoder, text | pixels, text | pixels | {"attention_mask": torch.ones(2, SEQ, dtype=torch.long)}],
        "pixel_values": [pixels, text | pixels, {"pixel_values": noise(2, several, channels, height, width)}],
        "input_features": [spectra, spectra | decoder, {"input_features": noise(2, frames, bins)},
                           {"input_features": noise(2, frames, bins)} | decoder],
        "input_values": [waves, waves | decoder, {"input_values": noise(2, _sizes(config, "max_length") or 100, bins)},
                         {"input_values": noise(2, 1, 4000)}],
        "pixel_values_videos": [{"pixel_values_videos": noise(2, several, channels, height, width)}]}
    likely = kinds.get(model.main_input_name, [])
    if "Mimi" in type(model).__name__ or "TTS" in type(model).__name__:
        likely = likely[3:]
    return _patches(model, config) + likely + [x for kind in kinds.values() if kind is not likely for x in kind]
