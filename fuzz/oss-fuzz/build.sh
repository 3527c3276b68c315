#!/bin/bash -eu
# SPDX-License-Identifier: Apache-2.0
# What OSS-Fuzz runs: $CC, $CXX, $CFLAGS and $CXXFLAGS bring the sanitizers and the coverage, $LIB_FUZZING_ENGINE the main().
source_dir=$SRC/flash3
build_dir=${WORK:-/tmp}/flash3

cmake -S "$source_dir" -B "$build_dir" -G Ninja -DCMAKE_BUILD_TYPE=None \
  -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX" -DCMAKE_C_FLAGS="$CFLAGS" -DCMAKE_CXX_FLAGS="$CXXFLAGS" \
  -DFLASH3_FUZZ=ON -DFLASH3_FUZZING_ENGINE="$LIB_FUZZING_ENGINE" -DFLASH3_HOPPER=OFF -DFLASH3_PYTHON=OFF \
  -DFLASH3_SHARED=OFF -DFLASH3_TESTS=OFF -DFLASH3_CLI=OFF -DFLASH3_EXAMPLES=OFF
cmake --build "$build_dir" --target flash3_fuzz

for program in "$build_dir"/bin/fuzz_*; do
  name=${program##*/} target=${program##*/fuzz_}
  cp "$program" "$OUT/$name"
  cp "$source_dir/fuzz/corpus/$target.zip" "$OUT/${name}_seed_corpus.zip"
  dictionary=$source_dir/fuzz/$target.dict
  if [ -f "$dictionary" ]; then cp "$dictionary" "$OUT/$name.dict"; fi
done
