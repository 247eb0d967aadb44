#!/bin/bash
# Runs the tests that work on live kernel objects: the engine's own, the zoo, the fault
# tests, the runtimes. Each
# group has a time limit. While the engine does not keep everything yet (CHANGELOG.md lists
# what it does not), a failing case is reported, not fatal: the summary says how many there
# are, and target/endtoend/*.txt say which and why.
set -uo pipefail
cd "$(dirname "$0")/.."
out=target/endtoend
mkdir -p "$out"
rm -rf target/zoo/status
cargo build --quiet --locked --workspace || exit 1

# group NAME LIMIT COMMAND...
group() {
	local name=$1 limit=$2
	shift 2
	echo "== $name"
	timeout --kill-after=30 "$limit" "$@" >"$out/$name.txt" 2>&1
	[ $? = 124 ] && echo "$name: did not end within $limit seconds"
	grep -E '^test result:' "$out/$name.txt" | tail -n 1
	grep -E '(FAILED|failed)$' "$out/$name.txt" | sed 's/^test //; s/ *\.\.\. FAILED//; s/ --- FAILED//' |
		sort -u | sed "s/^/  fails: /"
}

group engine 400 cargo test --quiet --locked --package torpor-engine --package torpor-tracee --no-fail-fast
group cli 300 cargo test --quiet --locked --package torpor-cli --no-fail-fast
group runtimes 1200 cargo test --quiet --locked --package torpor-runtimes-tests --no-fail-fast
group fault 600 cargo test --locked --package torpor-tests --test fault
group zoo 1200 cargo test --locked --package torpor-tests --test zoo
exit 0
