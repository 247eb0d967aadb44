#!/bin/bash
# dbgsym.sh PROGRAM PACKAGE: a package beside PACKAGE with the debug symbols of PROGRAM, which PACKAGE holds stripped.
# Debuggers find them by the program's build id.
set -euo pipefail
program=$1 package=$2

field() { dpkg-deb --field "$package" "$1"; }

id=$(readelf --notes "$program" | sed -n 's/^ *Build ID: //p')
[ -n "$id" ] || { echo "$program has no build id: debuggers could not find its symbols" >&2; exit 1; }
case $(readelf --sections --wide "$program") in
    *.debug_line*) ;;
    *) echo "$program has no debug symbols: build it with --profile dist" >&2; exit 1 ;;
esac
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
place=$root/usr/lib/debug/.build-id/${id:0:2}
mkdir -p "$place" "$root/DEBIAN"
objcopy --only-keep-debug --compress-debug-sections "$program" "$place/${id:2}.debug"
chmod 644 "$place/${id:2}.debug"
cat >"$root/DEBIAN/control" <<END
Package: $(field Package)-dbgsym
Version: $(field Version)
Architecture: $(field Architecture)
Maintainer: $(field Maintainer)
Depends: $(field Package) (= $(field Version))
Section: debug
Priority: optional
Build-Ids: $id
Description: debug symbols of $(field Package)
END
out=$(dirname "$package")/$(field Package)-dbgsym_$(field Version)_$(field Architecture).deb
dpkg-deb --root-owner-group --build "$root" "$out" >/dev/null
echo "$out"
