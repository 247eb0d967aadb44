#!/bin/bash
# Measures dump and restore on a tmpfs of its own; leaves the table on standard output and the numbers in
# target/bench.json. PARTS="memory small" measures these only; BENCH_ROUNDS, BENCH_MIB and MIGRATE_GBITS make it shorter.
# Then the queue, whose tables and plots are left in target/queue; with PARTS only what QUEUE_PARTS="day tools urgent move"
# names of it. QUEUE_SECONDS and QUEUE_TIMES make it shorter.
# QUEUE_PIECE is one of the long figures of the queue, an hour and five minutes at most: tools (half an hour of each), fifo,
# kill, checkpoint, stop (a day in an hour by that policy). Pieces are kept in target/queue and told together.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${QUEUE_PIECE:-}" in
"") ;;
tools) export PARTS=queue QUEUE_PARTS=tools QUEUE_SECONDS=1860 QUEUE_MOMENTS="1 60 600 1790" QUEUE_BESIDE=13 ;;
fifo | kill | checkpoint | stop) export PARTS=queue QUEUE_PARTS=hour:$QUEUE_PIECE QUEUE_SECONDS=3600 QUEUE_LIMIT=3780 ;;
*)
    echo "QUEUE_PIECE is tools, fifo, kill, checkpoint or stop" >&2
    exit 2
    ;;
esac
scripts/setup.sh
for tool in age:age gpg:gnupg openssl:openssl stress-ng:stress-ng puma:puma rackup:ruby-sinatra \
    javac:default-jdk-headless mvn:maven afl-fuzz:afl++ clang:clang cpio:cpio chromium:chromium; do
    command -v "${tool%%:*}" >/dev/null ||
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${tool##*:}" >/dev/null
done
/usr/bin/python3 -c "import flask, numpy, sqlalchemy" 2>/dev/null ||
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends \
        python3-flask python3-numpy python3-sqlalchemy >/dev/null
# With the database that the package makes by itself. It starts nothing.
[ -e /usr/share/redmine/config.ru ] ||
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends redmine redmine-sqlite >/dev/null
# libFuzzer, which comes with clang by recommendation only.
dpkg --status libclang-rt-14-dev >/dev/null 2>&1 ||
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends libclang-rt-14-dev >/dev/null
cargo build --quiet --release --locked --package torpor-cli --package torpor-bench
if [ "${PARTS:-}" != queue ]; then
    dir=$(mktemp -d)
    # gpg leaves its agent behind, which has its files there; what was killed last may still be there, too.
    trap 'gpgconf --homedir "$dir/tools" --kill gpg-agent 2>/dev/null; umount --lazy "$dir"; rmdir "$dir"' EXIT
    mount -t tmpfs -o size=9g torpor-bench "$dir"
    gcc -O2 -pthread -o "$dir/target" bench/target.c
    # shellcheck disable=SC2086 # words
    target/release/torpor-bench target/release/torpor "$dir" target/bench.json ${PARTS:-}
fi
[ -n "${PARTS:-}" ] && [ -z "${QUEUE_PARTS:-}" ] && exit
# Without it QEMU, one of the four tools of the study, would be left out.
[ "${QUEUE_PIECE:-}" != tools ] || scripts/kernel/run --fetch
kernel=$(ls target/kernel/debian/boot/vmlinuz* 2>/dev/null || true)
[ -z "$kernel" ] || export TORPOR_TEST_KERNEL="${TORPOR_TEST_KERNEL:-$PWD/$kernel}"
# shellcheck disable=SC2086 # words
target/release/torpor-bench-queue target/release/torpor target/queue ${QUEUE_PARTS:-}
