# SPDX-License-Identifier: Apache-2.0
"""flash3 beside the attention of other libraries: `python -m flash3.bench run` measures, `python -m flash3.bench plot` draws.

run: the points of the FlashAttention papers (on a GPU 16k tokens, hidden size 2048, bf16; on a CPU fewer), with all libraries
that are installed interleaved in one process; the median of the samples counts. plot: speed over sequence length, per head dim and
mask, from what run, bench/gpu/peers.py, or `flash3 bench --suite fp8 --json` wrote; error from what bench/cpu/cpu_accuracy.py wrote, and
memory from bench/cpu/cpu_memory.py's; the timeline of a kernel's block from what `flash3 trace --output` wrote. As SVG, for a light page and for a dark one.
"""
