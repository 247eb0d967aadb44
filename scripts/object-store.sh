#!/bin/sh
# Installs a server that speaks the protocol of S3, for the tests of snapshot and queue, below target/object-store.
set -eu
out="$(dirname "$0")/../target/object-store"
[ -x "$out/bin/moto_server" ] && exit 0
python3 -m venv "$out"
"$out/bin/pip" install --quiet 'moto[server]==5.2.5'
