# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's package name, over flash3."""
from . import _C  # registers torch.ops.flash_attn_3

__version__ = "3.0.0"
