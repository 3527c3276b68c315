#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every model class of the installed transformers that has a flash path, on flash3: small, random, in float32 on the CPU.

    PYTHONPATH=build/release/python python3 -m bench.cpu.transformers_models [--json FILE] [--only PATTERN …]

Of each class that transformers' AutoModelForCausalLM and AutoModel can make, if its _supports_flash_attn is true, two models of the
same weights are made (bench/cpu/tiny_configs.py): one with transformers' eager attention, one with flash3's ("f3"). Compared are the results
of a call without padding and of one with it, the gradients, what generate() adds to a padded batch, and what generate_batch() adds to
three prompts. What eager attention cannot do itself is not held against either. So that equality says something, a third model gives each
key the same weight, and the difference that this makes must be a hundred times that between the first two. bench/report/tables.py makes a table of the
file.
"""
import argparse
import contextlib
import copy
import datetime
import json
import pathlib
import re
import selectors
import subprocess
import sys
import time
import warnings
from unittest import mock

from bench import environment, result_file

PROMPTS = (5, 17, 1)
SECONDS = 120  # for one class
NEW_TOKENS = 6


class Failed(Exception):
    """A result that is not flash3's to have: what is written in its place."""


def first_line(error):
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text[:160]}"


def classes(patterns=None):
    """{name: kind} of the classes, the causal language models first; and how many have no flash path. Of the names that match a pattern:
    to look at a class is to import it, and all take a quarter of a minute."""
    import transformers
    from transformers.models.auto import modeling_auto
    found, without = {}, 0
    for kind, names in (("causal", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), ("base", modeling_auto.MODEL_MAPPING_NAMES)):
        encoders = {*modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
                    *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}
        of_language_models = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - encoders
        for model_type, several in names.items():
            for name in ([several] if isinstance(several, str) else several):
                if kind == "base" and model_type in of_language_models or name in found:
                    continue
                if patterns and not any(re.fullmatch(p, name) for p in patterns):
                    continue
                if getattr(getattr(transformers, name, None), "_supports_flash_attn", False):
                    found[name] = kind
                else:
                    without += 1
    return found, without


def results_of(output):
    """The floating-point tensors of what a model returns, but caches."""
    import torch
    tensors = []

    def visit(x):
        if isinstance(x, torch.Tensor):
            if x.is_floating_point() and x.dim() > 0:
                tensors.append(x)
        elif isinstance(x, dict):
            for name, part in x.items():
                if "past_key_values" not in name and name != "cache":  # as transformers 5.24 calls it
                    visit(part)
        elif isinstance(x, (list, tuple)):
            for part in x:
                visit(part)
    visit(output)
    if not tensors:
        raise Failed("the model returns no tensors")
    return tensors


class Models:
    """The three models of a class, and the calls that flash3 got."""

    def __init__(self, name):
        import torch
        import transformers
        import flash3.integrations.transformers as integration
        from bench.cpu.tiny_configs import tiny_config
        self.torch, self.integration = torch, integration
        integration.register()
        model_class = getattr(transformers, name)
        config = tiny_config(model_class)
        torch.manual_seed(0)
        self.eager = model_class._from_config(copy.deepcopy(config), attn_implementation="eager").float().eval()
        for parameter in self.eager.parameters():  # attention that is neither almost uniform nor left out
            if not parameter.any():
                parameter.data.normal_(0, 0.3)
            elif parameter.dim() > 1:
                parameter.data.mul_(4)
        self.flash3 = model_class._from_config(copy.deepcopy(config), attn_implementation="f3").float().eval()
        self.flash3.load_state_dict(self.eager.state_dict())
        self.calls = 0

    @contextlib.contextmanager
    def counted(self, **change):
        """Counts calls that reach flash3; change: options of attention that are others."""
        with contextlib.ExitStack() as stack:
            for name in ("attention", "attention_with_kv_cache"):
                attend = getattr(self.integration, name)

                def call(*args, attend=attend, **options):
                    self.calls += 1
                    return attend(*args, **{**options, **change})
                stack.enter_context(mock.patch.object(self.integration, name, call))
            yield

    def run(self, model, given, grad=False):
        self.torch.manual_seed(2)
        with self.torch.set_grad_enabled(grad):
            return results_of(model(**given))


