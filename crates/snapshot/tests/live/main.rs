//! Snapshots of real containers of runc, in directories and in a real registry.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod authority;
mod belief;
mod connections;
mod containerd;
mod cosign;
mod directory;
mod fallback;
mod fixture;
mod generation;
mod host;
mod ledger;
mod limit;
mod mounts;
mod near;
mod network;
mod pipeline;
mod podman;
mod postgres;
mod puma;
mod ready;
mod registry;
mod running;
mod s3;
mod sealed;
mod sealed_pack;
mod signed;
mod silent;
mod tampered;
mod template;
mod tree;
