#!/bin/bash
# deb.sh: Debian packages in target/debian: torpor, made by cargo-deb from the metadata in crates/cli/Cargo.toml,
# and torpor-dbgsym, where debuggers find what the program was stripped of.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo deb --version >/dev/null 2>&1 || cargo install --quiet --locked cargo-deb --version 3.8.0

cargo build --locked --profile dist --package torpor-cli
built=target/dist/torpor

# What `make install` would put on the machine is what the package holds.
BUILT=$built DESTDIR=target/deb PREFIX=/usr scripts/install.sh
package=$(cargo deb --quiet --no-build --package torpor-cli)
echo "$package"
scripts/dbgsym.sh "$built" "$package"
