# SPDX-License-Identifier: Apache-2.0
"""Results as JSON with a row on a line, so that a change of one measurement changes one line, and the commit that they are of."""
import json
import pathlib
import subprocess

from bench import ROOT


def commit_of(given, error):
    """Where the library comes from; a result without it is worth nothing."""
    if given is not None:
        return given.strip() or error("--commit is empty; it must name the commit that the library was built from")
    try:
        git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
        return git.stdout.strip() or error("git names no commit; give --commit")
    except (OSError, subprocess.CalledProcessError):
        return error("there is no git here to name the commit that the library was built from; give --commit")


def _is_table(value):
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(items) > 0 and all(isinstance(item, (dict, list)) for item in items)


def text_of(report):
    """The report as JSON: each entry of the outermost object on a line, and each row of a table among them.

    A table is a list or an object whose items are all lists or objects.
    """
    def lines(value, indent):
        if not _is_table(value):
            return json.dumps(value)
        pad = " " * (indent + 1)
        if isinstance(value, list):
            return "[\n" + ",\n".join(pad + json.dumps(row) for row in value) + f"\n{' ' * indent}]"
        return "{\n" + ",\n".join(f"{pad}{json.dumps(name)}: {json.dumps(row)}" for name, row in value.items()) + f"\n{' ' * indent}}}"

    if not isinstance(report, dict):
        return lines(report, 0) + "\n"
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {lines(value, 1)}" for name, value in report.items()) + "\n}\n"


def write(path, report):
    """Writes the report to a file."""
    pathlib.Path(path).write_text(text_of(report), encoding="utf-8")
