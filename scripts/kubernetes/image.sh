#!/bin/bash
# image.sh NAME ARCHIVE [TORPOR]: packs the image of the agent and the controller: the program, the libraries that
# it is linked with, the authorities that this machine trusts (for stores), and nothing else. ARCHIVE is loaded by `podman load`, `docker load` and `ctr image import`.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 NAME ARCHIVE [TORPOR]" >&2; exit 2; }
here=$(realpath "$(dirname "$0")")
torpor=$(realpath "${3:-$here/../../target/release/torpor}")
[ -x "$torpor" ] || { echo "there is no $torpor: build it with 'make build' first" >&2; exit 1; }

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
install -D --strip "$torpor" "$root/usr/bin/torpor"
# The loader stands there by its path, the others behind an arrow.
ldd "$torpor" | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }' | while read -r library; do
	install -D "$library" "$root$library"
done
authorities=/etc/ssl/certs/ca-certificates.crt
[ ! -e "$authorities" ] || install -D -m 644 "$authorities" "$root$authorities"
mkdir -p "$root/tmp" "$root/run/torpor" "$root/var/lib/torpor/kubernetes"
"$here/../rootfs/image" "$1" "$root" "$2" /usr/bin/torpor
