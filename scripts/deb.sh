#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Half of make deb: makes the packages of build/deb in dist/deb, and tries them: lintian; dpkg installs them into a root of their own, and
# removes them; in between a C and a C++ program are built with what lies there.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/deb out=dist/deb root=$PWD/build/deb/root
rm -rf $out "$root"
mkdir -p "$root/var/lib/dpkg/info" "$root/var/lib/dpkg/updates"
touch "$root/var/lib/dpkg/status"
cpack --config $build/CPackConfig.cmake -B $out >$build/cpack.log || { tail -n 40 $build/cpack.log >&2; exit 1; }
rm -rf $out/_CPack_Packages

# cpack's scripts call ldconfig, which is a trigger's work.
library=("$out"/libflash3-0_*.deb)
rm -rf $build/library
dpkg-deb -R "${library[0]}" $build/library
rm $build/library/DEBIAN/post*
echo "activate-noawait ldconfig" >$build/library/DEBIAN/triggers
dpkg-deb --root-owner-group -b $build/library "${library[0]}" >/dev/null

# The program's --help takes the place of a page of the manual; these packages close no report in Debian; and their publisher sets the
# maintainer.
lintian --fail-on error,warning --allow-root \
  --suppress-tags no-manual-page,initial-upload-closes-no-bugs,bogus-mail-host,bogus-mail-host-in-debian-changelog $out/*.deb

dpkg=(dpkg --root="$root" --force-depends --force-script-chrootless --log=/dev/null)
[ "$(id -u)" = 0 ] || dpkg=(fakeroot "${dpkg[@]}")
"${dpkg[@]}" -i $out/*.deb >$build/dpkg.log 2>&1 || { cat $build/dpkg.log >&2; exit 1; }
tests/install_consumer/install_and_consume.sh "$PWD/$build" cmake "${CC:-cc}" "${CXX:-c++}" "$root/usr"
"${dpkg[@]}" --purge libflash3-dev flash3 libflash3-0 >>$build/dpkg.log 2>&1
left=$(find "$root" ! -type d ! -path "$root/var/*")
[ -z "$left" ] || { echo "deb: dpkg has left"$'\n'"$left" >&2; exit 1; }
ls -l $out
