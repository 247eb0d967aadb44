#!/bin/bash
# benchmark-runtimes.sh [DIRECTORY]: builds the runtimes that Debian lacks, at pinned versions, for the
# whole matrix of `torpor benchmark`: containerd 2, gVisor's runsc with its shim, and youki. What is there
# already is left alone. RUNTIMES=containerd builds that one alone, CONTAINERD=v2.3.7 that version. Ends with a configuration of all cells,
# DIRECTORY/matrix.yaml.
set -euo pipefail
cd "$(dirname "$0")/.."

containerd=${CONTAINERD:-v2.2.9}
gvisor=v0.0.0-20260905035102-160fafc42237
youki=0.7.0

out=$(realpath -m "${1:-target/benchmark-runtimes}")
mkdir -p "$out/bin"

# wanted NAME: whether a runtime is to be built
wanted() {
	[[ " ${RUNTIMES:-$1} " == *" $1 "* ]]
}

# go_build NAME MODULE VERSION PACKAGE...: through the module proxy. `go install PACKAGE@VERSION` refuses
# modules with replace lines, a module that requires them does not.
go_build() {
	local name=$1 module=$2 version=$3
	shift 3
	wanted "$name" || return 0
	[ -e "$out/$name-$version" ] && return
	command -v go >/dev/null || { echo "$name takes Go 1.25 or newer: left out" >&2; return; }
	local dir
	dir=$(mktemp -d -p "$out")
	(
		cd "$dir"
		go mod init tools >/dev/null 2>&1
		go mod edit -require "$module@$version"
		if [ "$name" = gvisor ]; then
			without_oom_score || exit 1
		fi
		# gVisor takes its version from its own build, and says VERSION_MISSING without.
		CGO_ENABLED=0 GOFLAGS=-mod=mod go build -trimpath -o "$out/bin/" \
			-ldflags "-X gvisor.dev/gvisor/runsc/version.version=$version" "$@"
	) || { echo "$name does not build: left out" >&2; rm -rf "$dir"; return; }
	rm -rf "$dir"
	touch "$out/$name-$version"
}

# without_oom_score: gVisor's shim lowers its own OOM score and does not start where it may not (a
# container, or a machine without CAP_SYS_RESOURCE). There it is built with the score left as it is.
without_oom_score() {
	(echo -999 >/proc/self/oom_score_adj) 2>/dev/null && return
	# `go list` names no directory of a module that is not in the cache yet.
	GOFLAGS=-mod=mod go mod download gvisor.dev/gvisor || return 1
	cp -r "$(GOFLAGS=-mod=mod go list -m -f '{{.Dir}}' gvisor.dev/gvisor)" copy && chmod -R u+w copy
	local file=copy/pkg/shim/v1/manager.go
	grep -q 'oomScoreMax = -999$' "$file" || { echo "gVisor's shim has changed: see without_oom_score" >&2; return 1; }
	sed -i 's/oomScoreMax = -999$/oomScoreMax = 0/' "$file"
	go mod edit -replace gvisor.dev/gvisor=./copy
}

go_build containerd github.com/containerd/containerd/v2 "$containerd" \
	github.com/containerd/containerd/v2/cmd/containerd \
	github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2
go_build gvisor gvisor.dev/gvisor "$gvisor" gvisor.dev/gvisor/runsc gvisor.dev/gvisor/shim
if [ -e "$out/bin/shim" ]; then
	mv "$out/bin/shim" "$out/bin/containerd-shim-runsc-v1"
fi

# youki takes long: only where that was asked for. Without features it works with no control groups at all; that for
# seccomp takes a library of its own.
if wanted youki && [ "${TORPOR_LONG:-}" = 1 ] && [ ! -e "$out/bin/youki" ]; then
	cargo install --locked --root "$out" --version "$youki" --features v1,v2 youki ||
		echo "youki does not build: left out" >&2
fi

printf '[runsc_config]\nplatform = "systrap"\n' >"$out/runsc.toml"

handlers() {
	local name
	for name in runc crun; do
		if command -v "$name" >/dev/null; then
			echo "      - { name: $name, binary: $(command -v "$name") }"
		fi
	done
	if [ -x "$out/bin/youki" ]; then
		echo "      - { name: youki, binary: $out/bin/youki }"
	fi
	if [ -x "$out/bin/runsc" ]; then
		echo "      - { name: runsc, type: io.containerd.runsc.v1, config: $out/runsc.toml, path: [$out/bin] }"
	fi
}

{
	echo "# Made by scripts/benchmark-runtimes.sh: every cell that this machine can have."
	echo "endpoints:"
	for program in "$(command -v containerd || true)" "$out/bin/containerd"; do
		[ -x "$program" ] || continue
		version=$("$program" --version | sed -n 's/.* v\{0,1\}\([0-9][0-9]*\.[0-9][0-9]*\)\..*/\1/p')
		echo "  - name: containerd-${version:-unknown}"
		echo "    containerd: $program"
		echo "    handlers:"
		handlers
	done
} >"$out/matrix.yaml"
echo "$out/matrix.yaml"
