#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the site from docs/: OUT/html, with OUT = build/docs unless given. What Doxygen or Sphinx warns of is an error, and so is a link
# within the site that leads nowhere (docs/check_site.py).
#
#   docs/build.sh [OUT]
#
# scripts/setup.sh docs brings the tools; without them the exit code is 77, which a test shows as skipped.
# FLASH3_DOCS_VERSIONS="0.1.0=../0.1.0/ 0.2.0=./" gives each page a menu of versions, with their addresses relative to OUT/html.
# FLASH3_DOCS_PYTHON=… names a Python with the packages of scripts/requirements-tools.txt for docs.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p "${1:-build/docs}"
FLASH3_DOCS_OUTPUT=$(cd "${1:-build/docs}" && pwd)
export FLASH3_DOCS_OUTPUT
python=${FLASH3_DOCS_PYTHON:-build/toolchain/venv/bin/python}

command -v doxygen >/dev/null || { echo "no site: doxygen is not installed (scripts/setup.sh docs)"; exit 77; }
missing=$("$python" -c "import breathe, furo, myst_parser, sphinx" 2>&1) || {
  echo "no site: $python lacks the packages of scripts/requirements-tools.txt (scripts/setup.sh docs): ${missing##*$'\n'}"
  exit 77
}

# What an earlier build left would be in this one; pages that it had read would not be read again, and so not be warned of.
rm -rf "$FLASH3_DOCS_OUTPUT/doxygen" "$FLASH3_DOCS_OUTPUT/html"
doxygen docs/Doxyfile
"$python" -m sphinx --fresh-env --quiet --fail-on-warning --conf-dir docs \
  --define "breathe_projects.flash3=$FLASH3_DOCS_OUTPUT/doxygen" --doctree-dir "$FLASH3_DOCS_OUTPUT/doctrees" \
  . "$FLASH3_DOCS_OUTPUT/html"
echo '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=docs/index.html"><title>flash3</title>' \
  '<a href="docs/index.html">The documentation of flash3</a>' >"$FLASH3_DOCS_OUTPUT/html/index.html"
"$python" docs/check_site.py "$FLASH3_DOCS_OUTPUT/html"
echo "the site is $FLASH3_DOCS_OUTPUT/html/index.html"
