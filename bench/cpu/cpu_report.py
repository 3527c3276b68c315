# SPDX-License-Identifier: Apache-2.0
"""What bench/cpu/cpu_accuracy.py and bench/cpu/cpu_memory.py share: the calls that are compared, and where they ran."""
import datetime
import pathlib
import subprocess

import flash3
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import ROOT

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _torch(backend):
    def call(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return call


# Functions of (q, k, v), each [batch, seq, heads, dim].
CALLS = {"flash3": flash3.attention, "torch_flash": _torch(SDPBackend.FLASH_ATTENTION), "torch_math": _torch(SDPBackend.MATH)}


def _cpu():
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "a CPU")


def about():
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"device": f"{_cpu()}, {flash3.backends()['cpu']}", "torch": torch.__version__, "flash3": flash3.version(), "commit": commit,
            "date": datetime.date.today().isoformat()}
