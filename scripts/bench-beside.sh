#!/bin/bash
# bench-beside.sh COMMIT: builds that commit, and measures it and this checkout in turns. BENCH_ROUNDS says how often.
set -euo pipefail
cd "$(dirname "$0")/.."
other=$PWD/target/beside
git worktree remove --force "$other" 2>/dev/null || true
git worktree add --quiet --detach "$other" "$1"
trap 'git worktree remove --force "$other"' EXIT
(cd "$other" && cargo build --quiet --release --locked --package torpor-cli)
BENCH_BESIDE=$other/target/release/torpor PARTS=beside scripts/bench.sh
