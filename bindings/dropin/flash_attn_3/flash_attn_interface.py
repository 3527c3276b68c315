# SPDX-License-Identifier: Apache-2.0
"""The same module as the top-level flash_attn_interface: two copies would be two of everything."""
import sys

import flash_attn_interface

sys.modules[__name__] = flash_attn_interface
