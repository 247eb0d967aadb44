# What one does with this repository. `make demo` and `make test` need nothing but Debian 12, root and (one test) Go 1.24.

PREFIX  ?= /usr/local
DESTDIR ?=
SECONDS ?= 60

export PATH := $(HOME)/.cargo/bin:$(PATH)
export PREFIX DESTDIR

build:            ## build torpor, optimized
	cargo build --release --locked --package torpor-cli

demo:             ## a Redis server in a container goes to sleep and wakes up
	@scripts/demo.sh

test: setup check ## every test: unit, property, zoo, faults, end to end
	@scripts/without-autogroup scripts/test.sh

test-long: setup-long check ## the same at length, an older kernel, every fuzz target for a minute
	@rc=0; scripts/without-autogroup scripts/test.sh long || rc=1; scripts/fuzz.sh $(SECONDS) || rc=1; exit $$rc

check:            ## formatting, lints, documentation, licences
	cargo fmt --all --check
	cargo clippy --quiet --locked --workspace --all-targets -- --deny warnings
	RUSTDOCFLAGS="--deny warnings --allow rustdoc::private_intra_doc_links" cargo doc --quiet --locked --workspace --no-deps --document-private-items
	@scripts/deny.sh

zoo: setup        ## the programs of the zoo, each in all modes
	scripts/without-autogroup cargo test --locked --package torpor-tests --test zoo

docs:             ## the compatibility table, from the outcomes of the last test run
	cargo run --quiet --locked --package torpor-tests --bin zoo -- status --table >docs/compatibility.md

bench:            ## measure, against cp; prints the table and writes JSON
	@scripts/without-autogroup scripts/bench.sh
	@scripts/without-autogroup scripts/benchmark-matrix.sh

fuzz:             ## every fuzz target for SECONDS seconds
	@scripts/fuzz.sh $(SECONDS)

install: build    ## torpor, the links criu and crit, manual pages, completions
	@scripts/install.sh

deb:              ## a Debian package, in target/debian
	@scripts/deb.sh

setup:            ## install what building and testing needs
	@scripts/setup.sh

setup-long:       ## the same, and what only the long tests take
	@scripts/setup.sh long

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

.PHONY: build demo test test-long check zoo docs bench fuzz install deb setup setup-long help
