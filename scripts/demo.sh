#!/bin/bash
# demo.sh: a Redis server in a container goes to sleep, is gone, and wakes up, with its data, its
# connections and its processes. Installs and builds what is missing, and takes away all it made.
set -euo pipefail
cd "$(dirname "$0")/.."

bold='' dim='' green='' plain=''
if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' green=$'\e[32m' plain=$'\e[0m'; fi

work=$(mktemp -d /tmp/torpor-demo-XXXXXX)
name=${work##*/}
inside=$name-in outside=$name-out
log=$work/demo.log

step() { printf '\n%s%s%s\n' "$bold" "$1" "$plain"; }
say() { printf '    %s\n' "$1"; }
show() { printf '    %s$ %s%s\n' "$dim" "$1" "$plain"; }
now() { date +%s%N; }
since() { awk -v from="$1" -v to="$(now)" 'BEGIN { printf "%.0f ms", (to - from) / 1e6 }'; }
stop() {
    printf '\nThe demo stopped: %s\n' "$1" >&2
    tail -n 5 "$log" >&2
    for file in "$work"/work/*.log; do
        [ -e "$file" ] && { echo "$file ends with:"; tail -n 20 "$file"; } >&2
    done
    exit 1
}
# quietly WHAT COMMAND...: a command whose output is of interest only when it fails
quietly() {
    local what=$1
    shift
    "$@" >>"$log" 2>&1 </dev/null || stop "could not $what"
}
container() { runc --root "$work/runc" "$@"; }
clean_up() {
    container delete --force "$name" >>"$log" 2>&1 || true
    ip netns delete "$inside" >>"$log" 2>&1 || true
    ip netns delete "$outside" >>"$log" 2>&1 || true
    rm -rf "$work"
}
trap clean_up EXIT

prepare() {
    [ "$(id -u)" = 0 ] || { echo "The demo makes containers and networks: run it as root." >&2; exit 1; }
    local missing=()
    for pair in runc:runc redis-server:redis-server redis-cli:redis-tools busybox:busybox-static ip:iproute2; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        say "installing ${missing[*]}"
        quietly "update the package lists" apt-get update
        # Redis is for the container: its package must not start one here.
        quietly "install packages" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
            apt-get install -y --no-install-recommends "${missing[@]}"
    fi
    command -v cargo >/dev/null || [ ! -x scripts/setup.sh ] || quietly "install Rust" scripts/setup.sh
    [ -x "$HOME/.cargo/bin/cargo" ] && PATH=$HOME/.cargo/bin:$PATH
    say "building torpor (the first time takes a few minutes)"
    quietly "build torpor" cargo build --release -p torpor-cli
    mkdir "$work/bin"
    ln -s "$PWD/target/release/torpor" "$work/bin/criu"
    PATH=$work/bin:$PATH
    say "runc will find torpor under the name criu, first on its PATH:"
    show "criu --version"
    criu --version | sed 's/^/    /'
}

make_container() {
    ip netns add "$inside"
    ip netns add "$outside"
    ip -n "$outside" link add eth0 type veth peer name eth0 netns "$inside"
    ip -n "$inside" address add 10.99.0.2/24 dev eth0
    ip -n "$outside" address add 10.99.0.1/24 dev eth0
    for network in "$inside" "$outside"; do
        ip -n "$network" link set lo up
        ip -n "$network" link set eth0 up
    done
    mkdir "$work/bundle"
    quietly "make a root file system" scripts/rootfs/make "$work/bundle/rootfs" redis-server redis-cli
    (cd "$work/bundle" && runc spec)
    # What runc proposes, but with a Redis server in place of a shell, and in our network.
    sed -i -e '/"terminal"/s/true/false/' \
        -e '/"args"/,/]/s|"sh"|"redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--logfile", "/redis.log"|' \
        -e '/"root": {/,/}/s/"readonly": true/"readonly": false/' \
        -e "s|\"type\": \"network\"|\"type\": \"network\", \"path\": \"/run/netns/$inside\"|" \
        "$work/bundle/config.json"
    show "runc run --detach $name"
    # A detached container keeps the output that runc has: no file of this machine, but /dev/null.
    container --log "$log" run --detach --bundle "$work/bundle" "$name" >/dev/null 2>&1 </dev/null ||
        stop "could not start the container"
}

# ask WORDS...: the client's answer to a command, always on one and the same connection
open_client() {
    local tries=0
    until ip netns exec "$outside" redis-cli -h 10.99.0.2 ping 2>/dev/null | grep -q PONG; do
        [ $((tries += 1)) -lt 300 ] || stop "the server does not answer"
        sleep 0.1
    done
    coproc CLIENT { exec ip netns exec "$outside" redis-cli -h 10.99.0.2 2>&1; }
}
send() { echo "$*" >&"${CLIENT[1]}"; }
receive() { read -r -t 60 answer <&"${CLIENT[0]}" || stop "the client got no answer"; }
ask() { send "$@" && receive; }

processes() {
    container ps --format json "$name" | tr -d '[]' | tr ',' '\n' | while read -r pid; do
        [ -n "$pid" ] || continue
        awk -v name="$(cat "/proc/$pid/comm")" '
            /^NSpid:/ { inner = $NF }
            /^Threads:/ { threads = $2 }
            /^VmRSS:/ { memory = $2 }
            END { printf "    process %s in the container: %s, %d threads, %.0f MiB\n", inner, name, threads, memory / 1024 }
        ' "/proc/$pid/status"
    done
}

step "1. Prepare"
prepare

step "2. Start a Redis server in a container, and fill it"
make_container
open_client
ask "eval \"for i = 1, 200000 do redis.call('SET', 'key:'..i, string.rep(i..',', 20)) end return 'done'\" 0"
[ "$answer" = done ] || stop "the server was not filled: $answer"
ask "client id"; id=$answer
ask "incr visits"; visits=$answer
ask "dbsize"; keys=$answer
ask "get key:4711"; value=$answer
before=$(processes)
echo "$before"
say "$keys keys; a client is connected over TCP from outside (connection $id), visits = $visits"

step "3. Put it to sleep"
show "runc checkpoint --tcp-established $name"
start=$(now)
quietly "checkpoint the container" container checkpoint --image-path "$work/images" --work-path "$work/work" \
    --tcp-established "$name"
slept=$(since "$start")
say "asleep after $slept: $(du -sh "$work/images" | cut -f1) of images in $(ls "$work/images" | wc -l) files"
if container state "$name" >/dev/null 2>&1; then stop "the container is still there"; fi
show "runc list"
say "(nothing)"
say "No process, no cgroup, no memory is left. The client does not know; it says: incr visits"
send "incr visits"
if read -r -t 1 answer <&"${CLIENT[0]}"; then stop "somebody answered: $answer"; fi
say "... and waits."

step "4. Wake it up"
show "runc restore --tcp-established --detach $name"
start=$(now)
quietly "restore the container" container restore --image-path "$work/images" --work-path "$work/work" \
    --bundle "$work/bundle" --tcp-established --detach "$name"
woken=$(since "$start")
say "awake after $woken"
receive
say "and the client has its answer: visits = $answer"
[ "$answer" = $((visits + 1)) ] || stop "wrong answer: $answer"

step "5. Look closely"
after=$(processes)
echo "$after"
[ "$(echo "$before" | cut -d, -f1)" = "$(echo "$after" | cut -d, -f1)" ] || stop "the processes are others"
ask "client id"
[ "$answer" = "$id" ] || stop "the connection is another one: $answer"
say "the same connection ($answer)"
ask "dbsize"
[ "$answer" = "$keys" ] || stop "$answer keys"
ask "get key:4711"
[ "$answer" = "$value" ] || stop "a key has another value: $answer"
say "all $keys keys are there"
ip netns exec "$outside" redis-cli -h 10.99.0.2 ping | sed 's/^/    a new client says ping, the server says: /'

printf '\n%sAsleep in %s, awake in %s.%s Nothing was lost, and nobody noticed.\n' "$green$bold" "$slept" "$woken" "$plain"
