#!/bin/bash
# setup.sh [long]: installs what building and testing Torpor needs on Debian 12, with "long" for the long tests,
# too; does nothing where all is there.
set -euo pipefail
cd "$(dirname "$0")/.."

lists=(scripts/packages.txt)
[ "${1:-}" != long ] || lists+=(scripts/packages-long.txt)

# What the code is written for; see rust-version in Cargo.toml.
rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

say() { echo "setup: $1" >&2; }

packages() {
    local wanted missing=()
    wanted=$(sed 's/#.*//' "${lists[@]}" | awk 'NF { print $1 }')
    for package in $wanted; do
        dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
            missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    [ "$(id -u)" = 0 ] || { say "as root: apt-get install ${missing[*]}"; exit 1; }
    say "installing ${missing[*]}"
    apt-get update -qq
    # The packages' own daemons are of no use here, and some would get in the tests' way.
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install -qq --yes --no-install-recommends "${missing[@]}" >/dev/null
}

new_enough() {
    local have
    have=$(cargo --version 2>/dev/null | awk '{ print $2 }') || return 1
    [ -n "$have" ] && printf '%s\n%s\n' "$rust" "$have" | sort --version-sort --check=quiet
}

toolchain() {
    export PATH="$HOME/.cargo/bin:$PATH"
    if ! new_enough; then
        if ! command -v rustup >/dev/null; then
            say "installing Rust with rustup"
            if apt-cache policy rustup 2>/dev/null | grep -q 'Candidate: [0-9]'; then
                DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes rustup >/dev/null
            else
                command -v curl >/dev/null || apt-get install -qq --yes curl >/dev/null
                curl --proto '=https' --tlsv1.2 --silent --show-error --fail https://sh.rustup.rs |
                    sh -s -- -y --quiet --profile minimal --default-toolchain none
            fi
        fi
        rustup toolchain install --profile minimal "$rust"
        rustup default "$rust"
    fi
    cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
    cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
}

# Holds the dependencies to deny.toml; unoptimized, which builds in a third of the time.
deny() {
    local version=0.20.2
    [ "$(cargo deny --version 2>/dev/null)" = "cargo-deny $version" ] && return
    say "building cargo-deny"
    cargo install --quiet --locked --debug --version "$version" cargo-deny
}

# Debian 12 has Go 1.19, and a server of Go listens with Multipath TCP by itself from 1.24 on.
go_toolchain() {
    local have
    have=$(go env GOVERSION 2>/dev/null) || have=none
    printf '%s\n' go1.24 "$have" | sort --version-sort --check=quiet && [ "$have" != none ] ||
        say "the test go_http takes Go 1.24 or newer, from https://go.dev/dl (here: $have)"
}

packages
toolchain
go_toolchain
deny
