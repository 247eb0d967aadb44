#!/bin/bash
# Measures dump and restore on a tmpfs of its own; leaves the table on standard output and the numbers in
# target/bench.json. PARTS="memory small" measures these only; BENCH_ROUNDS and BENCH_MIB make it shorter.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
for tool in age:age gpg:gnupg openssl:openssl stress-ng:stress-ng; do
    command -v "${tool%%:*}" >/dev/null ||
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${tool##*:}" >/dev/null
done
cargo build --quiet --release --locked --package torpor-cli --package torpor-bench
dir=$(mktemp -d)
# gpg leaves its agent behind, which has its files there; what was killed last may still be there, too.
trap 'gpgconf --homedir "$dir/tools" --kill gpg-agent 2>/dev/null; umount --lazy "$dir"; rmdir "$dir"' EXIT
mount -t tmpfs -o size=9g torpor-bench "$dir"
gcc -O2 -pthread -o "$dir/target" bench/target.c
# shellcheck disable=SC2086 # words
target/release/torpor-bench target/release/torpor "$dir" target/bench.json ${PARTS:-}
