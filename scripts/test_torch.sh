#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# make test-torch TORCH=2.15.0: the tests of the Python package with another torch than scripts/requirements-python.txt has.
#
#   TORCH=VERSION     as pip finds it. PyPI's are of several GB: they stay in build/torch-VERSION until that is removed
#   WHEEL=FILE        the wheel to test; otherwise the package that make test has built
#   TORCH_TESTS="…"   arguments of pytest, in tests/python; otherwise all that need neither JAX nor a build of their own
#
# Either was built with the headers of one torch and holds its stable ABI alone, so that it is not built again.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "test-torch: $*" >&2; exit 1; }

torch=${TORCH:-}
[[ $torch =~ ^[0-9]+\.[0-9]+\.[0-9]+([+][a-z0-9]+)?$ ]] || die "TORCH = '$torch' but it must be a version: make test-torch TORCH=2.15.0"
package=$PWD/build/release/python
if [ -n "${WHEEL:-}" ]; then
  [ -f "$WHEEL" ] || die "WHEEL = $WHEEL is not there"
elif [ ! -f "$package/flash3/libflash3_torch.so" ]; then
  die "$package/flash3/libflash3_torch.so is not there: make test builds it, or WHEEL names a wheel"
fi

home=$PWD/build/torch-$torch
python=$home/venv/bin/python
pip_install=("$python" -m pip install -q --disable-pip-version-check --no-compile)
list=$home/requirements.txt
mkdir -p "$home"
{ sed -E '/^(#|(torch|jax|jaxlib)==)/d' scripts/requirements-python.txt scripts/requirements-check.txt; echo "torch==$torch"; } >"$list"
if ! cmp -s "$list" "$home/installed.txt"; then
  echo "test-torch: installing torch $torch into $home"
  python3 -m venv --clear "$home/venv"
  "${pip_install[@]}" -r "$list"
  cp "$list" "$home/installed.txt"
fi
if [ -n "${WHEEL:-}" ]; then
  package=$home/wheel
  rm -rf "$package"
  "${pip_install[@]}" --no-deps --no-index --target "$package" "$WHEEL"
fi

cd tests/python
read -ra tests <<<"${TORCH_TESTS:-}"
if [ ${#tests[@]} -eq 0 ]; then
  for file in test_*.py; do
    case $file in
      test_jax.py | test_package.py | test_build_backend.py | test_hub.py | test_docs.py) ;;
      *) tests+=("$file") ;;
    esac
  done
fi
export PYTHONPATH=$package:$PWD/../../bindings/dropin OMP_WAIT_POLICY=PASSIVE
"$python" -c "
import flash3, torch
assert torch.__version__.split('+')[0] == '$torch'.split('+')[0], torch.__version__
print('test-torch: torch', torch.__version__, 'and', flash3.__file__)"
exec "$python" -m pytest -rs "${tests[@]}"
