#!/bin/bash
# deb.sh: a Debian package in target/debian, made by cargo-deb from the metadata in crates/cli/Cargo.toml.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo deb --version >/dev/null 2>&1 || cargo install --quiet --locked cargo-deb --version 3.8.0

# What `make install` would put on the machine is what the package holds.
DESTDIR=target/deb PREFIX=/usr scripts/install.sh
cargo deb --quiet --no-build --package torpor-cli
