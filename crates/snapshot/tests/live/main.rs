//! Snapshots of real containers of runc, in directories and in a real registry.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod directory;
mod fallback;
mod pipeline;
mod place;
mod podman;
mod registry;
mod s3;
mod sealed;
mod template;
