#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install_and_consume.sh BUILD CMAKE CC CXX [INSTALLED]
#
# Installs BUILD into a fresh prefix, moves that prefix (an installed tree must not know where it was),
# and builds and runs a C and a C++ program with it: through find_package and through pkg-config, with
# the shared and with the static library. With INSTALLED, a prefix that something else has filled, a copy of that is used.
set -eu
build=$1 cmake=$2 cc=$3 cxx=$4 installed=${5:-}
consumer=$(cd "$(dirname "$0")" && pwd)/consumer
work=$build/install_consumer
rm -rf "$work"
mkdir -p "$work"

run() {
  echo "+ $*"
  "$@"
}

if [ -n "$installed" ]; then
  cp -r "$installed" "$work/prefix"
else
  run "$cmake" --install "$build" --prefix "$work/installed" >"$work/install.log"
  mv "$work/installed" "$work/prefix"
fi
prefix=$work/prefix

echo "== find_package"
run "$cmake" -S "$consumer" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" >"$work/configure.log"
run "$cmake" --build "$work/consumer" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
(cd "$work/consumer" && run ctest --output-on-failure --no-tests=error)

# try_pkg_config PREFIX shared|static
try_pkg_config() {
  PKG_CONFIG_PATH=$(dirname "$(find "$1" -name flash3.pc)")
  export PKG_CONFIG_PATH
  case $2 in
    # The library is where no loader looks: the programs must be told.
    shared) flags="$(pkg-config --cflags --libs flash3) $(pkg-config --variable=rpath flash3)" ;;
    static) flags=$(pkg-config --static --cflags --libs flash3) ;;
  esac
  echo "== pkg-config, $2: $flags"
  # $flags is a list of words on purpose.
  # shellcheck disable=SC2086
  "$cc" -std=c11 "$consumer/main.c" -o "$work/c_$2" $flags
  # shellcheck disable=SC2086
  "$cxx" -std=c++20 "$consumer/main.cpp" -o "$work/cpp_$2" $flags
  # shellcheck disable=SC2086
  "$cxx" -std=c++20 -fno-exceptions -fno-rtti "$consumer/no_exceptions.cpp" -o "$work/no_exceptions_$2" $flags
  for program in c cpp no_exceptions; do
    (unset LD_LIBRARY_PATH && "$work/${program}_$2")
  done
}

if find "$prefix" -name 'libflash3.so*' | grep -q .; then
  try_pkg_config "$prefix" shared
fi

# Where libflash3.so is there too, the linker would take it: a prefix with the archive alone.
cp -r "$prefix" "$work/static_prefix"
find "$work/static_prefix" -name 'libflash3.so*' -delete
try_pkg_config "$work/static_prefix" static

if [ -x "$prefix/bin/flash3" ]; then
  echo "== the installed command line"
  run "$prefix/bin/flash3" info
fi
