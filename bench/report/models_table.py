# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/transformers.md, from what bench/cpu/transformers_models.py wrote."""
import collections
import re

from bench.report.parts import NOT_MEASURED, source

KINDS = {"causal": "causal language models", "base": "other models"}
ASKED = {"forward": "a call", "padding": "a call with padding", "gradients": "gradients", "generate": "`generate`",
         "batching": "`generate_batch`"}
# Beginnings of what came of one, in the order in which a class is told of.
LEVELS = ("differs", "error", "refused", "unclear", "no attention", "eager")


def came_of(result):
    """{what was asked: what came of it}."""
    return {name: result[name] for name in ASKED if name in result}


def level(text):
    return text.partition(":")[0]


def reason(text):
    """Without what it begins with and the exception's name: one sentence for all classes that have the same, whatever their sizes."""
    text = re.sub(r"^[\w' ]+: ", "", text)
    text = re.sub(r"^\w*(Error|Failed|TooLarge): ", "", text)
    text = re.sub(r"\d+ million", "… million", re.sub(r"\((\d+, )+\d+\)", "(…)", text))
    text = re.sub(r", not the model's .*", ", not the model's own", text)  # however much of it the report holds
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def summary(results):
    header = ["", *KINDS.values()]
    count = lambda kind, test: sum(1 for r in results if r["kind"] == kind and test(r))
    rows = [["have a flash path", *(count(kind, lambda r: True) for kind in KINDS)],
            ["were made small, and run with eager attention", *(count(kind, lambda r: "forward" in r) for kind in KINDS)]]
    for name, words in ASKED.items():
        can = [count(kind, lambda r: name in r and level(r[name]) != "eager") for kind in KINDS]
        equal = [count(kind, lambda r: r.get(name) == "equal") for kind in KINDS]
        rows.append([f"{words}: equal, of those that eager attention can do", *(f"{e} of {c}" if c else "" for e, c in zip(equal, can))])
    return lines(header, rows)


def lines(header, rows):
    first, *rest = ("| " + " | ".join(str(cell) for cell in row) + " |" for row in (header, *rows))
    return "\n".join([first, "|" + "---|" * len(header), *rest])


def names(classes):
    return ", ".join(sorted(classes, key=str.lower))


def folded(title, classes):
    """The names of many classes, to be unfolded by who looks for one."""
    return f"<details>\n<summary>{len(classes)} {title}</summary>\n\n{names(classes)}\n\n</details>"


def deviations(results):
    """Rows of what is neither equal nor beyond eager attention: the reason, the classes, what was asked."""
    groups = collections.defaultdict(lambda: ([], set()))
    for result in results:
        for name, text in came_of(result).items():
            if text != "equal" and level(text) != "eager":
                classes, asked = groups[level(text), reason(text)]
                asked.add(name)
                if result["class"] not in classes:
                    classes.append(result["class"])
    order = sorted(groups.items(), key=lambda item: (LEVELS.index(item[0][0]), item[0][1]))
    return lines(["", "why", "classes", "asked for"],
                 [[kind, why, names(classes), ", ".join(ASKED[name] for name in ASKED if name in asked)]
                  for (kind, why), (classes, asked) in order])


def every_model(report):
    """A row for each class: what came of each call, or why it was not compared."""
    results = sorted(report["transformers_models"], key=lambda result: (result["kind"], result["class"].lower()))
    cell = lambda text: text.replace("|", "\\|").replace("\n", " ")
    rows = [[result["class"], result["kind"], *(cell(result.get(name, "")) for name in ASKED),
             "" if "forward" in result else cell(result.get("model") or result["inputs"])] for result in results]
    return lines(["class", "kind", *ASKED.values(), "not compared"], rows)


def models_tables(item):
    """item: (path, report), or None."""
    if item is None:
        return NOT_MEASURED
    path, report = item
    results = report["transformers_models"]
    equal = lambda kind, test: [r["class"] for r in results if r["kind"] == kind and "forward" in r and test(r) and
                                all(text == "equal" or level(text) == "eager" for text in came_of(r).values())]
    parts = [f"From {source(path, report, '../')}: transformers {report['transformers']}, torch {report['torch']}, CPU "
             f"({report['backend']}). {report['without_flash_path']} more classes have no flash path in transformers.",
             summary(results)]
    if worst := [r["error"] for r in results if r.get("forward") == "equal"]:
        parts.append(f"The largest difference of a call that counts as equal: {max(worst):.1e} of the result's largest element.")
    batched = lambda r: r.get("batching") == "equal"
    parts += [folded("causal language models are equal in all calls, continuous batching too", equal("causal", batched)),
              folded("more causal language models are equal in all that eager attention does", equal("causal", lambda r: not batched(r))),
              folded("causal language models have sinks", [r["class"] for r in results if r.get("sinks") and r["kind"] == "causal"]),
              f"Of the other models, {len(equal('base', lambda r: True))} classes are equal in all calls.",
              "## Refused, or otherwise not equal", deviations(results)]
    without = [r["class"] for r in results if "forward" not in r]
    parts.append(f"{len(without)} classes were not compared: the tool makes no small model or no inputs of them, or transformers chooses attention by a "
                 "table that has no other names (`KeyError: 'f3'`).")
    return "\n\n".join(parts)
