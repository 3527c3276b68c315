#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# make release: dist/ gets, of the commit that is checked out,
#
#   flash3-VERSION.tar.gz     the source archive, which pip builds too; the same commit gives the same bytes
#   flash3-….whl              the Python package, with flash3.jax and the GPU backend (FLASH3_HOPPER=OFF: without), as
#                             manylinux_2_28: auditwheel fails if it needs newer symbols
#   flash3_drop_in-….whl      FlashAttention-3's names over it
#   flash_attn_3-….whl        the name that transformers asks for; not for an index, where it is another's
#   flash3-VERSION.sha256     their sums, for sha256sum -c
#
# What it needs is there after scripts/setup.sh release.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "release: $*" >&2; exit 1; }

version=$(sed -n 's/^#define FLASH3_VERSION_STRING "\(.*\)"/\1/p' include/flash3/version.h)
changes=$(git status --porcelain)
[ -z "$changes" ] || die "the tree is dirty; commit or remove this first:"$'\n'"$changes"
python3 tests/gates/check_version.py >&2 || die "a place names another version than $version"
python3 tests/gates/check_abi.py --release >&2 || die "abi/ is not this release's"
python=build/toolchain/python/bin/python
[ -x $python ] || die "$python is not there: scripts/setup.sh release"
tools=$PWD/build/toolchain/venv/bin
[ -x "$tools/auditwheel" ] || die "$tools/auditwheel is not there: scripts/setup.sh release"

# The times in the archives are the commit's.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
rm -rf dist build/sdist
mkdir dist build/sdist

archive=dist/flash3-$version.tar.gz
"$python" -c "import scikit_build_core.build as backend; backend.build_sdist('dist')"
diff <(tar -tzf "$archive" | sed 's,^[^/]*/,,' | sort) <({ git ls-files; echo PKG-INFO; } | sort) >&2 ||
  die "$archive does not hold what the commit does (<: the archive)"

# The wheel is made of the archive, and so shows that it builds; always in the same folder, so that the wheel is always the same.
tar -xzf "$archive" -C build/sdist
if [ -z "${FLASH3_CUDA_ROOT:-}${CUDACXX:-}" ] && [ -x build/toolchain/cuda/bin/nvcc ]; then
  export FLASH3_CUDA_ROOT=$PWD/build/toolchain/cuda
fi
wheel=("$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index -w dist)
"${wheel[@]}" "--config-settings=cmake.define.FLASH3_HOPPER=${FLASH3_HOPPER:-ON}" \
  --config-settings=cmake.define.FLASH3_MANYLINUX=ON --config-settings=cmake.define.FLASH3_JAX=ON "build/sdist/flash3-$version"
# Nothing is put into it: torch brings its own library, and all others are of the system.
built=(dist/flash3-*linux_x86_64.whl)
PATH=$tools:$PATH "$tools/auditwheel" repair --only-plat --plat manylinux_2_28_x86_64 --exclude libtorch_cpu.so -w dist "${built[0]}"
rm "${built[0]}"
size=$(stat -c %s dist/flash3-*manylinux_2_28_x86_64.whl)
[ "$size" -le $((15 << 20)) ] || die "the wheel has $size bytes; it must have at most $((15 << 20))"
"${wheel[@]}" ./bindings/dropin
"${wheel[@]}" ./bindings/dropin/metadata

cd dist
sha256sum -- *.tar.gz *.whl | tee "flash3-$version.sha256"
