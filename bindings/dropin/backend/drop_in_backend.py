# SPDX-License-Identifier: Apache-2.0
"""What pip calls to build the drop-in: scikit-build-core, after a word about what pip does not bring with it."""
import sys

from scikit_build_core import build as hooks
from scikit_build_core.build import *  # noqa: F403  the hooks that stay as they are

LINE = ("flash3-drop-in: transformers' \"flash_attention_3\" and Transformer Engine also ask for a distribution flash_attn_3: "
        "pip install ./bindings/dropin/metadata")


def say(line):
    """Tells the user in spite of pip, which shows a build's output with -v alone."""
    try:
        with open("/dev/tty", "w", encoding="utf-8") as terminal:
            terminal.write(f"\n{line}\n")
    except OSError:
        print(line, file=sys.stderr, flush=True)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    say(LINE)
    return hooks.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    say(LINE)
    return hooks.build_editable(wheel_directory, config_settings, metadata_directory)
