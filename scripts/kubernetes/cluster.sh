#!/bin/bash
# cluster.sh DIRECTORY TORPOR: a Kubernetes with two nodes on this machine, for tests, with Torpor in it. It is
# there when DIRECTORY/ready is, and goes when the standard input ends. DIRECTORY/bin/kubectl is its kubectl, and
# DIRECTORY/store the store of checkpoints, if TORPOR_STORE names none. What a node is to a registry is in
# DIRECTORY/NODE/store.json. With TORPOR_IN_PODS its agents and controllers are pods of an image, as one apply makes them,
# or as helm does if that is its value; helm is DIRECTORY/bin/helm then.
# All processes are in a pid namespace of their own: nothing outlives it.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
	dir=$(realpath -m "$1") torpor=$(realpath "$2")
	mkdir -p "$dir"
	here=$(realpath "$(dirname "$0")")
	programs=$here/../../target/kubernetes/bin
	name=torpor-k8s-$$
	code=0
	# What is in the background keeps its standard input only if it is told to. It has one child: the inside.
	unshare --mount --pid --fork --kill-child --propagation private --net \
		bash "$0" --inside "$dir" "$torpor" "$programs" "$name" "$here" <&0 &
	unshared=$!
	while inside=$(cat "/proc/$unshared/task/$unshared/children" 2>/dev/null) && [ -z "$inside" ]; do sleep 0.1; done
	echo "${inside%% *}" >"$dir/pid"
	# Version 1 of cgroups lets nothing die that is frozen: pods that wait for their start, if a test fails.
	while [ -d "/proc/$unshared" ]; do
		[ ! -e "$dir/ends" ] || for state in $(find "/sys/fs/cgroup/freezer/$name-node"* -name freezer.state 2>/dev/null); do
			echo THAWED >"$state"
		done 2>/dev/null
		sleep 1
	done &
	wait "$unshared" || code=$?
	for _ in 1 2 3 4 5 6 7 8 9 10; do
		find /sys/fs/cgroup -depth -type d -path "*/$name*" -exec rmdir {} + 2>/dev/null && break
		sleep 0.3
	done
	[ -z "${TORPOR_IN_PODS:-}" ] || rmdir --parents --ignore-fail-on-non-empty /run/torpor /var/lib/torpor/kubernetes
	exit "$code"
fi

dir=$2 torpor=$3 programs=$4 name=$5 scripts=$6
mount -t proc proc /proc
# What is mixed is told apart differently by each program.
umount /sys/fs/cgroup/unified 2>/dev/null || true
mount --make-rshared /
mount -t tmpfs tmpfs /run/netns 2>/dev/null || { mkdir -p /run/netns; mount -t tmpfs tmpfs /run/netns; }
export PATH=$dir/bin:$programs:$PATH:/usr/sbin:/sbin
mkdir -p "$dir/bin" "$dir/log" "$dir/pki" "$dir/run" "$dir/store" "$dir/shared"
# What pods of both nodes see as /mnt of their node.
mount --bind "$dir/shared" /mnt
ln -sf "$torpor" "$dir/bin/criu"
ln -sf "$torpor" "$dir/bin/torpor"
ln -sf "$torpor" "$dir/bin/torpor-runc"
ln -sf "$torpor" "$dir/bin/kubectl-torpor"

# until_true SECONDS COMMAND...
until_true() {
	local end=$(($(date +%s) + $1))
	shift
	until "$@" >/dev/null 2>&1; do
		[ "$(date +%s)" -lt "$end" ] || { echo "not in time: $*" >&2; return 1; }
		sleep 0.3
	done
}

# run NAME COMMAND...: keeps a daemon running, as an init system does: it comes back when it is killed, until there
# is DIRECTORY/run/NAME.lost. Its process id in this namespace is in DIRECTORY/run/NAME.
run() {
	local name=$1
	shift
	while [ ! -e "$dir/run/$name.lost" ]; do
		"$@" >>"$dir/log/$name.log" 2>&1 </dev/null &
		echo $! >"$dir/run/$name"
		wait $! || true
		sleep 0.2
	done 2>/dev/null &
}

