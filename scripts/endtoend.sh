#!/bin/bash
# endtoend.sh: the tests that work on live kernel objects: the engine's own, the command's, the runtimes',
# the faults', the zoo. Each group has a time limit, and what it said is in target/endtoend.
#
# A case that fails is run again, by itself, when its group has ended: twice at most. If it never passes the
# run has failed. If it does it is called unsteady, by name, in the closing lines: that is a bug as well, but
# one of the kind that a slow machine brings to light. Cases in tests/unsteady.txt are known to be so: they are
# run and reported like all others, but do not fail the run.
set -uo pipefail
cd "$(dirname "$0")/.."
out=target/endtoend
mkdir -p "$out"
rm -rf target/zoo/status "$out"/*.txt

# Cases in user namespaces run as users who cannot enter a directory of mode 700: where the checkout lies
# below one it is mounted at another place as well, which goes with this run.
reachable() {
	local path=$PWD
	while [ "$path" != / ]; do
		[ $((0$(stat --format=%a "$path") & 1)) = 1 ] || return 1
		path=$(dirname "$path")
	done
}
if ! reachable; then
	place=$(mktemp -d /var/tmp/torpor-checkout-XXXXXX) && chmod 755 "$place" || exit 1
	echo "$PWD cannot be entered by other users: testing it at $place"
	unshare --mount sh -c 'mount --bind "$1" "$2" && chmod 755 "$2" && cd "$2" && exec scripts/endtoend.sh' \
		sh "$PWD" "$place"
	rc=$?
	rmdir "$place"
	exit "$rc"
fi

cargo build --quiet --locked --workspace || exit 1

passed=0 failed=() unsteady=()

failing() { sed -n 's/^test \(.*[^ ]\)  *\.\.\. FAILED$/\1/p' "$1" | sort -u; }

# group NAME LIMIT COMMAND...: runs a group within LIMIT seconds
group() {
	local name=$1 limit=$2 rc=0 report=$out/$1.txt case
	shift 2
	echo "== $name"
	timeout --kill-after=30 "$limit" "$@" >"$report" 2>&1 </dev/null || rc=$?
	passed=$((passed + $(awk '/^test result: / { sum += $4 } END { print sum + 0 }' "$report")))
	sed -n 's/^test result: /  /p' "$report" | grep -v ' 0 passed; 0 failed' || true
	[ "$rc" = 0 ] && return
	if [ "$rc" = 124 ] || [ "$rc" = 137 ] || [ -z "$(failing "$report")" ]; then
		echo "  $name ended with $rc (124: after its $limit seconds); the end of $report:"
		tail -n 40 "$report" | sed 's/^/  | /'
		failed+=("$name (as a whole)")
		return
	fi
	while read -r case; do
		again "$name" "$case" "$@"
	done < <(failing "$report")
}

# alone REPORT CASE COMMAND...: whether a case passes by itself
alone() {
	local report=$1 case=$2
	shift 2
	timeout --kill-after=30 600 "$@" -- --exact "$case" >"$report" 2>&1 </dev/null &&
		grep -q '^test result: ok\. 1 passed' "$report"
}

# again GROUP CASE COMMAND...: a case that failed, again, by itself
again() {
	local name=$1 case=$2 report
	report=$out/$1-again-$(tr -c 'A-Za-z0-9\n' _ <<<"$2")
	echo "  failed: $case; what it said:"
	grep -F -A 12 -e "---- $case" "$out/$1.txt" | cut -c1-400 | sed 's/^/  | /'
	shift 2
	if alone "$report.txt" "$case" "$@" || alone "${report}_2.txt" "$case" "$@"; then
		unsteady+=("$name: $case")
		passed=$((passed + 1))
	elif grep -qxF "$name: $case" tests/unsteady.txt; then
		unsteady+=("$name: $case")
		echo "  fails, as is known of it: $case; the end of ${report}_2.txt:"
		tail -n 25 "${report}_2.txt" | sed 's/^/  | /'
	else
		failed+=("$name: $case")
		echo "  fails: $case; the end of ${report}_2.txt:"
		tail -n 25 "${report}_2.txt" | sed 's/^/  | /'
	fi
}

group engine 600 cargo test --locked --package torpor-engine --package torpor-tracee --no-fail-fast
group cli 600 cargo test --locked --package torpor-cli --no-fail-fast
group runtimes 1200 cargo test --locked --package torpor-runtimes-tests --no-fail-fast
group fault 1200 cargo test --locked --package torpor-tests --test fault
group zoo 1500 cargo test --locked --package torpor-tests --test zoo
group older 1200 scripts/kernel/test

# The table tells of these outcomes, or it lies.
target/debug/zoo status --check docs/compatibility.md || failed+=("docs/compatibility.md: make docs")

for case in "${unsteady[@]}"; do echo "unsteady: $case (failed, then perhaps passed by itself; see $out)"; done
for case in "${failed[@]}"; do echo "FAILED: $case"; done
echo "$passed passed, ${#failed[@]} failed"
[ ${#failed[@]} = 0 ]
