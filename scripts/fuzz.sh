#!/bin/bash
# fuzz.sh [SECONDS]: runs every fuzz target for that long, from its corpus in the repository.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo fuzz --version >/dev/null 2>&1 || cargo install --quiet --locked cargo-fuzz
# The fuzzer's instrumentation needs compiler flags that are not stable.
export RUSTC_BOOTSTRAP=1
for dir in $(git ls-files '*fuzz/Cargo.toml'); do
    cd "$(dirname "$dir")/.."
    for target in $(cargo fuzz list); do
        echo "fuzz: $target"
        cargo fuzz run --sanitizer none "$target" -- -max_total_time="${1:-60}" -verbosity=0
    done
    cd - >/dev/null
done
