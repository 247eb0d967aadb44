#!/bin/bash
# fuzz.sh [SECONDS]: runs every fuzz target for that long, from its corpus in the repository, and says how often each has run.
# What one finds does not keep the others from being run.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo fuzz --version >/dev/null 2>&1 || cargo install --quiet --locked cargo-fuzz
# The fuzzer's instrumentation needs compiler flags that are not stable.
export RUSTC_BOOTSTRAP=1
how=(--features libfuzzer --sanitizer none)
targets=$(cargo fuzz list)
# Once for all, so that what does not build is no finding of a target.
cargo fuzz build "${how[@]}"
mkdir -p target/test
failed=
seconds=${1:-60}
for target in $targets; do
	report=target/test/fuzz-$target.txt
	# What is found new stays out of the repository's corpus until somebody chooses it.
	mkdir -p "target/fuzz-corpus/$target"
	if cargo fuzz run "${how[@]}" "$target" "target/fuzz-corpus/$target" "fuzz/corpus/$target" -- \
		-max_total_time="$seconds" -verbosity=0 -print_final_stats=1 >"$report" 2>&1; then
		echo "fuzz: $target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$report") runs in $seconds seconds"
	else
		failed+=" $target"
		echo "fuzz: $target has failed; the end of $report:"
		tail -n 40 "$report" | sed 's/^/  | /'
	fi
done
[ -z "$failed" ] || { echo "FAILED: fuzz:$failed"; exit 1; }