def worst(got, wanted, rows=None):
    """The largest difference of two lists of tensors, each over its own largest element, or a thousandth of the largest of all."""
    if [x.shape for x in got] != [x.shape for x in wanted]:
        raise ValueError(f"shapes {[tuple(x.shape) for x in got]} but eager's are {[tuple(x.shape) for x in wanted]}")
    def pick(x):
        if rows is None or x.dim() < 2 or x.shape[1] != rows.shape[1] or len(x) % len(rows):
            return x
        return x[rows.repeat_interleave(len(x) // len(rows), 0)]
    pairs = [(pick(a), pick(b)) for a, b in zip(got, wanted)]
    pairs = [(a, b) for a, b in pairs if b.numel()]
    if not all(b.isfinite().all() for _, b in pairs):
        raise Failed("eager's results are not finite")
    least = 1e-3 * max((float(b.abs().max()) for _, b in pairs), default=0.0)
    return max((float((a - b).abs().max()) / max(float(b.abs().max()), least, 1e-12) if a.isfinite().all() else float("inf")
                for a, b in pairs), default=0.0)


def attempt(ask_eager, ask_flash3, compare):
    """What came of one thing that both models were asked for."""
    try:
        wanted = ask_eager()
    except Exception as error:  # noqa: BLE001, whatever a model may raise
        return f"eager: {first_line(error)}"
    try:
        got = ask_flash3()
    except NotImplementedError as error:
        return f"refused: {first_line(error)}"
    except Exception as error:  # noqa: BLE001
        return f"error: {first_line(error)}"
    try:
        return compare(got, wanted)
    except Failed as error:
        return f"eager: {error}"
    except Exception as error:  # noqa: BLE001
        return f"error: {first_line(error)}"


def close(limit, rows=None):
    def compare(got, wanted):
        error = worst(got, wanted, rows)
        return "equal" if error <= limit else f"differs: by {error:.1e} of the largest element"
    return compare


def same_tokens(got, wanted):
    return "equal" if got == wanted else "differs: other tokens"


def forward(models, result):
    """The call without padding; its inputs. None: there are none to go on with."""
    from bench.cpu import tiny_configs
    why = "no inputs"
    for given in tiny_configs.inputs(models.eager):
        try:
            wanted = models.run(models.eager, given)
            break
        except Exception as error:  # noqa: BLE001
            why = why if why != "no inputs" else first_line(error)
    else:
        result["inputs"] = f"none of the tool's: {why}"
        return None
    result["inputs"] = ", ".join(given)

    def compare(got, wanted):
        result["calls"], result["error"] = models.calls, (error := worst(got, wanted))
        if not models.calls:
            return "no attention: flash3 is not called"
        with models.counted(softmax_scale=1e-6):
            result["difference_of_uniform_attention"] = control = worst(models.run(models.flash3, given), wanted)
        if error > 1e-4:
            return f"differs: by {error:.1e} of the largest element"
        return "equal" if control > 100 * error else f"unclear: uniform attention differs by {control:.1e}, flash3 by {error:.1e}"

    with models.counted():
        result["forward"] = attempt(lambda: wanted, lambda: models.run(models.flash3, given), compare)
    return given


def left_padded(models, given):
    """Tokens with padding before the first row, and their mask. A text may have several rows of tokens, as a MusicGen's."""
    ids = given["input_ids"]
    mask = models.torch.ones_like(ids[:2])
    mask[0, :7] = 0
    return ids * mask.repeat_interleave(len(ids) // 2, 0), mask


def with_padding(models, given):
    ids, mask = left_padded(models, given)
    padded = {**given, "input_ids": ids, "attention_mask": mask}
    return attempt(lambda: models.run(models.eager, padded), lambda: models.run(models.flash3, padded),
                   close(1e-4, mask.bool()))


def gradients(models, given):
    def ask(model):
        model.zero_grad()
        sum((x * models.torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in models.run(model, given, True)).backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        if not found:
            raise Failed("no parameter has a gradient")
        return found
    return attempt(lambda: ask(models.eager), lambda: ask(models.flash3), close(1e-3))


def generation(models, given):
    ids, mask = left_padded(models, given)

    def ask(model):
        model.generation_config.cache_implementation = None
        with models.torch.no_grad():
            return model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
                                  eos_token_id=2).tolist()
    return attempt(lambda: ask(models.eager), lambda: ask(models.flash3), same_tokens)


def generate_batch(models, model, prompts):
    import transformers
    from transformers.generation.continuous_batching import cache
    batching = transformers.ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=32)
    config = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2, pad_token_id=0)
    memory = models.torch.device("cpu"), 4 << 30, 0, 0  # transformers asks psutil, which need not be installed
    with mock.patch.object(cache, "get_device_and_memory_breakdown", return_value=memory):
        outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    found = {tuple(o.prompt_ids): o for o in outputs.values()}
    if len(found) != len(prompts) or any(o.error for o in found.values()):
        raise RuntimeError(f"{len(found)} of {len(prompts)} prompts, errors {[o.error for o in found.values()]}")
    return [list(found[tuple(prompt)].generated_tokens) for prompt in prompts]


def batching(models):
    """Continuous batching: flash3's tokens against those of plain eager generation, if eager's own batching has those."""
    generator = models.torch.Generator().manual_seed(3)
    prompts = [models.torch.randint(40, 128, (n,), generator=generator).tolist() for n in PROMPTS]

    def alone():
        with models.torch.no_grad():
            plain = [models.eager.generate(models.torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
                                           eos_token_id=2)[0, len(prompt):].tolist() for prompt in prompts]
        if generate_batch(models, models.eager, prompts) != plain:
            raise Failed("generate_batch has other tokens than generate")
        return plain
    return attempt(alone, lambda: generate_batch(models, models.flash3, prompts), same_tokens)


def try_class(name, kind):
    result = {"class": name, "kind": kind}
    try:
        models = Models(name)
    except Exception as error:  # noqa: BLE001
        result["model"] = first_line(error)
        return result
    compare_all(models, kind, result)
    return result


def compare_all(models, kind, result):
    """What came of each thing that the models were asked for, into result."""
    result["parameters"] = sum(p.numel() for p in models.eager.parameters())
    result["sinks"] = any("sink" in field for field, _ in models.eager.named_parameters())
    given = forward(models, result)
    if given is None:
        return
    result["gradients"] = gradients(models, given)
    if "input_ids" in given:
        result["padding"] = with_padding(models, given)
    if kind == "causal":
        result["generate"] = generation(models, given)
        result["batching"] = batching(models)


def work(names):
    """One line of JSON for each class, as they come."""
    warnings.simplefilter("ignore")
    import logging

    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr  # models print
    for item in names:
        name, kind = item.split(":")
        print(json.dumps({"begun": name}), file=out, flush=True)
        print(json.dumps(try_class(name, kind)), file=out, flush=True)


def run_all(found, say):
    """The results of workers, which are replaced where a class takes too long or ends them."""
    left, results = list(found), []
    while left:
        worker = subprocess.Popen([sys.executable, "-m", "bench.cpu.transformers_models", "--work", *(f"{name}:{found[name]}" for name in left)],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment())
        with selectors.DefaultSelector() as selector:
            selector.register(worker.stdout, selectors.EVENT_READ)
            begun = None
            while True:
                if not selector.select(SECONDS):
                    worker.kill()
                    results.append({"class": begun, "kind": found[begun], "model": f"no result in {SECONDS} s"})
                    break
                line = worker.stdout.readline()
                if not line:
                    if begun is not None:
                        results.append({"class": begun, "kind": found[begun], "model": f"the process ended with {worker.wait()}"})
                    break
                said = json.loads(line)
                begun = said.get("begun")
                if begun is None:
                    results.append(said)
                    say(said)
        worker.wait()
        if not results and begun is None:
            raise SystemExit("the worker ended before its first class")
        done = {result["class"] for result in results}
        left = [name for name in left if name not in done]
    return results


def versions():
    import torch
    import transformers
    import flash3
    return {"transformers": transformers.__version__, "torch": torch.__version__, "flash3": flash3.__version__,
            "python": ".".join(map(str, sys.version_info[:3])), "backend": flash3.backends()["cpu"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the results go")
    parser.add_argument("--only", nargs="*", help="patterns of whole class names")
    parser.add_argument("--commit")
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        return work(args.work)
    found, without = classes(args.only)
    began = time.time()

    def say(result):
        words = {key: str(value)[:60] for key, value in result.items() if key not in ("class", "kind", "sinks")}
        print(result["class"], words, flush=True)

    results = run_all(found, say)
    report = {"date": datetime.date.today().isoformat(), "commit": args.commit, **versions(), "without_flash_path": without,
              "seconds": round(time.time() - began), "transformers_models": results}
    if args.json:
        result_file.write(args.json, report)


if __name__ == "__main__":
    sys.exit(main())
