#!/bin/bash
# benchmark-matrix.sh [OUTPUT]: measures the whole matrix of container runtimes that this machine can have, and
# writes OUTPUT/report.html with screenshots beside it (default: target/benchmark). What was interrupted goes
# on. RUNS, EFFORT and SCALE ("5, 10, 50, 100") make it shorter or longer.
set -euo pipefail
cd "$(dirname "$0")/.."

# With PARTS or QUEUE_PIECE, `make bench` measures only what is named; the runtimes are the part "runtimes".
if [ -n "${PARTS:-}${QUEUE_PIECE:-}" ] && [[ " ${PARTS:-} " != *" runtimes "* ]]; then
	exit
fi
out=${1:-target/benchmark}
mkdir -p "$out"
for tool in sysbench:sysbench crun:crun chromium:chromium; do
	command -v "${tool%%:*}" >/dev/null ||
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${tool##*:}" >/dev/null ||
		echo "${tool##*:} is not to be had: what needs it is left out" >&2
done
# With the other benchmarks, as scripts/bench.sh has it: without them the crates have other features, and are built again.
cargo build --quiet --release --locked --package torpor-cli --package torpor-bench
endpoints=$(TORPOR_LONG=1 scripts/benchmark-runtimes.sh | tail -n 1)
{
	echo "runs: ${RUNS:-10}"
	echo "effort: ${EFFORT:-1}"
	echo "scale: [${SCALE:-5, 10, 50, 100}]"
	cat "$endpoints"
} >"$out/matrix.yaml"
target/release/torpor benchmark run --output "$out" "$out/matrix.yaml"
scripts/benchmark-screenshots.sh "$out/report.html" "$out"