certificates() {
	cd "$dir/pki"
	openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=torpor-test 2>/dev/null
	openssl req -newkey rsa:2048 -nodes -keyout api.key -out api.csr -subj /CN=kube-apiserver 2>/dev/null
	openssl x509 -req -in api.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out api.crt \
		-extfile <(echo subjectAltName=IP:127.0.0.1,IP:10.77.0.1,IP:10.78.0.1,DNS:kubernetes) 2>/dev/null
	# What the API server shows to kubelets, which ask it about everybody else.
	openssl req -newkey rsa:2048 -nodes -keyout to-kubelets.key -out to-kubelets.csr \
		-subj /O=system:masters/CN=to-kubelets 2>/dev/null
	openssl x509 -req -in to-kubelets.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out to-kubelets.crt \
		-extfile <(echo extendedKeyUsage=clientAuth) 2>/dev/null
	openssl genrsa -out accounts.key 2048 2>/dev/null
	cat >tokens.csv <<-END
		admin,admin,admin,"system:masters"
		scheduler,system:kube-scheduler,scheduler,""
		manager,system:kube-controller-manager,manager,"system:masters"
		node1,system:node:node1,node1,"system:nodes"
		node2,system:node:node2,node2,"system:nodes"
		proxy,system:kube-proxy,proxy,""
		alice,alice,alice,""
	END
	for user in admin scheduler manager node1 node2 proxy alice; do
		cat >"$dir/pki/$user.conf" <<-END
			apiVersion: v1
			kind: Config
			clusters: [{ name: c, cluster: { server: "https://10.77.0.1:6443", certificate-authority: $dir/pki/ca.crt } }]
			users: [{ name: u, user: { token: $user } }]
			contexts: [{ name: x, context: { cluster: c, user: u } }]
			current-context: x
		END
	done
	cd - >/dev/null
}

network() {
	ip link set lo up
	sysctl -qw net.ipv4.ip_forward=1
	ip link add br0 type bridge
	ip addr add 10.77.0.1/24 dev br0
	ip link set br0 up
	for n in 1 2; do
		ip netns add "node$n"
		ip link add "v$n" type veth peer name eth0 netns "node$n"
		ip link set "v$n" master br0 up
		ip -n "node$n" link set lo up
		ip -n "node$n" addr add "10.77.0.1$n/24" dev eth0
		ip -n "node$n" link set eth0 up
		ip -n "node$n" route add default via 10.77.0.1
	done
}

control_plane() {
	run etcd etcd --data-dir "$dir/etcd" --listen-client-urls http://127.0.0.1:2379 \
		--advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 --unsafe-no-fsync
	run apiserver kube-apiserver --etcd-servers http://127.0.0.1:2379 --secure-port 6443 \
		--advertise-address 10.77.0.1 --service-cluster-ip-range 10.78.0.0/24 \
		--authorization-mode Node,RBAC --token-auth-file "$dir/pki/tokens.csv" \
		--tls-cert-file "$dir/pki/api.crt" --tls-private-key-file "$dir/pki/api.key" \
		--service-account-issuer https://kubernetes.default.svc \
		--service-account-key-file "$dir/pki/accounts.key" \
		--service-account-signing-key-file "$dir/pki/accounts.key" --allow-privileged \
		--kubelet-preferred-address-types InternalIP --enable-admission-plugins NodeRestriction \
		--kubelet-client-certificate "$dir/pki/to-kubelets.crt" --kubelet-client-key "$dir/pki/to-kubelets.key" \
		${TORPOR_IN_PODS:+--enable-aggregator-routing}
	cat >"$dir/bin/kubectl" <<-END
		#!/bin/bash
		exec $programs/kubectl --kubeconfig $dir/pki/\${KUBE_USER:-admin}.conf "\$@"
	END
	chmod +x "$dir/bin/kubectl"
	until_true 120 kubectl get --raw /readyz
	run manager kube-controller-manager --kubeconfig "$dir/pki/manager.conf" --leader-elect=false \
		--service-account-private-key-file "$dir/pki/accounts.key" --root-ca-file "$dir/pki/ca.crt" \
		--use-service-account-credentials=false
	run scheduler kube-scheduler --kubeconfig "$dir/pki/scheduler.conf" --leader-elect=false
}

# image NAME: a container image with busybox alone. It sleeps, so that it does for sandboxes, too.
image() {
	[ -e "$dir/base.tar" ] && return
	"$scripts/../rootfs/make" "$dir/rootfs"
	"$scripts/../rootfs/image" "$1" "$dir/rootfs" "$dir/base.tar"
	mkdir "$dir/image"
	tar -C "$dir/image" -xf "$dir/base.tar"
	sed -i 's|"Cmd": .*"/bin/sh".|"Cmd": ["/bin/sleep", "2147483647"]|' "$dir/image/config.json"
	tar -C "$dir/image" -cf "$dir/base.tar" manifest.json config.json layer.tar
}

