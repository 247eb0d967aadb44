//! `torpor snapshot`: applications that start warm.
//!
//! A snapshot is an OCI image: small images, and packs of pages ([`pack`]). `create` makes it
//! from a container that is ready, `run` starts containers from it.

#![warn(unreachable_pub, clippy::print_stderr)]

pub mod archive;
pub mod asked;
pub mod belief;
pub mod bundle;
pub mod cache;
pub mod changes;
pub mod command;
pub mod cosign;
pub mod create;
pub mod cri;
pub mod description;
pub mod eager;
pub mod error;
pub mod events;
pub mod feed;
pub mod fetch;
pub mod fits;
pub mod generation;
pub mod inspect;
pub mod instance;
pub mod interrupt;
pub mod layer;
pub mod limit;
pub mod lint;
pub mod listing;
pub mod log;
pub mod mounts;
pub mod network;
pub mod own;
pub mod pack;
mod page_list;
pub mod patience;
pub mod pause;
pub mod places;
pub mod podman;
pub mod process;
pub mod progress;
pub mod publish;
pub mod ready;
pub mod report;
pub mod run;
pub mod runc;
pub mod sealed;
pub mod sealed_pack;
pub mod secrets;
pub mod shelf;
pub mod signature;
pub mod small;
pub mod source;
pub mod stored;
pub mod streams;
pub mod template;
pub mod touched;
pub mod unpack;
pub mod url;

pub use torpor_blobs::{self as store, oci, reference};
