# SPDX-License-Identifier: Apache-2.0
"""What flash_attn_interface can do, in the words of FlashAttention-3's build flags: True is what a call would be refused for."""

_DISABLED = {"CLUSTER", "SM8x"}
_FLAGS = ("BACKWARD", "SPLIT", "PAGEDKV", "APPENDKV", "LOCAL", "SOFTCAP", "PACKGQA", "FP16", "FP8", "VARLEN", "CLUSTER",
          "HDIM64", "HDIM96", "HDIM128", "HDIM192", "HDIM256", "SM8x", "HDIMDIFF64", "HDIMDIFF192")

CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{flag}": flag in _DISABLED for flag in _FLAGS}}


def show():
    for flag, disabled in CONFIG["build_flags"].items():
        print(f"{flag}: {disabled}")
