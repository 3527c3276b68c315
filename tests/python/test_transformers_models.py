# SPDX-License-Identifier: Apache-2.0
"""bench/cpu/transformers_models.py on a few classes: what it finds equal is, it notices what is not, and its table reads the file."""
import json
import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from conftest import ROOT


@pytest.mark.parametrize("name, kind", [("GptOssForCausalLM", "causal"), ("Gemma2ForCausalLM", "causal"), ("ViTModel", "base"),
                                        ("CLIPTextModel", "base")])
def test_a_class(script, name, kind):
    tool = script("cpu.transformers_models")
    assert tool.classes([name]) == ({name: kind}, 0)
    result = json.loads(json.dumps(tool.try_class(name, kind)))
    asked = {"forward", "gradients"} | ({"padding"} if name != "ViTModel" else set()) | \
        ({"generate", "batching"} if kind == "causal" else set())
    assert {key: result[key] for key in asked} == dict.fromkeys(asked, "equal")
    assert result["calls"] == 2 and result["difference_of_uniform_attention"] > 100 * result["error"]
    assert result["sinks"] == (name == "GptOssForCausalLM")


def test_what_is_not_equal_is_noticed(script):
    tool = script("cpu.transformers_models")
    models = tool.Models("LlamaForCausalLM")
    given = next(iter(script("cpu.tiny_configs").inputs(models.eager)))
    with models.counted(softmax_scale=0.2):
        found = {"forward": tool.attempt(lambda: models.run(models.eager, given), lambda: models.run(models.flash3, given), tool.close(1e-4)),
                 "padding": tool.with_padding(models, given), "gradients": tool.gradients(models, given)}
    assert {text.partition(":")[0] for text in found.values()} == {"differs"}, found

    def fails(error):
        raise error

    for error, text in ((NotImplementedError("no"), "refused: NotImplementedError: no"), (KeyError("x"), "error: KeyError: 'x'")):
        assert tool.attempt(lambda: 1, lambda: fails(error), tool.same_tokens) == text
    assert tool.attempt(lambda: fails(ValueError("so")), lambda: 1, tool.same_tokens) == "eager: ValueError: so"
    assert tool.attempt(lambda: [1], lambda: [2], tool.same_tokens) == "differs: other tokens"


def test_a_class_that_cannot_be_made(script):
    assert script("cpu.transformers_models").try_class("GPTNeoForCausalLM", "causal") == {
        "class": "GPTNeoForCausalLM", "kind": "causal", "model": "KeyError: 'f3'"}


def test_run_and_table(script, tmp_path):
    tool, file = script("cpu.transformers_models"), tmp_path / "models.json"
    with mock.patch.object(sys, "argv", ["tool", "--only", "ViTMSNModel", "GPTNeoForCausalLM", "--json", str(file)]):
        tool.main()
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["torch"] == torch.__version__ and {r["class"] for r in report["transformers_models"]} == {"ViTMSNModel", "GPTNeoForCausalLM"}
    text = script("report.models_table").models_tables((ROOT / "bench/results/x.json", report))
    assert "| have a flash path | 1 | 1 |" in text and "Of the other models, 1 classes are equal in all calls." in text
    assert "1 classes were not compared" in text and "<summary>0 causal language models have sinks</summary>\n\n\n\n</details>" in text
    rows = [line for line in script("report.models_table").every_model(report).splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == ["| ViTMSNModel", "| GPTNeoForCausalLM"]
    assert rows[1].endswith("|  |") and rows[2].endswith("| KeyError: 'f3' |")
