#!/bin/bash
# test.sh [long]: every test, in groups: of the crates that are plain code, and those that work on live
# kernel objects: the engine's own, the command's, those of what is built on the engine, the runtimes', the
# faults', the zoo. Two groups are at work at a time, since each of them waits now and then: of each part of this list
# the next one begins when one has ended. Each has a time limit, and what it said is in target/test. With "long" come those that take longer than a newcomer waits: the kernel that
# Debian 12 comes with, in an emulated machine, and all that TORPOR_LONG makes longer.
#
# A case that fails has failed. It is run again, by itself, only so that its report tells whether it fails
# there, too.
set -uo pipefail
cd "$(dirname "$0")/.."
out=target/test
long=
if [ "${1:-}" = long ]; then
	long=yes
	export TORPOR_LONG=1
fi
# What the caller has left open would be open in the programs that are put to sleep, too.
for fd in /proc/$$/fd/*; do
	fd=${fd##*/}
	# 255 is this script.
	[ "$fd" -le 2 ] || [ "$fd" = 255 ] || eval "exec $fd>&-"
done
mkdir -p "$out"
rm -rf target/zoo/status "$out"/*.txt
: >"$out/failed"

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
	unshare --mount sh -c 'mount --bind "$1" "$2" && chmod 755 "$2" && cd "$2" && exec scripts/test.sh ${3:+long}' \
		sh "$PWD" "$place" "$long"
	rc=$?
	rmdir "$place"
	exit "$rc"
fi

# One build for all: a selection of packages would build what they share with features of its own.
cargo test --quiet --locked --workspace --no-run --message-format=json-render-diagnostics >"$out/build.json" || exit 1
jq --raw-output 'select(.reason == "compiler-artifact" and .profile.test and .executable) |
	[(.package_id | sub(".*[#/]"; "") | sub("@.*"; "")), (.manifest_path | rtrimstr("/Cargo.toml")),
	 (if .target.kind == ["test"] then .target.name else .target.kind[0] end), .executable] | @tsv' "$out/build.json" | sort >"$out/programs"
: >"$out/ran"
export TORPOR_BIN=$PWD/target/debug/torpor

# fail WHAT: a group may run beside others, so what failed is in a file.
fail() { echo "$1" >>"$out/failed"; }

# A job of the queue boots it.
if [ -n "$long" ]; then
	if scripts/kernel/run --fetch; then
		TORPOR_TEST_KERNEL=$(ls "$PWD"/target/kernel/debian/boot/vmlinuz-* | tail -n 1)
		export TORPOR_TEST_KERNEL
	else
		fail "scripts/kernel/run --fetch: there is no kernel for an_emulator_boots_linux"
	fi
	# Rules of the queue are tried on it.
	if TORPOR_TEST_TRACE=$(scripts/trace.sh); then
		export TORPOR_TEST_TRACE
	else
		echo "left out: a_real_trace_is_tried: scripts/trace.sh cannot get the trace"
	fi
fi

failing() { sed -n 's/^test \(.*[^ ]\)  *\.\.\. FAILED$/\1/p' "$1" | sort -u; }

# passed REPORT...: how many tests passed
passed() { cat "$@" | awk '/^test result: / { sum += $4 } END { print sum + 0 }'; }

# left_out REPORT: what was not run, and counts as passed
left_out() {
	grep -E '^(left out: |SKIPPED |skipped|.*: (skipped|left out), |[a-z_:]+ is (left out|skipped): )' "$1" | sort -u | sed 's/^/  /'
}

# outcomes REPORT: the programs that were run, each with its outcome, and how much was tried where that depends on what is drawn
outcomes() {
	awk '/^     Running / { name = $2 " " $3 ": " }
		/^test result: / && !/ 0 passed; 0 failed/ { print "  " name substr($0, length("test result: ") + 1) }
		/^([a-z0-9-]+: )?[0-9]+ (of [0-9]+ |power cuts)/ { print "  " $0 }' "$1"
}

# idle: for how many ticks of the clock processors have had nothing to do
idle() { awk '$1 == "cpu" { print $5 + $6 }' /proc/stat; }

# idle_share TICKS SECONDS: how much of the time since then processors have had nothing to do, in percent
idle_share() { echo $((($(idle) - $1) * 100 / ($2 + 1) / $(getconf CLK_TCK) / $(getconf _NPROCESSORS_ONLN))); }

# group NAME LIMIT COMMAND...: runs a group within LIMIT seconds
group() {
	local name=$1 limit=$2 rc=0 report=$out/$1.txt case start=$SECONDS before took
	before=$(idle)
	shift 2
	[ -z "$long" ] || limit=$((limit * 10))
	echo "== $name"
	# A shell has what it starts beside itself ignore these signals, and so would all that tests start.
	timeout --kill-after=30 "$limit" env --default-signal=INT,QUIT "$@" >"$report" 2>&1 </dev/null || rc=$?
	took=$((SECONDS - start))
	# In one piece, since another group may be speaking.
	echo "$(outcomes "$report"; left_out "$report"
		echo "  $name took $took s, of which processors were idle for $(idle_share "$before" "$took") %")"
	[ "$rc" = 0 ] && return
	if [ "$rc" = 124 ] || [ "$rc" = 137 ] || [ -z "$(failing "$report")" ]; then
		echo "  $name ended with $rc (124: after its $limit seconds); the end of $report:"
		tail -n 40 "$report" | sed 's/^/  | /'
		fail "$name (as a whole)"
		return
	fi
	while read -r case; do
		again "$name" "$case" "$@"
	done < <(failing "$report")
}

# again GROUP CASE COMMAND...: a case that failed, again, by itself, for its report
again() {
	local name=$1 case=$2 report limit=600 verdict="fails by itself, too"
	[ -z "$long" ] || limit=$((limit * 10))
	report=$out/again-$1-$(tr -c 'A-Za-z0-9\n' _ <<<"$2").txt
	echo "  failed: $case; what it said:"
	grep -F -A 40 -e "---- $case" "$out/$1.txt" | cut -c1-400 | sed 's/^/  | /'
	shift 2
	timeout --kill-after=30 "$limit" env --default-signal=INT,QUIT "$@" -- --exact "$case" >"$report" 2>&1 </dev/null &&
		grep -q '^test result: ok\. 1 passed' "$report" && verdict="passes by itself"
	fail "$name: $case ($verdict)"
	echo "  $case $verdict; the end of $report:"
	tail -n 25 "$report" | sed 's/^/  | /'
}

# beside NAME LIMIT COMMAND...: the same beside one other group, as soon as that is the only one
beside() {
	while [ "$(jobs -pr | wc -l)" -gt 1 ]; do
		wait -n
	done
	group "$@" &
}

# The longest come first, so that something is left to do beside each of them.
beside queue 1200 scripts/run-tests torpor-queue
beside runtimes 1800 scripts/run-tests torpor-runtimes-tests
beside migrate 1200 scripts/run-tests torpor-migrate torpor-bench
beside snapshot 1200 scripts/run-tests torpor-snapshot
wait
# Kubernetes takes minutes to build: without it one test of the group cli is left out, and that is said.
[ -n "$long" ] || scripts/kubernetes/build.sh --built >/dev/null ||
	echo "left out: kubernetes: a_job_that_was_suspended_goes_on (scripts/kubernetes/build.sh builds what it takes)"
beside cli 1200 scripts/run-tests torpor-cli torpor-worker
beside kubernetes 1200 scripts/run-tests torpor-kubernetes
# What holds the benchmark to a tenth at length takes a machine with little else to do: it has a group of its own then.
beside benchmark 1200 scripts/run-tests torpor-benchmark ${long:+!torpor-benchmark:noise}
wait
# Tests of the engine see what this machine has mounted: nothing comes and goes beside them.
beside engine 1800 scripts/run-tests torpor-engine torpor-kernel torpor-tracee
beside plain 1800 scripts/run-tests torpor-store torpor-blobs torpor-images torpor-seal torpor-policy torpor-protoc torpor-crit torpor-sys torpor-tls \
	torpor-fuzz torpor-tests:lib torpor-tests:bin torpor-tests:interchange
wait
# The programs that both of the last two play.
target/debug/zoo build || fail "zoo: its programs do not build"
group exchange 1200 scripts/run-tests torpor-tests:exchange
beside fault 1800 scripts/run-tests torpor-tests:fault
beside zoo 1800 scripts/run-tests torpor-tests:zoo
wait
[ -z "$long" ] || group older 2400 scripts/kernel/test
[ -z "$long" ] || group crossing 60 scripts/kernel/crossing
[ -z "$long" ] || group noise 1200 scripts/run-tests torpor-benchmark:noise

# What nobody runs shows nothing.
while read -r forgotten; do
	fail "$forgotten: no group runs it"
done < <(cut -f4 "$out/programs" | grep -vxFf "$out/ran")

# The table tells of these outcomes, or it lies.
target/debug/zoo status --check docs/compatibility.md || fail "docs/compatibility.md: make docs"

sed 's/^/FAILED: /' "$out/failed"
echo "$(passed $(ls "$out"/*.txt | grep -v /again-)) passed, $(wc -l <"$out/failed") failed"
[ ! -s "$out/failed" ]
