#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of a notebook one after the other, without Jupyter.

    python examples/run_notebook.py examples/tour.ipynb [--write | --check]

Prints what the cells print, and the value of an expression at a cell's end, as Jupyter shows it: as a picture, if it has one. --write puts
both into the notebook instead, as the cells' outputs; --check fails where an output in the notebook is another, except in cells tagged
"varies", whose output depends on the machine or on time. A cell that raises ends the run with its traceback.
"""
import argparse
import ast
import contextlib
import io
import json
import pathlib
import sys


def source(cell):
    return "".join(cell["source"])


def run(cell, number, scope):
    """What a code cell prints, and the value of the expression at its end; None if there is none."""
    out, name = io.StringIO(), f"cell {number}"
    tree = ast.parse(source(cell), name)
    shown = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(out):
        exec(compile(tree, name, "exec"), scope)
        value = eval(compile(shown, name, "eval"), scope) if shown else None
    return out.getvalue(), value


def as_outputs(text, value, number):
    outputs = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}] if text else []
    if value is not None:
        picture = value._repr_svg_() if hasattr(value, "_repr_svg_") else None
        kind, content = ("image/svg+xml", picture) if picture else ("text/plain", repr(value))
        outputs.append({"data": {kind: content.splitlines(keepends=True)}, "execution_count": number, "metadata": {},
                        "output_type": "execute_result"})
    return outputs


def text_of(outputs):
    """The outputs as they are printed, and compared: all but the count."""
    return "".join(line for output in outputs for lines in output.get("data", {"": output.get("text")}).values() for line in lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=pathlib.Path)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true")
    how.add_argument("--check", action="store_true")
    args = parser.parse_args(arguments)
    notebook = json.loads(args.notebook.read_text(encoding="utf-8"))
    scope, wrong = {"__name__": "__main__"}, []
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        outputs = as_outputs(*run(cell, number, scope), number)
        if args.write:
            cell["execution_count"], cell["outputs"] = number, outputs
        elif not args.check:
            print(text_of(outputs), end="")
        elif text_of(outputs) != text_of(cell["outputs"]) and "varies" not in cell["metadata"].get("tags", ()):
            wrong.append(f"cell {number} prints\n{text_of(outputs)}and the notebook has\n{text_of(cell['outputs'])}")
    if args.write:
        args.notebook.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n".join(wrong) or f"{len(code)} cells of {args.notebook.name} in order" if args.check else "", end="\n" if args.check else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