node() {
	local n=$1 place=$dir/node$1
	mkdir -p "$place/cni" "$place/kubelet"
	cat >"$place/cni/10-net.conflist" <<-END
		{ "cniVersion": "0.4.0", "name": "pods", "plugins": [{ "type": "bridge", "bridge": "pods0",
		"isGateway": true, "ipMasq": false, "ipam": { "type": "host-local", "dataDir": "$place/addresses",
		"ranges": [[{ "subnet": "10.79.$n.0/24" }]], "routes": [{ "dst": "0.0.0.0/0" }] } }] }
	END
	cat >"$place/containerd.toml" <<-END
		version = 2
		root = "$place/root"
		state = "$place/state"
		[grpc]
		address = "$place/c.sock"
		[plugins."io.containerd.grpc.v1.cri"]
		sandbox_image = "docker.io/library/torpor-base:1"
		restrict_oom_score_adj = true
		tolerate_missing_hugetlb_controller = true
		[plugins."io.containerd.grpc.v1.cri".cni]
		bin_dir = "/usr/lib/cni"
		conf_dir = "$place/cni"
		[plugins."io.containerd.grpc.v1.cri".containerd]
		default_runtime_name = "runc"
		[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
		runtime_type = "io.containerd.runc.v2"
		[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
		BinaryName = "runc"
		Root = "$place/runc"
		[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.torpor]
		runtime_type = "io.containerd.runc.v2"
		[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.torpor.options]
		BinaryName = "$dir/bin/torpor-runc"
		Root = "$place/runc"
	END
	cat >"$place/kubelet.yaml" <<-END
		apiVersion: kubelet.config.k8s.io/v1beta1
		kind: KubeletConfiguration
		containerRuntimeEndpoint: unix://$place/c.sock
		cgroupDriver: cgroupfs
		cgroupRoot: /$name-node$n
		podLogsDir: $place/logs
		failSwapOn: false
		failCgroupV1: false
		oomScoreAdj: 0
		enforceNodeAllocatable: []
		localStorageCapacityIsolation: false
		evictionHard: { memory.available: "1Mi", nodefs.available: "0%", imagefs.available: "0%", nodefs.inodesFree: "0%" }
		imageGCHighThresholdPercent: 100
		authentication: { anonymous: { enabled: false }, webhook: { enabled: true }, x509: { clientCAFile: $dir/pki/ca.crt } }
		authorization: { mode: Webhook }
		resolvConf: ""
		nodeStatusUpdateFrequency: 2s
	END
	for controller in /sys/fs/cgroup/*/; do
		mkdir -p "$controller/$name-node$n"
		[ -e "$controller/cpuset.cpus" ] && cat "$controller/cpuset.cpus" >"$controller/$name-node$n/cpuset.cpus" &&
			cat "$controller/cpuset.mems" >"$controller/$name-node$n/cpuset.mems"
	done
	local in="nsenter --net=/run/netns/node$n" archive
	if [ -n "${TORPOR_IN_PODS:-}" ]; then
		own_places "$n"
		in="$in --mount=$dir/mounts/node$n"
		run "proxy$n" $in kube-proxy --kubeconfig "$dir/pki/proxy.conf" --hostname-override "node$n" \
			--proxy-mode iptables --conntrack-max-per-core 0 --conntrack-min 0
		run "containerd$n" $in containerd --config "$place/containerd.toml"
	else
		TORPOR_AGENT_SOCKET=$place/agent.sock run "containerd$n" $in containerd --config "$place/containerd.toml"
	fi
	until_true 60 ctr -a "$place/c.sock" version
	for archive in "$dir"/*.tar; do
		ctr -a "$place/c.sock" -n k8s.io images import "$archive" >/dev/null
	done
	run "kubelet$n" $in kubelet --config "$place/kubelet.yaml" --kubeconfig "$dir/pki/node$n.conf" \
		--root-dir "$place/kubelet" --hostname-override "node$n" --node-ip "10.77.0.1$n" --v 2
}

# own_places NODE: what Torpor has on a node has the same path on all of them. Each of these two gets mounts of its own.
own_places() {
	local place=$dir/node$1
	mkdir -p "$place/socket" "$place/torpor"
	touch "$dir/mounts/node$1"
	unshare --mount="$dir/mounts/node$1" --propagation slave bash -ec "
		mount --bind '$place/socket' /run/torpor
		mount --bind '$place/torpor' /var/lib/torpor/kubernetes
		mount --make-rshared /"
}

# torpor_in_pods: as users install it, but that the name of the controllers' Service stands in /etc/hosts of the nodes:
# nobody resolves it here. So it is applied before there are nodes.
torpor_in_pods() {
	mkdir "$dir/mounts"
	mount --bind "$dir/mounts" "$dir/mounts"
	mount --make-private "$dir/mounts"
	mkdir -p /run/torpor /var/lib/torpor/kubernetes
	# The API server, and each node, reach the pods of the other.
	for n in 1 2; do ip route add "10.79.$n.0/24" via "10.77.0.1$n"; done
	"$scripts/image.sh" docker.io/library/torpor:1 "$dir/torpor.tar" "$torpor"
	local image=docker.io/library/torpor:1 store=dir:$dir/store address
	if [ "$TORPOR_IN_PODS" = helm ]; then
		cat >"$dir/bin/helm" <<-END
			#!/bin/bash
			exec $programs/helm --kubeconfig $dir/pki/admin.conf "\$@"
		END
		chmod +x "$dir/bin/helm"
		# Where helm keeps its own record.
		until_true 60 kubectl get namespace default
		helm install torpor "$scripts/../../crates/kubernetes/chart" --set "image=$image,store=$store" \
			>"$dir/log/apply.log" 2>&1
	else
		torpor kubernetes manifests --image "$image" --store "$store" >"$dir/all.yaml"
		kubectl apply -f "$dir/all.yaml" >"$dir/log/apply.log" 2>&1
	fi
	address=$(kubectl -n torpor-system get service torpor-webhook -o 'jsonpath={.spec.clusterIP}')
	{ cat /etc/hosts; echo "$address torpor-webhook.torpor-system.svc"; } >"$dir/hosts"
	mount --bind "$dir/hosts" /etc/hosts
}

# torpor_itself: agents run beside the kubelets, with the tokens of pods that are made for their nodes.
torpor_itself() {
	torpor kubernetes manifests >"$dir/all.yaml"
	# There is no image of Torpor and no kube-proxy here: its programs run outside of pods.
	awk 'BEGIN { RS = "---\n"; ORS = "---\n" } !/kind: (Deployment|DaemonSet)/' "$dir/all.yaml" |
		sed '/^      service:$/,/^        path: /c\      url: https://127.0.0.1:9443/review' >"$dir/applied.yaml"
	kubectl apply -f "$dir/applied.yaml" >"$dir/log/apply.log" 2>&1
	kubectl -n torpor-system create token torpor-controller --duration 24h >"$dir/controller.token"
	# Agents find the controllers by the name of their Service, which nobody resolves here.
	{ cat /etc/hosts; echo "10.77.0.1 torpor-webhook.torpor-system.svc"; } >"$dir/hosts"
	mount --bind "$dir/hosts" /etc/hosts
	run controller torpor kubernetes controller --listen 0.0.0.0:9443 --server https://10.77.0.1:6443 \
		--token-file "$dir/controller.token" --ca-file "$dir/pki/ca.crt"
	for n in 1 2; do
		local token=(kubectl -n torpor-system create token torpor-agent --duration 24h --bound-object-kind Node
			--bound-object-name "node$n")
		"${token[@]}" >"$dir/node$n/token"
		for audience in agents controllers; do
			"${token[@]}" --audience "torpor.dev/$audience" >"$dir/node$n/$audience"
		done
		REGISTRY_AUTH_FILE=$dir/node$n/store.json run "agent$n" nsenter --net="/run/netns/node$n" torpor kubernetes agent --node "node$n" \
			--listen "10.77.0.1$n:7690" --socket "$dir/node$n/agent.sock" --state "$dir/node$n/torpor" \
			--controller https://torpor-webhook.torpor-system.svc:9443 --store "${TORPOR_STORE:-dir:$dir/store}" \
			--agents-token-file "$dir/node$n/agents" --controllers-token-file "$dir/node$n/controllers" \
			--server https://10.77.0.1:6443 --token-file "$dir/node$n/token" --ca-file "$dir/pki/ca.crt"
	done
	until_true 60 kubectl get --raw /apis/torpor.dev/v1alpha1/podcheckpoints
	until_true 60 bash -c "kubectl get mutatingwebhookconfigurations torpor.dev -o yaml | grep -q caBundle"
}

certificates
network
control_plane
image docker.io/library/torpor-base:1
[ -z "${TORPOR_IN_PODS:-}" ] || torpor_in_pods
node 1
node 2
until_true 120 kubectl get node node1 node2
[ -n "${TORPOR_IN_PODS:-}" ] || torpor_itself
until_true 180 kubectl wait --for=condition=Ready node/node1 node/node2 --timeout=1s
until_true 60 kubectl get serviceaccount default
if [ -n "${TORPOR_IN_PODS:-}" ]; then
	for owner in deployment/torpor-controller daemonset/torpor-agent; do
		until_true 180 kubectl -n torpor-system rollout status "$owner" --timeout=1s
	done
fi
cat >"$dir/bin/inside" <<-END
	#!/bin/bash
	exec nsenter --target \$(cat $dir/pid) --net --mount --pid "\$@"
END
chmod +x "$dir/bin/inside"
touch "$dir/ready"
# The end of the standard input is the end of all.
cat >/dev/null
touch "$dir/ends"
