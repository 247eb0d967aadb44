#!/bin/bash
# fuzz.sh [SECONDS]: runs every fuzz target for that long, from its corpus in the repository.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo fuzz --version >/dev/null 2>&1 || cargo install --quiet --locked cargo-fuzz
# The fuzzer's instrumentation needs compiler flags that are not stable.
export RUSTC_BOOTSTRAP=1
for target in $(cargo fuzz list); do
    echo "fuzz: $target"
    # What is found new stays out of the repository's corpus until somebody chooses it.
    mkdir -p "target/fuzz-corpus/$target"
    cargo fuzz run --features libfuzzer --sanitizer none "$target" \
        "target/fuzz-corpus/$target" "fuzz/corpus/$target" -- -max_total_time="${1:-60}" -verbosity=0
done
