#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# make aarch64: builds the CPU backend and the program for Arm64 on this machine, and tries them in qemu: attention on the real input,
# compared with the oracle, and cases of the table in every dtype. What it needs is there after scripts/setup.sh aarch64.
set -euo pipefail
cd "$(dirname "$0")/.."

for command in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$command" >/dev/null || { echo "aarch64: $command is not there: scripts/setup.sh aarch64" >&2; exit 1; }
done
cmake --preset aarch64
cmake --build --preset aarch64

flash3=(qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/bin/flash3)
"${flash3[@]}" info
"${flash3[@]}" run --input data/minilm_layer0.safetensors --check
for filter in fp32 fp16 bf16 e4m3; do
  "${flash3[@]}" verify --level quick --filter "$filter/" --filter /d64/
done
"${flash3[@]}" verify --level quick --backward --filter bf16/ --filter /d64/
