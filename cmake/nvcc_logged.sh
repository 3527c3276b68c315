#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiler launcher: runs one nvcc compilation and keeps all it said, and the CPU time it took, in
# <object>.log. The gates read these logs, so they hold for incremental builds too. On the terminal
# the routine part of the ptxas report is left out.
object=
previous=
for argument; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"

log=$object.log
if "$@" >"$log" 2>&1; then status=0; else status=$?; fi
grep -v -e '^ptxas info    : \(Compiling entry\|Function properties\|Used \|Compile time\|[0-9]* bytes gmem\)' \
  -e '^ *0 bytes stack frame, 0 bytes spill' "$log" >&2
{ echo "cpu time of this shell, then of nvcc (user, system):"; times; } >>"$log"
exit $status
