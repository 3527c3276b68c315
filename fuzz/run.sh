#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the fuzz targets of build/fuzz one after another (make fuzz).
#
#   FUZZ_TARGET   the one to run (default: all)
#   FUZZ_SECONDS  for each (default 600)
#   FUZZ_ARGS     more of libFuzzer's options
#
# It starts from fuzz/corpus/<target>.zip. What it learns goes to build/fuzz/corpus/<target>, and an input that breaks something to
# build/fuzz/findings/<target>-…; `build/fuzz/bin/fuzz_<target> FILE` replays one. The exit code is 1 if any was found.
set -uo pipefail
cd "$(dirname "$0")/.."
build=build/fuzz

known=$(cd fuzz/corpus && basename -s .zip -- *.zip | tr '\n' ' ')
# shellcheck disable=SC2206
targets=(${FUZZ_TARGET:-$known})
failed=()
for target in "${targets[@]}"; do
  program=$build/bin/fuzz_$target log=$build/logs/$target.log
  [ -x "$program" ] || { echo "fuzz: there is no target '$target'; they are $known" >&2; exit 2; }
  mkdir -p "$build/corpus/$target" "$build/findings" "$build/logs"
  options=(-max_total_time="${FUZZ_SECONDS:-600}" -timeout=30 -rss_limit_mb=4096 -malloc_limit_mb=2048 -print_final_stats=1
           -artifact_prefix="$build/findings/$target-")
  [ -f "fuzz/$target.dict" ] && options+=(-dict="fuzz/$target.dict")
  echo "fuzz: $target, ${FUZZ_SECONDS:-600} s (log: $log)"
  # shellcheck disable=SC2086
  if "$program" "${options[@]}" ${FUZZ_ARGS:-} "$build/corpus/$target" "$build/fuzz/corpus/$target" >"$log" 2>&1; then
    grep -E '^#[0-9]+.*DONE' "$log" | tail -n 1
  else
    failed+=("$target")
    tail -n 40 "$log"
  fi
done
[ ${#failed[@]} -eq 0 ] || { echo "fuzz: findings in ${failed[*]}; the inputs are in $build/findings" >&2; exit 1; }
