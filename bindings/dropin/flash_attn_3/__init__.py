# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's package name, over flash3."""
import pathlib

_others = sorted(pathlib.Path(__file__).parent.glob("_C*.so"))
if _others:  # it would be loaded as _C, in place of ours
    raise ImportError(f"FlashAttention-3 and flash3-drop-in are installed in one place ({_others[0]} is not of flash3-drop-in), and have "
                      "the same file names; pip uninstall flash_attn_3 flash3-drop-in, then install the one that you want")

from . import _C  # noqa: E402  registers torch.ops.flash_attn_3

__version__ = "3.0.0"
