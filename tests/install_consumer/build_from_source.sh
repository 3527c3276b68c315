#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# build_from_source.sh SOURCE WORK CMAKE CC CXX
#
# A stranger's project that has flash3's sources in its own build, by add_subdirectory() and by FetchContent: both are configured,
# and the programs of the first are built and run. The CPU backend alone, and not optimised: the compiler is what takes the time.
set -eu
source=$1 work=$2/build_from_source cmake=$3 cc=$4 cxx=$5
consumer=$(cd "$(dirname "$0")" && pwd)/consumer
rm -rf "$work"
mkdir -p "$work"

for from in fetch subdirectory; do
  echo "== $from"
  "$cmake" -S "$consumer" -B "$work/$from" -G Ninja -DFLASH3_FROM=$from -DFLASH3_SOURCE="$source" -DCMAKE_BUILD_TYPE=Debug -DFLASH3_HOPPER=OFF \
    -DFLASH3_CPU_KERNEL_OPTIMIZATION=-O0 -DCMAKE_CXX_FLAGS_DEBUG= -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" \
    >"$work/configure_$from.log" 2>&1 || { cat "$work/configure_$from.log"; exit 1; }
done
"$cmake" --build "$work/subdirectory" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
# What a program does not link is not built, nor what is for flash3's own developers.
if grep -E "oracle|libflash3\.so|tools/" "$work/build.log"; then
  echo "the build of a user's program has built more than the library"
  exit 1
fi
cd "$work/subdirectory" && ctest --output-on-failure --no-tests=error
