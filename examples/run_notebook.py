#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of a notebook one after the other, without Jupyter.

    python examples/run_notebook.py examples/tour.ipynb [--write | --check]

Prints what the cells print. --write puts it into the notebook instead, as their outputs; --check fails where an output that stands there is
another, but for cells tagged "varies", whose output tells of the machine or of time. A cell that raises ends the run with its traceback.
"""
import argparse
import contextlib
import io
import json
import pathlib
import sys


def source(cell):
    return "".join(cell["source"])


def run(cell, number, scope):
    """What a code cell prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source(cell), f"cell {number}", "exec"), scope)
    return out.getvalue()


def as_outputs(text):
    return [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}] if text else []


def text_of(cell):
    return "".join(line for output in cell["outputs"] for line in output["text"])


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
        printed = run(cell, number, scope)
        if args.write:
            cell["execution_count"], cell["outputs"] = number, as_outputs(printed)
        elif not args.check:
            print(printed, end="")
        elif printed != text_of(cell) and "varies" not in cell["metadata"].get("tags", ()):
            wrong.append(f"cell {number} prints\n{printed}and the notebook has\n{text_of(cell)}")
    if args.write:
        args.notebook.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n".join(wrong) or f"{len(code)} cells of {args.notebook.name} in order" if args.check else "", end="\n" if args.check else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
