#!/bin/bash
# Measures dump and restore on a tmpfs of its own; leaves the table on standard output
# and the numbers in target/bench.json.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --quiet --release --locked --package torpor-cli --package torpor-bench
dir=$(mktemp -d)
trap 'umount "$dir" 2>/dev/null; rmdir "$dir"' EXIT
mount -t tmpfs -o size=6g torpor-bench "$dir"
gcc -O2 -pthread -o "$dir/target" bench/target.c
target/release/torpor-bench target/release/torpor "$dir" target/bench.json
