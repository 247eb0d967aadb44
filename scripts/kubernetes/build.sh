#!/bin/bash
# build.sh [--built | --helm] [DIRECTORY]: builds a whole Kubernetes for the tests, at pinned versions, from Go modules: etcd,
# the control plane, the kubelet, kube-proxy, kubectl and containerd 2. What is there already is left alone. The first build takes
# both cores of a small machine for some minutes. Ends with the directory of the programs.
# With --built nothing is built: it fails if something is missing. With --helm helm alone is built, which no cluster takes.
set -euo pipefail
cd "$(dirname "$0")/../.."

kubernetes=v1.34.4
etcd=v3.6.7
containerd=v2.2.9
helm=v3.19.5

only_built= only_helm=
case "${1:-}" in
--built) only_built=yes; shift ;;
--helm) only_helm=yes; shift ;;
esac
out=$(realpath -m "${1:-target/kubernetes}")
if [ -n "$only_built" ]; then
	[ -e "$out/etcd-$etcd" ] && [ -e "$out/containerd-$containerd" ] && [ -e "$out/kubernetes-$kubernetes" ] || exit 1
	echo "$out/bin"
	exit
fi
mkdir -p "$out/bin"
# Others may build here as well, or run what is built: each program is written once.
exec 9>"$out/lock"
flock 9
command -v go >/dev/null || { echo "Kubernetes takes Go 1.25 or newer, and there is none" >&2; exit 1; }

# tools DIRECTORY MODULE VERSION: a module that requires another. `go install PACKAGE@VERSION` refuses modules with
# replace lines, a module that requires them does not.
tools() {
	mkdir -p "$1"
	cd "$1"
	go mod init tools >/dev/null 2>&1
	go mod edit -require "$2@$3"
}

# staging VERSION: Kubernetes takes its own libraries from its source tree; as modules they have their own versions.
staging() {
	local file
	file=$(go mod download -json "k8s.io/kubernetes@$1" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
	sed -n 's|^\tk8s.io/\([a-z0-9-]*\) => ./staging/.*|\1|p' "$file" | while read -r name; do
		go mod edit -replace "k8s.io/$name=k8s.io/$name@v0.${1#v1.}"
	done
}

# build NAME MODULE VERSION PACKAGE...
build() {
	local name=$1 module=$2 version=$3
	shift 3
	[ -e "$out/$name-$version" ] && return
	local dir
	dir=$(mktemp -d -p "$out")
	if (
		tools "$dir" "$module" "$version"
		if [ "$module" = k8s.io/kubernetes ]; then
			staging "$version"
		fi
		CGO_ENABLED=0 GOFLAGS=-mod=mod go build -trimpath -o "$out/bin/" \
			-ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$kubernetes" "$@"
	) 9>&-; then
		touch "$out/$name-$version"
	fi
	rm -rf "$dir"
	[ -e "$out/$name-$version" ] || { echo "$name $version does not build" >&2; exit 1; }
}

if [ -n "$only_helm" ]; then
	build helm helm.sh/helm/v3 "$helm" helm.sh/helm/v3/cmd/helm
	echo "$out/bin"
	exit
fi
build etcd go.etcd.io/etcd/server/v3 "$etcd" go.etcd.io/etcd/server/v3
[ -e "$out/bin/server" ] && mv "$out/bin/server" "$out/bin/etcd"
build containerd github.com/containerd/containerd/v2 "$containerd" \
	github.com/containerd/containerd/v2/cmd/containerd \
	github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2 \
	github.com/containerd/containerd/v2/cmd/ctr
build kubernetes k8s.io/kubernetes "$kubernetes" \
	k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-controller-manager \
	k8s.io/kubernetes/cmd/kube-scheduler k8s.io/kubernetes/cmd/kubelet k8s.io/kubernetes/cmd/kubectl
build kube-proxy k8s.io/kubernetes "$kubernetes" k8s.io/kubernetes/cmd/kube-proxy
echo "$out/bin"
